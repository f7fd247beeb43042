"""Gemma 1, 2 and 3: Llama's linears with more norms, the head tied to the embedding.

Source: vLLM ``model_executor/models/gemma.py``, ``gemma2.py``, ``gemma3.py``, ``gemma3_mm.py``.
Their configs do not write ``tie_word_embeddings``, which is true by default there.
"""

from __future__ import annotations

from dataclasses import replace

from models.base import Renames, wrap
from models.llama import FAMILY as LLAMA
from models.llama import LAYER, NORMS
from models.vision import keep_vision

FEEDFORWARD = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
HEADS = ("self_attn.q_norm", "self_attn.k_norm")

GEMMA = replace(LLAMA, name="gemma", architectures=("GemmaForCausalLM",), tied=True)
GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    preserved={**GEMMA.preserved, LAYER + r"(pre|post)_feedforward_layernorm\.weight": "norm"},
    norms=(*NORMS, *FEEDFORWARD),
)
GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    preserved={**GEMMA2.preserved, LAYER + r"self_attn\.[qk]_norm\.weight": "norm"},
    norms=(*GEMMA2.norms, *HEADS),
)

_TEXT = wrap(
    GEMMA3,
    "gemma3_vl",
    ("Gemma3ForConditionalGeneration",),
    keep_vision("vision_tower", "multi_modal_projector"),
)
GEMMA3_VL = replace(
    _TEXT,
    renames=Renames(
        prefixes={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        }
    ),
)
FAMILIES = (GEMMA, GEMMA2, GEMMA3, GEMMA3_VL)
