"""INT4 packed into int32 by compressed-tensors (``pack-quantized``): Kimi-K2.5 and others.

``weight_packed`` I32 ``[N, K/8]`` holds eight elements, the first in the lowest four bits, each
stored plus 8; ``weight_scale`` one number per group along the inputs (``[N, K/group]``), per row
(``[N, 1]``) or for all (``[1]``); ``weight_shape`` the two numbers N and K. Source:
compressed-tensors ``compressors/pack_quantized/helpers.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantize.errors import BadCheckpoint
from quantize.sources.base import Quantization, Weight, read_rows, say
from quantize.sources.groups import find_group
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.checkpoint import Checkpoint

NAME = "int4_packed"
METHODS = ("compressed-tensors",)
PER_INT32 = 8
ZERO = 8
"""What is added to an element before it is packed: -8 is stored as 0."""


def find(specs: Mapping[str, TensorSpec], quantization: Quantization) -> dict[str, Weight]:
    """Weights ``[N, K]`` or ``[E, N, K]`` stored as ``weight_packed`` I32.

    Raises `BadCheckpoint` for companions that are missing or do not fit, for other widths than 4
    bits, for zero points and for reordered groups.
    """
    found = {}
    for name, packed in specs.items():
        base = name.removesuffix("_packed")
        if base == name or packed.dtype != "I32" or len(packed.shape) not in (2, 3):
            continue
        _check_group(packed, base, specs, quantization)
        scale, shape = specs.get(f"{base}_scale"), specs.get(f"{base}_shape")
        if scale is None or shape is None:
            absent = "_scale" if scale is None else "_shape"
            raise BadCheckpoint(
                f"{say(packed)} has no {base}{absent}, expected it in one of the shards",
                "a shard is missing: download the checkpoint again",
            )
        columns = packed.shape[-1] * PER_INT32
        found[base] = Weight(
            spec=TensorSpec(base, "BF16", (*packed.shape[:-1], columns)),
            format=NAME,
            parts=(name, scale.name, shape.name),
            nbytes=packed.nbytes + scale.nbytes + shape.nbytes,
            stored=(packed.shape[-2], columns),
            block=(1, _group_size(packed, scale, columns, quantization)),
        )
    return found


def _check_group(
    packed: TensorSpec,
    base: str,
    specs: Mapping[str, TensorSpec],
    quantization: Quantization,
) -> None:
    group = find_group(quantization.groups, packed.module)
    faults = {
        f"{group.get('num_bits')} bits": group.get("num_bits") != 4,
        f"type {group.get('type')!r}": group.get("type", "int") != "int",
        "zero points (asymmetric)": not group.get("symmetric", True)
        or f"{base}_zero_point" in specs,
        "reordered groups (weight_g_idx)": f"{base}_g_idx" in specs,
    }
    if fault := next((text for text, bad in faults.items() if bad), ""):
        raise BadCheckpoint(
            f"{say(packed)} is stored with {fault}, expected symmetric INT4 in plain groups",
            "start from the BF16 model, or from a source in a supported format",
        )


def _group_size(
    packed: TensorSpec, scale: TensorSpec, columns: int, quantization: Quantization
) -> int:
    """Columns that share a scale; the config and the shapes must agree on it."""
    rows = packed.shape[:-1]
    group = find_group(quantization.groups, packed.module)
    size = group.get("group_size") or columns
    strategy = group.get("strategy")
    if strategy in ("channel", "tensor") or size <= 0:
        size = columns
    expected = (1,) if strategy == "tensor" else (*rows, -(-columns // size))
    if scale.shape != expected or columns % size:
        raise BadCheckpoint(
            f"{say(scale)} does not fit {say(packed)} in groups of {size} columns, expected "
            f"{list(expected)}",
            "config.json is not the one that the weights were stored with",
        )
    return int(size)


def decode(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    """Element times the scale of its group, float32.

    Raises `BadCheckpoint` when ``weight_shape`` names another shape: its rows are padded.
    """
    import torch

    _check_shape(checkpoint, weight)
    packed = read_rows(checkpoint, weight, 0, start, stop)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    elements = ((packed[:, :, None] >> shifts) & 15).view(stop - start, -1) - ZERO
    scale = checkpoint.specs[weight.parts[1]]
    if scale.shape == (1,):
        return elements * checkpoint.tensor(scale.name).float()
    scales = read_rows(checkpoint, weight, 1, start, stop).float()
    groups = elements.view(stop - start, -1, weight.block[1]) * scales[:, :, None]
    return groups.view(stop - start, -1)


def _check_shape(checkpoint: Checkpoint, weight: Weight) -> None:
    name = weight.parts[2]
    found = checkpoint.tensor(name).flatten().tolist()
    if found[-2:] != list(weight.stored):
        raise BadCheckpoint(
            f"{checkpoint.files.origin}/{checkpoint.shard_of[name]}: {name} is {found}, expected "
            f"{list(weight.stored)} as packed",
            "the checkpoint is damaged, or its rows are padded: start from the BF16 model",
        )
