"""What mixtures of experts share: patterns for experts and routers, and which layers have them.

Source: the decoder layers of vLLM's ``deepseek_v2.py``, ``glm4_moe.py`` and ``qwen3_moe.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import Experts, FusedExperts
from models.llama import LAYER, LINEARS

EXPERT = {LAYER + r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight": "expert"}
SHARED = {LAYER + r"mlp\.shared_experts\.(gate|up|down)_proj\.weight": "shared expert"}
ROUTER = {
    LAYER + r"mlp\.gate\.weight": "router",
    LAYER + r"mlp\.gate\.e_score_correction_bias": "router bias",
}
MTP = {
    LAYER + r"eh_proj\.weight": "MTP",
    LAYER + r"shared_head\.head\.weight": "MTP",
    LAYER + r"(enorm|hnorm|shared_head\.norm)\.weight": "norm",
    LAYER + r"embed_tokens\.weight": "embedding",
}
MTP_MODULES = ("eh_proj", "enorm", "hnorm", "shared_head.norm")

BLOCK = r"(model\.layers\.\d+\.mlp\.experts)\."
FUSED_EXPERTS = (
    FusedExperts(BLOCK + r"gate_up_proj(?:\.weight)?", ("gate_proj", "up_proj")),
    FusedExperts(BLOCK + r"down_proj(?:\.weight)?", ("down_proj",)),
)
"""As transformers 5 holds them in memory: ``[experts, outputs, inputs]``, gate before up."""


def after_dense_layers(config: Mapping[str, Any], layer: int) -> bool:
    """The first ``first_k_dense_replace`` layers have no experts, later ones have."""
    dense: int = config.get("first_k_dense_replace") or 0
    return layer >= dense and layer % (config.get("moe_layer_freq") or 1) == 0


def by_sparse_step(config: Mapping[str, Any], layer: int) -> bool:
    """Every ``decoder_sparse_step``-th layer has experts, save those in ``mlp_only_layers``."""
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def everywhere(_config: Mapping[str, Any], _layer: int) -> bool:
    """Every layer has experts."""
    return True


ROUTED = Experts(
    module="mlp.experts",
    count="n_routed_experts",
    sparse=after_dense_layers,
    beside=("mlp.gate",),
    dense={"mlp": LINEARS["mlp"]},
)
"""Experts behind a router after the first dense layers: DeepSeek's, and GLM-4's."""
