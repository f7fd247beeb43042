"""Qwen3 mixture of experts: Qwen3's attention, a router and experts in most layers.

Source: vLLM ``model_executor/models/qwen3_moe.py``, whose mapping tells of ``gate_up_proj`` too
late for its dense layers (0.32: it is copied before it is completed). What stays BF16 is as in AMD
Quark's template.
"""

from __future__ import annotations

from dataclasses import replace

from models import qwen3
from models.base import Experts
from models.llama import FUSED, LINEARS
from models.moe import EXPERT, FUSED_EXPERTS, ROUTER, by_sparse_step

FAMILY = replace(
    qwen3.FAMILY,
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    quantized={**qwen3.FAMILY.quantized, **EXPERT},
    preserved={**qwen3.FAMILY.preserved, **ROUTER},
    fused={"qkv_proj": FUSED["qkv_proj"]},
    joined=dict.fromkeys(FUSED["gate_up_proj"], "gate_up_proj"),
    linears={"self_attn": LINEARS["self_attn"]},
    experts=Experts(
        module="mlp.experts",
        count="num_experts",
        sparse=by_sparse_step,
        beside=("mlp.gate",),
        dense={"mlp": LINEARS["mlp"]},
    ),
    fused_experts=FUSED_EXPERTS,
)
