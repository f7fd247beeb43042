"""Every architecture as a tiny checkpoint: config and names as published, weights at random.

The names are those of the published indexes: for mixtures of experts one weight for each expert,
save where the publisher stores them fused (gpt-oss, Llama 4).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import tiny
import torch

Shapes = dict[str, tuple[int, ...]]

H, I, V, D, EXPERTS = 64, 96, 128, 32, 4  # noqa: E741 (intermediate size)
EMBEDDING = re.compile(r"(embed_tokens|position_embedding)\.weight$")
FLOAT32 = re.compile(r".*(e_score_correction_bias|block_sparse_moe\.gate\.weight)")


def materialize(shapes: Shapes) -> tiny.Tensors:
    """Seeded weights of these shapes; norms are ones, and what is published as F32 is F32."""
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        dtype = torch.float32 if FLOAT32.fullmatch(name) else torch.bfloat16
        norm = "norm" in name and name.endswith("weight")
        tensors[name] = (
            torch.ones(shape, dtype=dtype) if norm else tiny.random(*shape, seed=seed, dtype=dtype)
        )
    return tensors


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def weights(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def mlp(
    intermediate: int = I, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    gate, up, down = names
    return {gate: (intermediate, H), up: (intermediate, H), down: (H, intermediate)}


def attention(inputs: int = H) -> Shapes:
    return {
        "q_proj": (2 * D, inputs),
        "k_proj": (D, inputs),
        "v_proj": (D, inputs),
        "o_proj": (H, 2 * D),
    }


LATENT: Shapes = {
    "q_a_proj": (32, H),
    "q_a_layernorm": (32,),
    "q_b_proj": (2 * 64, 32),
    "kv_a_proj_with_mqa": (64 + 32, H),
    "kv_a_layernorm": (64,),
    "kv_b_proj": (2 * 64, 64),
    "o_proj": (H, 2 * 32),
}
HEAD_NORMS: Shapes = {"q_norm": (D,), "k_norm": (D,)}
NORMS: Shapes = {"input_layernorm": (H,), "post_attention_layernorm": (H,)}


def model(*layers: Shapes, head: bool = True) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (V, H)}
    for number, layer in enumerate(layers):
        shapes |= under(f"model.layers.{number}.", layer)
    shapes["model.norm.weight"] = (H,)
    return shapes | ({"lm_head.weight": (V, H)} if head else {})


def decoder(attn: Shapes, feedforward: Shapes, norms: Shapes = NORMS) -> Shapes:
    return weights("self_attn.", attn) | feedforward | weights("", norms)


def dense(attn: Shapes | None = None, norms: Shapes = NORMS) -> Shapes:
    return decoder(attn or attention(), weights("mlp.", mlp()), norms)


def experts(names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    shapes: Shapes = {}
    for number in range(EXPERTS):
        shapes |= weights(f"experts.{number}.", mlp(I, names))
    return shapes


def moe(*, shared: bool = True, bias: bool = True) -> Shapes:
    """A sparse block as DeepSeek spells it."""
    shapes = experts() | {"gate.weight": (EXPERTS, H)}
    if bias:
        shapes["gate.e_score_correction_bias"] = (EXPERTS,)
    if shared:
        shapes |= weights("shared_experts.", mlp())
    return under("mlp.", shapes)


MTP: Shapes = weights(
    "",
    {
        "eh_proj": (H, 2 * H),
        "enorm": (H,),
        "hnorm": (H,),
        "embed_tokens": (V, H),
        "shared_head.norm": (H,),
        "shared_head.head": (V, H),
    },
)

SIGLIP: Shapes = {
    "embeddings.patch_embedding.weight": (64, 3, 4, 4),
    "embeddings.patch_embedding.bias": (64,),
    "embeddings.position_embedding.weight": (16, 64),
    **{
        f"encoder.layers.0.{name}.{part}": shape[: 2 if part == "weight" else 1]
        for name, shape in {
            **{
                f"self_attn.{leaf}": (64, 64) for leaf in ("q_proj", "k_proj", "v_proj", "out_proj")
            },
            "mlp.fc1": (96, 64),
            "mlp.fc2": (64, 96),
            "layer_norm1": (64,),
            "layer_norm2": (64,),
        }.items()
        for part in ("weight", "bias")
    },
    "post_layernorm.weight": (64,),
    "post_layernorm.bias": (64,),
}


def common(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    config = tiny.llama_config(
        architectures=[architecture],
        model_type=model_type,
        hidden_size=H,
        intermediate_size=I,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=D,
        num_hidden_layers=2,
        vocab_size=V,
    )
    return config | changes


Checkpoint = tuple[dict[str, Any], Shapes]


def llama() -> Checkpoint:
    return common("LlamaForCausalLM", "llama"), model(dense(), dense())


def mistral() -> Checkpoint:
    return common("MistralForCausalLM", "mistral"), model(dense(), dense())


def qwen2() -> Checkpoint:
    bias = {
        f"self_attn.{leaf}.bias": shape[:1]
        for leaf, shape in attention().items()
        if leaf != "o_proj"
    }
    return common("Qwen2ForCausalLM", "qwen2"), model(*[dense() | bias] * 2)


def qwen3() -> Checkpoint:
    return common("Qwen3ForCausalLM", "qwen3"), model(*[dense(attention() | HEAD_NORMS)] * 2)


def _gemma(architecture: str, model_type: str, layer: Shapes, **changes: Any) -> Checkpoint:
    config = common(architecture, model_type, hidden_activation="gelu_pytorch_tanh", **changes)
    del config["tie_word_embeddings"]  # as published: true is the default of the class
    return config, model(layer, layer, head=False)


FEEDFORWARD = {"pre_feedforward_layernorm": (H,), "post_feedforward_layernorm": (H,)}


def gemma() -> Checkpoint:
    return _gemma("GemmaForCausalLM", "gemma", dense())


def gemma2() -> Checkpoint:
    layer = dense(norms=NORMS | FEEDFORWARD)
    return _gemma("Gemma2ForCausalLM", "gemma2", layer, query_pre_attn_scalar=D, sliding_window=64)


def gemma3() -> Checkpoint:
    layer = dense(attention() | HEAD_NORMS, NORMS | FEEDFORWARD)
    return _gemma(
        "Gemma3ForCausalLM", "gemma3_text", layer, query_pre_attn_scalar=D, sliding_window=64
    )


def gemma3_vl() -> Checkpoint:
    text, shapes = gemma3()
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
    }
    shapes = under("language_model.", shapes) | under("vision_tower.vision_model.", SIGLIP)
    projector = {"mm_input_projection_weight": (64, H), "mm_soft_emb_norm.weight": (64,)}
    return config, shapes | under("multi_modal_projector.", projector)


def phi3() -> Checkpoint:
    layer = decoder(
        {"qkv_proj": (4 * D, H), "o_proj": (H, 2 * D)},
        weights("mlp.", {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}),
    )
    config = common("Phi3ForCausalLM", "phi3", pad_token_id=0, original_max_position_embeddings=512)
    return config, model(layer, layer)


def qwen3_moe() -> Checkpoint:
    config = common(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=I,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    )
    attn = attention() | HEAD_NORMS
    return config, model(dense(attn), decoder(attn, moe(shared=False, bias=False)))


def glm4_moe() -> Checkpoint:
    config = common(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=I,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        use_qk_norm=True,
        attention_bias=True,
        num_nextn_predict_layers=1,
        partial_rotary_factor=0.5,
        routed_scaling_factor=1.0,
    )
    bias = {
        f"self_attn.{leaf}.bias": shape[:1]
        for leaf, shape in attention().items()
        if leaf != "o_proj"
    }
    attn = attention() | HEAD_NORMS
    sparse = decoder(attn, moe()) | bias
    return config, model(dense(attn) | bias, sparse, sparse | MTP)


def _deepseek_config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    config = common(
        architecture,
        model_type,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=I,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        q_lora_rank=32,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        num_key_value_heads=2,
        num_nextn_predict_layers=1,
    )
    del config["head_dim"]
    return config | changes


def deepseek_v3() -> Checkpoint:
    sparse = decoder(LATENT, moe())
    return _deepseek_config("DeepseekV3ForCausalLM", "deepseek_v3"), model(
        dense(LATENT), sparse, sparse | MTP
    )


def kimi_k2() -> Checkpoint:
    config = _deepseek_config("DeepseekV3ForCausalLM", "kimi_k2", num_nextn_predict_layers=0)
    return config, model(dense(LATENT), decoder(LATENT, moe()))


def kimi_k25() -> Checkpoint:
    text, shapes = kimi_k2()
    block = {
        "wqkv": (192, 64),
        "wo": (64, 64),
        "mlp.fc0": (96, 64),
        "mlp.fc1": (64, 96),
        "norm0": (64,),
        "norm1": (64,),
    }
    tower: Shapes = {
        "patch_embed.proj.weight": (64, 3, 14, 14),
        "patch_embed.proj.bias": (64,),
        "patch_embed.pos_emb.weight": (8, 8, 64),
    }
    for name, shape in block.items():
        tower |= {
            f"encoder.blocks.0.{name}.weight": shape,
            f"encoder.blocks.0.{name}.bias": shape[:1],
        }
    tower |= {"encoder.final_layernorm.weight": (64,), "encoder.final_layernorm.bias": (64,)}
    projector: Shapes = {
        "pre_norm.weight": (64,),
        "pre_norm.bias": (64,),
        "proj.0.weight": (256, 256),
        "proj.0.bias": (256,),
        "proj.2.weight": (H, 256),
        "proj.2.bias": (H,),
    }
    vision = {
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        "vt_hidden_size": 64,
        "vt_intermediate_size": 96,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 64,
        "text_hidden_size": H,
        "projector_ln_eps": 1e-5,
        "model_type": "kimi_k25_vision",
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": 5,
    }
    return config, under("language_model.", shapes) | under("vision_tower.", tower) | under(
        "mm_projector.", projector
    )


def minimax_m2() -> Checkpoint:
    config = common(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        scoring_func="sigmoid",
        use_routing_bias=True,
        rotary_dim=16,
        use_qk_norm=True,
        num_mtp_modules=3,
    )
    block = experts(("w1", "w3", "w2")) | {
        "gate.weight": (EXPERTS, H),
        "e_score_correction_bias": (EXPERTS,),
    }
    layer = decoder(
        attention() | {"q_norm": (2 * D,), "k_norm": (D,)}, under("block_sparse_moe.", block)
    )
    return config, model(layer, layer)


def minimax_m3() -> Checkpoint:
    sparse_attention = {
        "sparse_attention_freq": [0, 1],
        "sparse_num_index_heads": 1,
        "sparse_index_dim": D,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_local_block": 1,
    }
    text = common(
        "MiniMaxM3SparseForCausalLM",
        "minimax_m3_text",
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        n_shared_experts=1,
        shared_intermediate_size=I,
        dense_intermediate_size=I,
        use_routing_bias=True,
        rotary_dim=16,
        partial_rotary_factor=0.5,
        moe_layer_freq=[0, 1],
        sparse_attention_config=sparse_attention,
        num_mtp_modules=0,
        hidden_act="swigluoai",
    )
    block = (
        experts(("w1", "w3", "w2"))
        | weights("shared_experts.", mlp())
        | {"gate.weight": (EXPERTS, H), "e_score_correction_bias": (EXPERTS,)}
    )
    index = {
        "index_q_proj": (D, H),
        "index_k_proj": (D, H),
        "index_q_norm": (D,),
        "index_k_norm": (D,),
    }
    attn = attention() | HEAD_NORMS
    shapes = model(dense(attn), decoder(attn | index, under("block_sparse_moe.", block)))
    tower = {
        name.replace("patch_embedding.weight", "patch_embedding.weight"): shape
        for name, shape in SIGLIP.items()
        if "position" not in name
        and "patch_embedding.bias" not in name
        and "post_layernorm" not in name
    }
    tower["embeddings.patch_embedding.weight"] = (64, 3, 2, 4, 4)
    tower |= {"pre_layrnorm.weight": (64,), "pre_layrnorm.bias": (64,)}
    merge: Shapes = {}
    for module, sizes in {
        "multi_modal_projector": (64, H, H),
        "patch_merge_mlp": (4 * H, H, H),
    }.items():
        merge |= {
            f"{module}.linear_1.weight": (sizes[1], sizes[0]),
            f"{module}.linear_1.bias": (sizes[1],),
            f"{module}.linear_2.weight": (sizes[2], sizes[1]),
            f"{module}.linear_2.bias": (sizes[2],),
        }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "num_channels": 3,
        "img_token_compression_config": {"temporal_patch_size": 2, "spatial_merge_size": 2},
        "rope_theta": 10000.0,
        "layer_norm_eps": 1e-5,
    }
    config = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
        "projector_hidden_size": H,
        "image_token_index": 5,
        "video_token_index": 6,
    }
    return config, under("language_model.", shapes) | under(
        "vision_tower.vision_model.", tower
    ) | merge


def gpt_oss() -> Checkpoint:
    config = common(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=64,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
        swiglu_limit=7.0,
        attention_bias=True,
    )
    bias = {f"self_attn.{leaf}.bias": shape[:1] for leaf, shape in attention().items()}
    block: Shapes = {
        "router.weight": (EXPERTS, H),
        "router.bias": (EXPERTS,),
        "experts.gate_up_proj": (EXPERTS, H, 2 * I),
        "experts.gate_up_proj_bias": (EXPERTS, 2 * I),
        "experts.down_proj": (EXPERTS, I, H),
        "experts.down_proj_bias": (EXPERTS, H),
    }
    layer = decoder(attention(), under("mlp.", block)) | bias | {"self_attn.sinks": (2,)}
    return config, model(layer, layer)


def llama4() -> Checkpoint:
    text = common(
        "Llama4ForCausalLM",
        "llama4_text",
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        intermediate_size_mlp=I,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0],
        use_qk_norm=True,
        attn_temperature_tuning=False,
        attention_chunk_size=64,
    )
    block = {
        "router.weight": (EXPERTS, H),
        "experts.gate_up_proj": (EXPERTS, H, 2 * I),
        "experts.down_proj": (EXPERTS, I, H),
    } | weights("shared_expert.", mlp())
    shapes = model(
        decoder(attention(), weights("feed_forward.", mlp())),
        decoder(attention(), under("feed_forward.", block)),
    )
    tower: Shapes = {
        "class_embedding": (64,),
        "positional_embedding_vlm": (17, 64),
        "patch_embedding.linear.weight": (64, 48),
    }
    for name, shape in {
        **{f"self_attn.{leaf}": (64, 64) for leaf in attention()},
        "mlp.fc1": (96, 64),
        "mlp.fc2": (64, 96),
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
    }.items():
        tower |= {f"model.layers.0.{name}.weight": shape, f"model.layers.0.{name}.bias": shape[:1]}
    for norm in ("layernorm_pre", "layernorm_post"):
        tower |= {f"{norm}.weight": (64,), f"{norm}.bias": (64,)}
    tower |= {"vision_adapter.mlp.fc1.weight": (64, 96), "vision_adapter.mlp.fc2.weight": (64, 64)}
    vision = {
        "model_type": "llama4_vision_model",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 3,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
        "rope_theta": 10000,
    }
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
    }
    return config, under("language_model.", shapes) | under("vision_model.", tower) | {
        "multi_modal_projector.linear_1.weight": (H, 64)
    }


def eagle3_llama_long() -> Checkpoint:
    """Two layers, spelled with their numbers; only the first reads the embedding too."""
    config = common("LlamaForCausalLM", "llama", draft_vocab_size=V, eagle_config=TAPS)
    norms = NORMS | {"hidden_norm": (H,)}
    shapes: Shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,)}
    for number, inputs in enumerate((2 * H, H)):
        layer = decoder(attention(inputs), weights("mlp.", mlp()), norms)
        shapes |= under(f"layers.{number}.", layer)
    return config, shapes


TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


def _draft(architecture: str, attn: Shapes, model_type: str = "llama") -> Checkpoint:
    config = common(
        architecture, model_type, num_hidden_layers=1, draft_vocab_size=V, eagle_config=TAPS
    )
    layer = decoder(attn, weights("mlp.", mlp()), NORMS | {"hidden_norm": (H,)})
    return config, {"fc.weight": (H, 3 * H), "norm.weight": (H,)} | under("midlayer.", layer)


def eagle3_llama() -> Checkpoint:
    return _draft("LlamaForCausalLMEagle3", attention(2 * H))


def eagle3_qwen3() -> Checkpoint:
    return _draft("Eagle3Qwen3ForCausalLM", attention(2 * H) | HEAD_NORMS, model_type="qwen3")


def eagle3_mla() -> Checkpoint:
    latent = LATENT | {"q_a_proj": (32, 2 * H), "kv_a_proj_with_mqa": (96, 2 * H)}
    _, shapes = _draft("Eagle3DeepseekV2ForCausalLM", latent)
    deepseek = _deepseek_config("Eagle3DeepseekV2ForCausalLM", "kimi_k2", num_hidden_layers=1)
    return deepseek | {"draft_vocab_size": V, "eagle_config": TAPS}, shapes


TARGETS: tuple[Callable[[], Checkpoint], ...] = (
    llama,
    mistral,
    qwen2,
    qwen3,
    gemma,
    gemma2,
    gemma3,
    gemma3_vl,
    phi3,
    qwen3_moe,
    glm4_moe,
    deepseek_v3,
    kimi_k2,
    kimi_k25,
    minimax_m2,
    minimax_m3,
    gpt_oss,
    llama4,
)
DRAFTS: Mapping[Callable[[], Checkpoint], Callable[[], Checkpoint]] = {
    eagle3_llama: llama,
    eagle3_llama_long: llama,
    eagle3_qwen3: qwen3,
    eagle3_mla: deepseek_v3,
}
"""Each draft with the target that it fits."""


def linear_modules(shapes: Shapes) -> list[str]:
    """Every module that is a matrix and no embedding; fused experts as they are split."""
    modules = []
    for name, shape in shapes.items():
        block, _, leaf = name.partition("experts.")
        if len(shape) == 3 and leaf in ("gate_up_proj", "down_proj"):
            parts = ("gate_proj", "up_proj") if "feed_forward" in name else (leaf,)
            leaves = parts if leaf == "gate_up_proj" else (leaf,)
            modules += [f"{block}experts.{n}.{part}" for n in range(EXPERTS) for part in leaves]
        elif name.endswith(".weight") and len(shape) == 2 and not EMBEDDING.search(name):
            modules.append(name.removesuffix(".weight"))
    return modules
