"""What a quantization scheme is: the values that planning, quantizing and proving share.

A scheme is a *module* of this package (see `SCHEMES` in ``__init__``) that meets `Scheme`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Bits = NDArray[np.uint16]
    """BF16 numbers as their bits; numpy has no such type."""
    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    Stored = Bytes | Floats
    """A stored tensor in memory; FP8 elements are bytes."""

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of one element, by safetensors dtype name."""

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
"""torch's name of every safetensors dtype in `ITEM_BYTES`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One entry of a safetensors header: name, dtype in safetensors' spelling, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def module(self) -> str:
        """The module that owns the tensor: the name without its last component."""
        return self.name.rpartition(".")[0]


class NotFinite(ValueError):
    """A weight holds NaN or Inf."""


def finite_magnitude(bits: int) -> float:
    """The value of a BF16 magnitude given as bits. Raises `NotFinite` for NaN and Inf."""
    if bits >= 0x7F80:
        raise NotFinite("a number is NaN or Inf")
    return float(struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0])


class Scheme(Protocol):
    """A way to store a linear layer's weight ``[N, K]`` in fewer bits.

    Every operation is independent per weight row, so callers may pass any slice of rows.
    """

    NAME: str
    ALIASES: tuple[str, ...]
    QUARK_SCHEME: str
    """The scheme's name in Quark's registry (``quark.torch.LLMTemplate``)."""
    SQNR_FLOOR_DB: float
    """Least SQNR of a stored weight against its source."""
    COARSE_SQNR_FLOOR_DB: float
    """The same for a source whose values lie on a 4-bit grid, where rounding can meet its worst."""
    MATMUL_FLOOR_DB: float
    """Least SQNR of a layer's output ``x Wᵀ`` against float64."""
    MATMUL_ROW_FLOOR_DB: float
    """Least SQNR of a single output feature (one weight row) against float64."""

    def misfit(self, spec: TensorSpec) -> str:
        """Why this weight cannot be stored in the scheme; empty when it can."""
        ...

    def stored(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors that stand for weight ``spec`` in a quantized checkpoint."""
        ...

    def quantize(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Quantize a BF16 weight ``[N, K]`` with Quark's own operations, in `stored` order.

        Raises ValueError as `refuse` does.
        """
        ...

    def refuse(self, weight: Tensor) -> None:
        """Raise ValueError for a finite weight that Quark would store wrongly."""
        ...

    def quantize_bits(self, bits: Bits) -> tuple[Stored, ...]:
        """What `quantize` returns and refuses, from BF16 bits, by our kernel for CPUs.

        Raises `NotFinite` for NaN and Inf. Needs neither torch nor Quark; releases the GIL.
        """
        ...

    def define(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The same tensors from the scheme's published definition, without Quark."""
        ...

    def check_scale(self, scale: Tensor) -> str:
        """Why the stored scales are not valid; empty when they are."""
        ...

    def dequantize(self, *stored: Tensor) -> Tensor:
        """The float32 weight ``[N, K]`` that the stored tensors mean."""
        ...

    def activations(self, x: Tensor) -> Tensor:
        """The float32 numbers ``[M, K]`` that vLLM's kernel multiplies for BF16 ``x``."""
        ...

    def matmul(self, x: Tensor, *stored: Tensor) -> Tensor:
        """``x Wᵀ`` for BF16 ``x`` ``[M, K]`` as vLLM's kernel computes it, BF16 ``[M, N]``.

        Activations are quantized as the kernel quantizes them.
        """
        ...

    def layer_config(self) -> dict[str, Any]:
        """Quark's layer configuration (``input_tensors``, ``weight``, …) as a new dict."""
        ...
