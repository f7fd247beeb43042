"""FP8 with one scale per block of rows and columns (DeepSeek-V3, MiniMax-M2, Qwen3-FP8).

Source: ``weight_dequant_kernel`` of deepseek-ai/DeepSeek-V3 (``inference/kernel.py``): weight =
element x ``weight_scale_inv`` of its block; ``weight_block_size`` in ``quantization_config``.
Blocks at the edges are smaller. Scales are F32 or BF16, or UE8M0 (a power of two, as F8_E8M0 or
raw U8 bytes). compressed-tensors calls the scales ``weight_scale``, its strategy ``block``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantize.errors import BadCheckpoint
from quantize.sources.base import Weight, read_rows
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.checkpoint import Checkpoint

NAME = "fp8_block"
METHODS = ("fp8", "compressed-tensors")
SCHEME = ""
SUFFIXES = ("_scale_inv", "_scale")


def find(specs: Mapping[str, TensorSpec], quantization: Mapping[str, Any]) -> dict[str, Weight]:
    """FP8 weights with a scale of their own rank, ``[⌈N/n⌉, ⌈K/k⌉]`` for blocks of ``n x k``."""
    block = _block_size(quantization)
    found = {}
    for name, spec in specs.items():
        if block is None or spec.dtype != "F8_E4M3" or len(spec.shape) not in (2, 3):
            continue
        scale = next((specs[name + end] for end in SUFFIXES if name + end in specs), None)
        if scale is None:
            continue
        _check_grid(spec, scale, block)
        rows, columns = spec.shape[-2:]
        found[name] = Weight(
            spec=TensorSpec(name, "BF16", spec.shape),
            format=NAME,
            parts=(name, scale.name),
            nbytes=spec.nbytes + scale.nbytes,
            stored=(rows, columns),
            block=block,
        )
    return found


def _block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    given = quantization.get("weight_block_size")
    if given is None:
        groups = quantization.get("config_groups") or {}
        blocks = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
        given = next((block for block in blocks if block), None)
    if given is None:
        return None
    pair = isinstance(given, list) and len(given) == 2
    if not pair or not all(isinstance(size, int) and size > 0 for size in given):
        raise BadCheckpoint(
            f"config.json: weight_block_size is {given!r}, expected two numbers, rows and columns",
            "see the model's repository for the block size that it was quantized with",
        )
    return given[0], given[1]


def _check_grid(spec: TensorSpec, scale: TensorSpec, block: tuple[int, int]) -> None:
    rows, columns = (-(-size // step) for size, step in zip(spec.shape[-2:], block, strict=True))
    grid = (*spec.shape[:-2], rows, columns)
    if scale.shape != grid:
        raise BadCheckpoint(
            f"{scale.name} {list(scale.shape)} does not fit {spec.name} {list(spec.shape)} in "
            f"blocks of {block[0]} x {block[1]}, expected {list(grid)}",
            "weight_block_size in config.json is not the one that the weights were stored with",
        )


def decode(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    """Element times the scale of its block, float32."""
    tall, wide = weight.block
    elements = read_rows(checkpoint, weight, 0, start, stop).float()
    top = start // tall
    scales = _scales(checkpoint, weight, top, -(-stop // tall))
    rows = scales.repeat_interleave(tall, 0)[start - top * tall :][: stop - start]
    return elements * rows.repeat_interleave(wide, 1)[:, : elements.shape[1]]


def _scales(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    scales = read_rows(checkpoint, weight, 1, start, stop)
    if checkpoint.specs[weight.parts[1]].dtype in ("U8", "F8_E8M0"):
        import torch

        from schemes.mxfp4 import power_of_two

        return power_of_two(scales.view(torch.uint8))
    return scales.float()
