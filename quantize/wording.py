"""How refusals and checks name many things: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[str], joint: str = ", ", most: int = 3) -> str:
    """The first ``most`` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return joint.join(names[:most]) + more
