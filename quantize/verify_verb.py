"""``quantize verify``: prove an output, compare it with an earlier one, and tell CI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantize.baseline import Limits, judge, read_baseline, read_figures
from quantize.errors import BadOutput
from quantize.hub import fetch_output
from quantize.recheck import verify_output
from quantize.report import Report, check_table, junit_xml, summary, tensor_table

if TYPE_CHECKING:
    from quantize.view import View


FILES = ("junit", "html", "summary")
"""The options that name a file to write."""

_HINT = "name a file in a folder that is there and may be written to"


def check_file(option: str, path: Path) -> None:
    """Raise `BadOutput` now, not after the proof, when a file could not be written."""
    fault = ""
    try:
        if not path.parent.is_dir():
            fault = f"there is no folder {path.parent}"
        elif path.is_dir():
            fault = "this is a folder, not a file"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            fault = "may not be written"
    except OSError as error:  # a folder on the way that may not be entered
        fault = str(error.strerror)
    if fault:
        raise BadOutput(f"{option} {path}: {fault}", _HINT)


def verify_verb(view: View, given: Mapping[str, Any]) -> None:
    """Exit 1 when a check failed, or could not be made and was not excused."""
    allow = given["allow_unmeasured"]
    for option in FILES:
        if given[option]:
            check_file(f"--{option}", given[option])
    out = _bring(view, given["out"])
    draft = _bring(view, given["draft"]) if given["draft"] else None
    before = read_baseline(given["baseline"]) if given["baseline"] else None
    reports = verify_output(
        out,
        given["source"],
        draft,
        given["draft_source"],
        view.stage,
        ignore_index=given["ignore_index"],
        sample=given["sample"],
    )
    figures = _figures(out, draft, reports)
    if checks := judge(figures, before, _limits(given)):
        reports["baseline"] = Report(checks)
    try:
        _write(given, out, draft, reports)
    except OSError as error:
        raise BadOutput(f"a file that was asked for was not written: {error}", _HINT) from error
    failed = [check for report in reports.values() for check in report.failed]
    unmeasured = [check for report in reports.values() for check in report.unmeasured]
    view.show(*(check_table(name, report) for name, report in reports.items()))
    view.show(*(tensor_table(report) for report in reports.values() if report.tensors))
    if failed:
        view.show(f"{len(failed)} checks failed")
    if unmeasured:
        view.show(f"{len(unmeasured)} checks not measured; hint: give --source and --draft-source")
    view.result(
        not failed and (allow or not unmeasured),
        lambda: {
            "source": given["source"],
            "output": str(given["out"]),
            "checks": {name: report.to_json()["checks"] for name, report in reports.items()},
            "tensors": {name: report.to_json()["tensors"] for name, report in reports.items()},
            "figures": figures,
        },
    )


def _bring(view: View, out: Path) -> Path:
    """An output is a folder; one on the Hub is brought into the Hub cache."""
    return out if out.exists() else fetch_output(out, view.stage)


def _figures(out: Path, draft: Path | None, reports: Mapping[str, Report]) -> dict[str, Any]:
    proofs = {name: report.tensors for name, report in reports.items()}
    if "checkpoint" in proofs:  # one checkpoint: which kind it is, its report says
        proofs = dict.fromkeys(("target", "draft"), proofs["checkpoint"])
    return read_figures(out, proofs, draft)


def _limits(given: Mapping[str, Any]) -> Limits:
    return Limits(*(given[key] for key in Limits.__dataclass_fields__))


def _write(
    given: Mapping[str, Any], out: Path, draft: Path | None, reports: Mapping[str, Report]
) -> None:
    """The files that were asked for."""
    allow = given["allow_unmeasured"]
    if given["junit"]:
        given["junit"].write_text(junit_xml(reports, allow_unmeasured=allow), encoding="utf-8")
    if given["summary"]:
        with given["summary"].open("a", encoding="utf-8") as file:
            file.write(summary(f"quantize verify {given['out']}", reports))
    if given["html"]:
        from quantize.serving.page import write_page

        write_page(given["html"], out, draft, reports)
