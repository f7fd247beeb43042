"""Small real checkpoints on disk, written with safetensors as a trainer would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def llama_config(**changes: Any) -> dict[str, Any]:
    """The config of a tiny Llama: 8 layers, hidden 64, vocabulary 128."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 8,
        "vocab_size": 128,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | changes


def draft_config(**changes: Any) -> dict[str, Any]:
    """The config of a tiny Llama-style EAGLE-3 draft that fits `llama_config`."""
    return llama_config(
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=128
    ) | dict(changes)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Seeded Gaussian weights of the usual size (σ = 0.02)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 0.02).to(dtype)


def _layer(prefix: str, config: dict[str, Any], inputs: int, seed: int) -> Tensors:
    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {
        "self_attn.q_proj": (q, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }
    tensors = {
        f"{prefix}{name}.weight": random(*shape, seed=seed * 10 + n)
        for n, (name, shape) in enumerate(shapes.items())
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = torch.ones(h, dtype=torch.bfloat16)
    return tensors


def llama_tensors(config: dict[str, Any]) -> Tensors:
    """Weights for `llama_config`; no ``lm_head`` when the config ties it."""
    h, v = config["hidden_size"], config["vocab_size"]
    tensors = {"model.embed_tokens.weight": random(v, h, seed=1)}
    for n in range(config["num_hidden_layers"]):
        tensors |= _layer(f"model.layers.{n}.", config, h, seed=n + 2)
    tensors["model.norm.weight"] = torch.ones(h, dtype=torch.bfloat16)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(v, h, seed=99)
    return tensors


def draft_tensors(config: dict[str, Any], layer: str = "midlayer.") -> Tensors:
    """Weights for `draft_config`: no head, no embedding, three auxiliary states."""
    h = config["hidden_size"]
    target = config.get("target_hidden_size", h)
    tensors = {"fc.weight": random(h, 3 * target, seed=7)}
    tensors |= _layer(layer, config, 2 * h, seed=50)
    tensors[f"{layer}hidden_norm.weight"] = torch.ones(h, dtype=torch.bfloat16)
    tensors["norm.weight"] = torch.ones(h, dtype=torch.bfloat16)
    return tensors


def write(
    path: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1, index: bool | None = None
) -> Path:
    """Write a checkpoint folder of one or several shards; several come with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    names = list(tensors)
    size = -(-len(names) // shards)
    files = ["model.safetensors"]
    if shards > 1:
        files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    weight_map = {}
    for n, file in enumerate(files):
        part = {name: tensors[name].contiguous() for name in names[n * size : (n + 1) * size]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if index or (index is None and shards > 1):
        total = sum(t.nbytes for t in tensors.values())
        text = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(text, indent=2))
    return path


def write_llama(path: Path, shards: int = 1, **changes: Any) -> Path:
    """A tiny Llama checkpoint folder."""
    config = llama_config(**changes)
    return write(path, config, llama_tensors(config), shards)


def write_draft(path: Path, layer: str = "midlayer.", **changes: Any) -> Path:
    """A tiny EAGLE-3 draft folder that fits `write_llama`."""
    config = draft_config(**changes)
    return write(path, config, draft_tensors(config, layer))
