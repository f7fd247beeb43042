"""Ratios of sums over prompts, with percentile bootstrap intervals.

Efron and Tibshirani, *An Introduction to the Bootstrap*, chapter 13: prompts are drawn with
replacement, all turns of a prompt together. Every statistic of acceptance is such a ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantize.errors import ToolError

RESAMPLES = 10_000
LEVEL = 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval; the ends are None when one prompt gave the data."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class NoData(ToolError):
    """Nothing to divide by: no request had a verification step."""

    def __init__(self) -> None:
        super().__init__(
            "no data: the server verified no draft for these prompts",
            "serve with a draft, and let the answers be longer: --max-tokens",
        )


def ratio_interval(numerators: Floats, denominators: Floats, seed: int) -> Interval:
    """Σ numerators / Σ denominators; arrays of one number a prompt. Raises NoData."""
    value = _ratio(numerators.sum(), denominators.sum())
    weights = _weights(len(denominators), seed)
    return _interval(value, _draw(numerators, denominators, weights), len(denominators))


def paired_interval(
    ours: tuple[Floats, Floats], theirs: tuple[Floats, Floats], seed: int
) -> Interval:
    """The quotient of two such ratios over the same prompts, which are resampled together."""
    value = _ratio(ours[0].sum(), ours[1].sum()) / _ratio(theirs[0].sum(), theirs[1].sum())
    weights = _weights(len(ours[0]), seed)
    return _interval(value, _draw(*ours, weights) / _draw(*theirs, weights), len(ours[0]))


def _ratio(numerator: float, denominator: float) -> float:
    if not denominator:
        raise NoData
    return float(numerator / denominator)


def _weights(prompts: int, seed: int) -> Floats:
    """How often each prompt is drawn in each resample, shape (RESAMPLES, prompts)."""
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    return counts.astype(np.float64)


def _draw(numerators: Floats, denominators: Floats, weights: Floats) -> Floats:
    """The ratio in each resample; NaN where the prompts drawn have no steps."""
    below = weights @ denominators
    return np.divide(weights @ numerators, below, out=np.full_like(below, np.nan), where=below > 0)


def _interval(value: float, draws: Floats, prompts: int) -> Interval:
    if prompts < 2:
        return Interval(value, None, None)
    low, high = np.nanquantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))
