"""gpt-oss: biases everywhere, attention sinks, experts with ``gate_up_proj`` in one matrix.

Source: vLLM ``model_executor/models/gpt_oss.py``: its loader for Quark takes experts one by one,
``experts.7.gate_up_proj.weight``, gate and up row by row as they are stored, and the experts'
biases in one tensor. BF16 checkpoints store ``[experts, inputs, outputs]``; a name that ends in
``.weight`` is of an MXFP4 source, ``[experts, outputs, inputs]``.
"""

from __future__ import annotations

from models.base import Experts, Family, FusedExperts, Renames
from models.llama import ATTENTION, FUSED, LAYER, LINEARS, NORMS, REQUIRED, SKELETON
from models.moe import BLOCK, everywhere

FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    quantized=ATTENTION | {LAYER + r"mlp\.experts\.\d+\.(gate_up|down)_proj\.weight": "expert"},
    preserved=SKELETON
    | {
        LAYER + r"self_attn\.[qkvo]_proj\.bias": "bias",
        LAYER + r"self_attn\.sinks": "attention sinks",
        LAYER + r"mlp\.router\.weight": "router",
        LAYER + r"mlp\.router\.bias": "router bias",
        LAYER + r"mlp\.experts\.(gate_up|down)_proj_bias": "bias",
    },
    fused={"qkv_proj": FUSED["qkv_proj"]},
    renames=Renames(
        substrings={".self_attn.": ".attn."},
        suffixes={
            ".embed_tokens.weight": ".embedding.weight",
            ".gate_up_proj_blocks": ".w13_weight",
            ".down_proj_blocks": ".w2_weight",
            ".gate_up_proj_scales": ".w13_weight_scale",
            ".down_proj_scales": ".w2_weight_scale",
            ".gate_up_proj": ".w13_weight",
            ".down_proj": ".w2_weight",
            ".gate_up_proj_bias": ".w13_bias",
            ".down_proj_bias": ".w2_bias",
            ".gate_up_proj.weight": ".w13_weight",
            ".gate_up_proj.weight_scale": ".w13_weight_scale",
            ".gate_up_proj.bias": ".w13_bias",
            ".gate_up_proj.input_scale": ".w13_input_scale",
            ".down_proj.weight": ".w2_weight",
            ".down_proj.weight_scale": ".w2_weight_scale",
            ".down_proj.bias": ".w2_bias",
            ".down_proj.input_scale": ".w2_input_scale",
        },
    ),
    linears={"self_attn": LINEARS["self_attn"]},
    norms=NORMS,
    required=REQUIRED,
    experts=Experts(
        module="mlp.experts",
        count="num_local_experts",
        sparse=everywhere,
        leaves=("gate_up_proj", "down_proj"),
        beside=("mlp.router",),
        quantized_only=True,
    ),
    fused_experts=(
        FusedExperts(BLOCK + "gate_up_proj", ("gate_up_proj",), transposed=True),
        FusedExperts(BLOCK + "down_proj", ("down_proj",), transposed=True),
        FusedExperts(BLOCK + r"gate_up_proj\.weight", ("gate_up_proj",)),
        FusedExperts(BLOCK + r"down_proj\.weight", ("down_proj",)),
    ),
)
