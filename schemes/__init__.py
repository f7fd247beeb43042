"""Quantization schemes, one module each; a new one is a file here and its name in `SCHEMES`."""

from __future__ import annotations

from functools import cache

from schemes import fp8_rowwise, mxfp4
from schemes.base import Scheme

SCHEMES: tuple[Scheme, ...] = (mxfp4, fp8_rowwise)


@cache
def find_scheme(name: str) -> Scheme:
    """The scheme of a name or alias, in any case. Raises ValueError for an unknown one."""
    for scheme in SCHEMES:
        if name.lower() in (known.lower() for known in (scheme.NAME, *scheme.ALIASES)):
            return scheme
    known = ", ".join(f"{s.NAME} (or {', '.join(s.ALIASES)})" for s in SCHEMES)
    raise ValueError(f"unknown scheme {name!r}; known are {known}")
