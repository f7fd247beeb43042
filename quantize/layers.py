"""Whether the decoder layers of a known family are complete, by their kind and by the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from models.base import Experts, Family
from quantize.errors import BadPlan
from quantize.wording import some
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from quantize.roles import Role

READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "w1", "w3")
WRITES_HIDDEN = ("o_proj", "down_proj", "w2")
"""Leaves of decoder linears whose inputs, or outputs, are the hidden states."""

MOST_EXPERTS = 65536
"""More than any model has: a config's number is not believed beyond it."""


def check_known_layers(
    family: Family, layers: Mapping[int, set[str]], config: Mapping[str, Any]
) -> None:
    """Every layer has what the family and the (text) config ask of it, and what its like have.

    ``layers`` are the names inside each layer. Raises `BadPlan` for the first one that lacks any.
    """
    parts = {number: _split(family, names) for number, names in sorted(layers.items())}
    kinds: dict[str, dict[int, set[str]]] = {}
    for number, (names, experts) in parts.items():
        kind = _kind(family, config, number)
        refuse_missing(number, _needed(family, config, kind) - names)
        if family.experts:
            _check_experts(family.experts, config, number, kind, experts)
        kinds.setdefault(kind, {})[number] = names
    for alike in kinds.values():
        common = {n for n in set().union(*alike.values()) if not re.match(family.varies, n)}
        for number, names in alike.items():
            refuse_missing(number, common - names)


def check_widths(family: Family, roles: Mapping[str, Role], config: Mapping[str, Any]) -> None:
    """Embedding, head and decoder linears have the width that the (text) config says.

    A transposed weight or a config of another model would else be quantized along the wrong axis.
    Raises `BadPlan`; a config without ``hidden_size`` or ``vocab_size`` says nothing.
    """
    hidden, vocab = config.get("hidden_size"), config.get("vocab_size")
    for name, role in roles.items():
        spec = role.spec
        if family.draft or len(spec.shape) != 2 or not spec.nbytes:
            continue
        if name in (family.embedding, family.head):
            _require_size(spec, 0, "vocab_size", vocab)
            _require_size(spec, 1, "hidden_size", hidden)
        leaf = spec.module.rpartition(".")[2]
        if role.kind != "preserved" and re.match(family.layers, name):
            if leaf in READS_HIDDEN:
                _require_size(spec, 1, "hidden_size", hidden)
            if leaf in WRITES_HIDDEN:
                _require_size(spec, 0, "hidden_size", hidden)


def _require_size(spec: TensorSpec, axis: int, key: str, size: Any) -> None:
    if isinstance(size, int) and spec.shape[axis] != size:
        side = ("rows", "columns")[axis]
        raise BadPlan(
            f"config.json: {key} is {size}, found {spec.name} {list(spec.shape)}, expected {size} "
            f"{side}",
            "the config belongs to another model, or the weight is stored transposed",
        )


def refuse_missing(number: int, missing: set[str]) -> None:
    """Raise `BadPlan` when a layer lacks tensors."""
    if missing:
        raise BadPlan(
            f"layer {number} lacks {some(sorted(missing), most=8)}",
            "the checkpoint is incomplete: download it again",
        )


def _split(family: Family, names: set[str]) -> tuple[set[str], set[str]]:
    """The names of single experts apart from the others; a rotary buffer is never needed."""
    others = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    if family.experts is None:
        return others, set()
    single = re.compile(re.escape(family.experts.module) + r"\.\d+\.")
    experts = {name for name in others if single.match(name)}
    return others - experts, experts


def _kind(family: Family, config: Mapping[str, Any], number: int) -> str:
    if family.mtp and number >= config["num_hidden_layers"]:
        return "MTP"
    try:
        return "sparse" if family.experts and family.experts.sparse(config, number) else "dense"
    except (TypeError, ArithmeticError, LookupError) as error:
        raise BadPlan(
            f"config.json does not tell whether layer {number} has experts ({error})",
            "see the config of the model in its original repository",
        ) from error


def _needed(family: Family, config: Mapping[str, Any], kind: str) -> set[str]:
    sparse = kind != "dense"
    linears = dict(family.linears)
    modules = {*family.norms}
    if family.experts and sparse:
        modules |= {*family.experts.beside}
    elif family.experts:
        linears |= family.experts.dense
    if family.mtp and kind == "MTP":
        modules |= {*family.mtp.modules}
    modules |= {f"{block}.{leaf}" for block, leaves in linears.items() for leaf in leaves}
    return {f"{module}.weight" for module in modules} | {*family.needs(config, sparse)}


def _check_experts(
    experts: Experts, config: Mapping[str, Any], number: int, kind: str, found: set[str]
) -> None:
    count = 0 if kind == "dense" else _count(experts, config)
    expected = {
        f"{experts.module}.{expert}.{leaf}.weight"
        for expert in range(count)
        for leaf in experts.leaves
    }
    refuse_missing(number, expected - found)
    if found - expected:
        raise BadPlan(
            f"layer {number} holds {min(found - expected)}, and by config.json it has "
            f"{count} experts" + (" (a dense layer)" if kind == "dense" else ""),
            f"{experts.count} in config.json is wrong, or it belongs to another model",
        )


def _count(experts: Experts, config: Mapping[str, Any]) -> int:
    count = config.get(experts.count)
    if type(count) is not int or not 0 < count <= MOST_EXPERTS:
        raise BadPlan(
            f"config.json: {experts.count} is {count!r}, expected the number of experts",
            "the config belongs to another model: download it again",
        )
    return count
