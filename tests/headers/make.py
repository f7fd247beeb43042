"""Whole header sets of published models: every name, dtype, shape, shard and the index, no data.

The files have their full logical size and take no room (``truncate`` makes them sparse), so that
a checkpoint of 600 GB is opened and planned from a few MB. Names, dtypes and shapes follow the
public configs and modelling code; that they are complete and right shows in the counts of tensors,
parameters and bytes, which ``test_headers.py`` compares with published ones. Only the place of a
tensor among the shards is *derived* where a comment says so.

    python tests/headers/make.py kimi-k2.5-int4 FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

Tensor = tuple[str, tuple[int, ...]]
Tensors = dict[str, Tensor]
"""Name to dtype (safetensors' spelling) and shape."""

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Model:
    """A model's config and its shards, by file name."""

    config: dict[str, Any]
    shards: dict[str, Tensors]


def nbytes(tensors: Tensors) -> int:
    """Bytes of the tensors' data."""
    return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values())


def write(model: Model, folder: Path) -> None:
    """Write config, index and sparse shards of full length."""
    folder.mkdir(parents=True)
    for name, tensors in model.shards.items():
        header = _header(tensors)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + nbytes(tensors))
    total = sum(map(nbytes, model.shards.values()))
    weight_map = {name: shard for shard, tensors in model.shards.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(model.config, indent=2))


def _header(tensors: Tensors) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _split(tensors: Tensors, names: list[str]) -> dict[str, Tensors]:
    """Contiguous shards of about equal bytes; the real cuts are not public: *derived*."""
    size = nbytes(tensors) / len(names)
    shards: dict[str, Tensors] = {name: {} for name in names}
    begin = 0
    for name, tensor in tensors.items():
        shards[names[min(len(names) - 1, int(begin / size))]][name] = tensor
        begin += nbytes({name: tensor})
    return shards


def _bf16(*shape: int) -> Tensor:
    return "BF16", shape


def _fp8(name: str, rows: int, columns: int) -> Tensors:
    """A weight in blocks of 128 × 128 with its F32 scales; blocks at the edge may be partial."""
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale_inv": ("F32", (ceil(rows / 128), ceil(columns / 128))),
    }


