"""MXFP4: FP4 (E2M1) elements in blocks of 32 along K, one power-of-two (E8M0) scale per block.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3, with the scale rule "even" that
AMD Quark and vLLM use: round the block's largest magnitude to the nearest power of two, a
mantissa of 1.75 or more going up, and let that power stand for 4 (the largest exponent of E2M1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schemes.base import TensorSpec, finite_magnitude
from schemes.minifloat import round_to_minifloat
from schemes.quark_config import layer_config as _layer_config
from schemes.quark_quantize import quantize_with_quark

if TYPE_CHECKING:
    from torch import Tensor

    from schemes.base import Bits, Stored

NAME = "mxfp4"
ALIASES: tuple[str, ...] = ("w_mxfp4_a_mxfp4",)
QUARK_SCHEME = "mxfp4"
# Floors: 1 dB under the least of the demo pair (weights 18.3, outputs 15.1, worst row 11.5) and of
# random layers, Student-t with 4 degrees of freedom included (17.35, 14.5, 10.0), on
# `quantize.activations`. A row whose scales are all one step off is at 7.1 dB or less.
SQNR_FLOOR_DB = 16.3
COARSE_SQNR_FLOOR_DB = SQNR_FLOOR_DB
MATMUL_FLOOR_DB = 13.5
MATMUL_ROW_FLOOR_DB = 9.0

BLOCK = 32
ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of E2M1 codes 0 to 7; bit 3 is the sign."""
_SMALLEST, _LARGEST = 1, 252
"""Scale bytes that stand for finite BF16 weights: Quark writes 1 (2⁻¹²⁶) where the rule gives
less; 252 (2¹²⁵) is the last one whose largest product, 6·2¹²⁵, is finite in BF16."""

_WEIGHT: dict[str, Any] = {
    "dtype": "fp4",
    "is_dynamic": False,
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": BLOCK,
    "block_size": None,
    "symmetric": None,
    "round_method": "half_even",
    "scale_type": "float",
    "zero_point_type": "int32",
    "scale_format": "e8m0",
    "scale_calculation_mode": "even",
    "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver",
    "is_scale_quant": False,
    "enable_buffer_reuse": False,
    "max_input_numel": 4194304,
}


def misfit(spec: TensorSpec) -> str:
    """Why this weight cannot be stored in MXFP4; empty when it can."""
    if len(spec.shape) != 2:
        return f"{len(spec.shape)}-D, MXFP4 needs a 2-D weight"
    if spec.shape[1] % BLOCK:
        return f"input size {spec.shape[1]} is not a multiple of {BLOCK}"
    return ""


