"""How vLLM finds a module's quantization by name, and the names that make it find ours.

A port of vLLM 0.32: ``model_executor/layers/quantization/quark/quark.py`` (``QuarkConfig``),
``quark/utils.py`` (``should_ignore_layer``) and ``utils/config_utils.py``
(``find_matching_patterns``). A *runtime* name is the one vLLM asks for when it builds a linear
layer; a draft's differ from those of its checkpoint, and no part of vLLM translates them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from models.base import Family
from quantize.errors import BadCheckpoint, BadPlan
from quantize.spelling import ask, spell, spell_built, spell_key, spell_own
from schemes.base import Scheme

Layer = Mapping[str, Any]
"""A layer configuration of Quark: ``input_tensors``, ``weight``, …"""

Fused = Mapping[str, Sequence[str]]
"""A fused module's leaf name to the leaf names of its members; vLLM's packed_modules_mapping."""


class FusedMismatch(BadPlan):
    """Members of one fused module differ in scheme; vLLM raises ``ValueError``."""


def get_matching_fused(family: Family) -> Fused:
    """The mapping that vLLM's matcher has: a draft's configuration is never given one.

    Source: ``get_draft_quant_config`` in ``model_executor/models/utils.py``, against
    ``SupportsQuant.__new__`` in ``model_executor/models/interfaces.py`` for a target.
    """
    return {} if family.draft else family.fused


def is_excluded(name: str, exclude: Iterable[str], fused: Fused) -> bool:
    """Whether vLLM leaves a runtime module unquantized. Raises `FusedMismatch`.

    Entries are exact names, or with ``re:`` expressions anchored at the start alone. A hit on the
    fused name wins over its members; one excluded expert excludes the block of experts.
    """
    exclude = tuple(exclude)
    children = f"{name}." if name.endswith(".experts") else None
    if any(_matches(name, entry) or (children and entry.startswith(children)) for entry in exclude):
        return True
    hits = [any(_matches(shard, entry) for entry in exclude) for shard in _shards(name, fused)]
    if any(hits) and not all(hits):
        raise _mismatch(name, "exclude names some of its members and not all")
    return any(hits)


def find_layer_config(name: str, config: Mapping[str, Any], fused: Fused) -> Layer | None:
    """The layer configuration that vLLM applies to a runtime module; None: unquantized.

    ``config`` is a Quark ``quantization_config``. Order: ``exclude``, the first fitting key of
    ``layer_quant_config``, ``global_quant_config``; ``layer_type_quant_config`` is without effect
    in vLLM, which looks it up by class where the keys are strings. Raises `FusedMismatch`.
    """
    if is_excluded(name, config["exclude"], fused):
        return None
    # Of a module that is stored fused, and so is its own only member, vLLM reads no key.
    found = [
        config["global_quant_config"] if shard == name else _find_by_key(shard, config)
        for shard in _shards(name, fused)
    ] or [_find_by_key(name, config)]
    if not all(_equal(layer, found[0]) for layer in found):
        raise _mismatch(name, "layer_quant_config gives its members different configurations")
    return found[0]


def rename_entries(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """A Quark configuration as vLLM reads it for a family: entries renamed as modules are.

    Source: ``apply_vllm_mapper`` in ``quark/quark.py``.
    """
    layers = config.get("layer_quant_config") or {}
    rename = family.renames.apply
    return {
        **config,
        "exclude": [rename(entry) for entry in config["exclude"]],
        "layer_quant_config": {rename(key): layer for key, layer in layers.items()},
    }


def name_scheme(layer: Layer | None, schemes: Iterable[Scheme]) -> str | None:
    """The name of the scheme that has this layer configuration; None when there is none to name.

    Raises `BadCheckpoint` for a configuration that is none of ours.
    """
    if layer is None:
        return None
    for scheme in schemes:
        if _equal(layer, scheme.layer_config()):
            return scheme.NAME
    raise BadCheckpoint(
        f"config.json: quantization_config holds the layer configuration {layer}, which belongs "
        f"to none of the schemes {', '.join(scheme.NAME for scheme in schemes)}"
    )


def name_runtime_modules(
    family: Family, modules: Iterable[str], target_layers: int | None
) -> dict[str, tuple[str, ...]]:
    """The runtime names of checkpoint modules, each with the checkpoint modules it holds.

    ``target_layers`` is the number of layers of the draft's target; a draft needs it.
    """
    modules = tuple(modules)
    present = {*modules}
    found: dict[str, list[str]] = {}
    for module in modules:
        own = spell_own(family, module, target_layers)
        name = ask(family, spell_built(family, own, module, present))
        found.setdefault(name, []).append(module)
    return {name: tuple(members) for name, members in found.items()}


def list_exclusions(
    family: Family, excluded: Iterable[str], modules: Iterable[str], target_layers: int | None
) -> list[str]:
    """The ``exclude`` list by which Quark and vLLM leave exactly these checkpoint modules alone.

    ``modules`` are all linear modules of the checkpoint. The head is always listed, as Quark's
    own configurations do, the embedding never: releases before 0.32 break on it. For a draft the
    checkpoint's names (Quark's matching) are joined by the runtime names and by anchored
    expressions, which also hold with another target. Raises `FusedMismatch`.
    """
    head = family.head.removesuffix(".weight")
    chosen = {*excluded, head} - {family.embedding.removesuffix(".weight")}
    runtime = name_runtime_modules(family, sorted({*modules, *chosen}), target_layers)
    for name, members in runtime.items():
        if 0 < len(chosen.intersection(members)) < len(members):
            left = ", ".join(member for member in members if member not in chosen)
            raise _mismatch(name, f"it is excluded without {left}")
    present = {*modules, *chosen}
    names = sorted(
        {name for module in chosen for name in spell(family, module, present, target_layers)}
    )
    if not family.draft:
        return names
    off = [name for name, members in runtime.items() if chosen.intersection(members)]
    return names + sorted({_anchor(name, off, runtime) for name in off})


def choose_layer_keys(
    family: Family,
    schemes: Mapping[str, str],
    default: str,
    patterns: Iterable[tuple[str, str]],
    target_layers: int | None,
) -> dict[str, str]:
    """The keys of ``layer_quant_config``, in order, each with the name of its scheme.

    ``schemes`` names the scheme of every quantized checkpoint module and ``patterns`` are the
    user's globs, first match first. They are the keys if vLLM reads them as intended for every
    module, now and once it gives drafts a fused mapping; else exact names are. Raises
    `FusedMismatch`, and `BadPlan` when no names say what was asked.
    """
    runtime = name_runtime_modules(family, schemes, target_layers)
    wanted = {name: {schemes[member] for member in members} for name, members in runtime.items()}
    for name, found in wanted.items():
        if len(found) > 1:
            raise _mismatch(name, f"its members have the schemes {', '.join(sorted(found))}")
    intended = {name: found.pop() for name, found in wanted.items()}
    exact = {
        name: scheme
        for module, scheme in schemes.items()
        if scheme != default
        for name in spell_key(family, module, schemes.keys(), target_layers)
    }
    mappings: tuple[Fused, ...] = ({}, family.fused) if family.draft else (family.fused,)
    for keys in ({}, dict(patterns), exact):
        if all(_reads_as(family, intended, keys, default, fused) for fused in mappings):
            return keys
    raise BadPlan("no names of layer_quant_config make vLLM read the layer schemes as asked")


def _matches(name: str, entry: str) -> bool:
    return bool(re.match(entry[3:], name)) if entry.startswith("re:") else entry == name


def _shards(name: str, fused: Fused) -> list[str]:
    leaf = name.rpartition(".")[2]
    return [name.replace(leaf, member) for member in fused.get(leaf, ())]


def _find_by_key(name: str, config: Mapping[str, Any]) -> Layer:
    layers: Mapping[str, Layer] = config.get("layer_quant_config") or {}
    for key, layer in layers.items():
        # Without a star, vLLM looks for the module's name inside the key.
        if fnmatch(name, key) if "*" in key else name in key:
            return layer
    default: Layer = config["global_quant_config"]
    return default


def _equal(one: object, other: object) -> bool:
    """Equal in values and in types: vLLM tells 1 from 1.0 and from True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


