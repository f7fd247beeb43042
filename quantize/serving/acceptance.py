"""Acceptance length: what vLLM counted and what each request reports, with intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantize.errors import ToolError
from quantize.serving.client import Advance, Answer, Sampling, ask_all, fetch
from quantize.serving.intervals import (
    LEVEL,
    RESAMPLES,
    Floats,
    Interval,
    NoData,
    paired_interval,
    ratio_interval,
)
from quantize.serving.metrics import Counts, Page, count_between, read_page
from quantize.serving.prompts import Message, Prompt

WARM_UP = Prompt(0, "warm-up", (Message("user", "Say hello in one short sentence."),))
WARM_UP_TOKENS = 16
SETTLE = 20.0
"""Seconds for the counters on ``/metrics`` to reach what the answers report."""

CONVENTIONS = (
    "acceptance length (AL), pooled: 1 + accepted / steps over all requests; a step is one "
    "verification by the target with at least one draft token; the 1 is the target's own token",
    "mean of requests: the plain mean of each request's own 1 + accepted / steps; requests without "
    "a step have none and are left out",
    "acceptance rate at position i: tokens accepted at position i / steps",
    "tokens after an end-of-sequence inside a step count as accepted, as vLLM counts them",
    "counters: differences of two scrapes of /metrics, summed over engines, warm-up excluded, and "
    "equal to the sum of vLLM's per-request metrics",
    f"intervals: {LEVEL:.0%}, percentile bootstrap over prompts, {RESAMPLES:,} resamples",
    "tokens per second: generated tokens / wall time of the whole run; a side figure",
)


@dataclass(frozen=True)
class RequestAcceptance:
    """One generated turn: verification steps, draft tokens accepted and proposed, and its text.

    ``tokens`` were emitted; ``per_position[i]`` counts the steps that accepted position i.
    """

    prompt_index: int
    domain: str
    steps: int
    accepted: int
    draft_tokens: int
    tokens: int
    text: str
    finish_reason: str
    per_position: tuple[int, ...]


@dataclass(frozen=True)
class Acceptance:
    """What was accepted over a set of prompts."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]
    per_request: tuple[RequestAcceptance, ...]

    @property
    def length(self) -> float:
        """Pooled acceptance length, in tokens per step. Raises ToolError without a draft."""
        if not self.drafts:
            raise NoData
        return 1 + self.accepted / self.drafts

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance rate by position. Raises ToolError without a draft."""
        if not self.drafts:
            raise NoData
        return tuple(count / self.drafts for count in self.per_position)


@dataclass(frozen=True)
class Measured:
    """One run over all prompts; ``seconds`` is its wall time."""

    acceptance: Acceptance
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """All generated tokens."""
        return sum(len(answer.token_ids) for answer in self.answers)


def measure(
    url: str, prompts: Sequence[Prompt], sampling: Sampling, concurrency: int, advance: Advance
) -> Measured:
    """Ask every prompt and count what is accepted, after a warm-up that does not count.

    Raises ToolError when a request failed, when the counters cannot be trusted and when the server
    does not report each request's own acceptance.
    """
    short = Sampling(WARM_UP_TOKENS, sampling.temperature, sampling.seed)
    cold = _scrape(url)
    warm = ask_all(url, [WARM_UP], short, 1, lambda _: None)
    before = _settle(url, cold, require_requests(warm))
    start = time.monotonic()
    answers = ask_all(url, prompts, sampling, concurrency, advance)
    seconds = time.monotonic() - start
    requests = require_requests(answers)
    counts = count_between(before, _settle(url, before, requests))
    acceptance = combine(counts, requests)
    return Measured(acceptance, answers, seconds)


def require_requests(answers: Iterable[Answer]) -> tuple[RequestAcceptance, ...]:
    """Each answer's own acceptance. Raises ToolError when the server does not report it."""
    return tuple(_request(answer) for answer in answers)


def combine(counts: Counts, requests: Sequence[RequestAcceptance]) -> Acceptance:
    """Counters and requests as one. Raises ToolError when they disagree: other traffic, or loss."""
    added = add_up(requests)
    if (added.drafts, added.accepted) != (counts.drafts, counts.accepted):
        raise ToolError(
            f"the server counted {counts.drafts} steps and {counts.accepted} accepted tokens, its "
            f"answers report {added.drafts} and {added.accepted}",
            "did something else use this server? measure where nothing else does",
        )
    return Acceptance(
        counts.drafts, counts.draft_tokens, counts.accepted, counts.per_position, tuple(requests)
    )


def add_up(requests: Sequence[RequestAcceptance]) -> Acceptance:
    """The acceptance of some requests, from what they report themselves."""
    positions = zip(*(request.per_position for request in requests), strict=True)
    return Acceptance(
        sum(request.steps for request in requests),
        sum(request.draft_tokens for request in requests),
        sum(request.accepted for request in requests),
        tuple(map(sum, positions)),
        tuple(requests),
    )


