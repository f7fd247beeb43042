"""vLLM's counters of speculative decoding: what was counted between two pages of ``/metrics``.

Names and labels are those of ``vllm/v1/spec_decode/metrics.py`` (0.32); Prometheus adds ``_total``
to a counter, and a ``_created`` series with the time at which it began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantize.errors import ToolError

PREFIX = "vllm:spec_decode_num_"
NAMES = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")

Key = tuple[str, tuple[tuple[str, str], ...]]
"""One series: the counter's name, and its labels with their values."""


@dataclass(frozen=True)
class Page:
    """The four counters of one scrape by series, and the time (s) at which each series began."""

    values: Mapping[Key, int]
    created: Mapping[Key, float]


@dataclass(frozen=True)
class Counts:
    """Drafts (verification steps), draft tokens proposed, and accepted: in all and by position."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]


def read_page(text: str) -> Page:
    """The counters on a Prometheus page. Raises ToolError when one is missing."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[Key, int] = {}
    created: dict[Key, float] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ToolError(f"/metrics is no Prometheus page: {error}", "is this a vLLM?") from error
    for sample in (sample for family in families for sample in family.samples):
        for name in NAMES:
            key = (name, tuple(sorted(sample.labels.items())))
            if sample.name == f"{PREFIX}{name}_total":
                values[key] = int(sample.value)
            elif sample.name == f"{PREFIX}{name}_created":
                created[key] = sample.value
    for name in NAMES:
        if not any(key[0] == name for key in values):
            raise ToolError(
                f"/metrics has no series {PREFIX}{name}_total: the server does not count drafts",
                "serve with --speculative-config, and without --disable-log-stats",
            )
    return Page(values, created)


def count_between(before: Page, after: Page) -> Counts:
    """What was counted from one scrape to the next, summed over engines.

    Raises ToolError when a series came or went or started anew, and when the positions do not
    add up to all accepted tokens.
    """
    if before.values.keys() != after.values.keys():
        changed = before.values.keys() ^ after.values.keys()
        raise ToolError(f"/metrics: series {_some(changed)} is in one of two scrapes only", RESTART)
    grown = {key: after.values[key] - before.values[key] for key in after.values}
    reset = {key for key, value in grown.items() if value < 0}
    reset |= {key for key, time in before.created.items() if after.created.get(key) != time}
    if reset:
        raise ToolError(f"/metrics: counter {_some(reset)} was reset between two scrapes", RESTART)
    drafts, draft_tokens, accepted, _ = (
        sum(value for key, value in grown.items() if key[0] == name) for name in NAMES
    )
    per_position = _by_position(grown)
    if sum(per_position) != accepted:
        raise ToolError(
            f"/metrics: {accepted} accepted tokens, but the positions add up to {sum(per_position)}"
            f" ({', '.join(map(str, per_position))})",
            "this vLLM counts in a way that is not understood: report it with its version",
        )
    return Counts(drafts, draft_tokens, accepted, per_position)


RESTART = "the server restarted while it was measured: measure again, and read its log"


def _by_position(grown: Mapping[Key, int]) -> tuple[int, ...]:
    positions: dict[int, int] = {}
    for (name, labels), value in grown.items():
        if name == "accepted_tokens_per_pos":
            position = int(dict(labels)["position"])
            positions[position] = positions.get(position, 0) + value
    return tuple(positions.get(i, 0) for i in range(max(positions) + 1))


def _some(keys: set[Key]) -> str:
    name, labels = min(keys)
    return f"{PREFIX}{name}{{{', '.join(f'{label}={value}' for label, value in labels)}}}"
