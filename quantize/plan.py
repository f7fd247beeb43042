"""Decides from headers alone the fate of every tensor, with the reason. Pure: no I/O, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.base import Family
from quantize.entry import Entry, entry_from_json, entry_to_json
from quantize.errors import BadPlan
from quantize.metadata import build_quantization_config
from quantize.patterns import (
    BF16_SCHEME,
    check_fused,
    check_patterns,
    matches,
    resolve_scheme,
)
from quantize.roles import Role, check_layers, classify, find_family, text_config
from quantize.share import quantized_share, warn_share
from quantize.sources import keeps_bytes
from quantize.sources.base import PLAIN, FusedRows, Weight
from quantize.wording import some
from schemes import find_scheme
from schemes.base import TensorSpec

MISFIT = "stays as it is: "
TENSOR_PARALLEL = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Plan:
    """What will be written for one checkpoint, tensor by tensor, in source order."""

    entries: tuple[Entry, ...]
    family: str
    kind: Literal["target", "draft"]
    scheme: str
    quantization_config: dict[str, Any] | None
    tensor_parallel: tuple[int, ...]
    target_layers: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def stored(self) -> dict[str, TensorSpec]:
        """Every tensor of the output, by name."""
        return {spec.name: spec for entry in self.entries for spec in entry.stored}

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `plan_from_json` reads them back."""
        return {
            "family": self.family,
            "kind": self.kind,
            "scheme": self.scheme,
            "target_layers": self.target_layers,
            "tensor_parallel": list(self.tensor_parallel),
            "notes": list(self.notes),
            "bytes_before": sum(entry.source_bytes for entry in self.entries),
            "bytes_after": sum(spec.nbytes for spec in self.stored.values()),
            "share_quantized": round(quantized_share(self.entries), 4),
            "tensors": [entry_to_json(entry) for entry in self.entries],
            "quantization_config": self.quantization_config,
        }


@dataclass(frozen=True)
class Options:
    """What the user asked of one checkpoint; every field changes the bytes written.

    ``fused_rows`` are globs with the rows of each part of such a weight (`Quantization`).
    """

    scheme: str
    exclude: tuple[str, ...] = ()
    layer_schemes: tuple[tuple[str, str], ...] = ()
    allow_unmatched: bool = False
    cast_weights: bool = False
    cast_head: bool = False
    fused_rows: FusedRows = ()


def make_plan(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    options: Options,
    *,
    target_layers: int | None = None,
    dropped: Mapping[str, str] | None = None,
    weights: Mapping[str, Weight] | None = None,
    unused: Mapping[str, str] | None = None,
) -> Plan:
    """Plan one checkpoint from its headers and config.

    ``target_layers`` is needed for a draft: vLLM numbers its layers after the target's.
    ``dropped`` maps tensors that `pair` found redundant to the reason. ``weights`` says how the
    source stores what is not a plain tensor and ``unused`` what it stores beside them
    (`quantize.source`). Raises `BadPlan`.
    """
    family = find_family(specs, config)
    roles = classify(family, specs, config)
    check_layers(family, roles, config)
    check_patterns(family, roles, options)
    weights, dropped = weights or {}, dropped or {}
    entries = tuple(
        _dropped(roles[name], dropped[name])
        if name in dropped
        else _decide(roles[name], options, weights.get(name))
        for name in specs
    )
    check_fused(family, entries)
    scheme = resolve_scheme(options.scheme)
    quantized = [entry for entry in entries if entry.scheme]
    if scheme != BF16_SCHEME and not quantized:
        why = "".join(f"; {note}" for note in _notes(entries))
        raise BadPlan(
            f"nothing is left to quantize to {scheme}: every tensor stays as it is{why}",
            f"loosen the exclusions, or ask for another scheme ({BF16_SCHEME} leaves all as it is)",
        )
    return Plan(
        entries=entries,
        family=family.name,
        kind="draft" if family.draft else "target",
        scheme=scheme,
        quantization_config=build_quantization_config(
            family, entries, scheme, options.layer_schemes, target_layers
        )
        if quantized
        else None,
        tensor_parallel=_tensor_parallel(family, quantized, text_config(config)),
        target_layers=target_layers,
        notes=(*_notes(entries), *_unused(unused or {}), *_share_note(scheme, entries)),
    )


def _decide(role: Role, options: Options, weight: Weight | None) -> Entry:
    scheme, reason = _choose(role, options)
    spec = role.spec
    if weight is not None and weight.format != PLAIN:
        reason += f"; stored as {weight.format}"
    if scheme is not None and scheme != BF16_SCHEME:
        misfit = find_scheme(scheme).misfit(spec)
        if not misfit:
            return _quantized(role, scheme, reason, options, weight)
        reason = f"{MISFIT}{misfit}"
    stored = spec
    if role.head and spec.dtype != "BF16":
        stored, reason = _cast_head(spec, options)
    return _entry(role, None, (stored,), reason, weight)


