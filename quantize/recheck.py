"""`verify`: proves folders written earlier, from their own reports and the sources given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.engine import Stage
from quantize.entry import Entry
from quantize.errors import BadOutput, ToolError
from quantize.job import HALVES, PAIR_REPORT, REPORT
from quantize.manifest import MANIFEST, check_files, require_files
from quantize.pair import check_pair, redundant_tensors, target_layers
from quantize.plan import Options, Plan, make_plan, plan_from_json
from quantize.report import Check, Report
from quantize.source import Source, read_through
from quantize.verify import verify_checkpoint


def verify_output(
    out: Path,
    source: str | None,
    draft: Path | None,
    draft_source: str | None,
    stage: Stage,
    *,
    ignore_index: bool = False,
    sample: bool = False,
) -> dict[str, Report]:
    """The reports of an output by name; ``pair`` is among them when both halves are given.

    ``out`` is one checkpoint, or what `pair` wrote; ``ignore_index`` is about the sources and
    ``sample`` for `verify_checkpoint`. Raises `BadOutput` when a folder has no report.
    """
    _require_folder(out)
    whole = (out / PAIR_REPORT).is_file()
    if whole and draft is not None:
        raise BadOutput(f"{out} holds both halves, and --draft names another", "leave out --draft")
    folder, draft = (out / "target", out / "draft") if whole else (out, draft)
    if draft is None and draft_source is not None:
        raise BadOutput("--draft-source was given without a draft", "add --draft OUT")
    sources = [
        _open_source(name, of, ignore_index=ignore_index) if name and of else None
        for name, of in ((source, folder), (draft_source, draft))
    ]
    target = _open_output(folder)
    first = _verify_one(folder, target, sources[0], stage, sample=sample)
    if draft is None:
        return {"checkpoint": first}
    drafted = _open_output(draft)
    second = _verify_one(draft, drafted, sources[1], stage, sample=sample)
    plan = plan_from_json(_read_report(draft)["plan"])
    checks = (*check_pair(target, drafted), _check_depth(plan, target))
    extra = _check_dropped(plan, target, sources[1])
    links = (_check_link(out),) if whole else ()
    return {"target": first, "draft": second, "pair": Report((*checks, *extra, *links))}


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise BadOutput(
            f"{folder}: the folder does not exist, expected an output of quantize run or pair",
            "write it again with quantize run or quantize pair",
        )


def _open_output(folder: Path) -> Checkpoint:
    """An output is always a folder: its path is never taken for a Hub id."""
    _require_folder(folder)
    require_files(folder, _read_report(folder).get(MANIFEST))
    return open_checkpoint(str(folder))


def _open_source(name: str, out: Path, *, ignore_index: bool) -> Source:
    """The source of the output ``out``, read as its report says that it was."""
    stored = open_checkpoint(name, ignore_index=ignore_index)
    return read_through(stored, _options(_read_report(out)).fused_rows)


def _verify_one(
    folder: Path, out: Checkpoint, source: Source | None, stage: Stage, *, sample: bool
) -> Report:
    recorded = _read_report(folder)
    plan = plan_from_json(recorded["plan"])
    size = sum(entry.source.nbytes for entry in plan.entries)
    with stage(f"verify {folder}", size) as advance:
        report = verify_checkpoint(out, plan, _comparable(plan, source), advance, sample=sample)
    stored = sum(spec.nbytes for spec in plan.stored.values())
    with stage(f"hash {folder}", stored) as advance:
        files = check_files(folder, recorded.get(MANIFEST), advance)
    return replace(report, checks=(_check_plan(recorded, plan, source), files, *report.checks))


def _comparable(plan: Plan, source: Source | None) -> Source | None:
    """The source if it has the tensors of the plan; of another one no byte can be compared."""
    if source is None:
        return None
    same = all(source.specs.get(entry.source.name) == entry.source for entry in plan.entries)
    return source if same else None


def _check_plan(recorded: Mapping[str, Any], plan: Plan, source: Source | None) -> Check:
    """The recorded plan is the one that the recorded options give for the source."""
    required = "the recorded options give the recorded plan"
    if source is None:
        return Check("plan", "not_measured", "needs --source", required)
    dropped = {
        entry.source.name: entry.reason.removeprefix("dropped: ")
        for entry in plan.entries
        if not entry.stored
    }
    try:
        again = make_plan(
            source.specs,
            source.config,
            _options(recorded),
            target_layers=plan.target_layers if plan.kind == "draft" else None,
            dropped=dropped,
            weights=source.weights,
            unused=source.unused,
        )
    except ToolError as error:
        return Check("plan", "fail", error.message, required, "is this the right --source?")
    if again != plan:
        return Check("plan", "fail", "another plan", required, "is this the right --source?")
    lost = [e.source.name for e in again.entries if not e.stored and not _may_drop(again, e)]
    if lost:
        return Check("plan", "fail", f"{len(lost)} tensors dropped", required, ", ".join(lost))
    return Check("plan", "pass", f"{len(plan.entries)} tensors", required)


def _options(recorded: Mapping[str, Any]) -> Options:
    options = dict(recorded["options"])
    options["exclude"] = tuple(options["exclude"])
    options["layer_schemes"] = tuple(map(tuple, options["layer_schemes"]))
    options["fused_rows"] = tuple((glob, tuple(rows)) for glob, rows in options["fused_rows"])
    return Options(**options)


def _may_drop(plan: Plan, entry: Entry) -> bool:
    """Whether `redundant_tensors` could have named it: a target needs all of its tensors."""
    return plan.kind == "draft" and entry.role in ("head", "embedding", "d2t", "t2d")


def _check_depth(plan: Plan, target: Checkpoint) -> Check:
    """The draft was written for a target of this depth: vLLM numbers its layers after it."""
    layers = target_layers(target)
    good = plan.target_layers == layers
    return Check(
        "target layers",
        "pass" if good else "fail",
        f"draft written for {plan.target_layers}",
        f"{layers}, the target's num_hidden_layers",
        "" if good else "its exclusions miss its layers in vLLM: write it again with this --target",
    )


def _check_dropped(plan: Plan, target: Checkpoint, source: Source | None) -> tuple[Check, ...]:
    """What was dropped from the draft is what the target has, byte for byte."""
    names = {entry.source.name for entry in plan.entries if not entry.stored}
    required = "each is the target's own, byte for byte, or an identity d2t"
    if not names:
        return ()
    if source is None:
        return (Check("dropped tensors", "not_measured", "needs --draft-source", required),)
    wrong = names - redundant_tensors(target, source, dedupe=True).keys()
    said = ", ".join(sorted(wrong or names))
    return (Check("dropped tensors", "fail" if wrong else "pass", said, required),)


def _check_link(out: Path) -> Check:
    """Each half names the pair's report by its hash."""
    digest = sha256((out / PAIR_REPORT).read_bytes()).hexdigest()
    required = "each half names the pair's report by its hash"
    wrong = [
        name for name in HALVES if _read_report(out / name).get("pair", {}).get("sha256") != digest
    ]
    if wrong:
        return Check("link", "fail", f"another hash in {' and '.join(wrong)}", required, REPORT)
    return Check("link", "pass", digest[:12], required)


def _read_report(folder: Path) -> dict[str, Any]:
    path = folder / REPORT
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        plan_from_json(data["plan"])
    except FileNotFoundError as error:
        raise BadOutput(
            f"{path}: the file is missing, expected the report of quantize run or pair",
            "verify works on folders written by quantize run or pair",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOutput(
            f"{path}: not a report of this tool ({error})",
            "verify works on folders written by quantize run or pair",
        ) from error
    return dict(data)
