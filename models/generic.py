"""Any decoder whose names fit: 2-D ``*_proj.weight`` linears under ``layers.N.``, a known head.

Serves architectures that have no file of their own yet. It knows roles by the conventional names
only, so a tensor with another name is refused instead of guessed.
"""

from __future__ import annotations

from models.base import Family
from models.llama import FUSED

LAYER = r"model\.layers\.\d+\."
BLOCK = LAYER + r"(?:\w+\.)*"

FAMILY = Family(
    name="generic",
    architectures=(),
    quantized={
        LAYER + r"(self_attn|attn|attention)\.\w+_proj\.weight": "attention",
        LAYER + r"(mlp|feed_forward|ffn)\.\w+_proj\.weight": "mlp",
        LAYER + r"\w+\.shared_experts?\.\w+_proj\.weight": "shared expert",
        LAYER + r"\w+\.experts\.\d+\.\w+_proj\.weight": "expert",
    },
    preserved={
        r"model\.embed_tokens\.weight": "embedding",
        r"lm_head\.weight": "head",
        r"model\.(final_)?norm\.weight": "norm",
        BLOCK + r"\w*norm\w*\.(weight|bias)": "norm",
        BLOCK + r"\w+_proj\.bias": "bias",
        LAYER + r"\w+\.(gate|router)\.weight": "router",
        LAYER + r"\w+\.(gate|router)\.(bias|e_score_correction_bias)": "router",
        BLOCK + r"rotary_emb\.inv_freq": "rotary buffer",
    },
    fused=FUSED,
)
