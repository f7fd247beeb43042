"""Rounding BF16 numbers to narrow floating-point formats, in integer operations on the bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def round_to_minifloat(values: Tensor, mantissa_bits: int, bias: int) -> Tensor:
    """The codes (exponent and mantissa, no sign) of ``|values|``, to nearest, ties to even.

    ``values`` are BF16 and finite; the codes are int16 and not saturated. Subnormals as in
    OCP MX v1.0, section 5.3.
    """
    import torch

    magnitudes = values.view(torch.int16) & 0x7FFF
    dropped = 7 - mantissa_bits
    half = (1 << (dropped - 1)) - 1
    normal = (magnitudes + half + ((magnitudes >> dropped) & 1)) >> dropped
    normal -= (127 - bias) << mantissa_bits
    # Below the least normal number, 2^(1 - bias), codes count equal steps. Adding 2⁷ steps makes
    # BF16 itself round to whole steps, and they can be read off the low bits of the sum.
    anchor = torch.tensor(2.0 ** (8 - bias - mantissa_bits), dtype=torch.bfloat16)
    sums = (magnitudes.view(torch.bfloat16) + anchor.to(values.device)).view(torch.int16)
    subnormal = sums - int(anchor.view(torch.int16))
    return torch.where(magnitudes < (128 - bias) << 7, subnormal, normal)