def stored(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """``weight`` U8 ``[N, K/2]`` (two elements a byte) and ``weight_scale`` U8 ``[N, K/32]``."""
    rows, columns = spec.shape
    return (
        TensorSpec(spec.name, "U8", (rows, columns // 2)),
        TensorSpec(f"{spec.name}_scale", "U8", (rows, columns // BLOCK)),
    )


def quantize(weight: Tensor) -> tuple[Tensor, ...]:
    """Packed elements U8 ``[N, K/2]`` and scales U8 ``[N, K/32]`` of a finite BF16 weight.

    Raises ValueError as `refuse` does.
    """
    refuse(weight)
    packed, scale = quantize_with_quark(QUARK_SCHEME, weight)
    return packed, scale


def quantize_bits(bits: Bits) -> tuple[Stored, ...]:
    """What `quantize` returns and refuses, from BF16 bits ``[N, K]`` by our kernel for CPUs.

    Raises `NotFinite` for NaN and Inf.
    """
    import numpy as np

    from schemes.kernels import quantize_mxfp4

    rows, columns = bits.shape
    packed = np.empty((rows, columns // 2), np.uint8)
    scale = np.empty((rows, columns // BLOCK), np.uint8)
    _refuse_large(finite_magnitude(quantize_mxfp4(bits, packed, scale)))
    return packed, scale


def refuse(weight: Tensor) -> None:
    """Raise ValueError for a magnitude of 1.75·2¹²⁷ (3.0e38) or more.

    Quark's scale for it makes the stored weight infinite.
    """
    _refuse_large(float(weight.abs().amax()))


def _refuse_large(magnitude: float) -> None:
    if magnitude >= 1.75 * 2.0**127:
        raise ValueError(f"largest magnitude {magnitude:.3g} overflows MXFP4 (limit 2.98e38)")


def define(weight: Tensor) -> tuple[Tensor, ...]:
    """What `quantize` returns, from the definition alone, in integer operations on the bits.

    Quark departs from the definition in one place, and so does this: a block whose largest
    magnitude is not zero but under 1.75·2⁻¹²⁵ (8.2e-38) is divided by 2⁻¹²⁷ (scale byte 0) but
    its scale is written as 1, so its values are stored doubled. An all-zero block has scale 1.
    """
    import torch

    rows, columns = weight.shape
    bits = weight.view(torch.int16).view(rows, columns // BLOCK, BLOCK)
    magnitudes = bits & 0x7FFF  # magnitudes order as their bits do
    # BF16 has 7 mantissa bits: adding 0x20 carries into the exponent from mantissa 1.75 on.
    exponent = ((magnitudes.amax(dim=2) + 0x20) >> 7) - 2
    scale = exponent.clamp(min=_SMALLEST)
    # Dividing by a power of two is exact here; results that underflow are far below .25.
    divisor = power_of_two(exponent.clamp(min=0).to(torch.uint8)).to(torch.bfloat16)
    ratios = bits.view(torch.bfloat16) / divisor[:, :, None]
    codes = round_to_minifloat(ratios, mantissa_bits=1, bias=1).clamp_(max=7)  # saturates at 6
    codes |= ((bits < 0) & (codes > 0)).to(torch.int16) << 3  # zero has no sign
    low, high = codes.view(rows, columns // 2, 2).unbind(dim=2)
    return (low | (high << 4)).to(torch.uint8), scale.to(torch.uint8)


def power_of_two(scale: Tensor) -> Tensor:
    """The float32 values of E8M0 bytes: ``2^(byte - 127)``; 255 is NaN (MX v1.0, section 5.4.1)."""
    import torch

    bits = scale.to(torch.int32) << 23
    bits.masked_fill_(scale == 0, 0x400000)  # 2⁻¹²⁷ is subnormal in float32
    bits.masked_fill_(scale == 255, 0x7FC00000)
    return bits.view(torch.float32)


def check_scale(scale: Tensor) -> str:
    """Why these scale bytes cannot come from a finite BF16 weight; empty when they can."""
    low, high = int(scale.amin()), int(scale.amax())
    if low < _SMALLEST or high > _LARGEST:
        return f"scale bytes {low} to {high}, expected {_SMALLEST} to {_LARGEST}"
    return ""


def dequantize(*stored: Tensor) -> Tensor:
    """The float32 weight ``[N, K]``: element times scale, low nibble first."""
    import torch

    packed, scale = stored
    values = torch.tensor([*ELEMENTS, *(-value for value in ELEMENTS)], device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)  # by byte
    elements = torch.nn.functional.embedding(packed.to(torch.int32), pairs)
    blocks = elements.view(packed.shape[0], -1, BLOCK) * power_of_two(scale)[:, :, None]
    return blocks.view(packed.shape[0], -1)


def activations(x: Tensor) -> Tensor:
    """The float32 numbers that `matmul` multiplies for BF16 ``x`` ``[M, K]``."""
    return dequantize(*define(x))


def matmul(x: Tensor, *stored: Tensor) -> Tensor:
    """``x Wᵀ`` in BF16 as vLLM computes it: both sides quantized, summed in float32.

    Mirrors ``EmulationMxfp4LinearKernel`` of vLLM 0.32
    (``vllm/model_executor/kernels/linear/mxfp4/emulation.py``), whose product of BF16 matrices
    is made here in float32 (exact products, far faster on a CPU without BF16 instructions);
    native MXFP4 kernels multiply the same values. Activations follow the weights' "even" rule.
    """
    import torch

    return torch.nn.functional.linear(activations(x), dequantize(*stored)).to(torch.bfloat16)


def layer_config() -> dict[str, Any]:
    """Quark's layer configuration of ``mxfp4``: weights static, activations dynamic."""
    return _layer_config(_WEIGHT | {"is_dynamic": True}, _WEIGHT)
