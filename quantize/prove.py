"""Reads every stored tensor once beside its source and notes what differs or is out of range."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantize.activations import TOKENS, seeded_activations
from quantize.checkpoint import Checkpoint
from quantize.entry import Entry
from quantize.report import TensorProof
from quantize.source import Source
from quantize.transform import find_damage, preserved_bytes, rounded_rows, tensor_bytes
from schemes import find_scheme

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Findings:
    """What one pass over the tensors found; the lists hold problems in words."""

    changed: list[str] = field(default_factory=list)
    """Preserved tensors whose bytes differ from the source's."""
    quantized: list[str] = field(default_factory=list)
    scales: list[str] = field(default_factory=list)
    finite: list[str] = field(default_factory=list)
    proofs: list[TensorProof] = field(default_factory=list)
    preserved_bytes: int = 0
    quantized_bytes: int = 0


def prove_entry(out: Checkpoint, entry: Entry, source: Source | None, found: Findings) -> None:
    """Check one stored entry against the scheme and, where there is one, the source."""
    if entry.scheme is not None:
        _prove_quantized(out, entry, source, found)
        return
    spec = entry.stored[0]
    for start, stop in out.chunks(spec.name):
        stored = out.read(spec.name, start, stop)
        if damage := find_damage(out, spec.name, stored, spec.dtype, start):
            found.finite.append(f"{damage}, expected finite values")
        if source is not None and stored != preserved_bytes(source, entry, start, stop):
            found.changed.append(spec.name)
            break
    found.preserved_bytes += spec.nbytes


@dataclass
class Sums:
    """Energies of one weight and of its layer's outputs, summed over row ranges."""

    signal: float = 0.0
    noise: float = 0.0
    out_signal: float = 0.0
    out_noise: float = 0.0
    worst_row: float = math.inf


def _prove_quantized(out: Checkpoint, entry: Entry, source: Source | None, found: Findings) -> None:
    if entry.source.nbytes == 0:
        return
    scheme = find_scheme(entry.scheme or "")
    columns = entry.source.shape[1]
    x = seeded_activations(entry.source.module, TOKENS, columns)
    sums = Sums()
    # The source's own ranges: some of its weights can only be read whole.
    for start, stop in (source or out).chunks(
        entry.source.name if source else entry.stored[0].name
    ):
        stored = tuple(out.tensor(spec.name, start, stop) for spec in entry.stored)
        problem = _scale_fault(entry, stored)
        if problem:
            found.scales.append(f"{entry.stored[-1].name} rows {start} to {stop}: {problem}")
        if source is None:
            continue
        weight = rounded_rows(source, entry.source.name, start, stop)
        defined = _expected(source, entry, weight, start, stop)
        for spec, ours, theirs in zip(entry.stored, stored, defined, strict=True):
            if tensor_bytes(ours) != tensor_bytes(theirs):
                found.quantized.append(f"{spec.name} rows {start} to {stop}: other bytes")
        _add_energies(sums, weight, scheme.dequantize(*stored), x, scheme.matmul(x, *stored))
    found.quantized_bytes += sum(spec.nbytes for spec in entry.stored)
    if source is not None:
        found.proofs.append(_proof(entry, sums))


def _scale_fault(entry: Entry, stored: tuple[Tensor, ...]) -> str:
    """Why the scales are not valid. Another tool's may be zero, never infinite."""
    scheme = find_scheme(entry.scheme or "")
    if not entry.kept:
        return scheme.check_scale(stored[-1])
    import torch

    finite = scheme.dequantize(*stored).to(torch.bfloat16).isfinite().all()
    return "" if finite else "they make a weight infinite or NaN in BF16"


def _expected(
    source: Source, entry: Entry, weight: Tensor, start: int, stop: int
) -> tuple[Tensor, ...]:
    """What the stored tensors must be: the source's own where kept, else the definition's."""
    if entry.kept:
        return source.pieces(entry.source.name, start, stop)
    return find_scheme(entry.scheme or "").define(weight)


def _add_energies(sums: Sums, weight: Tensor, stored: Tensor, x: Tensor, y: Tensor) -> None:
    exact = weight.double()
    reference = x.double() @ exact.T
    sums.signal += float(exact.square().sum())
    sums.noise += float((exact - stored).square().sum())
    row_signal = reference.square().sum(0)
    row_noise = (reference - y).square().sum(0)
    sums.out_signal += float(row_signal.sum())
    sums.out_noise += float(row_noise.sum())
    rows = zip(row_signal.tolist(), row_noise.tolist(), strict=True)
    sums.worst_row = min(sums.worst_row, *(_decibels(s, n) for s, n in rows))


def _decibels(signal: float, noise: float) -> float:
    """SQNR in dB; an all-zero reference that is met exactly has no noise and passes."""
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise)


def _proof(entry: Entry, sums: Sums) -> TensorProof:
    error = 0.0 if sums.out_noise == 0 else math.inf
    if sums.out_signal > 0:
        error = math.sqrt(sums.out_noise / sums.out_signal)
    return TensorProof(
        name=entry.source.name,
        scheme=entry.scheme or "",
        sqnr_db=_decibels(sums.signal, sums.noise),
        matmul_error=error,
        matmul_db=_decibels(sums.out_signal, sums.out_noise),
        worst_row_db=sums.worst_row,
    )
