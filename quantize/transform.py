"""From rows of a source tensor to the bytes that stand for them: check, cast, quantize.

A BF16 weight never becomes a torch tensor on the CPU: importing torch takes longer than quantizing
a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from quantize.checkpoint import Checkpoint
from quantize.compute import Compute
from quantize.entry import Entry
from quantize.errors import BadCheckpoint
from quantize.source import Source
from schemes import find_scheme
from schemes.base import NotFinite, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from schemes.base import Bits

FLOATS = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2"}
"""Formats that can hold NaN and Inf, and numpy's type of their bytes; it has no BF16."""


def stored_bytes(
    source: Source, entry: Entry, start: int, stop: int, compute: Compute
) -> Sequence[memoryview]:
    """The stored bytes of rows ``start`` to ``stop`` of one entry, in the order of its specs.

    Raises `BadCheckpoint` for a NaN, an Inf or a weight that the scheme cannot hold.
    """
    name = entry.source.name
    if entry.kept:
        # A NaN or an overflow would be copied unseen.
        meant = source.read(name, start, stop)
        _refuse_damage(source, entry, entry.source.dtype, meant, (start, stop))
        return [tensor_bytes(piece) for piece in source.pieces(name, start, stop)]
    if entry.scheme is None:
        data = preserved_bytes(source, entry, start, stop)
        _refuse_damage(source, entry, entry.stored[0].dtype, data, (start, stop))
        return [memoryview(data)]
    bits = _bf16_bits(source, entry, start, stop)
    try:
        return [_flat(piece) for piece in quantize_rows(find_scheme(entry.scheme), bits, compute)]
    except NotFinite:
        _refuse_damage(source, entry, "BF16", bits, (start, stop))
        raise
    except ValueError as error:
        raise BadCheckpoint(
            f"{source.files.origin}/{source.shard_of[name]}: {name} rows {start} to {stop}: "
            f"{error}",
            f"keep it in BF16: --exclude-layers {entry.source.module!r}",
        ) from error


def _refuse_damage(
    source: Source, entry: Entry, dtype: str, data: Any, rows: tuple[int, int]
) -> None:
    """Raise `BadCheckpoint` naming the first NaN or Inf: the source's, or one that a cast made."""
    name, given = entry.source.name, entry.source.dtype
    damage = find_damage(source, name, data, dtype, rows[0])
    if damage and dtype != given:
        before = find_damage(source, name, source.read(name, *rows), given, rows[0])
        damage = before or f"{damage} when rounded to BF16"
    if damage:
        raise BadCheckpoint(
            f"{damage}, expected finite values",
            "the source is damaged or its training diverged: get a good copy",
        )


def quantize_rows(scheme: Scheme, bits: Bits, compute: Compute) -> Sequence[Any]:
    """The scheme's stored arrays of a BF16 weight's rows; raises as `Scheme.quantize_bits`."""
    if compute.kernels:
        return scheme.quantize_bits(bits)
    import torch

    weight = torch.from_numpy(bits).view(torch.bfloat16).to(compute.device)
    if not bool(weight.isfinite().all()):
        raise NotFinite("a number is NaN or Inf")
    scheme.refuse(weight)
    pieces = scheme.quantize(weight) if compute.engine == "quark" else scheme.define(weight)
    return [np.frombuffer(tensor_bytes(piece.cpu()), np.uint8) for piece in pieces]


def rounded_rows(source: Source, name: str, start: int, stop: int) -> Tensor:
    """Rows of a source tensor, rounded to BF16 where they are something else."""
    import torch

    return source.tensor(name, start, stop).to(torch.bfloat16)


def preserved_bytes(source: Source, entry: Entry, start: int, stop: int) -> bytearray | memoryview:
    """Rows of a preserved tensor in its stored dtype: BF16 for a head that is cast by consent."""
    if entry.stored[0].dtype == entry.source.dtype:
        return source.read(entry.source.name, start, stop)
    return tensor_bytes(rounded_rows(source, entry.source.name, start, stop))


def _bf16_bits(source: Source, entry: Entry, start: int, stop: int) -> Bits:
    """Rows ``[stop - start, K]`` of the BF16 weight that is quantized."""
    data: bytearray | memoryview
    if entry.source.dtype == "BF16":
        data = source.read(entry.source.name, start, stop)
    else:
        data = tensor_bytes(rounded_rows(source, entry.source.name, start, stop))
    return np.frombuffer(data, np.uint16).reshape(stop - start, *entry.source.shape[1:])


def _flat(piece: Any) -> memoryview:
    return memoryview(piece.reshape(-1).view(np.uint8))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in memory order, without a copy where it is contiguous."""
    import torch

    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def find_damage(checkpoint: Checkpoint, name: str, data: Any, dtype: str, start: int) -> str:
    """The first NaN or Inf in words, for example ``folder/file: weight[3, 4] is nan``; else empty.

    ``data`` are rows of the tensor from ``start``, stored as ``dtype``.
    """
    if dtype not in FLOATS:
        return ""
    numbers = np.frombuffer(data, FLOATS[dtype])
    if dtype == "BF16":
        if int(np.bitwise_and(numbers, 0x7FFF).max(initial=0)) < 0x7F80:
            return ""
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(numbers)
    if finite.all():
        return ""
    flat = int(np.argmin(finite))
    shape = checkpoint.specs[name].shape
    rows = numbers.size // prod(shape[1:])
    first = [int(i) for i in np.unravel_index(flat, (rows, *shape[1:]))] if shape else []
    place = [start + first[0], *first[1:]] if shape else "[]"
    return (
        f"{checkpoint.files.origin}/{checkpoint.shard_of[name]}: {name}{place} is {numbers[flat]}"
    )
