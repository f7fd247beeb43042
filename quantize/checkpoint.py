"""Opens a checkpoint from its headers alone, and reads its tensors by offset (never mapped).

Opening proves that the files are whole and agree with each other: what a later stage could
silently lose is refused here, by name. Nothing in this module imports torch at its top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantize.errors import BadCheckpoint
from quantize.files import (
    Files,
    LocalFiles,
    fetch_again,
    read_at,
)
from quantize.header import Header, read_header, read_json
from quantize.shards import find_shards, index_name, refuse_index
from quantize.side_files import find_side_files
from schemes.base import TORCH_NAMES, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"

CHUNK_BYTES = 8 << 20
"""Source bytes handled at a time: bounds memory whatever the tensor's size."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and tensors; every file was found whole when it was opened.

    ``specs`` are in the order of shards, then of data. ``offsets`` count bytes from the start of
    the tensor's file; ``headers`` holds the SHA-256 of each shard's length prefix and header;
    ``strides`` those of tensors that are not contiguous (only in ``.bin`` files).
    """

    files: Files
    config: dict[str, Any]
    specs: Mapping[str, TensorSpec]
    shard_of: Mapping[str, str]
    offsets: Mapping[str, int]
    side_files: tuple[str, ...]
    headers: Mapping[str, str]
    strides: Mapping[str, tuple[int, ...]]

    @property
    def path(self) -> Path | None:
        """The folder; None for a checkpoint on the Hub."""
        return self.files.path if isinstance(self.files, LocalFiles) else None

    @property
    def source_files(self) -> tuple[str, ...]:
        """Every file that the checkpoint is made of."""
        name = index_name(self.files.sizes())
        index = (name,) if name in self.files.sizes() else ()
        return (CONFIG, *index, *self.headers, *self.side_files)

    def read(self, name: str, start_row: int = 0, stop_row: int | None = None) -> bytearray:
        """The bytes of rows ``start_row`` to ``stop_row`` (exclusive) of the first dimension.

        Raises `BadCheckpoint` when the file has become shorter or cannot be read, `ValueError`
        for rows that the tensor does not have. A 0-D tensor has one row.
        """
        spec = self.specs[name]
        rows = spec.shape[0] if spec.shape else 1
        stop = rows if stop_row is None else stop_row
        if not 0 <= start_row <= stop <= rows:
            raise ValueError(f"{name}: rows {start_row}:{stop} of {rows}")
        if name in self.strides:
            from quantize.pickled import gather

            place = self.shard_of[name], spec, self.offsets[name], self.strides[name]
            return gather(self.files, *place, range(start_row, stop))
        row_bytes = spec.nbytes // rows if rows else 0
        offset = self.offsets[name] + start_row * row_bytes
        return read_at(self.files, self.shard_of[name], offset, (stop - start_row) * row_bytes)

    def chunks(self, name: str) -> Iterator[tuple[int, int]]:
        """Row ranges of about `CHUNK_BYTES` each that cover a tensor's first dimension.

        A tensor that is not contiguous is read whole: each of its rows may lie in all of it.
        """
        spec = self.specs[name]
        rows = spec.shape[0] if spec.shape else 1
        step = (
            rows or 1
            if name in self.strides
            else max(1, CHUNK_BYTES // max(1, spec.nbytes // max(1, rows)))
        )
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def expert(self, name: str, expert: int, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of one matrix of a tensor ``[E, N, …]``.

        ``[stop - start, …]``, writable, on the CPU. Raises as `read` does.
        """
        import torch

        spec = self.specs[name]
        experts, rows, *rest = spec.shape
        if not (0 <= expert < experts and 0 <= start <= stop <= rows):
            raise ValueError(f"{name}: expert {expert}, rows {start}:{stop} of {spec.shape}")
        if name in self.strides:
            return self.tensor(name, expert, expert + 1)[0, start:stop]
        row_bytes = spec.nbytes // max(1, experts * rows)
        offset = self.offsets[name] + (expert * rows + start) * row_bytes
        data = read_at(self.files, self.shard_of[name], offset, (stop - start) * row_bytes)
        dtype = getattr(torch, TORCH_NAMES[spec.dtype])
        if not data:
            return torch.empty((stop - start, *rest), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(stop - start, *rest)

    def tensor(self, name: str, start_row: int = 0, stop_row: int | None = None) -> Tensor:
        """The rows that `read` returns as a writable tensor ``[stop - start, ...]`` on the CPU."""
        import torch

        spec = self.specs[name]
        data = self.read(name, start_row, stop_row)
        dtype = getattr(torch, TORCH_NAMES[spec.dtype])
        shape = spec.shape
        if shape:
            shape = ((shape[0] if stop_row is None else stop_row) - start_row, *shape[1:])
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)


