"""Model families, one module each; a new one is a file here and its name in `FAMILIES`."""

from __future__ import annotations

from models import (
    deepseek_v3,
    eagle3,
    eagle3_mla,
    eagle3_qwen3,
    gemma,
    generic,
    glm4_moe,
    gpt_oss,
    kimi_k25,
    llama,
    llama4,
    minimax_m2,
    minimax_m3,
    mistral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from models.base import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    *gemma.FAMILIES,
    phi3.FAMILY,
    qwen3_moe.FAMILY,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    deepseek_v3.FAMILY,
    kimi_k25.FAMILY,
    minimax_m2.FAMILY,
    *minimax_m3.FAMILIES,
    *llama4.FAMILIES,
    eagle3.FAMILY,
    eagle3_qwen3.FAMILY,
    eagle3_mla.FAMILY,
    generic.FAMILY,
)


def find_family(architecture: str) -> Family:
    """The family that knows an architecture, or the generic decoder."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    return generic.FAMILY
