"""A source on the Hub, shard by shard: downloaded when it is read, released when others come.

The disk holds a few shards of a source at a time, whatever its size. Each shard is quantized and
proven before the next one comes, because it may be gone afterwards.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import file_digest
from itertools import groupby
from pathlib import Path
from shutil import disk_usage, rmtree
from threading import Lock
from typing import Any

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.compute import Compute
from quantize.engine import Advance, write_tensors
from quantize.entry import Entry
from quantize.errors import BadCheckpoint, BadOutput
from quantize.hub import HubFiles, download_file
from quantize.layout import Shard
from quantize.plan import Plan
from quantize.prove import Findings, prove_entry
from quantize.report import TensorProof
from quantize.source import Source
from quantize.workdir import Journal

HELD = 2
"""Shards held at a time: a weight and its scales may lie in neighbouring ones."""


@dataclass
class ShardWindow:
    """The files of a repository; its shards are read from ``folder``, where `HELD` of them lie."""

    remote: HubFiles
    folder: Path
    held: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def origin(self) -> str:
        """``org/name@commit``."""
        return self.remote.origin

    def sizes(self) -> Any:
        """Size in bytes of every file, in the order of names."""
        return self.remote.sizes()

    def open(self, name: str) -> io.RawIOBase:
        """A shard from disk, downloaded first where it is not; raises `ToolError`."""
        if not name.endswith(".safetensors"):
            return self.remote.open(name)
        with self.lock:
            if name not in self.held:
                self._bring(name)
            self.held.append(self.held.pop(self.held.index(name)))
            return io.FileIO(self.folder / name)

    def _bring(self, name: str) -> None:
        # What an earlier run left counts too, and goes first.
        there = sorted(path.name for path in self.folder.glob("*.safetensors"))
        for other in [n for n in there if n not in (*self.held, name)] + self.held[: 1 - HELD]:
            (self.folder / other).unlink()
        self.held = self.held[1 - HELD :]
        size = self.remote.tree[name]
        if not (self.folder / name).exists() and size > disk_usage(self.folder).free:
            raise BadOutput(
                f"{self.folder} needs {size:,} bytes for {name} of {self.origin}, and its disk "
                f"has {disk_usage(self.folder).free:,} free",
                "free some space and repeat the command: it continues where it stopped",
            )
        path = download_file(self.remote, name, self.folder)
        self._check(path, name)
        self.held.append(name)

    def _check(self, path: Path, name: str) -> None:
        """What arrived is what the Hub has."""
        expected = self.remote.hashes.get(name)
        with path.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest() if expected else None
        if found != expected:
            path.unlink()
            raise BadCheckpoint(
                f"{self.origin}/{name}: the download has SHA-256 {found}, expected {expected}",
                "repeat the command: the file is downloaded again",
            )


@contextmanager
def open_window(source: Source, folder: Path) -> Iterator[Source]:
    """The source with its shards read through ``folder``, which is removed when all went well."""
    if not isinstance(source.files, HubFiles):
        raise ValueError(f"{source.files.origin} is on this machine already")
    folder.mkdir(parents=True, exist_ok=True)
    window = ShardWindow(source.files, folder)
    yield replace(source, files=window, stored=replace(source.stored, files=window))
    rmtree(folder)


def write_and_prove(
    source: Source,
    plan: Plan,
    shards: tuple[Shard, ...],
    folder: Path,
    journal: Journal,
    proofs: Path | None,
    compute: Compute,
    advance: Advance,
) -> Findings:
    """Write the tensors of one source shard and prove them, then those of the next.

    ``proofs`` keeps what was found for a resumed run; None proves nothing.
    """
    found = read_proofs(proofs) if proofs else {}
    for _, group in groupby(plan.entries, lambda entry: source.shard_of[entry.source.name]):
        entries = tuple(group)
        part = replace(plan, entries=entries)
        write_tensors(source, part, shards, folder, journal, compute, advance)
        if proofs:
            _prove(source, entries, open_checkpoint(str(folder)), found, proofs)
    return merge(found.values())


def _prove(
    source: Source,
    entries: Iterable[Entry],
    out: Checkpoint,
    found: dict[str, Findings],
    proofs: Path,
) -> None:
    new = [entry for entry in entries if entry.stored and entry.source.name not in found]
    for entry in new:
        found[entry.source.name] = Findings()
        prove_entry(out, entry, source, found[entry.source.name], sample=False)
    names = (entry.source.name for entry in new)
    lines = (json.dumps({"name": name, **asdict(found[name])}) + "\n" for name in names)
    with proofs.open("a", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def read_proofs(path: Path) -> dict[str, Findings]:
    """What an earlier run proved, by tensor; a last line that a kill cut is taken off."""
    path.touch()
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    os.truncate(path, len(complete))
    found = {}
    for line in complete.splitlines():
        item = json.loads(line)
        name, proofs = item.pop("name"), [TensorProof(**proof) for proof in item["proofs"]]
        found[name] = Findings(**item | {"proofs": proofs})
    return found


def merge(parts: Iterable[Findings]) -> Findings:
    """All findings as of one pass."""
    whole = Findings()
    for part in parts:
        for name in ("changed", "quantized", "scales", "finite", "proofs"):
            getattr(whole, name).extend(getattr(part, name))
        for name in ("preserved_bytes", "quantized_bytes", "sampled_rows"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.float32_db = max(whole.float32_db, part.float32_db)
    return whole
