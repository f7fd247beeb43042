"""The formats in which sources store weights, one file each: all of them become BF16 weights."""

from __future__ import annotations

from typing import cast

from quantize.sources import fp8_block, fp8_tensor, int4_packed, mxfp4
from quantize.sources.base import Format, Weight

FORMATS = cast("tuple[Format, ...]", (fp8_block, fp8_tensor, int4_packed, mxfp4))

COARSE = (int4_packed.NAME, mxfp4.NAME)
"""Formats whose values lie on a 4-bit grid."""

METHODS = tuple(sorted({method for format in FORMATS for method in format.METHODS}))


def find_format(name: str) -> Format:
    """The format that a weight or an entry names."""
    return next(format for format in FORMATS if name == format.NAME)


def keeps_bytes(weight: Weight, scheme: str) -> bool:
    """Whether a stored weight already holds the bytes of the scheme, row by row."""
    return weight.scheme == scheme and not weight.transposed
