"""Which family a checkpoint belongs to, and the role of each of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import models
from models import eagle3, eagle3_mla, eagle3_qwen3
from models.base import Family
from quantize.errors import BadPlan
from quantize.layers import check_known_layers, check_widths, refuse_missing
from quantize.wording import some
from schemes.base import TensorSpec

DRAFTS = {
    "llama": eagle3.FAMILY,
    "qwen3": eagle3_qwen3.FAMILY,
    "deepseek_v3": eagle3_mla.FAMILY,
}
"""The draft of each family whose own architecture a draft's config may name."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor is for; ``kind`` is quantized, optional or preserved (see `Family`).

    ``head`` marks the tensor that serves as LM head: a tied target's is its embedding.
    """

    spec: TensorSpec
    name: str
    kind: str
    head: bool


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: ``text_config`` where a wrapper has one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def find_family(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by architecture and tensor names.

    vLLM builds a draft of architecture ``LlamaForCausalLM`` as ``Eagle3LlamaForCausalLM``
    (``transformers_utils/configs/eagle.py``), so a draft is recognised by its ``fc`` too.
    Raises `BadPlan`.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise BadPlan(
            f"config.json: architectures is {names!r}, expected a list of one class name",
            "set it to the class that vLLM should build",
        )
    family = models.find_family(names[0])
    if "fc.weight" not in specs or family.draft:
        return family
    if family.name in DRAFTS:
        return DRAFTS[family.name]
    known = (name for draft in DRAFTS.values() for name in draft.architectures)
    raise BadPlan(
        f"config.json: architecture {names[0]} with a tensor fc.weight looks like a draft that is "
        f"not known, expected one of {', '.join(known)}",
        "EAGLE-3 drafts in the style of Llama, Qwen3 and DeepSeek are supported",
    )


def classify(
    family: Family, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]
) -> dict[str, Role]:
    """The role of every tensor. Raises `BadPlan` naming the tensors that have none.

    What a decoder layer would quantize stays BF16 by default in a layer for multi-token prediction.
    """
    tied = family.head not in specs and not family.draft
    head = family.embedding if tied else family.head
    roles = {}
    unknown = []
    for name, spec in specs.items():
        found = family.role(name)
        if found is None or (found[1] != "preserved" and len(spec.shape) != 2):
            unknown.append(f"{name} {spec.dtype} {list(spec.shape)}")
        elif found[1] == "quantized" and _is_mtp(family, name, config):
            roles[name] = Role(spec, f"MTP {found[0]}", "optional", head=False)
        else:
            roles[name] = Role(spec, *found, head=name == head)
    if unknown:
        raise BadPlan(
            f"family {family.name} has no role for {some(unknown, most=5)}",
            "a tensor whose role is unknown is never guessed: a new family is one file in models/",
        )
    return roles


def _is_mtp(family: Family, name: str, config: Mapping[str, Any]) -> bool:
    if family.mtp is None or (match := re.match(family.layers, name)) is None:
        return False
    layers = text_config(config).get("num_hidden_layers")
    return isinstance(layers, int) and int(match[1]) >= layers


def check_layers(family: Family, roles: Mapping[str, Role], config: Mapping[str, Any]) -> None:
    """Every decoder layer is there, with all its experts, and like layers have the same tensors.

    VLLM does not miss a tensor that a quantized checkpoint lacks: it would keep what it started
    with. Raises `BadPlan` naming what is missing.
    """
    absent = [name for name in family.required if name not in roles]
    if absent:
        raise BadPlan(
            f"there is no {', '.join(absent)}, which every checkpoint of family {family.name} has",
            "the checkpoint is incomplete: download it again",
        )
    layers: dict[int, set[str]] = {}
    pattern = re.compile(family.layers)
    for name in roles:
        if match := pattern.match(name):
            layers.setdefault(int(match.group(1) or 0), set()).add(name[match.end() :])
    check_widths(family, roles, text_config(config))
    _check_numbers(family, layers, config)
    if family.architectures:
        check_known_layers(family, layers, text_config(config))
    else:
        _check_unknown_layers(family, layers)


def _check_numbers(
    family: Family, layers: Mapping[int, set[str]], config: Mapping[str, Any]
) -> None:
    text = text_config(config)
    expected = text.get("num_hidden_layers")
    extra = text.get(family.mtp.count) if family.mtp else 0
    found = {*layers}
    if type(expected) is int and type(extra) is int and extra > 0:
        # They may be left out, and must be counted before a size that cannot be is built.
        found -= {number for number in found if expected <= number < expected + extra}
    if type(expected) is not int or found != {*range(min(expected, len(found) + 1))}:
        raise BadPlan(
            f"config.json: num_hidden_layers is {expected!r}, found tensors of "
            f"{len(layers)} layers ({_ranges(sorted(layers))})",
            "the checkpoint is incomplete, or its config belongs to another model",
        )


def _check_unknown_layers(family: Family, layers: Mapping[int, set[str]]) -> None:
    """The layers of an unknown architecture may differ, but what vLLM fuses must be complete.

    A lone member is legal (a gate of attention, an MLP without gate) unless other layers have more.
    """
    suffixes = set().union(*layers.values())
    for number, found in sorted(layers.items()):
        refuse_missing(number, _missing_members(family, suffixes, found))


def _missing_members(family: Family, suffixes: set[str], found: set[str]) -> set[str]:
    present = {name.removesuffix(".weight") for name in found if name.endswith("_proj.weight")}
    parents = {name.rpartition(".")[0] for name in present}
    return {
        f"{parent}.{leaf}.weight"
        for parent in parents
        for group in family.fused.values()
        for leaf in group
        if f"{parent}.{leaf}" not in present
        and (others := [other for other in group if f"{parent}.{other}" in present])
        and (len(others) > 1 or f"{parent}.{leaf}.weight" in suffixes)
    }


def _ranges(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans[:5])
