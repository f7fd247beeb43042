"""MiniMax-M3: dense layers first, sparse attention with an indexer, a vision tower.

Source: ``vllm/models/minimax_m3``. Experts and shared experts are quantized, attention and dense
layers stay BF16, as in amd/MiniMax-M3-MXFP4. The indexer's projections are loaded into
``qkv_proj``; its MTP modules, under ``model.mtp``, are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.base import Experts, Family, Renames, wrap
from models.llama import ATTENTION, FUSED, LAYER, LINEARS, MLP, NORMS, REQUIRED, SKELETON
from models.minimax_m2 import EXPERT, FUSED_EXPERTS, HEAD_NORMS, ROUTER, ROW_PARALLEL, needs
from models.vision import keep_vision

SHARED = {LAYER + r"block_sparse_moe\.shared_experts\.(gate|up|down)_proj\.weight": "shared expert"}


def by_frequency(config: Mapping[str, Any], layer: int) -> bool:
    """``moe_layer_freq`` has a number for each layer, 0 for a dense one; without it all have."""
    frequency = config.get("moe_layer_freq")
    return frequency is None or (layer < len(frequency) and frequency[layer] != 0)


TEXT = Family(
    name="minimax_m3_text",
    architectures=("MiniMaxM3SparseForCausalLM",),
    quantized=EXPERT | SHARED,
    optional=ATTENTION | MLP | {LAYER + r"self_attn\.index_[qk]_proj\.weight": "attention"},
    preserved=SKELETON
    | ROUTER
    | HEAD_NORMS
    | {
        LAYER + r"self_attn\.index_[qk]_norm\.weight": "norm",
        r"model\.mtp\.(?:\w+\.)*\w*norm\w*\.weight": "norm",
        r"model\.mtp\.(?:\w+\.)*embed_tokens\.weight": "embedding",
        r"model\.mtp\..+": "MTP",
    },
    fused=FUSED,
    joined={"index_q_proj": "qkv_proj", "index_k_proj": "qkv_proj"},
    row_parallel=ROW_PARALLEL,
    linears={"self_attn": LINEARS["self_attn"]},
    needs=needs,
    varies=r"self_attn\.index_",
    norms=(*NORMS, "self_attn.q_norm", "self_attn.k_norm"),
    required=REQUIRED,
    experts=Experts(
        module="block_sparse_moe.experts",
        count="num_local_experts",
        sparse=by_frequency,
        leaves=("w1", "w2", "w3"),
        beside=("block_sparse_moe.gate",),
        dense={"mlp": LINEARS["mlp"]},
    ),
    fused_experts=FUSED_EXPERTS,
)
VL = replace(
    wrap(
        TEXT,
        "minimax_m3",
        ("MiniMaxM3SparseForConditionalGeneration",),
        keep_vision("vision_tower", "(?:multi_modal_projector|patch_merge_mlp)"),
    ),
    # Its class for AMD renames these, its class for NVIDIA does not when they are whole names.
    asked={r"^(vision_tower\..*)\.mlp\.(fc[12])$": r"\1.\2"},
    renames=Renames(
        prefixes={
            "multi_modal_projector.": "vision_tower.multi_modal_projector.",
            "patch_merge_mlp.": "vision_tower.patch_merge_mlp.",
        },
    ),
)
FAMILIES = (TEXT, VL)
