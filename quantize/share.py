"""How much of a model a plan quantizes, in the bytes that its weights have as they are used.

Stored bytes would not do: a source may hold its experts in four bits already.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantize.entry import Entry

EXPERT = "expert"
"""The role of a routed expert's weight in every family."""


def quantized_share(entries: Sequence[Entry]) -> float:
    """The part of the logical weights' bytes that gets a scheme, from 0 to 1."""
    total = sum(entry.source.nbytes for entry in entries)
    return sum(entry.source.nbytes for entry in entries if entry.scheme) / total if total else 0.0


def warn_share(entries: Sequence[Entry]) -> tuple[str, ...]:
    """A warning when most of a mixture of experts stays BF16, with what takes the most of it."""
    share = quantized_share(entries)
    if share >= 0.5 or not any(entry.role == EXPERT for entry in entries):
        return ()
    kept: dict[str, int] = {}
    for entry in entries:
        if not entry.scheme:
            kept[entry.role] = kept.get(entry.role, 0) + entry.source.nbytes
    role, size = max(kept.items(), key=lambda item: item[1])
    return (
        f"most of this mixture of experts stays as it is: {share:.0%} of its bytes are quantized; "
        f"{size} bytes are kept as {role}",
    )
