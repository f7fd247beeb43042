"""EAGLE-3 draft with latent attention, for DeepSeek and Kimi; its feed-forward layer is dense.

Source: vLLM ``model_executor/models/deepseek_eagle3.py``. ``kv_b_proj`` is absorbed when it is
loaded and stays BF16 by default, as does ``fc``.
"""

from __future__ import annotations

from dataclasses import replace

from models import eagle3
from models.deepseek_v3 import LATENT_FUSED, LATENT_LINEARS, latent_needs
from models.eagle3 import LAYER
from models.llama import LINEARS

FAMILY = replace(
    eagle3.FAMILY,
    name="eagle3_mla",
    architectures=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    quantized={
        LAYER + r"self_attn\.(q|q_a|q_b|o)_proj\.weight": "attention",
        LAYER + r"self_attn\.kv_a_proj_with_mqa\.weight": "attention",
        LAYER + r"mlp\.(gate|up|down)_proj\.weight": "mlp",
    },
    optional={**eagle3.FAMILY.optional, LAYER + r"self_attn\.kv_b_proj\.weight": "attention"},
    preserved={**eagle3.FAMILY.preserved, LAYER + r"self_attn\.(q|kv)_a_layernorm\.weight": "norm"},
    fused=LATENT_FUSED,
    linears={"self_attn": LATENT_LINEARS, "mlp": LINEARS["mlp"]},
    norms=(*eagle3.FAMILY.norms, "self_attn.kv_a_layernorm"),
    needs=latent_needs,
)