def _plain(name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.weight": _bf16(rows, columns)}


def _int4(name: str, rows: int, columns: int) -> Tensors:
    """Eight weights in an I32, a BF16 scale for each group of 32."""
    return {
        f"{name}.weight_packed": ("I32", (rows, columns // 8)),
        f"{name}.weight_scale": _bf16(rows, columns // 32),
        f"{name}.weight_shape": ("I32", (2,)),
    }


Linear = Callable[[str, int, int], Tensors]


def _mlp(name: str, hidden: int, inner: int, linear: Linear) -> Tensors:
    return (
        linear(f"{name}.gate_proj", inner, hidden)
        | linear(f"{name}.up_proj", inner, hidden)
        | linear(f"{name}.down_proj", hidden, inner)
    )


def llama_405b() -> Model:
    """meta-llama/Llama-3.1-405B in BF16: 191 shards."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    hidden, inner, kv = 16384, 53248, 8 * 128
    tensors: Tensors = {"model.embed_tokens.weight": _bf16(128256, hidden)}
    for n in range(126):
        prefix = f"model.layers.{n}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = _bf16(rows, hidden)
        tensors |= _mlp(f"{prefix}mlp", hidden, inner, _plain)
        tensors |= _norms(prefix, hidden)
    tensors |= {"model.norm.weight": _bf16(hidden), "lm_head.weight": _bf16(128256, hidden)}
    names = [f"model-{n:05}-of-00191.safetensors" for n in range(1, 192)]
    return Model(config, _split(tensors, names))


def _norms(prefix: str, hidden: int) -> Tensors:
    return {
        f"{prefix}{name}_layernorm.weight": _bf16(hidden) for name in ("input", "post_attention")
    }


MLA = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""What DeepSeek-V3 and Kimi-K2 share."""


def _mla(prefix: str, heads: int, linear: Linear) -> Tensors:
    """Multi-head latent attention; names of ``modeling_deepseek.py``."""
    name = f"{prefix}self_attn"
    return {
        **linear(f"{name}.q_a_proj", 1536, 7168),
        f"{name}.q_a_layernorm.weight": _bf16(1536),
        **linear(f"{name}.q_b_proj", heads * (128 + 64), 1536),
        **linear(f"{name}.kv_a_proj_with_mqa", 512 + 64, 7168),
        f"{name}.kv_a_layernorm.weight": _bf16(512),
        **linear(f"{name}.kv_b_proj", heads * (128 + 128), 512),
        **linear(f"{name}.o_proj", 7168, heads * 128),
    }


def _moe(prefix: str, experts: int, expert: Linear, shared: Linear) -> Tensors:
    name = f"{prefix}mlp"
    tensors: Tensors = {
        f"{name}.gate.weight": _bf16(experts, 7168),
        f"{name}.gate.e_score_correction_bias": ("F32", (experts,)),
    }
    tensors |= _mlp(f"{name}.shared_experts", 7168, 2048, shared)
    for n in range(experts):
        tensors |= _mlp(f"{name}.experts.{n}", 7168, 2048, expert)
    return tensors


def deepseek_v3() -> Model:
    """deepseek-ai/DeepSeek-V3 in FP8: 163 shards, layer 61 is the MTP module."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        **MLA,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
    }
    tensors: Tensors = {"model.embed_tokens.weight": _bf16(129280, 7168)}
    for n in range(62):
        prefix = f"model.layers.{n}."
        if n == 61:
            tensors |= _mtp(prefix)
        tensors |= _mla(prefix, 128, _fp8)
        dense = n < 3
        tensors |= (
            _mlp(f"{prefix}mlp", 7168, 18432, _fp8) if dense else _moe(prefix, 256, _fp8, _fp8)
        )
        tensors |= _norms(prefix, 7168)
    tensors |= {"model.norm.weight": _bf16(7168), "lm_head.weight": _bf16(129280, 7168)}
    names = [f"model-{n:05}-of-000163.safetensors" for n in range(1, 164)]
    return Model(config, _split(tensors, names))


def _mtp(prefix: str) -> Tensors:
    """What the multi-token prediction module has beside a decoder layer; copies, stored again."""
    return {
        f"{prefix}embed_tokens.weight": _bf16(129280, 7168),
        f"{prefix}enorm.weight": _bf16(7168),
        f"{prefix}hnorm.weight": _bf16(7168),
        f"{prefix}eh_proj.weight": _bf16(7168, 2 * 7168),
        f"{prefix}shared_head.norm.weight": _bf16(7168),
        f"{prefix}shared_head.head.weight": _bf16(129280, 7168),
    }


def kimi_k25() -> Model:
    """moonshotai/Kimi-K2.5: INT4 experts in a multimodal wrapper, 64 shards.

    Layer n lies in shard n + 1, embedding and head in shard 62, the vision tower in shard 64;
    that the projector lies in shard 63 and ``norm`` in 62 is *derived*.
    """
    prefix = "language_model.model."
    parts: list[Tensors] = []
    for n in range(61):
        layer = f"{prefix}layers.{n}."
        block = _moe(layer, 384, _int4, _plain) if n else _mlp(f"{layer}mlp", 7168, 18432, _plain)
        parts.append(_mla(layer, 64, _plain) | block | _norms(layer, 7168))
    parts += [
        {
            f"{prefix}embed_tokens.weight": _bf16(163840, 7168),
            f"{prefix}norm.weight": _bf16(7168),
            "language_model.lm_head.weight": _bf16(163840, 7168),
        },
        _projector(),
        dict(_vision_tower()),
    ]
    names = (f"model-{n:05}-of-000064.safetensors" for n in range(1, 65))
    return Model(_kimi_config(), dict(zip(names, parts, strict=True)))


def _kimi_config() -> dict[str, Any]:
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        **MLA,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "model_type": "kimi_k2",
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 32,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                    },
                }
            },
            "format": "pack-quantized",
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "vocab_size": 163840,
    }
    vision = {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "text_hidden_size": 7168,
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "dtype": "bfloat16",
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": vision,
    }


def _projector() -> Tensors:
    merged = 4 * 1152
    return {
        **_with_bias("mm_projector.pre_norm", 1152),
        **_with_bias("mm_projector.proj.0", merged, merged),
        **_with_bias("mm_projector.proj.2", 7168, merged),
    }


def _vision_tower() -> Iterator[tuple[str, Tensor]]:
    """MoonViT: 27 blocks of width 1152."""
    yield from _with_bias("vision_tower.patch_embed.proj", 1152, 3, 14, 14).items()
    yield "vision_tower.patch_embed.pos_emb.weight", _bf16(64, 64, 1152)
    for n in range(27):
        block = f"vision_tower.encoder.blocks.{n}"
        yield from _with_bias(f"{block}.norm0", 1152).items()
        yield from _with_bias(f"{block}.norm1", 1152).items()
        yield from _with_bias(f"{block}.wqkv", 3 * 1152, 1152).items()
        yield from _with_bias(f"{block}.wo", 1152, 1152).items()
        yield from _with_bias(f"{block}.mlp.fc0", 4304, 1152).items()
        yield from _with_bias(f"{block}.mlp.fc1", 1152, 4304).items()
    yield from _with_bias("vision_tower.encoder.final_layernorm", 1152).items()


def _with_bias(name: str, *shape: int) -> Tensors:
    return {f"{name}.weight": _bf16(*shape), f"{name}.bias": _bf16(shape[0])}


def minimax_m25() -> Model:
    """MiniMaxAI/MiniMax-M2.5 in FP8: 126 shards, counted from 0; no MTP weights are published."""
    config = {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    }
    tensors: Tensors = {"model.embed_tokens.weight": _bf16(200064, 3072)}
    for n in range(62):
        prefix = f"model.layers.{n}."
        for name, rows, columns in (
            ("q", 6144, 3072),
            ("k", 1024, 3072),
            ("v", 1024, 3072),
            ("o", 3072, 6144),
        ):
            tensors |= _fp8(f"{prefix}self_attn.{name}_proj", rows, columns)
        tensors |= {
            f"{prefix}self_attn.q_norm.weight": _bf16(6144),
            f"{prefix}self_attn.k_norm.weight": _bf16(1024),
            f"{prefix}block_sparse_moe.gate.weight": ("F32", (256, 3072)),
            f"{prefix}block_sparse_moe.e_score_correction_bias": ("F32", (256,)),
        }
        for expert in range(256):
            name = f"{prefix}block_sparse_moe.experts.{expert}"
            tensors |= _fp8(f"{name}.w1", 1536, 3072) | _fp8(f"{name}.w2", 3072, 1536)
            tensors |= _fp8(f"{name}.w3", 1536, 3072)
        tensors |= _norms(prefix, 3072)
    tensors |= {"model.norm.weight": _bf16(3072), "lm_head.weight": _bf16(200064, 3072)}
    names = [f"model-{n:05}-of-00126.safetensors" for n in range(126)]
    return Model(config, _split(tensors, names))


MODELS: dict[str, Callable[[], Model]] = {
    "llama-3.1-405b": llama_405b,
    "deepseek-v3-fp8": deepseek_v3,
    "kimi-k2.5-int4": kimi_k25,
    "minimax-m2.5-fp8": minimax_m25,
}

if __name__ == "__main__":
    write(MODELS[sys.argv[1]](), Path(sys.argv[2]))
