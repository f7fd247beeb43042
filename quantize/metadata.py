"""What vLLM reads beside the weights: pure dict to dict, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from models.base import Family
from quantize.entry import Entry
from quantize.errors import BadPlan
from quantize.share import EXPERT
from quantize.vllm_names import choose_layer_keys, list_exclusions
from schemes import find_scheme
from schemes.quark_config import quantization_config

LINEAR_ROLES = ("router", "vision", "projector", "MTP")
"""Preserved roles whose matrices are linear layers, beside the quantizable ones and the head."""


def linear_modules(family: Family, entries: Iterable[Entry]) -> dict[str, str | None]:
    """Every linear module of a plan with its scheme, None where it stays as it is.

    A dropped or absent head counts as preserved; embeddings and norms are no linears.
    """
    found: dict[str, str | None] = {family.head.removesuffix(".weight"): None}
    for entry in entries:
        role = family.role(entry.source.name)
        linear = role is not None and (role[1] != "preserved" or role[0] in LINEAR_ROLES)
        if linear and entry.source.name.endswith(".weight") and len(entry.source.shape) == 2:
            found[entry.source.module] = entry.scheme
    return found


def build_quantization_config(
    family: Family,
    entries: Iterable[Entry],
    scheme: str,
    patterns: Iterable[tuple[str, str]],
    target_layers: int | None,
) -> dict[str, Any]:
    """Quark's ``quantization_config`` for a plan, in the spelling that vLLM asks for.

    ``scheme`` is the default; when nothing uses it, the first scheme in use takes its place.
    ``patterns`` are the user's layer globs with canonical scheme names, kept where they say the
    right thing.
    """
    entries = tuple(entries)
    modules = linear_modules(family, entries)
    _check_experts(family, entries)
    schemes = {module: used for module, used in modules.items() if used}
    default = scheme if scheme in schemes.values() else next(iter(schemes.values()))
    excluded = [module for module, used in modules.items() if used is None]
    globs = [(pattern, used) for pattern, used in patterns if used in schemes.values()]
    keys = choose_layer_keys(family, schemes, default, globs, target_layers)
    return quantization_config(
        find_scheme(default).layer_config(),
        exclude=list_exclusions(family, excluded, modules, target_layers),
        layer_configs={key: find_scheme(used).layer_config() for key, used in keys.items()},
    )


def _check_experts(family: Family, entries: Iterable[Entry]) -> None:
    if family.experts is None or not family.experts.quantized_only:
        return
    kept = [e.source.name for e in entries if e.role == EXPERT and e.scheme is None]
    if kept:
        raise BadPlan(
            f"{kept[0]} and {len(kept) - 1} more weights of experts would stay BF16, which vLLM "
            f"does not load for family {family.name} beside quantized layers",
            "quantize the experts too, or leave the whole model as it is: --scheme bf16",
        )


def edit_config(
    config: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The source's ``config.json`` with our ``quantization_config`` last.

    Every other key keeps its name, value and order.
    """
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    return kept | ({"quantization_config": dict(quantization)} if quantization else {})