def length_interval(requests: Sequence[RequestAcceptance], seed: int = 0) -> Interval:
    """Pooled acceptance length with its interval. Raises ToolError without data."""
    steps, accepted = _by_prompt(requests, lambda r: (r.steps, r.accepted))
    return ratio_interval(steps + accepted, steps, seed)


def mean_interval(requests: Sequence[RequestAcceptance], seed: int = 0) -> Interval:
    """Mean of the requests' own acceptance lengths. Raises ToolError without data."""
    with_data = [request for request in requests if request.steps]
    lengths, counts = _by_prompt(with_data, lambda r: (1 + r.accepted / r.steps, 1))
    return ratio_interval(lengths, counts, seed)


def rate_intervals(requests: Sequence[RequestAcceptance], seed: int = 0) -> tuple[Interval, ...]:
    """Acceptance rate at every position. Raises ToolError without data."""
    steps, *positions = _by_prompt(requests, lambda r: (r.steps, *r.per_position))
    return tuple(ratio_interval(position, steps, seed) for position in positions)


def length_ratio(
    ours: Sequence[RequestAcceptance], theirs: Sequence[RequestAcceptance], seed: int = 0
) -> Interval:
    """Ratio of two pooled lengths, paired by prompt.

    Raises ToolError when the two did not measure the same prompts, and without data.
    """
    if {r.prompt_index for r in ours} != {r.prompt_index for r in theirs}:
        raise ToolError("retention compares two runs of different prompts", "measure both again")
    ratios = []
    for requests in (ours, theirs):
        steps, accepted = _by_prompt(requests, lambda r: (r.steps, r.accepted))
        ratios.append((steps + accepted, steps))
    return paired_interval(ratios[0], ratios[1], seed)


def summarize(acceptance: Acceptance, seed: int = 0) -> dict[str, Any]:
    """An acceptance as JSON values, with intervals. Raises ToolError without data."""
    requests = acceptance.per_request
    by_domain: dict[str, list[RequestAcceptance]] = {}
    for request in requests:
        by_domain.setdefault(request.domain, []).append(request)
    return {
        "steps": acceptance.drafts,
        "draft_tokens": acceptance.draft_tokens,
        "accepted": acceptance.accepted,
        "accepted_per_position": list(acceptance.per_position),
        "requests": len(requests),
        "requests_without_a_step": sum(not request.steps for request in requests),
        "length": vars(length_interval(requests, seed)),
        "mean_of_requests": vars(mean_interval(requests, seed)),
        "rates": [vars(rate) for rate in rate_intervals(requests, seed)],
        "domains": {
            domain: {
                "prompts": len({request.prompt_index for request in found}),
                "length": vars(length_interval(found, seed)),
            }
            for domain, found in by_domain.items()
            if any(request.steps for request in found)
        },
    }


def _request(answer: Answer) -> RequestAcceptance:
    if answer.histogram is None:
        raise ToolError(
            f"the answer to prompt {answer.prompt.index} carries no metrics.speculative_decoding",
            "start the server with --speculative-config and "
            "--per-request-spec-decode-metrics summary",
        )
    histogram = answer.histogram
    per_position = tuple(sum(histogram[i:]) for i in range(1, len(histogram)))
    return RequestAcceptance(
        answer.prompt.index,
        answer.prompt.domain,
        sum(histogram),
        sum(per_position),
        answer.draft_tokens,
        len(answer.token_ids),
        answer.text,
        answer.finish_reason,
        per_position,
    )


def _scrape(url: str) -> Page:
    return read_page(fetch(f"{url}/metrics").decode())


def _settle(url: str, before: Page, requests: Sequence[RequestAcceptance]) -> Page:
    """The page once it shows the steps of ``requests``: it may lag behind the answers."""
    steps = sum(request.steps for request in requests)
    deadline = time.monotonic() + SETTLE
    while True:
        page = _scrape(url)
        if count_between(before, page).drafts >= steps or time.monotonic() > deadline:
            return page
        time.sleep(0.2)


def _by_prompt(
    requests: Sequence[RequestAcceptance],
    values: Callable[[RequestAcceptance], Sequence[float]],
) -> list[Floats]:
    """Sums over each prompt's turns: one array a value, in the order of prompts."""
    sums: dict[int, Floats] = {}
    for request in requests:
        row = np.asarray(values(request), dtype=np.float64)
        sums[request.prompt_index] = sums.get(request.prompt_index, np.zeros_like(row)) + row
    if not sums:
        raise NoData
    return list(np.array([sums[index] for index in sorted(sums)]).T)
