"""Llama 4: experts stored transposed, ``[experts, inputs, outputs]``, a shared expert, a tower.

Source: vLLM ``model_executor/models/llama4.py`` and ``mllama4.py``; what stays BF16 is as in AMD
Quark's template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import Experts, Family, FusedExperts, wrap
from models.llama import ATTENTION, FUSED, LAYER, LINEARS, NORMS, REQUIRED, SKELETON
from models.vision import keep_vision

MLP = LAYER + r"feed_forward\."
BLOCK = r"(model\.layers\.\d+\.feed_forward\.experts)\."


def by_step(config: Mapping[str, Any], layer: int) -> bool:
    """Every ``interleave_moe_layer_step``-th layer has experts; 0 means none."""
    step: int = config.get("interleave_moe_layer_step", 1)
    return step > 0 and (layer + 1) % step == 0


TEXT = Family(
    name="llama4_text",
    architectures=("Llama4ForCausalLM",),
    quantized=ATTENTION
    | {
        MLP + r"(gate|up|down)_proj\.weight": "mlp",
        MLP + r"shared_expert\.(gate|up|down)_proj\.weight": "shared expert",
        MLP + r"experts\.\d+\.(gate|up|down)_proj\.weight": "expert",
    },
    preserved=SKELETON | {MLP + r"router\.weight": "router"},
    fused=FUSED,
    linears={"self_attn": LINEARS["self_attn"]},
    norms=NORMS,
    required=REQUIRED,
    experts=Experts(
        module="feed_forward.experts",
        count="num_local_experts",
        sparse=by_step,
        beside=("feed_forward.router",),
        dense={"feed_forward": LINEARS["mlp"]},
    ),
    fused_experts=(
        FusedExperts(BLOCK + "gate_up_proj", ("gate_proj", "up_proj"), transposed=True),
        FusedExperts(BLOCK + "down_proj", ("down_proj",), transposed=True),
    ),
)
VL = wrap(
    TEXT,
    "llama4",
    ("Llama4ForConditionalGeneration",),
    keep_vision("vision_model", "multi_modal_projector"),
)
FAMILIES = (TEXT, VL)
