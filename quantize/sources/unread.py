"""Refuses quantized tensors that no format of this package can read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quantize.errors import BadCheckpoint, BadPlan
from quantize.files import Files
from quantize.sources.base import say
from schemes.base import TensorSpec

KEYS = ("quantization_config", "compression_config")
LEFTOVERS = (
    "input_scale",
    "_scale_ub",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "prob_scale",
    "output_scale",
)
"""Endings of what is left beside quantized weights: scales of activations and of the KV cache."""
SIGNS = {
    (".qweight", ".qzeros", ".g_idx"): "GPTQ or AWQ",
    (".absmax", ".quant_map", ".nested_absmax", ".SCB"): "bitsandbytes",
    ("_scale_2", "_global_scale"): "NVFP4 (ModelOpt or compressed-tensors)",
    ("_packed", "_shape", "_zero_point"): "compressed-tensors",
    ("_blocks", "_scales"): "MXFP4 as gpt-oss stores it",
    ("_scale", "_scale_inv"): "FP8 or MXFP4",
}
HINT = "start from the BF16 model that it was made from, or from a source in a supported format"


def find_quantization(config: Mapping[str, Any], files: Files, methods: Collection[str]) -> Any:
    """The one ``quantization_config``, at whatever level; empty when there is none.

    Raises `BadPlan` for several that differ, and for one that is not about weights of a known
    format.
    """
    found = dict(_walk(config, ""))
    if not found:
        return {}
    place = f"{files.origin}/config.json: {next(iter(found))}"
    first = next(iter(found.values()))
    if any(other != first for other in found.values()):
        raise BadPlan(
            f"{files.origin}/config.json: {' and '.join(found)} differ, expected one "
            "quantization_config",
            "keep the one that the weights were stored with",
        )
    method = first.get("quant_method") if isinstance(first, dict) else first
    if not isinstance(first, dict) or method not in methods:
        raise BadPlan(
            f"{place} says that the source is already quantized, with quant_method {method!r}, "
            f"expected one of {', '.join(methods)}",
            HINT,
        )
    _refuse_rotations(first, place)
    return first


def _walk(config: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in config.items():
        if key in KEYS:
            found += [(f"{path}{key}", value)] if value else []
        elif isinstance(value, dict):
            found += _walk(value, f"{path}{key}.")
    return found


def _refuse_rotations(quantization: Mapping[str, Any], place: str) -> None:
    """Weights that were rotated mean nothing without the same rotation of their inputs."""
    algorithms = quantization.get("algo_config")
    found = algorithms if isinstance(algorithms, list) else [algorithms]
    names = [item.get("name") for item in found if isinstance(item, dict)]
    rotated = [str(name) for name in names if name in ("rotation", "quarot")]
    transforms = quantization.get("transform_config")
    if transforms and (not isinstance(transforms, dict) or transforms.get("config_groups")):
        rotated.append("transform_config")
    if rotated:
        raise BadPlan(
            f"{place}: the weights were transformed by {', '.join(rotated)}, expected weights that "
            "need no rotation of their inputs",
            HINT,
        )


def drop_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what it says of the source's quantization, at every level."""
    return {
        key: drop_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in KEYS
    }


def refuse_unread(
    files: Files,
    specs: Mapping[str, TensorSpec],
    read: Collection[str],
    quantization: Mapping[str, Any],
) -> None:
    """Raise `BadCheckpoint` for a tensor of a quantized weight that is not among those ``read``."""
    for name, spec in specs.items():
        if name in read or not (sign := _sign(spec, specs)):
            continue
        place = "config.json has no quantization_config"
        if quantization:
            place = f"quant_method {quantization['quant_method']!r} does not say how to read it"
        elif "hf_quant_config.json" in files.sizes():
            place = "hf_quant_config.json is ModelOpt's"
        if spec.dtype == "F8_E4M3":
            place += f", and there is no {name}_scale_inv or {name}_scale that fits"
        raise BadCheckpoint(
            f"{files.origin}: {say(spec)} belongs to a quantized weight ({sign}), expected BF16: "
            f"{place}",
            HINT,
        )


def _sign(spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> str:
    """The format that a tensor speaks of; empty for a plain one."""
    name, dtype = spec.name, spec.dtype
    for endings, known in SIGNS.items():
        for ending in endings:
            base = name.removesuffix(ending)
            # A norm may have a `scale` of its own: a companion stands beside its weight.
            if base != name and (
                not ending.startswith("_") or base in specs or base.endswith("weight")
            ):
                return known
    if "quant_state" in name:
        return "bitsandbytes"
    if dtype.startswith("F8_"):
        return "FP8"
    narrow = dtype in ("U8", "I8", "I32", "U32") and len(spec.shape) > 1
    if narrow and name.endswith("_blocks"):
        return "MXFP4 as gpt-oss stores it"
    return f"stored as {dtype}" if narrow else ""
