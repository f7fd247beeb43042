"""Llama-style EAGLE-3 draft: ``fc`` over three target states and one decoder layer.

Source: vLLM ``model_executor/models/llama_eagle3.py`` (``_load_weights`` accepts ``midlayer.`` and
``layers.0.``); the default policy, ``fc`` and head in BF16, is that of amd/kimi-k2.5-eagle3-fp8.
"""

from __future__ import annotations

from models.base import Family
from models.llama import FUSED, LINEARS, NORMS

LAYER = r"(midlayer|layers\.\d+)\."

FAMILY = Family(
    name="eagle3_llama",
    architectures=(
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    ),
    quantized={
        LAYER + r"self_attn\.[qkvo]_proj\.weight": "attention",
        LAYER + r"mlp\.(gate|up|down)_proj\.weight": "mlp",
    },
    optional={r"fc\.weight": "fc"},
    preserved={
        r"lm_head\.weight": "head",
        r"embed_tokens\.weight": "embedding",
        LAYER + r"(input_layernorm|hidden_norm|post_attention_layernorm)\.weight": "norm",
        r"(norm|input_norm|fc_norm\.\d+)\.weight": "norm",
        LAYER + r"(self_attn|mlp)\.\w+_proj\.bias": "bias",
        r"d2t": "d2t",
        r"t2d": "t2d",
        r"mask_hidden": "mask",
    },
    embedding="embed_tokens.weight",
    # `midlayer` is layer 0 and has no number of its own.
    layers=r"(?:midlayer|layers\.(\d+))\.",
    fused=FUSED,
    linears=LINEARS,
    norms=NORMS,
    required=("fc.weight", "norm.weight"),
    draft=True,
)
