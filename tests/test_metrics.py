"""vLLM's counters: every page here is written by hand, and so is what it must add up to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest

from quantize.errors import ToolError
from quantize.serving.acceptance import (
    Acceptance,
    add_up,
    combine,
    length_interval,
    require_requests,
)
from quantize.serving.client import Answer
from quantize.serving.metrics import Counts, count_between, read_page
from quantize.serving.prompts import Message, Prompt

NAMES = ("drafts", "draft_tokens", "accepted_tokens")


def page(
    engines: Mapping[str, tuple[int, int, int, tuple[int, ...]]], created: str = "1.7e+09"
) -> str:
    """A page by engine: drafts, draft tokens, accepted tokens, accepted by position."""
    lines = []
    for engine, (*totals, positions) in engines.items():
        labels = f'engine="{engine}",model_name="model"'
        for name, value in zip(NAMES, totals, strict=True):
            lines.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {value}.0")
            lines.append(f"vllm:spec_decode_num_{name}_created{{{labels}}} {created}")
        for position, value in enumerate(positions):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            lines.append(f'{name}_total{{{labels},position="{position}"}} {value}.0')
            lines.append(f'{name}_created{{{labels},position="{position}"}} {created}')
    return "\n".join(lines) + "\n"


def count(before: str, after: str) -> Counts:
    return count_between(read_page(before), read_page(after))


def test_two_engines_are_summed_after_the_difference() -> None:
    before = page({"0": (10, 30, 9, (5, 3, 1)), "1": (20, 60, 12, (8, 3, 1))})
    after = page({"0": (110, 330, 69, (45, 18, 6)), "1": (70, 210, 42, (28, 10, 4))})
    # Engine 0: 100, 300, 60, (40, 15, 5); engine 1: 50, 150, 30, (20, 7, 3).
    assert count(before, after) == Counts(150, 450, 90, (60, 22, 8))


def test_created_series_are_never_summed() -> None:
    """Each is a time in seconds, some 1.7 thousand million."""
    before, after = page({"0": (0, 0, 0, (0, 0))}), page({"0": (4, 8, 3, (2, 1))})
    assert "_created" in after
    assert count(before, after) == Counts(4, 8, 3, (2, 1))


def test_a_counter_that_fell_is_a_reset() -> None:
    before = page({"0": (10, 30, 9, (5, 3, 1)), "1": (0, 0, 0, (0, 0, 0))})
    # In the sum over engines nothing fell: only engine 0 started anew.
    after = page({"0": (2, 6, 1, (1, 0, 0)), "1": (50, 150, 30, (20, 7, 3))})
    with pytest.raises(ToolError, match=r"engine=0.* was reset"):
        count(before, after)


def test_a_restart_that_counted_further_is_a_reset() -> None:
    before = page({"0": (10, 30, 9, (5, 3, 1))})
    after = page({"0": (110, 330, 69, (45, 18, 6))}, created="1.8e+09")
    with pytest.raises(ToolError, match="was reset"):
        count(before, after)


def test_zero_drafts_are_no_data() -> None:
    same = page({"0": (10, 30, 9, (5, 3, 1))})
    counts = count(same, same)
    assert counts == Counts(0, 0, 0, (0, 0, 0))
    with pytest.raises(ToolError, match="no data"):
        _ = combine(counts, ()).length


@pytest.mark.parametrize("name", [*NAMES, "accepted_tokens_per_pos"])
def test_a_missing_series_is_named(name: str) -> None:
    text = page({"0": (10, 30, 9, (5, 3, 1))})
    full = f"vllm:spec_decode_num_{name}_total{{"
    lacking = "\n".join(line for line in text.splitlines() if not line.startswith(full)) + "\n"
    with pytest.raises(ToolError, match=f"no series vllm:spec_decode_num_{name}_total"):
        read_page(lacking)


def test_an_engine_that_came_later_is_refused() -> None:
    before = page({"0": (10, 30, 9, (5, 3, 1))})
    after = page({"0": (10, 30, 9, (5, 3, 1)), "1": (10, 30, 9, (5, 3, 1))})
    with pytest.raises(ToolError, match="one of two scrapes only"):
        count(before, after)


def test_positions_must_add_up_to_all_accepted() -> None:
    before = page({"0": (0, 0, 0, (0, 0, 0))})
    after = page({"0": (100, 300, 60, (40, 15, 4))})
    with pytest.raises(ToolError, match="60 accepted tokens, but the positions add up to 59"):
        count(before, after)


def test_a_page_that_is_none_is_refused() -> None:
    with pytest.raises(ToolError, match="no Prometheus page"):
        read_page("<html>{</html>\n")


def test_the_real_exposition_is_read() -> None:
    """What prometheus_client itself writes for vLLM's counters, comments included."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    for name, value in zip(NAMES, (7, 21, 5), strict=True):
        made = Counter(f"vllm:spec_decode_num_{name}", "x", labels, registry=registry)
        made.labels("model", "0").inc(value)
    by_position = Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "x",
        [*labels, "position"],
        registry=registry,
    )
    for position, value in enumerate((3, 2, 0)):
        by_position.labels("model", "0", str(position)).inc(value)
    after = generate_latest(registry).decode()
    assert "_created" in after
    before = read_page(after)
    zeros = type(before)(dict.fromkeys(before.values, 0), before.created)
    assert count_between(zeros, read_page(after)) == Counts(7, 21, 5, (3, 2, 0))


def answer(index: int, histogram: tuple[int, ...], tokens: int) -> Answer:
    prompt = Prompt(index, "math", (Message("user", "?"),))
    drafted = (len(histogram) - 1) * sum(histogram)
    return Answer(prompt, 0, "text", tuple(range(tokens)), "stop", histogram, drafted)


def test_an_end_of_sequence_inside_a_block_counts_as_vllm_counts_it() -> None:
    """k = 3: two steps accept 1 and 3 tokens; the end is the first token of the second block.

    Emitted: 1 (prefill) + 2 (first step) + 1 = 4 tokens, yet vLLM has counted 4 accepted.
    """
    (request,) = require_requests([answer(0, (0, 1, 0, 1), tokens=4)])
    assert (request.steps, request.accepted, request.draft_tokens) == (2, 4, 6)
    assert request.per_position == (2, 1, 1)
    counts = count(
        page({"0": (0, 0, 0, (0, 0, 0))}),
        page({"0": (2, 6, 4, (2, 1, 1))}),
    )
    both = combine(counts, [request])
    assert both.length == 1 + 4 / 2
    assert both.per_request[0].tokens == 4


def test_requests_and_counters_that_disagree_are_refused() -> None:
    requests = require_requests([answer(0, (1, 1, 0, 0), 3)])
    with pytest.raises(
        ToolError, match="3 steps and 1 accepted tokens, its answers report 2 and 1"
    ):
        combine(Counts(3, 9, 1, (1, 0, 0)), requests)


def test_a_server_without_request_metrics_is_refused() -> None:
    bare = Answer(Prompt(4, "qa", (Message("user", "?"),)), 0, "x", (1,), "stop", None, 0)
    with pytest.raises(ToolError, match="prompt 4 carries no") as refused:
        require_requests([bare])
    assert "--per-request-spec-decode-metrics summary" in refused.value.hint


def test_lengths_by_hand() -> None:
    """Two requests of 10 and 30 steps: pooled and mean of requests differ."""
    requests = require_requests([answer(0, (5, 5), 15), answer(1, (30, 0), 30)])
    pooled: Acceptance = add_up(requests)
    assert pooled.length == 1 + 5 / 40
    assert pooled.rates == (5 / 40,)
    assert length_interval(requests).value == 1.125
