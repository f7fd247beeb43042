"""Each verb from parsed options to its stage and its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import click

from quantize.card import NOT_SERVED
from quantize.checkpoint import Checkpoint, bring_local, open_checkpoint
from quantize.compute import choose_compute
from quantize.engine import load_engine
from quantize.errors import ToolError
from quantize.estimate import estimate, estimate_lines
from quantize.job import HALVES, Settings, check_place, run_one, run_pair
from quantize.patterns import resolve_scheme
from quantize.plan import Options
from quantize.prepare import Job, PairOptions, is_draft, prepare_draft, prepare_target
from quantize.report import Report, check_table, plan_table, tensor_table
from quantize.share import quantized_share
from quantize.view import View


def plan_verb(view: View, given: dict[str, Any]) -> None:
    """``quantize plan``: headers alone; head equality is not_measured and leaves exit code 0."""
    model = _open(_given(given, "model"), given)
    wishes = PairOptions()
    jobs = []
    if is_draft(model):
        options = _options(given, "")
        jobs = [prepare_draft(model, _target(given), options, wishes, compare=False)]
    else:
        _refuse_target(given, model)
        jobs = [prepare_target(model, _options(given, ""), compare=False)]
    if given["draft"]:
        draft = open_checkpoint(given["draft"])
        jobs.append(
            prepare_draft(draft, jobs[0].source, _options(given, "draft_"), wishes, compare=False)
        )
    checks = [check for job in jobs for check in job.checks]
    view.show(*(plan_table(job.plan) for job in jobs))
    view.show(*(line for job in jobs for line in _plan_lines(job)))
    if checks:
        view.show(check_table("checks", Report(tuple(checks))))
    view.result(
        True,
        lambda: {
            "source": model.files.origin,
            "plan": jobs[0].plan.to_json(),
            "checks": Report(tuple(checks)).to_json()["checks"],
            "estimate": estimate(jobs[0].plan),
            **({"draft_plan": jobs[1].plan.to_json()} if given["draft"] else {}),
        },
    )


def _plan_lines(job: Job) -> Iterable[str]:
    sizes = ", ".join(map(str, job.plan.tensor_parallel))
    yield f"{job.plan.kind}: tensor-parallel sizes that stay valid: {sizes}"
    yield from estimate_lines(job.plan)
    share = quantized_share(job.plan.entries)
    yield f"{job.plan.kind}: {share:.1%} of the weights' bytes are quantized"
    yield from (f"note: {note}" for note in job.plan.notes)


def run_verb(view: View, given: dict[str, Any]) -> None:
    """``quantize run``: one checkpoint; a draft is recognised and needs ``--target``."""
    options = _options(given, "")
    model = _local(view, _open(_given(given, "model"), given), given)
    settings = _settings(view, given)
    if is_draft(model):
        job = prepare_draft(model, _local(view, _target(given), given), options, _wishes(given))
    else:
        _refuse_target(given, model)
        job = prepare_target(model, options)
    out: Path = given["out"]
    check_place(out, [job])
    load_engine([job.plan], settings.compute, view.stage)
    report = run_one(job, out, settings)
    view.show(plan_table(job.plan), check_table(str(out), report), tensor_table(report))
    view.show(f"next: quantize verify {quote(str(out))} --source {quote(model.files.origin)}")
    view.result(
        True,
        lambda: {
            "source": model.files.origin,
            "output": str(out),
            "plan": job.plan.to_json(),
            **report.to_json(),
        },
    )


def pair_verb(view: View, given: dict[str, Any]) -> None:
    """``quantize pair``: target and draft into one folder."""
    if given["min_retention"] is not None and not given["accept"]:
        raise click.UsageError("--min-retention needs --accept")
    names = _given(given, "target"), _given(given, "draft")
    target = _local(view, _open(names[0], given), given)
    draft = open_checkpoint(names[1], ignore_index=given["ignore_index"])
    draft = _local(view, draft, given)
    first = prepare_target(target, _options(given, ""))
    jobs = (
        first,
        prepare_draft(draft, first.source, _options(given, "draft_"), _wishes(given)),
    )
    check_place(given["out"], jobs)
    settings = _settings(view, given)
    load_engine([job.plan for job in jobs], settings.compute, view.stage)
    reports = run_pair(*jobs, given["out"], settings)
    out: Path = given["out"]
    _show_pair(view, jobs, reports, out)
    served = {}
    if given["accept"]:
        from quantize.serving_verbs import accept_pair

        served = accept_pair(view, given, out, (str(target.path), str(draft.path)))
    view.result(
        served.get("ok", True),
        lambda: {
            "source": target.files.origin,
            "draft_source": draft.files.origin,
            "output": str(out),
            "served": served or NOT_SERVED,
            "plan": {name: job.plan.to_json() for name, job in zip(HALVES, jobs, strict=True)},
            "checks": {name: report.to_json()["checks"] for name, report in reports.items()},
            "tensors": {name: report.to_json()["tensors"] for name, report in reports.items()},
        },
    )


def _show_pair(view: View, jobs: Iterable[Job], reports: Mapping[str, Report], out: Path) -> None:
    view.show(*(plan_table(job.plan) for job in jobs))
    view.show(*(check_table(name, report) for name, report in reports.items()))
    view.show(*(tensor_table(report) for report in reports.values() if report.tensors))
    sources = " ".join(
        f"--{option} {quote(job.source.files.origin)}"
        for option, job in zip(("source", "draft-source"), jobs, strict=True)
    )
    view.show(f"next: quantize verify {quote(str(out))} {sources}")


def _given(given: dict[str, Any], name: str) -> str:
    """A positional checkpoint, or the option that stands for it."""
    value, option = given[name], given[f"{name}_option"]
    if bool(value) == bool(option):
        problem = "is missing" if not value else "was given twice"
        raise click.UsageError(
            f"{name.upper()} {problem}: a folder or a Hub id, before any --exclude-layers, which "
            "takes every value up to the next option"
        )
    return str(value or option)


def _open(model: str, given: Mapping[str, Any]) -> Checkpoint:
    return open_checkpoint(model, revision=given["revision"], ignore_index=given["ignore_index"])


def _target(given: Mapping[str, Any]) -> Checkpoint:
    if not given["target"]:
        raise ToolError(
            "MODEL is an EAGLE-3 draft: its names, vocabulary and head depend on its target",
            "add --target TARGET, or quantize both: quantize pair TARGET DRAFT -o OUT",
        )
    return open_checkpoint(given["target"])


def _refuse_target(given: Mapping[str, Any], model: Checkpoint) -> None:
    if given["target"]:
        raise ToolError(
            f"--target was given, but {model.files.origin} is no draft",
            "leave --target out, or give the draft as MODEL",
        )


def _local(view: View, checkpoint: Checkpoint, given: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint as it is read: one on the Hub in passing, or downloaded and kept if asked."""
    if checkpoint.path is not None or not (given["keep_source"] or given.get("accept")):
        return checkpoint
    with view.stage(f"download {checkpoint.files.origin}", 0):
        return bring_local(checkpoint, ignore_index=given["ignore_index"])


def _options(given: Mapping[str, Any], key: str) -> Options:
    return Options(
        scheme=resolve_scheme(given[f"{key}scheme"]),
        exclude=tuple(given[f"{key}exclude"]),
        layer_schemes=tuple(
            (pattern, resolve_scheme(scheme)) for pattern, scheme in given[f"{key}layer_schemes"]
        ),
        allow_unmatched=given["allow_unmatched"],
        cast_weights=given["cast_weights"],
        cast_head=given["cast_head"],
        # A draft is never stored so: its rows are not asked for.
        fused_rows=() if key else given["fused_rows"],
    )


def _wishes(given: Mapping[str, Any]) -> PairOptions:
    return PairOptions(given["dedupe_head"], given["require_shared_head"])


def _settings(view: View, given: Mapping[str, Any]) -> Settings:
    if given["workers"] and not given["no_verify"]:  # the proof computes in torch
        import torch

        torch.set_num_threads(given["workers"])
    return Settings(
        command=view.argv,
        stage=view.stage,
        max_shard_size=given["max_shard_size"],
        compute=choose_compute(given["engine"], given["device"], given["workers"]),
        verify=not given["no_verify"],
        restart=given["restart"],
    )
