"""Synthetic checkpoints for the benchmarks: headers of 10¹² parameters, and a Llama of any size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

Shapes = dict[str, tuple[int, ...]]

HIDDEN = 2048


def write_trillion(folder: Path) -> int:
    """Headers of 61 layers with 384 experts over sparse files (no data); returns parameters.

    The dimensions are those of Kimi-K2 with plain attention: one dense layer, then 60 layers of
    experts, one shard per layer.
    """
    shards = [{"model.embed_tokens.weight": (163840, 7168), "model.norm.weight": (7168,)}]
    shards += [_expert_layer(f"model.layers.{n}.", 0 if n == 0 else 384) for n in range(61)]
    shards += [{"lm_head.weight": (163840, 7168)}]
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for n, shapes in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        header, size = _header(shapes)
        with (folder / file).open("wb") as shard:
            shard.write(header)
            shard.truncate(len(header) + size)
        weight_map |= dict.fromkeys(shapes, file)
    parameters = sum(prod(shape) for shapes in shards for shape in shapes.values())
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_config(folder, "SyntheticForCausalLM", 61, 7168, 18432, 163840, n_routed_experts=384)
    return parameters


def _expert_layer(prefix: str, experts: int, hidden: int = 7168, inner: int = 2048) -> Shapes:
    shapes: Shapes = {
        f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in ("q", "k", "v", "o")
    }
    shapes |= {
        f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
    }
    if experts:
        shapes[f"{prefix}mlp.gate.weight"] = (experts, hidden)
    blocks = [f"experts.{e}." for e in range(experts)] or [""]
    inner = inner if experts else 18432
    for block in blocks:
        shapes[f"{prefix}mlp.{block}gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.{block}up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.{block}down_proj.weight"] = (hidden, inner)
    return shapes


def write_llama(folder: Path, layers: int) -> int:
    """A BF16 Llama in one file, about 134 MB a layer with equal sizes; returns bytes of weights.

    All weights are windows into one Gaussian buffer (σ = 0.02): finite, and cheap to write.
    """
    inner, vocab = 4 * HIDDEN, 4096
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for n in range(layers):
        prefix = f"model.layers.{n}."
        for name in ("q", "k", "v", "o"):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, HIDDEN)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, HIDDEN)
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}
    folder.mkdir()
    header, size = _header(shapes)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for window in _windows([prod(shape) for shape in shapes.values()]):
            file.write(window.data)
    _write_config(folder, "LlamaForCausalLM", layers, HIDDEN, inner, vocab)
    return size


def _windows(counts: list[int]) -> Iterator[np.ndarray]:
    """BF16 bit patterns (truncated float32), a different window for each tensor."""
    noise = np.random.default_rng(0).standard_normal(max(counts) + 4096, dtype=np.float32)
    bits = ((noise * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    for n, count in enumerate(counts):
        yield bits[n % 4096 :][:count]


def _header(shapes: Shapes) -> tuple[bytes, int]:
    """A safetensors header of BF16 tensors, and the bytes of data that follow it."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset


def _write_config(
    folder: Path,
    architecture: str,
    layers: int,
    hidden: int,
    inner: int,
    vocab: int,
    **more: int,
) -> None:
    config = {
        "architectures": [architecture],
        "model_type": "llama" if architecture.startswith("Llama") else "synthetic",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128,
        "head_dim": 128,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | more, indent=2))
