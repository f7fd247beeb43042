"""Which family a checkpoint belongs to, and the role of each of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import models
from models import eagle3
from models.base import Family
from quantize.errors import BadPlan
from schemes.base import TensorSpec


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
    if family.name == "llama":
        return eagle3.FAMILY
    raise BadPlan(
        f"config.json: architecture {names[0]} with a tensor fc.weight looks like a draft that is "
        f"not known, expected one of {', '.join(eagle3.FAMILY.architectures)}",
        "Llama-style EAGLE-3 drafts are supported",
    )


def classify(family: Family, specs: Mapping[str, TensorSpec]) -> dict[str, Role]:
    """The role of every tensor. Raises `BadPlan` naming the tensors that have none."""
    tied = family.head not in specs and not family.draft
    head = family.embedding if tied else family.head
    roles = {}
    unknown = []
    for name, spec in specs.items():
        found = family.role(name)
        if found is None or (found[1] != "preserved" and len(spec.shape) != 2):
            unknown.append(f"{name} {spec.dtype} {list(spec.shape)}")
        else:
            roles[name] = Role(spec, *found, head=name == head)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise BadPlan(
            f"family {family.name} has no role for {', '.join(unknown[:5])}{more}",
            "a tensor whose role is unknown is never guessed: a new family is one file in models/",
        )
    return roles


def check_layers(
    family: Family, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]
) -> None:
    """Every decoder layer is there, and known families have the same tensors in each of them.

    VLLM does not miss a tensor that a quantized checkpoint lacks: it would keep what it started
    with. Raises `BadPlan` naming what is missing.
    """
    absent = [name for name in family.required if name not in specs]
    if absent:
        raise BadPlan(
            f"there is no {', '.join(absent)}, which every checkpoint of family {family.name} has",
            "the checkpoint is incomplete: download it again",
        )
    layers: dict[int, set[str]] = {}
    pattern = re.compile(family.layers)
    for name in specs:
        if match := pattern.match(name):
            layers.setdefault(int(match.group(1) or 0), set()).add(name[match.end() :])
    expected = text_config(config).get("num_hidden_layers")
    if type(expected) is not int or {*layers} != {*range(min(expected, len(layers) + 1))}:
        raise BadPlan(
            f"config.json: num_hidden_layers is {expected!r}, found tensors of "
            f"{len(layers)} layers ({_ranges(sorted(layers))})",
            "the checkpoint is incomplete, or its config belongs to another model",
        )
    suffixes = set().union(*layers.values())
    for number, found in sorted(layers.items()):
        missing = _missing(family, suffixes, found)
        if missing:
            raise BadPlan(
                f"layer {number} lacks {', '.join(sorted(missing))}",
                "the checkpoint is incomplete: download it again",
            )


def _missing(family: Family, suffixes: set[str], found: set[str]) -> set[str]:
    if family.architectures:
        linears = [f"{block}.{leaf}" for block, leaves in family.linears.items() for leaf in leaves]
        needed = {f"{module}.weight" for module in (*linears, *family.norms)}
        uneven = {name for name in suffixes if name.endswith(("_proj.weight", "_proj.bias"))}
        return (needed | uneven) - found
    # The layers of an unknown architecture may differ, but what vLLM fuses must be complete: a
    # lone member is legal (a gate of attention, an MLP without gate) unless other layers have more.
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
