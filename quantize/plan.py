"""Decides from headers alone the fate of every tensor, with the reason. Pure: no I/O, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from schemes.base import TensorSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """The fate of one source tensor.

    ``scheme`` None means preserved; ``stored`` empty means dropped on purpose. A preserved tensor
    whose stored dtype differs from its source's is cast (only with the user's consent).
    """

    source: TensorSpec
    source_format: str
    role: str
    scheme: str | None
    stored: tuple[TensorSpec, ...]
    reason: str


@dataclass(frozen=True)
class Plan:
    """What will be written for one checkpoint, tensor by tensor, in source order."""

    entries: tuple[Entry, ...]
    family: str
    kind: Literal["target", "draft"]
    scheme: str
    quantization_config: dict[str, Any] | None
    target_layers: int | None = None
    notes: tuple[str, ...] = ()
