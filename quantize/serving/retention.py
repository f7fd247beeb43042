"""Retention: quantized acceptance length over the baseline's, as a gate that can say undecided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from quantize.errors import ToolError
from quantize.report import Check
from quantize.serving.acceptance import Acceptance, Measured, length_ratio
from quantize.serving.intervals import Interval

LEAST_RATE = 0.02
"""Acceptance at position 1 below which a draft is miswired, not bad: even a draft that was hardly
trained guesses more than one token in fifty, an untrained one none."""
CAUSES = (
    "the draft's architecture (LlamaForCausalLMEagle3) and its auxiliary layers",
    'exclusions in quantization_config spelled as vLLM asks for them ("model.fc", not "fc"): '
    "quantize verify checks them",
    "d2t: offsets for a pruned vocabulary, not absolute ids",
    'the method in --speculative-config ("eagle3")',
    "a draft of another target",
)

Verdict = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True)
class Cell:
    """One combination to serve."""

    name: str
    target: str
    draft: str


@dataclass(frozen=True)
class Retention:
    """How much of the baseline's acceptance length one cell keeps."""

    cell: str
    baseline: str
    ratio: Interval


def plan_cells(
    target: str, draft: str, baseline_target: str | None, baseline_draft: str | None
) -> tuple[Cell, ...]:
    """Every combination: the candidate first, the full baseline last."""
    targets = {"target": target} | ({"baseline-target": baseline_target} if baseline_target else {})
    drafts = {"draft": draft} | ({"baseline-draft": baseline_draft} if baseline_draft else {})
    return tuple(
        Cell(f"{first}+{second}", where, what)
        for first, where in targets.items()
        for second, what in drafts.items()
    )


def measure_cells(
    cells: Sequence[Cell], repeats: int, run: Callable[[Cell, int], Measured]
) -> dict[str, list[Measured]]:
    """Every cell ``repeats`` times, interleaved: what drifts with time falls on all cells alike."""
    runs: dict[str, list[Measured]] = {cell.name: [] for cell in cells}
    for repeat in range(repeats):
        for cell in cells:
            runs[cell.name].append(run(cell, repeat))
    return runs


def noise_floor(runs: Mapping[str, Sequence[Acceptance]]) -> float | None:
    """The largest relative difference of two lengths of the same cell; None without repeats."""
    differences = [
        abs(a.length / b.length - 1)
        for repeats in runs.values()
        for a, b in combinations(repeats, 2)
    ]
    return max(differences, default=None)


def retain(
    cells: Sequence[Cell], runs: Mapping[str, Sequence[Acceptance]], seed: int
) -> tuple[Retention, ...]:
    """The retention of every cell against the last one; repeats of a prompt count together."""
    *others, baseline = cells
    pooled = {
        name: [r for run in repeats for r in run.per_request] for name, repeats in runs.items()
    }
    return tuple(
        Retention(
            cell.name, baseline.name, length_ratio(pooled[cell.name], pooled[baseline.name], seed)
        )
        for cell in others
    )


def decide(ratio: Interval, bar: float) -> Verdict:
    """Whether a whole interval lies at or above the bar, or below it; undecided when it straddles.

    Without an interval (one prompt) nothing can be decided.
    """
    if ratio.low is None or ratio.high is None:
        return "undecided"
    if ratio.low >= bar:
        return "pass"
    return "fail" if ratio.high < bar else "undecided"


def check_retention(ratio: Interval, bar: float, floor: float | None) -> Check:
    """The gate of ``--min-retention``; undecided is not_measured, never pass."""
    verdict = decide(ratio, bar)
    if verdict == "undecided":
        measured, detail = f"undecided: {ratio}", "more prompts, or longer answers, narrow it"
        return Check("retention", "not_measured", measured, f"at least {bar}", detail)
    thin = floor is not None and abs(ratio.value - bar) < floor
    detail = f"the margin is below the noise floor {floor:.4f}: repeat more" if thin else ""
    return Check("retention", verdict, str(ratio), f"at least {bar}", detail)


def check_wiring(name: str, acceptance: Acceptance) -> Check:
    """Below `LEAST_RATE` at position 1 the draft is wired wrongly: not a matter of quality."""
    rate = acceptance.rates[0]
    required = f"acceptance at position 1 of at least {LEAST_RATE:.0%}"
    if rate >= LEAST_RATE:
        return Check(f"wiring of {name}", "pass", f"{rate:.1%}", required)
    causes = "a wiring fault, not low quality; likely causes: " + "; ".join(CAUSES)
    return Check(f"wiring of {name}", "fail", f"{rate:.1%}", required, causes)


def require_baseline(bar: float | None, cells: Sequence[Cell]) -> None:
    """Raises ToolError when a retention is asked for and there is nothing to compare with."""
    if bar is not None and len(cells) == 1:
        raise ToolError(
            "--min-retention needs a baseline to compare with",
            "add --baseline-draft, --baseline-target or both",
        )
