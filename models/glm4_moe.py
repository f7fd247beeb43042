"""GLM-4.5 to 4.7, mixture of experts: dense layers first, shared experts, MTP layers at the end.

Source: vLLM ``model_executor/models/glm4_moe.py`` and ``glm4_moe_mtp.py``. As in AMD Quark's
template only the routed experts are quantized by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import Family, Mtp
from models.llama import ATTENTION, FUSED, LAYER, LINEARS, MLP, NORMS, REQUIRED, SKELETON
from models.moe import EXPERT, FUSED_EXPERTS, MTP, MTP_MODULES, ROUTED, ROUTER, SHARED


def needs(config: Mapping[str, Any], sparse: bool) -> tuple[str, ...]:
    """Norms on queries and keys where ``use_qk_norm`` says so, and the router's correction bias."""
    names: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",) if sparse else ()
    if config.get("use_qk_norm"):
        names += ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    return names


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    quantized=EXPERT,
    optional=ATTENTION | MLP | SHARED,
    preserved=SKELETON
    | ROUTER
    | MTP
    | {
        LAYER + r"self_attn\.[qk]_norm\.weight": "norm",
        LAYER + r"self_attn\.[qkv]_proj\.bias": "bias",
    },
    fused=FUSED,
    linears={"self_attn": LINEARS["self_attn"]},
    norms=NORMS,
    needs=needs,
    required=REQUIRED,
    experts=ROUTED,
    mtp=Mtp("num_nextn_predict_layers", MTP_MODULES),
    fused_experts=FUSED_EXPERTS,
)