def _mismatch(name: str, detail: str) -> FusedMismatch:
    return FusedMismatch(
        f"vLLM runs {name} as one module, which needs one scheme, but {detail}",
        "name all of its members, or none",
    )


def _anchor(name: str, excluded: Collection[str], names: Iterable[str]) -> str:
    """The expression for a draft's runtime module, for any layer if all layers exclude it."""
    tail = re.escape(name.removeprefix("model."))
    anywhere = re.sub(r"^layers\\\.\d+", r"layers\\.\\d+", tail)
    pattern = rf"^(model\.)?{anywhere}$"
    if any(re.match(pattern, other) for other in names if other not in excluded):
        pattern = rf"^(model\.)?{tail}$"
    return f"re:{pattern}"


def _reads_as(
    family: Family, intended: Mapping[str, str], keys: Mapping[str, str], default: str, fused: Fused
) -> bool:
    layers = {key: {"scheme": scheme} for key, scheme in keys.items()}
    written = {
        "exclude": (),
        "global_quant_config": {"scheme": default},
        "layer_quant_config": layers,
    }
    config = rename_entries(family, written)
    try:
        return all(
            find_layer_config(name, config, fused) == {"scheme": scheme}
            for name, scheme in intended.items()
        )
    except FusedMismatch:
        return False
