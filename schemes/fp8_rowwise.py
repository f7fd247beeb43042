"""FP8 row-wise: E4M3 weights with one float32 scale per output row, activations per token.

Quark calls it ``ptpc_fp8`` (per token, per channel). Source: E4M3 of OCP 8-bit Floating Point
v1.0 (no infinities, largest finite 448), scale = largest magnitude of the row / 448.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from schemes.base import TensorSpec, finite_magnitude
from schemes.minifloat import round_to_minifloat
from schemes.quark_config import layer_config as _layer_config
from schemes.quark_quantize import quantize_with_quark

if TYPE_CHECKING:
    from torch import Tensor

    from schemes.base import Bits, Stored

NAME = "fp8_rowwise"
ALIASES: tuple[str, ...] = ("ptpc_fp8", "fp8_per_channel", "FP8_DYNAMIC")
QUARK_SCHEME = "ptpc_fp8"
# Floors: 1 dB under the least of the demo pair (weights 31.47, outputs 28.55, worst row 25.25);
# random layers, Student-t with 4 degrees of freedom included, stay above (31.47, 28.55, 25.88), on
# `quantize.activations`. A row whose scale is doubled or halved is at 6.3 dB or less.
SQNR_FLOOR_DB = 30.4
# Rows of MXFP4 values give 29.85 to 30.1 dB (measured), and 28.9 dB when all magnitudes are 1, 2
# and 4 of a row whose largest is 6: E4M3 then rounds each of them by nearly a sixteenth.
COARSE_SQNR_FLOOR_DB = 27.9
MATMUL_FLOOR_DB = 27.5
MATMUL_ROW_FLOOR_DB = 24.2

LARGEST = 448.0
"""Largest finite E4M3 number."""
ZERO_ROW_SCALE = 2.0**-23
"""Quark's scale for an all-zero row: the float32 machine epsilon."""
_LEAST_TOKEN_SCALE = 1.0 / (LARGEST * 512.0)
"""vLLM's lower bound for a token's scale (``_FP8_MIN_SCALING_FACTOR``)."""

_WEIGHT: dict[str, Any] = {
    "dtype": "fp8_e4m3",
    "is_dynamic": False,
    "qscheme": "per_channel",
    "ch_axis": 0,
    "group_size": None,
    "block_size": None,
    "symmetric": True,
    "round_method": "half_even",
    "scale_type": "float",
    "zero_point_type": "int32",
    "scale_format": None,
    "scale_calculation_mode": None,
    "mx_element_dtype": None,
    "observer_cls": "PerChannelMinMaxObserver",
    "is_scale_quant": False,
    "enable_buffer_reuse": False,
    "max_input_numel": 4194304,
}


def misfit(spec: TensorSpec) -> str:
    """Why this weight cannot be stored in FP8 row-wise; empty when it can."""
    if len(spec.shape) != 2:
        return f"{len(spec.shape)}-D, FP8 row-wise needs a 2-D weight"
    return ""


