"""FP8 (E4M3) with one scale for a whole weight, or for each output row.

Written by vLLM and TensorRT tools (``quant_method`` fp8), compressed-tensors (float-quantized),
AMD Quark (``fp8``, ``ptpc_fp8``: also our own output) and FBGEMM. Weight = element x scale; an
``input_scale`` beside it is about activations. Source: ``_dequantize`` of compressed-tensors
(``quantization/lifecycle/forward.py``) and its scale shapes, vLLM ``quark_w8a8_fp8.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantize.sources.base import Quantization, Weight, find_scale, read_rows
from schemes import fp8_rowwise
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.checkpoint import Checkpoint

NAME = "fp8_tensor"
METHODS = ("fp8", "compressed-tensors", "quark", "fbgemm_fp8", "mxfp8")
UE8M0 = ("U8", "F8_E8M0")
"""How powers of two are stored: their biased exponents, with or without a dtype of their own."""


def find(specs: Mapping[str, TensorSpec], quantization: Quantization) -> dict[str, Weight]:
    """FP8 weights ``[N, K]`` or ``[E, N, K]`` whose scale has no more than a number per row."""
    del quantization  # the shapes say it all
    found = {}
    for name, spec in specs.items():
        if spec.dtype != "F8_E4M3" or len(spec.shape) not in (2, 3):
            continue
        scale = find_scale(specs, name)
        if scale is None or not is_per_row(spec, scale):
            continue
        found[name] = Weight(
            spec=TensorSpec(name, "BF16", spec.shape),
            format=NAME,
            parts=(name, scale.name),
            nbytes=spec.nbytes + scale.nbytes,
            stored=(spec.shape[-2], spec.shape[-1]),
            scheme=fp8_rowwise.NAME if _layout(spec, scale) == "rows" else "",
        )
    return found


def is_per_row(spec: TensorSpec, scale: TensorSpec) -> bool:
    """Whether a scale has one number for the weight, each expert, or each row or column of it."""
    return bool(_layout(spec, scale))


def _layout(spec: TensorSpec, scale: TensorSpec) -> str:
    """What has a scale of its own: ``rows``, ``columns`` (of experts ``[E, K, N]``), ``whole``."""
    *experts, rows, columns = spec.shape
    shape = list(scale.shape)
    if shape in ([*experts, rows], [*experts, rows, 1]):
        return "rows"
    if shape in ([], [1], experts, [*experts, 1], [*experts, 1, 1]):
        return "whole"
    if experts and shape == [*experts, 1, columns]:
        return "columns"
    return ""


def decode(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    """Element times scale, float32."""
    return read_rows(checkpoint, weight, 0, start, stop).float() * _scale(
        checkpoint, weight, start, stop
    )


def pieces(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> tuple[Tensor, ...]:
    """The elements and their rows' scales, float32 ``[N]``: exact from any narrower dtype."""
    elements = read_rows(checkpoint, weight, 0, start, stop)
    return elements, _scale(checkpoint, weight, start, stop).reshape(-1)


def _scale(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    """Float32 scales to multiply rows by: ``[rows, 1]``, ``[1, columns]`` or ``[1, 1]``."""
    spec, scale = (checkpoint.specs[part] for part in weight.parts)
    layout = _layout(spec, scale)
    if layout == "rows":
        return as_float(read_rows(checkpoint, weight, 1, start, stop), scale.dtype).reshape(-1, 1)
    if weight.expert is None or scale.shape in ((), (1,)):
        found = checkpoint.tensor(scale.name)
    else:
        found = checkpoint.tensor(scale.name, weight.expert, weight.expert + 1)
    return as_float(found, scale.dtype).reshape(1, -1)


def as_float(scales: Tensor, dtype: str) -> Tensor:
    """Stored scales as float32; ``dtype`` is safetensors' name of theirs."""
    if dtype not in UE8M0:
        return scales.float()
    import torch

    from schemes.mxfp4 import power_of_two

    return power_of_two(scales.view(torch.uint8))
