"""How much of a weight, and of its layer's outputs, is lost: energies by weight row, and decibels.

Outputs are compared with ``x Wᵀ`` of the source's weight. Float32 is exact enough for that by far
(about -120 dB against a noise of -30 dB) and twice as fast as float64; some rows of each weight
are measured in both, which shows it in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantize.report import TensorProof

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAY_DIFFER_DB = 0.01
"""Between float32 and float64, of one output feature's SQNR."""
_BLOCK_ROWS = 256
"""Weight rows at a time: what is computed of them stays in the cache."""
_LEAST, _MOST = 2.0**-40, 2.0**40
"""Rows with a largest magnitude outside of these are measured in float64."""


@dataclass(frozen=True)
class Inputs:
    """Activations ``[M, K]`` of one layer: as they are, and as the kernel multiplies them."""

    exact: Tensor
    quantized: Tensor


@dataclass(frozen=True)
class Energies:
    """Of each weight row and of the output feature it makes, float64 ``[N]``."""

    signal: Tensor
    noise: Tensor
    out_signal: Tensor
    out_noise: Tensor


def measure(weight: Tensor, stored: Tensor, inputs: Inputs) -> Energies:
    """Energies of BF16 rows ``[N, K]``, of which float32 ``stored`` is left."""
    import torch

    blocks = []
    for start in range(0, len(weight), _BLOCK_ROWS):
        rows = weight[start : start + _BLOCK_ROWS]
        left = stored[start : start + _BLOCK_ROWS]
        blocks.append(measure_in(_choose_type(rows, left), rows, left, inputs))
    return Energies(
        *(
            torch.cat([getattr(block, name) for block in blocks])
            for name in ("signal", "noise", "out_signal", "out_noise")
        )
    )


def _choose_type(weight: Tensor, stored: Tensor) -> torch.dtype:
    import torch

    return torch.float32 if bool(_fit_float32(weight, stored).all()) else torch.float64


def _fit_float32(weight: Tensor, stored: Tensor) -> Tensor:
    """Rows whose squares neither overflow nor vanish, in what is stored as well."""
    sizes = [rows.abs().amax(dim=1).float() for rows in (weight, stored)]
    first, second = (((size > _LEAST) & (size < _MOST)) | (size == 0) for size in sizes)
    return first & second


def measure_in(dtype: torch.dtype, weight: Tensor, stored: Tensor, inputs: Inputs) -> Energies:
    """`measure`, with the reference and all differences in ``dtype``."""
    import torch

    exact = weight.to(dtype)
    reference = torch.nn.functional.linear(inputs.exact.to(dtype), exact)
    outputs = torch.nn.functional.linear(inputs.quantized, stored).to(torch.bfloat16)
    return Energies(
        _energy(exact, 1),
        _energy(exact - stored, 1),
        _energy(reference, 0),
        _energy(reference - outputs, 0),
    )


def _energy(numbers: Tensor, dim: int) -> Tensor:
    import torch

    norms: Tensor = torch.linalg.vector_norm(numbers, dim=dim)
    return norms.double().square()


def compare_types(weight: Tensor, stored: Tensor, inputs: Inputs) -> float:
    """Largest difference in dB between an output feature's SQNR in float32 and in float64.

    Of the rows that are measured in float32 at all.
    """
    import torch

    fit = _fit_float32(weight, stored)
    weight, stored = weight[fit], stored[fit]
    low, high = (
        by_feature(measure_in(dtype, weight, stored, inputs))
        for dtype in (torch.float32, torch.float64)
    )
    differ = (low - high).abs()[low != high]
    return float(differ.max()) if len(differ) else 0.0


def by_feature(rows: Energies) -> Tensor:
    """SQNR of each output feature in dB, as `decibels` says."""
    import torch

    found = 10 * torch.log10(rows.out_signal / rows.out_noise)
    found[(rows.out_signal == 0) | ~rows.out_noise.isfinite()] = -math.inf
    found[rows.out_noise == 0] = math.inf
    return found


@dataclass
class Sums:
    """Energies of one weight and of its layer's outputs, summed over row ranges."""

    signal: float = 0.0
    noise: float = 0.0
    out_signal: float = 0.0
    out_noise: float = 0.0
    worst_row: float = math.inf

    def add(self, rows: Energies) -> None:
        """Add the energies of more rows."""
        self.signal += float(rows.signal.sum())
        self.noise += float(rows.noise.sum())
        self.out_signal += float(rows.out_signal.sum())
        self.out_noise += float(rows.out_noise.sum())
        self.worst_row = min(self.worst_row, float(by_feature(rows).min()))

    def proof(self, name: str, scheme: str) -> TensorProof:
        """What they mean for the weight of that name."""
        error = 0.0 if self.out_noise == 0 else math.inf
        if self.out_signal > 0:
            error = math.sqrt(self.out_noise / self.out_signal)
        return TensorProof(
            name=name,
            scheme=scheme,
            sqnr_db=decibels(self.signal, self.noise),
            matmul_error=error,
            matmul_db=decibels(self.out_signal, self.out_noise),
            worst_row_db=self.worst_row,
        )


def decibels(signal: float, noise: float) -> float:
    """SQNR in dB; an all-zero reference that is met exactly has no noise and passes."""
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise)