def _quantized(
    role: Role, scheme: str, reason: str, options: Options, weight: Weight | None
) -> Entry:
    spec = role.spec
    stored = find_scheme(scheme).stored(spec)
    if weight is not None and keeps_bytes(weight, scheme):
        return _entry(role, scheme, stored, f"{reason}: bytes kept", weight, kept=True)
    _check_source_dtype(spec, options)
    if spec.dtype != "BF16":
        reason += f"; cast from {spec.dtype} to BF16 first"
    return _entry(role, scheme, stored, reason, weight)


def _choose(role: Role, options: Options) -> tuple[str | None, str]:
    """Scheme and reason: head, then exclusions, then --layer-scheme, then defaults."""
    if role.head:
        return None, "the head is never quantized"
    if role.kind == "preserved":
        return None, "kept by the family's policy"
    for pattern in options.exclude:
        if matches(pattern, role.spec.module):
            return None, f"excluded by --exclude-layers {pattern!r}"
    for pattern, scheme in options.layer_schemes:
        if matches(pattern, role.spec.module):
            return resolve_scheme(scheme), f"--layer-scheme {pattern!r} {scheme}"
    if role.kind == "optional":
        return None, "kept by default; --layer-scheme can change it"
    return resolve_scheme(options.scheme), "decoder linear"


def _entry(
    role: Role,
    scheme: str | None,
    stored: tuple[TensorSpec, ...],
    reason: str,
    weight: Weight | None,
    *,
    kept: bool = False,
) -> Entry:
    form, size = (weight.format, weight.nbytes) if weight else (PLAIN, role.spec.nbytes)
    return Entry(role.spec, form, role.name, scheme, stored, reason, size, kept)


def _dropped(role: Role, reason: str) -> Entry:
    return _entry(role, None, (), f"dropped: {reason}", None)


def _check_source_dtype(spec: TensorSpec, options: Options) -> None:
    if spec.dtype == "BF16" or (spec.dtype in ("F16", "F32") and options.cast_weights):
        return
    raise BadPlan(
        f"{spec.name} is due for quantization and is stored as {spec.dtype}, expected BF16",
        "add --cast-weights to round such weights to BF16 first",
    )


def _cast_head(spec: TensorSpec, options: Options) -> tuple[TensorSpec, str]:
    if spec.dtype in ("F16", "F32") and options.cast_head:
        return TensorSpec(spec.name, "BF16", spec.shape), f"head: cast from {spec.dtype} to BF16"
    raise BadPlan(
        f"the head {spec.name} is stored as {spec.dtype}, expected BF16: it could not be shared "
        "bit for bit",
        "add --cast-head to store it rounded to BF16 (recorded in the report)",
    )


def _tensor_parallel(
    family: Family, quantized: Iterable[Entry], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """Sizes at which vLLM splits the heads and every rank's slice still fits its scheme."""
    sliced = [
        entry
        for entry in quantized
        if entry.source.module.rpartition(".")[2] in family.row_parallel
    ]
    shapes = {(entry.scheme or "", entry.source.shape) for entry in sliced}
    heads = read_heads(config)
    return tuple(
        size
        for size in TENSOR_PARALLEL
        if (heads is None or splits_heads(heads, size))
        and all(
            shape[1] % size == 0
            and not find_scheme(scheme).misfit(TensorSpec("", "BF16", (shape[0], shape[1] // size)))
            for scheme, shape in shapes
        )
    )


def read_heads(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Attention and key-value heads of a (text) config; None when it does not say."""
    heads = config.get("num_attention_heads")
    shared = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(shared, int) or min(heads, shared) < 1:
        return None
    return heads, shared


def splits_heads(heads: tuple[int, int], size: int) -> bool:
    """As vLLM asks: ``verify_with_parallel_config`` (``config/model.py``), ``QKVParallelLinear``.

    Fewer key-value heads than ranks are repeated, which needs a multiple.
    """
    queries, shared = heads
    return queries % size == 0 and (shared % size == 0 or size % shared == 0)


def _notes(entries: Iterable[Entry]) -> tuple[str, ...]:
    misfits = [entry for entry in entries if entry.reason.startswith(MISFIT)]
    if not misfits:
        return ()
    names = some([entry.source.name for entry in misfits])
    return (f"{len(misfits)} weights stay BF16 ({misfits[0].reason}): {names}",)


def _share_note(scheme: str, entries: tuple[Entry, ...]) -> tuple[str, ...]:
    return () if scheme == BF16_SCHEME else warn_share(entries)


def _unused(unused: Mapping[str, str]) -> tuple[str, ...]:
    if not unused:
        return ()
    reason = next(iter(unused.values()))
    return (f"{len(unused)} tensors are left out ({reason}): {some(list(unused))}",)


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that `Plan.to_json` wrote."""
    return Plan(
        entries=tuple(entry_from_json(item) for item in data["tensors"]),
        family=data["family"],
        kind=data["kind"],
        scheme=data["scheme"],
        quantization_config=data["quantization_config"],
        tensor_parallel=tuple(data["tensor_parallel"]),
        target_layers=data["target_layers"],
        notes=tuple(data["notes"]),
    )
