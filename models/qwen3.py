"""Qwen3, dense: Llama's names with an RMSNorm on every head's query and key.

Source: vLLM ``model_executor/models/qwen3.py``.
"""

from __future__ import annotations

from models.base import Family
from models.llama import ATTENTION, FUSED, LAYER, LINEARS, MLP, NORMS, REQUIRED, SKELETON

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    quantized=ATTENTION | MLP,
    preserved=SKELETON
    | {
        LAYER + r"self_attn\.[qk]_norm\.weight": "norm",
        LAYER + r"self_attn\.[qkvo]_proj\.bias": "bias",
    },
    fused=FUSED,
    linears=LINEARS,
    norms=(*NORMS, "self_attn.q_norm", "self_attn.k_norm"),
    required=REQUIRED,
)
