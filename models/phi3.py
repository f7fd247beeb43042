"""Phi-3 and Phi-4, dense: ``qkv_proj`` and ``gate_up_proj`` are stored fused, as vLLM runs them.

Source: vLLM ``model_executor/models/phi3.py``.
"""

from __future__ import annotations

from models.base import Family
from models.llama import LAYER, NORMS, REQUIRED, SKELETON

FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    quantized={
        LAYER + r"self_attn\.(qkv|o)_proj\.weight": "attention",
        LAYER + r"mlp\.(gate_up|down)_proj\.weight": "mlp",
    },
    preserved=SKELETON,
    fused={"qkv_proj": ("qkv_proj",), "gate_up_proj": ("gate_up_proj",)},
    linears={"self_attn": ("qkv_proj", "o_proj"), "mlp": ("gate_up_proj", "down_proj")},
    norms=NORMS,
    required=REQUIRED,
)
