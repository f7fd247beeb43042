"""Qwen3-style EAGLE-3 draft: the Llama-style one with norms on queries and keys.

Source: vLLM ``model_executor/models/qwen3_eagle3.py``, which names ``qkv_proj`` without
``self_attn`` (0.32).
"""

from __future__ import annotations

from dataclasses import replace

from models import eagle3

FAMILY = replace(
    eagle3.FAMILY,
    name="eagle3_qwen3",
    architectures=("Eagle3Qwen3ForCausalLM",),
    preserved={**eagle3.FAMILY.preserved, eagle3.LAYER + r"self_attn\.[qk]_norm\.weight": "norm"},
    asked={r"\.self_attn\.((?:qkv|q|k|v)_proj)$": r".\1"},
    norms=(*eagle3.FAMILY.norms, "self_attn.q_norm", "self_attn.k_norm"),
)
