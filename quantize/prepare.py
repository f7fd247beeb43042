"""What `plan`, `run` and `pair` are about: a source, checked and planned.

Reads headers, and weights only where a check of target against draft needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.base import Family
from quantize.checkpoint import Checkpoint
from quantize.errors import BadPlan
from quantize.head import check_tie
from quantize.pair import check_pair, redundant_tensors, require_pair, target_layers
from quantize.plan import Options, Plan, make_plan
from quantize.report import Check
from quantize.roles import find_family
from quantize.source import Source, naming, read_through


@dataclass(frozen=True)
class PairOptions:
    """What the user asked about the pair's shared tensors."""

    dedupe_head: bool = True
    require_shared_head: bool = False


@dataclass(frozen=True)
class Job:
    """One checkpoint to write. ``target`` is the draft's; ``checks`` were made before it."""

    source: Source
    plan: Plan
    options: Options
    target: Checkpoint | None = None
    checks: tuple[Check, ...] = ()


def prepare_target(source: Checkpoint, options: Options, *, compare: bool = True) -> Job:
    """Check and plan a target. ``compare`` reads weights where a check needs them."""
    source = read_through(source, options.fused_rows)
    with naming(source):
        family = _family(source, draft=False)
        tie = check_tie(family, source, compare=compare)
        plan = make_plan(
            source.specs, source.config, options, weights=source.weights, unused=source.unused
        )
        return Job(source, plan, options, checks=(tie,))


def prepare_draft(
    source: Checkpoint,
    target: Checkpoint,
    options: Options,
    wishes: PairOptions,
    *,
    compare: bool = True,
) -> Job:
    """Check a draft against its target and plan it; a plan alone does not ``compare`` weights."""
    source, target = read_through(source, options.fused_rows), read_through(target)
    with naming(source):
        _family(source, draft=True)
        checks = check_pair(
            target, source, compare=compare, require_shared=wishes.require_shared_head
        )
        require_pair(checks)
        plan = make_plan(
            source.specs,
            source.config,
            options,
            target_layers=target_layers(target),
            dropped=redundant_tensors(target, source, dedupe=compare and wishes.dedupe_head),
            weights=source.weights,
            unused=source.unused,
        )
    return Job(source, plan, options, target, checks)


def is_draft(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an EAGLE-3 draft."""
    with naming(checkpoint):
        return find_family(checkpoint.specs, checkpoint.config).draft


def _family(source: Checkpoint, *, draft: bool) -> Family:
    family = find_family(source.specs, source.config)
    if family.draft == draft:
        return family
    if draft:
        raise BadPlan(
            f"{source.files.origin} is not a draft (architecture {source.config['architectures']})",
            "give the target first and the draft second",
        )
    raise BadPlan(
        f"{source.files.origin} is an EAGLE-3 draft, expected a target model",
        "quantize a draft with --target TARGET, or both: quantize pair TARGET DRAFT -o OUT",
    )
