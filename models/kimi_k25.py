"""Kimi-K2.5 and K2.6: Kimi-K2 (a DeepSeek-V3) with a vision tower, under ``language_model.``.

Source: vLLM ``model_executor/models/kimi_k25.py``; what is quantized is as in
amd/Kimi-K2.5-MXFP4, and ``--layer-scheme '*self_attn*' fp8_rowwise`` gives its AttnFP8 variant.
"""

from __future__ import annotations

from dataclasses import replace

from models.base import Renames, wrap
from models.deepseek_v3 import FAMILY as DEEPSEEK
from models.vision import keep_vision

FAMILY = replace(
    wrap(
        DEEPSEEK,
        "kimi_k25",
        ("KimiK25ForConditionalGeneration",),
        keep_vision("vision_tower", "mm_projector"),
    ),
    renames=Renames(
        prefixes={
            "language_model.layers.": "language_model.model.layers.",
            "mm_projector.proj.0": "mm_projector.linear_1",
            "mm_projector.proj.2": "mm_projector.linear_2",
        }
    ),
)
