"""The schemes' quantization as CPU kernels: BF16 bits in, stored bytes out, one pass in cache.

Each kernel is the integer arithmetic of its scheme's ``define``, whose bytes are AMD Quark's; tests
hold all three equal. They hold no lock of the interpreter: callers run them in threads, over rows.

Numba, because it needs neither a compiler on the user's machine nor torch. Measured on a Zen 3
core: GB/s of BF16 (MXFP4, FP8), and seconds from nothing to the first MXFP4 result, cold and warm:

============================  ============  ====  ====
numba 0.65                    4.0,  3.1     2.3   0.7
C++ (gcc 12) through ctypes   2.8,  3.5     0.3   0.0
torch.compile of ``define``   0.16, 0.04    24    5.8
============================  ============  ====  ====

C++ would save half a second of start for a compiler, or a wheel for every platform. torch.compile
leaves out the rounding to BF16 between two operations, and so gives other FP8 bytes. Compiled code
is cached beside this file or, where that is read-only, in the user's cache folder (or
NUMBA_CACHE_DIR); with no place to write, it is compiled anew in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from numba import njit
from numpy import float32, int16, int32, uint8, uint16, uint32

if TYPE_CHECKING:
    from schemes.base import Bits, Bytes, Floats

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _compiled(function: Kernel) -> Kernel:
    """The function in machine code, from numba's cache where there is one."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder to cache in
        return njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def _part(function: Kernel) -> Kernel:
    """A part of kernels, copied into them: LLVM alone leaves a call in the inner loop."""
    return njit(inline="always")(function)  # type: ignore[no-any-return]


# numba widens every sum of integers to 64 bits: the casts keep vectors of narrow lanes.


@_part
def _float(bits: Any) -> Any:
    """The float32 number of 32 bits."""
    return uint32(bits).view(float32)


@_part
def _round_to_bf16(quotient: Any) -> Any:
    """The bits of a quotient of BF16 numbers rounded to BF16; the low 16 are zero.

    To nearest: there are no ties, as no quotient of 8-bit significands has 9 bits.
    """
    bits = float32(quotient).view(uint32)
    return uint32(uint32(bits + uint32(0x8000)) & uint32(0xFFFF0000))


@_part
def _high_half(number: Any) -> Any:
    """The upper 16 bits of a float32 number: those of a BF16 number where it is one."""
    return int16(float32(number).view(uint32) >> uint32(16))


@_part
def _largest(bits: Any) -> Any:
    """The largest magnitude of BF16 numbers ``[n]``, as bits: magnitudes order as they do."""
    largest = int16(0)
    for i in range(len(bits)):
        largest = max(largest, int16(bits[i] & uint16(0x7FFF)))
    return largest


@_part
def _e2m1(quotient: Any, negative: Any) -> Any:
    """The E2M1 code of the BF16 number with these bits, its sign apart; ties to even.

    Counts the midpoints below it. Bits under 0 are those of numbers too small for an exponent.
    """
    code = uint8(quotient > int16(0x3E80)) + uint8(quotient >= int16(0x3F40))  # 0.25, 0.75
    code += uint8(quotient > int16(0x3FA0)) + uint8(quotient >= int16(0x3FE0))  # 1.25, 1.75
    code += uint8(quotient > int16(0x4020)) + uint8(quotient >= int16(0x4060))  # 2.5, 3.5
    code += uint8(quotient > int16(0x40A0))  # 5
    sign = uint8(negative and quotient > int16(0x3E80))  # zero has none
    return uint8(uint8(code) | uint8(sign << 3))


@_part
def _e4m3(quotient: Any) -> Any:
    """The E4M3 code of a BF16 magnitude given as float32 bits; ties to even, saturating."""
    odd = uint32((quotient >> uint32(20)) & uint32(1))
    normal = int32(uint32(quotient + uint32(0x7FFFF) + odd) >> uint32(20))
    normal = int32(normal - int32((127 - 7) << 3))
    # 2¹⁴ + x has steps of 2⁻⁹, those of E4M3's subnormal numbers.
    sum_ = float32(_float(quotient) + float32(2.0**14)).view(uint32)
    subnormal = int32(int32(sum_) - int32((127 + 14) << 23))
    code = subnormal if quotient < uint32((127 - 6) << 23) else normal
    return min(int32(code), int32(0x7E))


@_part
def _pack_block(weight: Any, out: Any, shift: Any) -> None:
    """Fill 16 bytes from 32 numbers whose scale byte is 3 or more: subtract exponents.

    Numbers that are subnormal are under a quarter of such a scale: they get code 0, as they must.
    """
    for i in range(16):
        low, high = weight[2 * i], weight[2 * i + 1]
        first = _e2m1(int16(int16(low & uint16(0x7FFF)) - shift), int16(low) < 0)
        second = _e2m1(int16(int16(high & uint16(0x7FFF)) - shift), int16(high) < 0)
        out[i] = uint8(first | uint8(second << 4))


@_part
def _pack_tiny_block(weight: Any, out: Any, exponent: Any) -> None:
    """The same for a smaller scale, by an exact product with ``2^(127 - exponent)``."""
    factor = _float(uint32(254 - exponent) << uint32(23))
    for i in range(16):
        low, high = weight[2 * i], weight[2 * i + 1]
        first = _float(uint32(low & uint16(0x7FFF)) << uint32(16)) * factor
        second = _float(uint32(high & uint16(0x7FFF)) << uint32(16)) * factor
        code = _e2m1(_high_half(first), int16(low) < 0)
        out[i] = uint8(code | uint8(_e2m1(_high_half(second), int16(high) < 0) << 4))


@_compiled
def quantize_mxfp4(bits: Bits, packed: Bytes, scale: Bytes) -> int:
    """Fill ``packed`` ``[N, K/2]`` and ``scale`` ``[N, K/32]`` from BF16 bits ``[N, K]``.

    Returns the bits of the largest magnitude: the result means nothing where that is not finite.
    """
    worst = int16(0)
    for row in range(bits.shape[0]):
        for block in range(scale.shape[1]):
            weight = bits[row, 32 * block : 32 * block + 32]
            out = packed[row, 16 * block : 16 * block + 16]
            largest = _largest(weight)
            worst = max(worst, largest)
            exponent: Any = ((int32(largest) + 0x20) >> 7) - 2  # mantissa 1.75 carries into it
            scale[row, block] = uint8(max(exponent, 1))
            if exponent >= 3:
                _pack_block(weight, out, int16((exponent - 127) << 7))
            else:
                _pack_tiny_block(weight, out, max(exponent, 0))
    return int(worst)


@_compiled
def quantize_fp8_rowwise(bits: Bits, codes: Bytes, scale: Floats) -> int:
    """Fill ``codes`` ``[N, K]`` (E4M3) and ``scale`` ``[N]`` from BF16 bits ``[N, K]``.

    Returns the bits of the largest magnitude: the result means nothing where that is not finite.
    """
    worst = int16(0)
    for row in range(bits.shape[0]):
        weight, out = bits[row], codes[row]
        largest = _largest(weight)
        worst = max(worst, largest)
        amax = _float(uint32(largest) << uint32(16))
        scale[row] = amax / float32(448) if largest else float32(2.0**-23)
        divisor = _float(_round_to_bf16(scale[row]))
        for i in range(len(weight)):
            magnitude = _float(uint32(weight[i] & uint16(0x7FFF)) << uint32(16))
            code = _e4m3(_round_to_bf16(magnitude / divisor))
            out[i] = uint8(code) | uint8((weight[i] >> uint16(8)) & uint16(0x80))
    return int(worst)
