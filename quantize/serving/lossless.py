"""Is speculation lossless: the target's greedy text with and without the draft.

Verification computes k+1 tokens at a time, plain decoding one: other kernels or other shapes round
differently, and where two tokens are almost equally likely the text may part there. A first
difference with a small logit margin is such a near-tie; one with a large margin is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from quantize.errors import ToolError
from quantize.report import Check
from quantize.serving.client import Answer

NEAR_TIE = 0.5
"""Nats. Logits in BF16 lie 0.125 apart between 16 and 32, and 0.25 between 32 and 64: a few
roundings in either direction."""
END = -1
"""Stands for the end of an answer that stopped where the other went on."""


@dataclass(frozen=True)
class Difference:
    """The first place where the two texts of a prompt part.

    ``position`` counts tokens of the turn, from 0; ``margin`` (nats) is how much likelier the
    target alone finds its own token there than the one chosen with the draft, at least, when the
    latter is not among the likeliest (``bounded``).
    """

    prompt_index: int
    turn: int
    position: int
    plain_token: int
    drafted_token: int
    margin: float
    bounded: bool

    @property
    def near_tie(self) -> bool:
        """Whether roundings explain it."""
        return self.margin <= NEAR_TIE and not self.bounded


@dataclass(frozen=True)
class Lossless:
    """How many prompts have the same text, and the first difference of each other one."""

    prompts: int
    differences: tuple[Difference, ...]

    @property
    def faults(self) -> tuple[Difference, ...]:
        """The differences that roundings do not explain."""
        return tuple(found for found in self.differences if not found.near_tie)


def compare(plain: Sequence[Answer], drafted: Sequence[Answer]) -> Lossless:
    """Compare answers of the target alone, with logprobs, to those with the draft.

    Turns after a prompt's first difference continue other texts and are not compared. Raises
    ToolError when the two are not answers to the same prompts.
    """
    places = [[(answer.prompt.index, answer.turn) for answer in side] for side in (plain, drafted)]
    if places[0] != places[1]:
        raise ToolError("the answers with and without the draft are to different prompts")
    turns = zip(plain, drafted, strict=True)
    found = [
        next((part for alone, with_draft in group if (part := _part(alone, with_draft))), None)
        for _, group in groupby(turns, lambda pair: pair[0].prompt.index)
    ]
    return Lossless(len(found), tuple(difference for difference in found if difference))


def _part(plain: Answer, drafted: Answer) -> Difference | None:
    tokens = zip_longest(plain.token_ids, drafted.token_ids, fillvalue=END)
    for position, (ours, theirs) in enumerate(tokens):
        if ours != theirs:
            margin, bounded = _margin(plain, position, ours, theirs)
            index = plain.prompt.index
            return Difference(index, plain.turn, position, ours, theirs, margin, bounded)
    return None


def _margin(plain: Answer, position: int, ours: int, theirs: int) -> tuple[float, bool]:
    """How much likelier ``ours`` is; a token that is not listed is at most as likely as the last.

    Where one text ends, no token stands there to compare: an infinite, and so a faulty, margin.
    """
    if END in (ours, theirs):
        return float("inf"), True
    likeliest = plain.alternatives[position]
    bounded = theirs not in likeliest
    other = min(likeliest.values()) if bounded else likeliest[theirs]
    return likeliest[ours] - other, bounded


def check_lossless(result: Lossless) -> Check:
    """The check of ``--lossless``."""
    same = result.prompts - len(result.differences)
    measured = f"{same} of {result.prompts} identical"
    if ties := len(result.differences) - len(result.faults):
        measured += f", {ties} part at a near-tie"
    required = f"the same text, or a first difference within {NEAR_TIE} nats"
    if not result.faults:
        return Check("lossless", "pass", measured, required)
    worst = max(result.faults, key=lambda found: found.margin)
    detail = (
        f"prompt {worst.prompt_index}, turn {worst.turn}, token {worst.position}: "
        f"{worst.drafted_token} instead of {worst.plain_token}, "
        f"{'at least ' if worst.bounded else ''}{worst.margin:.2f} nats less likely"
    )
    return Check("lossless", "fail", f"{measured}, {len(result.faults)} do not", required, detail)
