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


def write_experts(folder: Path, experts: int, inner: int = 4096) -> int:
    """A Llama 4 of two layers whose experts are 3-D FP8 tensors; returns bytes of weights.

    Each is ``[experts, inputs, outputs]`` with one scale per expert: the layout that is hardest to
    stream, because an output's weights lie in every row.
    """
    vocab = 4096
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    wide: Shapes = {}
    for n in range(2):
        prefix, block = f"model.layers.{n}.", f"model.layers.{n}.feed_forward."
        for name in ("q", "k", "v", "o"):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (HIDDEN,)
        shapes[f"{block}router.weight"] = (experts, HIDDEN)
        for name in ("gate", "up"):
            shapes[f"{block}shared_expert.{name}_proj.weight"] = (inner, HIDDEN)
        shapes[f"{block}shared_expert.down_proj.weight"] = (HIDDEN, inner)
        wide[f"{block}experts.gate_up_proj"] = (experts, HIDDEN, 2 * inner)
        wide[f"{block}experts.down_proj"] = (experts, inner, HIDDEN)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}
    folder.mkdir()
    header, size = _header(shapes, wide)
    codes = np.random.default_rng(1).integers(0, 0x7F, 1 << 24).astype(np.uint8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for window in _windows([prod(shape) for shape in shapes.values()]):
            file.write(window.data)
        for shape in wide.values():
            np.full(experts, 2.0**-14, np.float32).tofile(file)
            for start in range(0, prod(shape), len(codes)):
                file.write(codes[: prod(shape) - start].data)
    more = {
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": inner,
    }
    _write_config(folder, "Llama4ForCausalLM", 2, HIDDEN, inner, vocab, **more)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return size


def write_small_experts(folder: Path, layers: int, experts: int) -> int:
    """A BF16 checkpoint of small experts (3 MB a tensor, one each); returns bytes of weights."""
    shapes: Shapes = {"model.embed_tokens.weight": (4096, HIDDEN)}
    for n in range(layers):
        shapes |= _expert_layer(f"model.layers.{n}.", experts, HIDDEN, 768)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (4096, HIDDEN)}
    folder.mkdir()
    header, size = _header(shapes)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for window in _windows([prod(shape) for shape in shapes.values()]):
            file.write(window.data)
    _write_config(
        folder, "SyntheticForCausalLM", layers, HIDDEN, 768, 4096, n_routed_experts=experts
    )
    return size


def _windows(counts: list[int]) -> Iterator[np.ndarray]:
    """BF16 bit patterns (truncated float32), a different window for each tensor."""
    noise = np.random.default_rng(0).standard_normal(max(counts) + 4096, dtype=np.float32)
    bits = ((noise * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    for n, count in enumerate(counts):
        yield bits[n % 4096 :][:count]


def _header(shapes: Shapes, fp8: Shapes | None = None) -> tuple[bytes, int]:
    """A safetensors header, and the bytes of data that follow it.

    BF16 tensors first; then FP8 ones, each after its F32 scale per expert.
    """
    specs = [(name, "BF16", shape, 2) for name, shape in shapes.items()]
    for name, shape in (fp8 or {}).items():
        specs += [(f"{name}_scale", "F32", shape[:1], 4), (name, "F8_E4M3", shape, 1)]
    entries, offset = {}, 0
    for name, dtype, shape, size in specs:
        end = offset + size * prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
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
