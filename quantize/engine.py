"""Runs a plan: read, check, quantize, write at known offsets, journal. Memory stays bounded.

Every operation works on a range of weight rows, because both schemes are independent per row:
the peak is set by `CHUNK_BYTES`, whatever the size of tensor, shard or model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from quantize.compute import Compute
from quantize.entry import Entry
from quantize.errors import BadOutput, ToolError
from quantize.layout import Shard
from quantize.parallel import run_in_order
from quantize.plan import Plan
from quantize.source import Source
from quantize.transform import stored_bytes
from quantize.workdir import Journal
from schemes import find_scheme
from schemes.quark_setup import build_lock, import_quark, missing_compiler, needs_build

Advance = Callable[[int], None]
"""Reports source bytes done, for progress."""

Stage = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows one stage of known size (bytes; 0 unknown) as it advances."""

Places = dict[str, tuple[int, int]]
"""File descriptor and offset of every output tensor."""

SYNC_BYTES = 1 << 30
"""Source bytes between two syncs: what an interrupted run may have to do again."""


def load_engine(plans: Iterable[Plan], compute: Compute, stage: Stage) -> None:
    """Load what computes before the bars start: it may be compiled first, and shows nothing.

    Raises `ToolError` naming the C++ compiler that a first build of Quark lacks.
    """
    schemes = {entry.scheme for plan in plans for entry in plan.entries if entry.scheme}
    if schemes and compute.engine == "quark":
        _load_quark(stage, compute.workers)
    elif compute.device == "cpu":
        with stage("load the kernels (compiled on first use)", 0):
            for name in schemes:
                find_scheme(name).quantize_bits(np.zeros((1, 32), np.uint16))


def _load_quark(stage: Stage, workers: int) -> None:
    text = "load AMD Quark"
    if needs_build():
        text = "compile AMD Quark's C++ extension (first use only: one to several minutes)"
        if compiler := missing_compiler():
            raise ToolError(
                f"AMD Quark compiles a C++ extension on first use, and {compiler} is not on PATH",
                "install a C++ compiler (Debian and Ubuntu: apt-get install g++), or set CXX; "
                "--engine native needs none and gives the same bytes",
            )
    if lock := build_lock():
        text += f" (waits while {lock} exists: remove it if no other build is running)"
    with stage(text, 0):
        import_quark()
        import torch

        torch.set_num_threads(workers)


@dataclass(frozen=True)
class Task:
    """One range of rows of an entry; ``last`` of its entry, ``stop`` 0 with nothing to write."""

    entry: Entry
    start: int
    stop: int
    last: bool


def write_tensors(
    source: Source,
    plan: Plan,
    shards: Sequence[Shard],
    folder: Path,
    journal: Journal,
    compute: Compute,
    advance: Advance,
) -> None:
    """Write every tensor of the plan that the journal does not list yet.

    Workers read, quantize and write ranges of rows, each its own; another thread syncs what they
    wrote. Raises `BadCheckpoint` for a NaN or Inf.
    """
    with ExitStack() as stack:
        places = _open_shards(folder, shards, stack)
        sync = stack.enter_context(ThreadPoolExecutor(1))
        done = run_in_order(
            partial(_write_rows, source, places, compute),
            _list_tasks(source, plan, journal),
            compute.workers if compute.engine == "native" else 1,  # Quark has threads of its own
        )
        written: list[Entry] = []
        syncs: list[Future[None]] = []
        for task, _ in stack.enter_context(closing(done)):
            if not task.last:
                continue
            written += [task.entry] if task.stop else []
            if sum(entry.source.nbytes for entry in written) > SYNC_BYTES:
                syncs.append(sync.submit(_sync, places, journal, written))
                written = []
            advance(task.entry.source.nbytes)
        syncs.append(sync.submit(_sync, places, journal, written))
        for future in syncs:
            future.result()


def _list_tasks(source: Source, plan: Plan, journal: Journal) -> Iterator[Task]:
    for entry in plan.entries:
        name = entry.source.name
        if not entry.stored or name in journal.done:
            yield Task(entry, 0, 0, last=True)
            continue
        rows = entry.source.shape[0] if entry.source.shape else 1
        for start, stop in source.chunks(name):
            yield Task(entry, start, stop, last=stop == rows)


def _write_rows(source: Source, places: Places, compute: Compute, task: Task) -> None:
    entry = task.entry
    if task.stop == 0 or entry.source.nbytes == 0:
        return
    rows = entry.source.shape[0] if entry.source.shape else 1
    pieces = stored_bytes(source, entry, task.start, task.stop, compute)
    for spec, piece in zip(entry.stored, pieces, strict=True):
        descriptor, offset = places[spec.name]
        _write_all(descriptor, piece, offset + task.start * (spec.nbytes // rows))


def _open_shards(folder: Path, shards: Sequence[Shard], stack: ExitStack) -> Places:
    places: Places = {}
    for shard in shards:
        descriptor = os.open(folder / shard.name, os.O_RDWR | os.O_CREAT, 0o644)
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, shard.size)
        _write_all(descriptor, memoryview(shard.header), 0)
        places |= {name: (descriptor, offset) for name, offset in shard.offsets.items()}
    return places


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written


def _sync(places: Places, journal: Journal, written: Sequence[Entry]) -> None:
    """Bytes first, then the journal: what it lists is on disk, whatever stops the machine."""
    for descriptor in {places[spec.name][0] for entry in written for spec in entry.stored}:
        os.fdatasync(descriptor)
    for entry in written:
        journal.add(entry.source.name)


def check_disk(folder: Path, shards: Sequence[Shard]) -> None:
    """The disk has room for what is still to be written. Raises `BadOutput`."""
    present = sum(path.stat().st_blocks * 512 for path in folder.rglob("*.safetensors"))
    need = sum(shard.size for shard in shards) - present
    free = shutil.disk_usage(folder).free
    if need > free:
        raise BadOutput(
            f"{folder} needs {need} bytes more and its disk has {free} free",
            "free some space, or choose an -o on another disk",
        )