def open_checkpoint(
    model: str, *, revision: str | None = None, ignore_index: bool = False
) -> Checkpoint:
    """Open a local folder or a Hub id (``org/name[@revision]``), reading headers only.

    ``ignore_index`` reads the shards as if there were no index. Raises `BadCheckpoint` for
    whatever is missing, damaged or contradictory, and `ToolError` when the Hub is out of reach.
    """
    files = _find(model, revision)
    sizes = files.sizes()
    if CONFIG not in sizes:
        raise BadCheckpoint(
            f"{files.origin}: found no {CONFIG}, expected a checkpoint folder as transformers "
            "writes it",
            fetch_again(files, CONFIG),
        )
    config = read_json(files, CONFIG, sizes[CONFIG])
    shards, index = find_shards(files, sizes, ignore_index)
    headers = _read_headers(files, sizes, shards)
    shard_of = _assign(files, headers)
    if index is not None:
        _compare(files, sizes, index, shard_of)
    return Checkpoint(
        files=files,
        config=config,
        specs={spec.name: spec for header in headers.values() for spec in header.specs},
        shard_of=shard_of,
        offsets={
            spec.name: offset
            for header in headers.values()
            for spec, offset in zip(header.specs, header.offsets, strict=True)
        },
        side_files=find_side_files(files, sizes),
        headers={shard: header.sha256 for shard, header in headers.items()},
        strides={n: steps for header in headers.values() for n, steps in header.strides.items()},
    )


def bring_local(checkpoint: Checkpoint, *, ignore_index: bool = False) -> Checkpoint:
    """The same checkpoint with its files on this machine: one on the Hub is downloaded."""
    if checkpoint.path is not None:
        return checkpoint
    from quantize.hub import download

    return open_checkpoint(str(download(checkpoint)), ignore_index=ignore_index)


def fingerprint(checkpoint: Checkpoint) -> dict[str, dict[str, int | str]]:
    """Size, header hash, and mtime (ns) or commit of every source file, as JSON values.

    Equal fingerprints mean the same source to a resumed run. A local file that has gone since it
    was opened is a `BadCheckpoint`.
    """
    marks: dict[str, dict[str, int | str]] = {}
    for name in checkpoint.source_files:
        marks[name] = _mark(checkpoint, name)
        if name in checkpoint.headers:
            marks[name]["header_sha256"] = checkpoint.headers[name]
    return marks


def _mark(checkpoint: Checkpoint, name: str) -> dict[str, int | str]:
    if checkpoint.path is None:
        commit = checkpoint.files.origin.rpartition("@")[2]
        return {"size": checkpoint.files.sizes()[name], "commit": commit}
    try:
        stat = (checkpoint.path / name).stat()
    except OSError as error:
        raise BadCheckpoint(
            f"{checkpoint.path / name}: was there, and can no longer be found ({error.strerror})",
            fetch_again(checkpoint.files, name),
        ) from error
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _find(model: str, revision: str | None) -> Files:
    path = Path(model)
    if path.is_dir():
        if revision is not None:
            raise BadCheckpoint(
                f"{model}: found a local folder, which has no revision {revision!r}",
                "leave --revision out",
            )
        return LocalFiles(path)
    if path.exists():
        raise BadCheckpoint(
            f"{model}: found a file, expected a checkpoint folder or a Hub id",
            f"pass its folder: {path.parent}",
        )
    from quantize.hub import find_on_hub, is_hub_id

    if not is_hub_id(model):
        raise BadCheckpoint(
            f"{model}: the folder does not exist, and it is not a Hub id (ORG/NAME[@REVISION])",
            f"ls -d {path.parent}/*/",
        )
    return find_on_hub(model, revision)


def _read_headers(
    files: Files, sizes: Mapping[str, int], shards: tuple[str, ...]
) -> dict[str, Header]:
    # Threads, because each header of a remote file costs a round trip.
    with ThreadPoolExecutor(max_workers=8) as pool:
        read = partial(_read_shard, files)
        return dict(zip(shards, pool.map(read, shards, [sizes[s] for s in shards]), strict=True))


def _read_shard(files: Files, name: str, size: int) -> Header:
    if not name.endswith(".bin"):
        return read_header(files, name, size)
    from quantize.pickled import read_pickle_header

    return read_pickle_header(files, name, size)


def _assign(files: Files, headers: Mapping[str, Header]) -> dict[str, str]:
    """The shard of every tensor; a tensor in two shards, or none at all, is refused."""
    shard_of: dict[str, str] = {}
    for shard, header in headers.items():
        for spec in header.specs:
            first = shard_of.setdefault(spec.name, shard)
            if first != shard:
                raise BadCheckpoint(
                    f"{files.origin}: tensor {spec.name!r} is in two shards, {first} and {shard}; "
                    "expected one",
                    "move the shard that does not belong to this model out of the folder",
                )
    if not shard_of:
        raise BadCheckpoint(
            f"{files.origin}: found no tensor in {', '.join(headers)}, expected weights",
            fetch_again(files, next(iter(headers))),
        )
    return shard_of


def _compare(
    files: Files, sizes: Mapping[str, int], index: Mapping[str, str], shard_of: Mapping[str, str]
) -> None:
    """Refuse an index that names other tensors, or other places, than the shards hold."""
    for name, shard in index.items():
        if name not in shard_of:
            refuse_index(files, sizes, f"names tensor {name!r}, which {shard} lacks")
        if shard_of[name] != shard:
            found = f"{shard_of[name]} holds it"
            refuse_index(files, sizes, f"puts tensor {name!r} in {shard}, but {found}")
    for name, shard in shard_of.items():
        if name not in index:
            refuse_index(files, sizes, f"omits tensor {name!r}, which {shard} holds")
