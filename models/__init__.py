"""Model families, one module each; a new one is a file here and its name in `FAMILIES`."""

from __future__ import annotations

from models import eagle3, generic, llama, qwen2, qwen3
from models.base import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    eagle3.FAMILY,
    generic.FAMILY,
)


def find_family(architecture: str) -> Family:
    """The family that knows an architecture, or the generic decoder."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    return generic.FAMILY
