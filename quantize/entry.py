"""The fate of one tensor: what a plan is made of, and its form in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemes.base import TensorSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """The fate of one source tensor.

    ``scheme`` None means preserved; ``stored`` empty means dropped on purpose. A weight that is
    not BF16 is cast before it is quantized, and a preserved tensor whose stored dtype differs
    from its source's is cast; both need the user's consent. ``source`` is the logical weight;
    ``source_bytes`` are those that the source's files hold for it, and ``kept`` says that they
    are the scheme's own and are copied.
    """

    source: TensorSpec
    source_format: str
    role: str
    scheme: str | None
    stored: tuple[TensorSpec, ...]
    reason: str
    source_bytes: int
    kept: bool = False


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """The entry as JSON values; `entry_from_json` reads them back."""
    return {
        **_spec_to_json(entry.source),
        "source_format": entry.source_format,
        "role": entry.role,
        "scheme": entry.scheme,
        "stored": [_spec_to_json(spec) for spec in entry.stored],
        "reason": entry.reason,
        "source_bytes": entry.source_bytes,
        "kept": entry.kept,
    }


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def entry_from_json(item: Mapping[str, Any]) -> Entry:
    """The entry that `entry_to_json` wrote."""
    return Entry(
        source=_spec(item),
        source_format=item["source_format"],
        role=item["role"],
        scheme=item["scheme"],
        stored=tuple(_spec(spec) for spec in item["stored"]),
        reason=item["reason"],
        source_bytes=item["source_bytes"],
        kept=item["kept"],
    )


def _spec(item: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(item["name"], item["dtype"], tuple(item["shape"]))
