"""The names by which vLLM 0.32 builds the modules of a checkpoint: renamed, fused, renumbered."""

from __future__ import annotations

import re
from collections.abc import Collection

from models.base import Family
from quantize.errors import BadPlan

EXPERTS = ".experts."


def spell_own(family: Family, module: str, target_layers: int | None) -> str:
    """A module's own name in vLLM, whether or not it is part of another there."""
    if family.draft:
        return _renumber(family, module, target_layers)
    return family.renames.apply(module)


def spell_built(family: Family, own: str, module: str, present: Collection[str]) -> str:
    """The name of the module that vLLM builds for this one: fused, all experts, or its own.

    ``present`` are all modules: what vLLM fuses is one module only where all its members are.
    """
    if EXPERTS in own:
        return own[: own.index(EXPERTS)] + EXPERTS.rstrip(".")
    parent, dot, leaf = module.rpartition(".")
    for group, members in family.fused.items():
        if leaf in members and all(parent + dot + member in present for member in members):
            return own.removesuffix(leaf) + group
    return own.removesuffix(leaf) + family.joined[leaf] if leaf in family.joined else own


def ask(family: Family, name: str) -> str:
    """The name by which vLLM asks for a module, given the one that its parts lead to."""
    for pattern, replacement in family.asked.items():
        name = re.sub(pattern, replacement, name)
    return name


def _renumber(family: Family, module: str, target_layers: int | None) -> str:
    """A draft's module as vLLM names it: its layers count on from the target's.

    Source: ``load_weights`` and ``start_layer_id`` in ``model_executor/models/llama_eagle3.py``.
    """
    if module == family.head.removesuffix(".weight"):
        return module
    layer = re.match(r"layers\.(\d+)\.(.*)", module.replace("midlayer.", "layers.0."))
    if layer is None:
        return f"model.{module}"
    if target_layers is None:
        raise BadPlan(
            f"vLLM names the draft's {module} by the number of layers of its target, not known",
            "name the target: --target TARGET",
        )
    return f"model.layers.{target_layers + int(layer[1])}.{layer[2]}"


def spell(
    family: Family, module: str, present: Collection[str], target_layers: int | None
) -> tuple[str, ...]:
    """Every name by which Quark (the checkpoint's) or vLLM may look for a module.

    For a target vLLM finds by itself what a name is part of, unless it asks by another name.
    """
    own = spell_own(family, module, target_layers)
    built = spell_built(family, own, module, present)
    asked = ask(family, built)
    if family.draft:
        return tuple(dict.fromkeys((module, own, built, ask(family, own), asked)))
    joined = EXPERTS not in own and module.rpartition(".")[2] in family.joined
    return (module, asked) if joined or asked != built else (module,)


def spell_key(
    family: Family, module: str, present: Collection[str], target_layers: int | None
) -> tuple[str, ...]:
    """The same for a key of ``layer_quant_config``: one for all experts of a layer."""
    names = spell(family, module, present, target_layers)
    block, experts, _ = module.partition(EXPERTS)
    return (block + experts.rstrip("."), *names[1:]) if experts and not family.draft else names
