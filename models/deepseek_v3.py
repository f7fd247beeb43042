"""DeepSeek-V2, -V3 and -R1, and Kimi-K2, which is built by the same classes.

Source: vLLM ``model_executor/models/deepseek_v2.py`` and ``deepseek_mtp.py``. Attention is latent
(MLA): ``kv_b_proj`` is absorbed into its neighbours when it is loaded. As AMD publishes these
models, experts, shared experts and dense layers are quantized and attention stays BF16;
``--layer-scheme '*self_attn*' fp8_rowwise`` is AMD's AttnFP8 variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import Family, Mtp
from models.llama import FUSED, LAYER, MLP, NORMS, REQUIRED, SKELETON
from models.moe import EXPERT, FUSED_EXPERTS, MTP, MTP_MODULES, ROUTED, ROUTER, SHARED

LATENT = "q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj"
ATTENTION = {LAYER + rf"self_attn\.({LATENT})\.weight": "attention"}
LATENT_NORMS = {LAYER + r"self_attn\.(q|kv)_a_layernorm\.weight": "norm"}
LATENT_FUSED = {
    "gate_up_proj": FUSED["gate_up_proj"],
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
LATENT_LINEARS = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def latent_needs(config: Mapping[str, Any], sparse: bool) -> tuple[str, ...]:
    """Queries by way of ``q_lora_rank`` or directly; a bias where routing is ``noaux_tc``."""
    query = ("q_a_proj", "q_a_layernorm", "q_b_proj") if config.get("q_lora_rank") else ("q_proj",)
    names = tuple(f"self_attn.{module}.weight" for module in query)
    if sparse and config.get("topk_method") == "noaux_tc":
        names += ("mlp.gate.e_score_correction_bias",)
    return names


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"),
    quantized=EXPERT | SHARED | MLP,
    optional=ATTENTION,
    preserved=SKELETON | ROUTER | MTP | LATENT_NORMS,
    fused=LATENT_FUSED,
    linears={"self_attn": LATENT_LINEARS},
    norms=(*NORMS, "self_attn.kv_a_layernorm"),
    needs=latent_needs,
    required=REQUIRED,
    experts=ROUTED,
    mtp=Mtp("num_nextn_predict_layers", MTP_MODULES),
    fused_experts=FUSED_EXPERTS,
)
