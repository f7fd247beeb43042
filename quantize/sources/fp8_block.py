"""FP8 with one scale per block of rows and columns (DeepSeek-V3, MiniMax-M2, Qwen3-FP8, MXFP8).

Source: ``weight_dequant_kernel`` of deepseek-ai/DeepSeek-V3 (``inference/kernel.py``): weight =
element x ``weight_scale_inv`` of its block; ``weight_block_size`` in ``quantization_config``.
Blocks at the edges are smaller. Scales are F32 or BF16, or UE8M0 (a power of two, as F8_E8M0 or
raw U8 bytes). compressed-tensors calls the scales ``weight_scale``, its strategy ``block``.
MXFP8 is one UE8M0 scale per 1 x 32 (OCP MX v1.0, section 5.2), needing no ``weight_block_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantize.errors import BadCheckpoint
from quantize.sources.base import Quantization, Weight, find_scale, read_rows, say
from quantize.sources.fp8_tensor import METHODS as TENSOR_METHODS
from quantize.sources.fp8_tensor import UE8M0, as_float, is_per_row
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.checkpoint import Checkpoint

NAME = "fp8_block"
METHODS = TENSOR_METHODS
FUSED = ("qkv_proj", "qkv", "Wqkv", "query_key_value", "gate_up_proj", "fused_qkv_a_proj")
"""Leaves of modules that are several linears in one, whose scale grid may restart in each."""
MX_BLOCK = 32


def find(specs: Mapping[str, TensorSpec], quantization: Quantization) -> dict[str, Weight]:
    """FP8 weights with a scale of their own rank, ``[⌈N/n⌉, ⌈K/k⌉]`` for blocks of ``n x k``.

    Raises `BadCheckpoint` for a grid that is of another block size, or may restart.
    """
    given = _block_size(quantization)
    found = {}
    for name, spec in specs.items():
        if spec.dtype != "F8_E4M3" or len(spec.shape) not in (2, 3):
            continue
        scale = find_scale(specs, name)
        if scale is None or is_per_row(spec, scale):
            continue
        block = (1, MX_BLOCK) if _is_mx(spec, scale) else given
        if block is None:
            raise BadCheckpoint(
                f"{say(scale)} fits no row, column or whole of {say(spec)}, and config.json names "
                "no weight_block_size, expected one or the other",
                "add weight_block_size to quantization_config as the publisher quantized it",
            )
        rows, columns = spec.shape[-2:]
        chunks = quantization.chunks(spec.module)
        _check_grid(spec, scale, block, chunks)
        found[name] = Weight(
            spec=TensorSpec(name, "BF16", spec.shape),
            format=NAME,
            parts=(name, scale.name),
            nbytes=spec.nbytes + scale.nbytes,
            stored=(rows, columns),
            block=block,
            chunks=chunks,
        )
    return found


def _is_mx(spec: TensorSpec, scale: TensorSpec) -> bool:
    grid = (*spec.shape[:-1], -(-spec.shape[-1] // MX_BLOCK))
    return scale.dtype in UE8M0 and scale.shape == grid


def _block_size(quantization: Quantization) -> tuple[int, int] | None:
    given = quantization.config.get("weight_block_size")
    if given is None:
        blocks = (weights.get("block_structure") for _, weights in quantization.groups)
        given = next((block for block in blocks if block), None)
    if given is None:
        return None
    pair = isinstance(given, list) and len(given) == 2
    if not pair or not all(type(size) is int and size > 0 for size in given):
        raise BadCheckpoint(
            f"config.json: weight_block_size is {given!r}, expected two numbers, rows and columns",
            "see the model's repository for the block size that it was quantized with",
        )
    return given[0], given[1]


def _check_grid(
    spec: TensorSpec, scale: TensorSpec, block: tuple[int, int], chunks: tuple[int, ...]
) -> None:
    *experts, rows, columns = spec.shape
    tall, wide = block
    option = f"--fused-rows {spec.module!r} ROWS,ROWS,… (the rows of each of its parts, in order)"
    if chunks and sum(chunks) != rows:
        raise BadCheckpoint(
            f"--fused-rows gives {say(spec)} parts of {', '.join(map(str, chunks))} rows, expected "
            f"a sum of {rows}",
            "give the rows of its parts in order",
        )
    grid = (*experts, sum(-(-part // tall) for part in chunks or (rows,)), -(-columns // wide))
    fused = spec.module.rpartition(".")[2] in FUSED or spec.name.rpartition(".")[2] in FUSED
    if scale.shape != grid:
        raise BadCheckpoint(
            f"{scale.name} {list(scale.shape)} does not fit {spec.name} {list(spec.shape)} in "
            f"blocks of {tall} x {wide}, expected {list(grid)}",
            f"if its blocks start anew in each part of the fused weight, add {option}"
            if fused
            else "weight_block_size in config.json is not the one that the weights were stored "
            "with",
        )
    if fused and rows % tall and not chunks:
        raise BadCheckpoint(
            f"{say(spec)} is several linears in one, in blocks of {tall} rows: whether the blocks "
            f"start anew in each, its scales {list(scale.shape)} cannot tell",
            f"add {option}; {rows} alone says that they do not",
        )


def decode(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    """Element times the scale of its block, float32."""
    elements = read_rows(checkpoint, weight, 0, start, stop).float()
    rows = _scale_rows(weight, start, stop)
    scales = _scales(checkpoint, weight, int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]
    return elements * scales.repeat_interleave(weight.block[1], 1)[:, : elements.shape[1]]


def _scale_rows(weight: Weight, start: int, stop: int) -> Tensor:
    """The row of scales that each stored row belongs to."""
    import torch

    tall = weight.block[0]
    if not weight.chunks:
        return torch.arange(start, stop) // tall
    first, parts = 0, []
    for rows in weight.chunks:
        parts.append(torch.arange(rows) // tall + first)
        first += -(-rows // tall)
    return torch.cat(parts)[start:stop]


def _scales(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    scales = read_rows(checkpoint, weight, 1, start, stop)
    return as_float(scales, checkpoint.specs[weight.parts[1]].dtype)
