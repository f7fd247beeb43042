"""Runs a plan: read, check, quantize, write at known offsets, journal. Memory stays bounded.

Every operation works on a range of weight rows, because both schemes are independent per row:
the peak is set by `CHUNK_BYTES`, whatever the size of tensor, shard or model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from quantize.checkpoint import Checkpoint
from quantize.entry import Entry
from quantize.errors import BadCheckpoint, BadOutput, ToolError
from quantize.layout import Shard
from quantize.plan import Plan
from quantize.source import Source
from quantize.workdir import Journal
from schemes import find_scheme
from schemes.quark_setup import build_lock, import_quark, missing_compiler, needs_build

if TYPE_CHECKING:
    from torch import Tensor

Advance = Callable[[int], None]
"""Reports source bytes done, for progress."""

Stage = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows one stage of known size (bytes; 0 unknown) as it advances."""

FLOATS = ("F64", "F32", "F16", "BF16")
SYNC_BYTES = 256 << 20


def load_quark(plans: Iterable[Plan], stage: Stage) -> None:
    """Import Quark and build its kernels before the bars start: both take long and show nothing.

    Raises `ToolError` naming the C++ compiler that a first build lacks.
    """
    if not any(entry.scheme for plan in plans for entry in plan.entries):
        return
    text = "load AMD Quark"
    if needs_build():
        text = "compile AMD Quark's C++ extension (first use only: one to several minutes)"
        if compiler := missing_compiler():
            raise ToolError(
                f"AMD Quark compiles a C++ extension on first use, and {compiler} is not on PATH",
                "install a C++ compiler (Debian and Ubuntu: apt-get install g++), or set CXX",
            )
    if lock := build_lock():
        text += f" (waits while {lock} exists: remove it if no other build is running)"
    with stage(text, 0):
        import_quark()


def write_tensors(
    source: Source,
    plan: Plan,
    shards: Sequence[Shard],
    folder: Path,
    journal: Journal,
    device: str,
    advance: Advance,
) -> None:
    """Write every tensor of the plan that the journal does not list yet.

    Raises `BadCheckpoint` for a NaN or Inf.
    """
    with ExitStack() as stack:
        places = _open_shards(folder, shards, stack)
        unsynced: list[str] = []
        pending = 0
        for entry in plan.entries:
            if entry.stored and entry.source.name not in journal.done:
                _write_entry(source, entry, places, device)
                unsynced.append(entry.source.name)
                pending += entry.source.nbytes
            if pending > SYNC_BYTES:
                _sync(places, journal, unsynced)
                pending = 0
            advance(entry.source.nbytes)
        _sync(places, journal, unsynced)


def _write_entry(
    source: Source, entry: Entry, places: dict[str, tuple[int, int]], device: str
) -> None:
    rows = entry.source.shape[0] if entry.source.shape else 1
    if entry.source.nbytes == 0:
        return
    for start, stop in source.chunks(entry.source.name):
        pieces = transform(source, entry, start, stop, device)
        for spec, piece in zip(entry.stored, pieces, strict=True):
            descriptor, offset = places[spec.name]
            _write_all(descriptor, piece, offset + start * (spec.nbytes // rows))


def transform(
    source: Source, entry: Entry, start: int, stop: int, device: str
) -> Iterator[memoryview]:
    """The stored bytes of rows ``start`` to ``stop`` of one entry, in the order of its specs."""
    if entry.kept:
        # A NaN or an overflow would be copied unseen.
        meant = source.tensor(entry.source.name, start, stop)
        check_finite(source, entry.source.name, meant, start)
        pieces = source.pieces(entry.source.name, start, stop)
        yield from (tensor_bytes(piece) for piece in pieces)
        return
    if entry.scheme is None and entry.source.dtype not in FLOATS:
        yield memoryview(source.read(entry.source.name, start, stop))
        return
    tensor = source.tensor(entry.source.name, start, stop)
    check_finite(source, entry.source.name, tensor, start)
    cast = cast_head(entry, tensor) if entry.scheme is None else cast_weight(tensor)
    if cast is not tensor:
        check_finite(source, entry.source.name, cast, start, " when rounded to BF16")
    if entry.scheme is None:
        yield tensor_bytes(cast)
        return
    try:
        pieces = find_scheme(entry.scheme).quantize(cast.to(device))
    except ValueError as error:
        raise BadCheckpoint(
            f"{source.files.origin}/{source.shard_of[entry.source.name]}: {entry.source.name} rows "
            f"{start} to {stop}: {error}",
            f"keep it in BF16: --exclude-layers {entry.source.module!r}",
        ) from error
    yield from (tensor_bytes(piece.cpu()) for piece in pieces)


def cast_weight(weight: Tensor) -> Tensor:
    """The BF16 weight that is quantized."""
    import torch

    return weight.to(torch.bfloat16)


def cast_head(entry: Entry, tensor: Tensor) -> Tensor:
    """The tensor in its stored dtype: BF16 for a head that is cast by consent, else unchanged."""
    return tensor if entry.stored[0].dtype == entry.source.dtype else cast_weight(tensor)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in memory order, without a copy where it is contiguous."""
    import torch

    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def check_finite(
    source: Checkpoint, name: str, tensor: Tensor, start: int, rounded: str = ""
) -> None:
    """Raise `BadCheckpoint` with the first index of a NaN or Inf; rows begin at ``start``."""
    import torch

    if bool(torch.isfinite(tensor).all()):
        return
    first = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    value = tensor[tuple(first)].item()
    if first:
        first[0] += start
    raise BadCheckpoint(
        f"{source.files.origin}/{source.shard_of[name]}: {name}{first} is {value}{rounded}, "
        "expected finite values",
        "the source is damaged or its training diverged: get a good copy",
    )


def _open_shards(
    folder: Path, shards: Sequence[Shard], stack: ExitStack
) -> dict[str, tuple[int, int]]:
    """File descriptor and offset of every output tensor."""
    places: dict[str, tuple[int, int]] = {}
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


def _sync(places: dict[str, tuple[int, int]], journal: Journal, names: list[str]) -> None:
    """Bytes first, then the journal: what it lists is on disk, whatever stops the machine."""
    for descriptor in {descriptor for descriptor, _ in places.values()}:
        os.fdatasync(descriptor)
    for name in names:
        journal.add(name)
    names.clear()


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
