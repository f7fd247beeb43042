"""The draft's vocabulary: ``d2t`` leads draft ids to target ids, ``t2d`` marks those it reaches.

Source: vLLM ``model_executor/models/llama_eagle3.py`` (``compute_logits``): target id = i + d2t[i].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quantize.checkpoint import Checkpoint
from quantize.report import Check

LARGEST_VOCABULARY = 1 << 24
"""Ids of a target: ``d2t`` and ``t2d`` are read whole. Published vocabularies have 2¹⁸ or so."""


def check_d2t(draft: Checkpoint, kept: int, vocab: int) -> Check:
    """``d2t`` and ``t2d`` of a draft that proposes ``kept`` of the target's ``vocab`` ids."""
    problem = _d2t_problem(draft, kept, vocab)
    required = "offsets (target id = i + d2t[i]) iff the draft vocabulary is pruned; t2d agrees"
    detail = "repair d2t in the draft: it maps draft ids to target ids by offset"
    if problem:
        return Check("d2t", "fail", problem, required, detail)
    summary = "in range, unique, agrees" if "d2t" in draft.specs else "full vocabulary, no d2t"
    return Check("d2t", "pass", summary, required)


def _d2t_problem(draft: Checkpoint, kept: int, vocab: int) -> str:
    spec = draft.specs.get("d2t")
    if spec is None:
        return "" if kept == vocab else f"no d2t, and {kept} of {vocab} ids are drafted"
    if spec.dtype != "I64" or spec.shape != (kept,) or vocab > LARGEST_VOCABULARY:
        return (
            f"d2t is {spec.dtype} {list(spec.shape)} for {vocab} target ids, not I64 [{kept}] for "
            f"at most {LARGEST_VOCABULARY}"
        )
    d2t = np.frombuffer(draft.read("d2t"), dtype=np.int64)
    if kept == vocab:
        return "a d2t that is not the identity beside a full vocabulary" if d2t.any() else ""
    ids = np.arange(kept) + d2t
    mask = _t2d(draft, vocab)
    if isinstance(mask, str):
        return mask
    if _looks_absolute(d2t, mask, vocab):
        return "d2t holds absolute target ids, not offsets"
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab:
        return f"d2t leads to target ids {ids.min()} to {ids.max()}, outside 0 to {vocab - 1}"
    if len(np.unique(ids)) != kept:
        return "d2t leads two draft ids to one target id"
    if mask is not None and not np.array_equal(np.flatnonzero(mask), np.sort(ids)):
        return "t2d marks other target ids than d2t leads to"
    return ""


def _t2d(draft: Checkpoint, vocab: int) -> NDArray[np.bool_] | str | None:
    """The mask; None where there is none; a problem in words."""
    spec = draft.specs.get("t2d")
    if spec is None:
        return None
    if spec.dtype != "BOOL" or spec.shape != (vocab,):
        return f"t2d is {spec.dtype} {list(spec.shape)}, not BOOL [{vocab}]"
    return np.frombuffer(draft.read("t2d"), dtype=np.bool_)


def _looks_absolute(d2t: NDArray[np.int64], mask: NDArray[np.bool_] | None, vocab: int) -> bool:
    if d2t.min(initial=0) < 0 or d2t.max(initial=0) >= vocab or not d2t.any():
        return False
    if mask is not None:
        return bool(np.array_equal(np.flatnonzero(mask), np.sort(d2t)))
    # Without a mask: sorted ids rise at every step, while offsets rest wherever two
    # neighbouring ids are both kept, which every pruned vocabulary has.
    return len(d2t) > 1 and bool((np.diff(d2t) > 0).all())
