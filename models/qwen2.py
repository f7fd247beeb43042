"""Qwen2 and Qwen2.5, dense: Llama's names with biases on q, k and v.

Source: vLLM ``model_executor/models/qwen2.py``.
"""

from __future__ import annotations

from models.base import Family
from models.llama import ATTENTION, FUSED, LAYER, LINEARS, MLP, NORMS, REQUIRED, SKELETON

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    quantized=ATTENTION | MLP,
    preserved=SKELETON | {LAYER + r"self_attn\.[qkv]_proj\.bias": "bias"},
    fused=FUSED,
    linears=LINEARS,
    norms=NORMS,
    required=REQUIRED,
)
