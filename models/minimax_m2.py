"""MiniMax-M2, M2.1 and M2.5: experts ``w1``, ``w2``, ``w3`` under ``block_sparse_moe``.

Source: vLLM ``model_executor/models/minimax_m2.py``, which builds the experts by the name
``mlp.experts``. Attention stays BF16, as in amd/MiniMax-M2.5-MXFP4; the router is stored as F32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import Experts, Family, FusedExperts, Mtp
from models.llama import ATTENTION, FUSED, LAYER, LINEARS, NORMS, REQUIRED, SKELETON
from models.moe import everywhere

BLOCK = r"(model\.layers\.\d+\.block_sparse_moe\.experts)\."
EXPERT = {LAYER + r"block_sparse_moe\.experts\.\d+\.w[123]\.weight": "expert"}
ROUTER = {
    LAYER + r"block_sparse_moe\.gate\.weight": "router",
    LAYER + r"block_sparse_moe\.e_score_correction_bias": "router bias",
}
HEAD_NORMS = {LAYER + r"self_attn\.[qk]_norm\.weight": "norm"}
FUSED_EXPERTS = (
    FusedExperts(BLOCK + r"gate_up_proj(?:\.weight)?", ("w1", "w3")),
    FusedExperts(BLOCK + r"down_proj(?:\.weight)?", ("w2",)),
)
ROW_PARALLEL = ("o_proj", "down_proj", "w2")


def needs(config: Mapping[str, Any], sparse: bool) -> tuple[str, ...]:
    """The router's correction bias, where the config uses one."""
    used = sparse and config.get("use_routing_bias")
    return ("block_sparse_moe.e_score_correction_bias",) if used else ()


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    quantized=EXPERT,
    optional=ATTENTION,
    preserved=SKELETON | ROUTER | HEAD_NORMS,
    fused={"qkv_proj": FUSED["qkv_proj"]},
    asked={r"\.block_sparse_moe\.experts$": ".mlp.experts"},
    row_parallel=ROW_PARALLEL,
    linears={"self_attn": LINEARS["self_attn"]},
    norms=(*NORMS, "self_attn.q_norm", "self_attn.k_norm"),
    needs=needs,
    required=REQUIRED,
    experts=Experts(
        module="block_sparse_moe.experts",
        count="num_local_experts",
        sparse=everywhere,
        leaves=("w1", "w2", "w3"),
        beside=("block_sparse_moe.gate",),
    ),
    mtp=Mtp("num_mtp_modules", ()),
    fused_experts=FUSED_EXPERTS,
)