def stored(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """``weight`` F8_E4M3 ``[N, K]`` and ``weight_scale`` F32 ``[N]``."""
    return (
        TensorSpec(spec.name, "F8_E4M3", spec.shape),
        TensorSpec(f"{spec.name}_scale", "F32", spec.shape[:1]),
    )


def quantize(weight: Tensor) -> tuple[Tensor, ...]:
    """E4M3 elements ``[N, K]`` and float32 scales ``[N]`` of a finite BF16 weight.

    Raises ValueError as `refuse` does.
    """
    refuse(weight)
    return quantize_with_quark(QUARK_SCHEME, weight)


def refuse(weight: Tensor) -> None:
    """Raise ValueError for a row that is not zero but whose scale is no normal BF16 number.

    Its largest magnitude is under 448·2⁻¹²⁶ (5.3e-36): Quark divides by the scale in BF16, where
    it loses its digits or becomes zero, and would store wrong values or NaN.
    """
    amax = weight.abs().amax(dim=1).float()
    lost = ((amax > 0) & (amax < LARGEST * 2.0**-126)).nonzero()
    if len(lost):
        _refuse_row(int(lost[0]), float(amax[int(lost[0])]))


def quantize_bits(bits: Bits) -> tuple[Stored, ...]:
    """What `quantize` returns and refuses, from BF16 bits ``[N, K]`` by our kernel for CPUs.

    Raises `NotFinite` for NaN and Inf. The E4M3 elements are uint8.
    """
    import numpy as np

    from schemes.kernels import quantize_fp8_rowwise

    codes = np.empty(bits.shape, np.uint8)
    scale = np.empty(len(bits), np.float32)
    finite_magnitude(quantize_fp8_rowwise(bits, codes, scale))
    lost = np.flatnonzero(scale < 2.0**-126)
    if len(lost):
        row = int(lost[0])
        _refuse_row(row, finite_magnitude(int((bits[row] & 0x7FFF).max())))
    return codes, scale


def _refuse_row(row: int, magnitude: float) -> NoReturn:
    raise ValueError(f"row {row}: largest magnitude {magnitude:.3g} is under 5.3e-36")


def define(weight: Tensor) -> tuple[Tensor, ...]:
    """What `quantize` returns, from the definition alone, in integer operations on the bits.

    The scale is float32, but Quark divides in the weight's own dtype: quotient = BF16(w /
    BF16(scale)), then saturating E4M3, ties to even. Against a division in float32 that moves
    about 3 % of the elements to the neighbouring code and costs 0.07 dB.
    """
    import torch

    amax = weight.abs().amax(dim=1).float()
    scale = (amax / LARGEST).masked_fill_(amax == 0, ZERO_ROW_SCALE)
    quotient = (weight / scale.to(torch.bfloat16)[:, None]).clamp_(-LARGEST, LARGEST)
    codes = round_to_minifloat(quotient, mantissa_bits=3, bias=7)
    codes |= (weight.view(torch.int16) >> 8) & 0x80  # zero keeps its sign
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scale


def check_scale(scale: Tensor) -> str:
    """Why these row scales are not valid; empty when all are finite and above zero."""
    bad = (~(scale.isfinite() & (scale > 0))).nonzero()
    if len(bad):
        row = int(bad[0])
        return f"scale of row {row} is {float(scale[row])}, expected finite and above zero"
    return ""


def dequantize(*stored: Tensor) -> Tensor:
    """The float32 weight ``[N, K]``: element times its row's scale."""
    import torch

    elements, scale = stored
    codes = torch.arange(256, dtype=torch.uint8, device=elements.device)
    values = codes.view(torch.float8_e4m3fn).float()  # to look up is twice as fast as to convert
    return torch.take(values, elements.view(torch.uint8).long()).mul_(scale[:, None])


def activations(x: Tensor) -> Tensor:
    """The float32 numbers that `matmul` multiplies for BF16 ``x`` ``[M, K]``.

    Mirrors vLLM 0.32: ``QuantFP8.forward_native`` per token
    (``vllm/model_executor/layers/quantization/input_quant_fp8.py``).
    """
    import torch

    token_scale = (x.abs().amax(dim=1, keepdim=True).float() / LARGEST).clamp_(_LEAST_TOKEN_SCALE)
    tokens = (x.float() * token_scale.reciprocal()).clamp_(-LARGEST, LARGEST)
    return tokens.to(torch.float8_e4m3fn).float() * token_scale


def matmul(x: Tensor, *stored: Tensor) -> Tensor:
    """``x Wᵀ`` in BF16 as vLLM computes it: per-token FP8 activations, row-wise scaled product.

    A test holds it equal to ``RowWiseTorchFP8ScaledMMLinearKernel``, the kernel of ROCm without
    AITER (``vllm/model_executor/kernels/linear/scaled_mm/pytorch.py``), whose
    ``torch._scaled_mm`` multiplies the same float32 numbers on a CPU, more slowly. The CPU's
    ``ChannelWiseTorchFP8ScaledMMLinearKernel`` multiplies the scales after the same product.
    """
    import torch

    return torch.nn.functional.linear(activations(x), dequantize(*stored)).to(torch.bfloat16)


def layer_config() -> dict[str, Any]:
    """Quark's layer configuration of ``ptpc_fp8``: weights static, activations dynamic."""
    return _layer_config(_WEIGHT | {"is_dynamic": True, "ch_axis": 1}, _WEIGHT)
