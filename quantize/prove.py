"""Reads every stored tensor once beside its source and notes what differs or is out of range.

Every quantized byte is compared with the CPU kernel's, and some rows of every weight with the
scheme's definition as well, which shares no code with the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quantize.activations import TOKENS, seed_of, seeded_activations
from quantize.checkpoint import Checkpoint
from quantize.energies import Inputs, Sums, compare_types, measure
from quantize.entry import Entry
from quantize.report import TensorProof
from quantize.source import Source
from quantize.transform import find_damage, preserved_bytes, rounded_rows, tensor_bytes
from schemes import find_scheme
from schemes.base import Scheme

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_ROWS = 32
"""Rows of each weight that are checked twice: the first, the last and some between."""


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
    sampled_rows: int = 0
    """Rows whose bytes were compared with the definition, too."""
    float32_db: float = 0.0
    """Largest difference between float32 and float64 on the sampled rows."""


def prove_entry(
    out: Checkpoint, entry: Entry, source: Source | None, found: Findings, *, sample: bool
) -> None:
    """Check one stored entry against the scheme and, where there is one, the source.

    With ``sample``, SQNR is measured on `SAMPLE_ROWS` of each weight; all bytes are compared.
    """
    if entry.scheme is not None:
        _prove_quantized(out, entry, source, found, sample=sample)
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


def _prove_quantized(
    out: Checkpoint, entry: Entry, source: Source | None, found: Findings, *, sample: bool
) -> None:
    if entry.source.nbytes == 0:
        return
    scheme = find_scheme(entry.scheme or "")
    rows, columns = entry.source.shape
    inputs = _inputs(scheme, entry.source.module, columns) if source else None
    chosen = sample_rows(entry.source.name, rows)
    sums = Sums()
    # The source's own ranges: some of its weights can only be read whole.
    for start, stop in (source or out).chunks(
        entry.source.name if source else entry.stored[0].name
    ):
        stored = tuple(out.tensor(spec.name, start, stop) for spec in entry.stored)
        if problem := _scale_fault(entry, stored):
            found.scales.append(f"{entry.stored[-1].name} rows {start} to {stop}: {problem}")
        if source is None or inputs is None:
            continue
        weight = rounded_rows(source, entry.source.name, start, stop)
        expected = _expected(source, entry, weight, start, stop)
        _note_bytes(entry, stored, expected, f"rows {start} to {stop}", found)
        here = chosen[(chosen >= start) & (chosen < stop)] - start
        picked, left = weight[here], tuple(part[here] for part in stored)
        if len(here):
            _note_sample(entry, scheme, picked, left, inputs, found)
        measured, kept = (picked, left) if sample else (weight, stored)
        if len(measured):
            sums.add(measure(measured, scheme.dequantize(*kept), inputs))
    found.quantized_bytes += sum(spec.nbytes for spec in entry.stored)
    if source is not None:
        found.proofs.append(sums.proof(entry.source.name, scheme.NAME))


def _scale_fault(entry: Entry, stored: tuple[Tensor, ...]) -> str:
    """Why the scales are not valid. Another tool's may be zero, never infinite."""
    scheme = find_scheme(entry.scheme or "")
    if not entry.kept:
        return scheme.check_scale(stored[-1])
    import torch

    finite = scheme.dequantize(*stored).to(torch.bfloat16).isfinite().all()
    return "" if finite else "they make a weight infinite or NaN in BF16"


def _inputs(scheme: Scheme, module: str, columns: int) -> Inputs:
    x = seeded_activations(module, TOKENS, columns)
    return Inputs(x.float(), scheme.activations(x))


def sample_rows(name: str, rows: int) -> Any:
    """Numbers of `SAMPLE_ROWS` rows, always the same for a name: both ends, and half by chance."""
    quarter = SAMPLE_ROWS // 4
    if rows <= SAMPLE_ROWS:
        return np.arange(rows)
    middle = np.arange(quarter, rows - quarter)
    generator = np.random.default_rng(seed_of(name))
    some = generator.choice(middle, SAMPLE_ROWS - 2 * quarter, replace=False)
    return np.concatenate((np.arange(quarter), np.sort(some), np.arange(rows - quarter, rows)))


def _expected(source: Source, entry: Entry, weight: Tensor, start: int, stop: int) -> Sequence[Any]:
    """What the stored tensors must be: the source's own where kept, else the kernel's; or why not.

    Empty for a weight that the scheme cannot hold.
    """
    import torch

    if entry.kept:
        return source.pieces(entry.source.name, start, stop)
    try:
        bits = weight.view(torch.uint16).numpy()
        return [
            torch.from_numpy(part) for part in find_scheme(entry.scheme or "").quantize_bits(bits)
        ]
    except ValueError:
        return ()


def _note_bytes(
    entry: Entry, stored: Sequence[Tensor], expected: Sequence[Tensor], where: str, found: Findings
) -> None:
    if not expected:
        found.quantized.append(f"{entry.source.name} {where}: the source is not what it was")
    for spec, ours, theirs in zip(entry.stored, stored, expected, strict=False):
        if not np.array_equal(tensor_bytes(ours), tensor_bytes(theirs)):
            found.quantized.append(f"{spec.name} {where}: other bytes")


def _note_sample(
    entry: Entry,
    scheme: Scheme,
    weight: Tensor,
    stored: tuple[Tensor, ...],
    inputs: Inputs,
    found: Findings,
) -> None:
    """Compare some rows with the definition, and float32 with float64 on them."""
    if not entry.kept:
        _note_bytes(entry, stored, scheme.define(weight), "against the definition", found)
        found.sampled_rows += len(weight)
    difference = compare_types(weight, scheme.dequantize(*stored), inputs)
    found.float32_db = max(found.float32_db, difference)
