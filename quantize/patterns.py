"""The user's scheme names and globs: what they name, and what may stand in one fused module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import TYPE_CHECKING

from models.base import Family
from quantize.entry import Entry
from quantize.errors import BadPlan
from quantize.roles import Role
from quantize.wording import some
from schemes import find_scheme

if TYPE_CHECKING:
    from quantize.plan import Options


BF16_SCHEME = "bf16"
"""The scheme that leaves a model as it is."""


def resolve_scheme(name: str) -> str:
    """The canonical name of a scheme or alias. Raises `BadPlan`."""
    if name.lower() == BF16_SCHEME:
        return BF16_SCHEME
    try:
        return find_scheme(name).NAME
    except ValueError as error:
        raise BadPlan(str(error), f"or {BF16_SCHEME}, which leaves the model as it is") from error


def matches(pattern: str, module: str) -> bool:
    """Whether a glob of the user names a module; `fnmatch` rules, as in Quark."""
    return re.fullmatch(translate(pattern), module) is not None


def check_patterns(family: Family, roles: Mapping[str, Role], options: Options) -> None:
    """A pattern that names nothing, or only what no scheme can change, is a typing mistake."""
    names = {role.spec.module for role in roles.values() if role.spec.name.endswith(".weight")}
    # A tied or shared head has no tensor, and excluding it is still what people mean.
    names.add(family.head.removesuffix(".weight"))
    free = {role.spec.module for role in roles.values() if role.kind != "preserved"}
    for pattern in options.exclude:
        _require_match("--exclude-layers", pattern, names, options)
    for pattern, _ in options.fused_rows:
        _require_match("--fused-rows", pattern, names, options)
    for pattern, scheme in options.layer_schemes:
        _require_match("--layer-scheme", pattern, names, options)
        hit = [name for name in names if matches(pattern, name)]
        if hit and not free.intersection(hit) and resolve_scheme(scheme) != BF16_SCHEME:
            raise BadPlan(
                f"--layer-scheme {pattern!r} {scheme} names only modules that stay as they are: "
                f"{some(sorted(hit))}",
                "the head, embeddings, norms and routers are never quantized",
            )


def _require_match(option: str, pattern: str, names: Iterable[str], options: Options) -> None:
    compiled = re.compile(translate(pattern))
    if options.allow_unmatched or any(compiled.fullmatch(name) for name in names):
        return
    if re.compile(translate(pattern.removesuffix(".weight"))) != compiled:
        hint = f"patterns match module names, without .weight: {pattern.removesuffix('.weight')!r}"
    else:
        hint = f"module names look like {some(sorted(names))}; or add --allow-unmatched"
    raise BadPlan(f"{option} {pattern!r} matches no module", hint)


def check_fused(family: Family, entries: Iterable[Entry]) -> None:
    """VLLM runs a fused group as one matrix: its members need one scheme."""
    fused = {member: group for group, members in family.fused.items() for member in members}
    groups: dict[tuple[str, str], dict[str, str | None]] = {}
    for entry in entries:
        parent, _, leaf = entry.source.module.rpartition(".")
        if leaf in fused and entry.source.name.endswith(".weight"):
            groups.setdefault((parent, fused[leaf]), {})[leaf] = entry.scheme
    for (parent, group), schemes in groups.items():
        if len(set(schemes.values())) > 1:
            found = ", ".join(f"{leaf} {scheme or 'BF16'}" for leaf, scheme in schemes.items())
            raise BadPlan(
                f"{parent}: vLLM fuses {', '.join(schemes)} into {group}, which needs one scheme; "
                f"found {found}",
                f"name all of them, for example with the pattern '*{parent.rpartition('.')[2]}.*'",
            )
