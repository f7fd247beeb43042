"""Llama (and the names that most dense decoders share with it).

Source: vLLM ``model_executor/models/llama.py``, transformers ``models/llama/modeling_llama.py``.
"""

from __future__ import annotations

from models.base import Family

LAYER = r"model\.layers\.\d+\."

ATTENTION = {LAYER + r"self_attn\.[qkvo]_proj\.weight": "attention"}
MLP = {LAYER + r"mlp\.(gate|up|down)_proj\.weight": "mlp"}
SKELETON = {
    r"model\.embed_tokens\.weight": "embedding",
    LAYER + r"(input|post_attention)_layernorm\.weight": "norm",
    r"model\.norm\.weight": "norm",
    r"lm_head\.weight": "head",
    # Written by old exports; every loader recomputes it.
    LAYER + r"self_attn\.rotary_emb\.inv_freq": "rotary buffer",
}
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
REQUIRED = ("model.embed_tokens.weight", "model.norm.weight")

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    quantized=ATTENTION | MLP,
    preserved=SKELETON | {LAYER + r"(self_attn|mlp)\.\w+_proj\.bias": "bias"},
    fused=FUSED,
    linears=LINEARS,
    norms=NORMS,
    required=REQUIRED,
)
