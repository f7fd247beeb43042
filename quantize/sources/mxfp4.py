"""MXFP4 as others store it: FP4 (E2M1) elements, one power of two for each 32 along the inputs.

Three layouts of the same bytes, low nibble first (OCP MX v1.0):

- gpt-oss: ``X_blocks`` U8 ``[…, N, K/32, 16]`` and ``X_scales`` U8 ``[…, N, K/32]``, experts first
  (transformers ``integrations/mxfp4.py``, ``convert_moe_packed_tensors``); read as ``X.weight``,
  because a plain ``X`` of that model has its inputs before its outputs;
- compressed-tensors ``mxfp4-pack-quantized``: ``weight_packed`` U8 ``[N, K/2]``, ``weight_scale``;
- AMD Quark, and our own output: ``weight`` U8 ``[N, K/2]`` and ``weight_scale`` U8 ``[N, K/32]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quantize.errors import BadCheckpoint
from quantize.sources.base import Quantization, Weight, find_scale, read_rows, say
from quantize.sources.groups import values
from schemes import mxfp4
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.checkpoint import Checkpoint

NAME = "mxfp4"
METHODS = ("mxfp4", "compressed-tensors", "quark")
BLOCK = mxfp4.BLOCK


def find(specs: Mapping[str, TensorSpec], quantization: Quantization) -> dict[str, Weight]:
    """U8 weights with U8 scales for each 32 of them.

    Raises `BadCheckpoint` for scales that are missing or of another shape.
    """
    pairs = {
        "mxfp4": _blocks,
        "compressed-tensors": _packed,
        "quark": _quark,
    }[quantization.config["quant_method"]](specs, quantization)
    found = {}
    for name, packed, scale, shape in pairs:
        if scale is None or scale.dtype != "U8" or scale.shape != (*shape[:-1], shape[-1] // BLOCK):
            raise BadCheckpoint(
                f"{say(packed)} is MXFP4 with {say(scale) if scale else 'no scales'}, expected U8 "
                f"{[*shape[:-1], shape[-1] // BLOCK]}",
                "a shard is missing or the checkpoint is damaged: download it again",
            )
        found[name] = Weight(
            spec=TensorSpec(name, "BF16", shape),
            format=NAME,
            parts=(packed.name, scale.name),
            nbytes=packed.nbytes + scale.nbytes,
            stored=(shape[-2], shape[-1]),
            block=(1, BLOCK),
            scheme=mxfp4.NAME,
        )
    return found


Pairs = Iterator[tuple[str, TensorSpec, TensorSpec | None, tuple[int, ...]]]
"""Logical name and shape of a weight, its packed elements and its scales."""


def _blocks(specs: Mapping[str, TensorSpec], _: Quantization) -> Pairs:
    for name, spec in specs.items():
        if name.endswith("_blocks") and spec.dtype == "U8" and len(spec.shape) in (3, 4):
            *rows, groups, packed = spec.shape
            if packed == BLOCK // 2:
                base = name.removesuffix("_blocks")
                yield f"{base}.weight", spec, specs.get(f"{base}_scales"), (*rows, groups * BLOCK)


def _packed(specs: Mapping[str, TensorSpec], _: Quantization) -> Pairs:
    for name, spec in specs.items():
        base = name.removesuffix("_packed")
        if base == name or spec.dtype != "U8" or f"{base}_global_scale" in specs:
            continue  # a global scale is NVFP4's
        yield base, spec, specs.get(f"{base}_scale"), _unpacked(spec)


def _quark(specs: Mapping[str, TensorSpec], quantization: Quantization) -> Pairs:
    if not _is_mxfp4(quantization.config):
        return
    for name, spec in specs.items():
        if name.endswith(".weight") and spec.dtype == "U8" and len(spec.shape) in (2, 3):
            yield name, spec, find_scale(specs, name), _unpacked(spec)


def _unpacked(spec: TensorSpec) -> tuple[int, ...]:
    return (*spec.shape[:-1], spec.shape[-1] * 2)


def _is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether FP4 means MXFP4 in every layer of a Quark config, and occurs in it."""
    keys = ("layer_quant_config", "layer_type_quant_config")
    layers = [config.get("global_quant_config"), *(v for k in keys for v in values(config.get(k)))]
    weights = [layer.get("weight") for layer in layers if isinstance(layer, dict)]
    narrow = [w for w in weights if isinstance(w, dict) and not _is_wide(w.get("dtype"))]
    return bool(narrow) and all(
        (w.get("dtype"), w.get("scale_format"), w.get("group_size")) == ("fp4", "e8m0", BLOCK)
        for w in narrow
    )


def _is_wide(dtype: Any) -> bool:
    """Whether a Quark dtype is one that is not stored as U8."""
    return str(dtype).startswith(("fp8", "int8", "bfloat16", "float16"))


def decode(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    """Element times the power of two of its block, float32."""
    return mxfp4.dequantize(*pieces(checkpoint, weight, start, stop))


def pieces(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> tuple[Tensor, ...]:
    """Packed elements U8 ``[rows, K/2]`` and scales U8 ``[rows, K/32]``, as they are stored."""
    packed, scales = (read_rows(checkpoint, weight, part, start, stop) for part in (0, 1))
    return packed.reshape(stop - start, -1), scales
