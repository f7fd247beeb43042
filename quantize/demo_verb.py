"""The verb ``demo``: the whole line on the embedded pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantize.checkpoint import open_checkpoint
from quantize.compute import choose_compute
from quantize.demo import build_target, draft_path
from quantize.engine import load_engine
from quantize.job import Settings, run_pair
from quantize.plan import Options
from quantize.prepare import PairOptions, prepare_draft, prepare_target
from quantize.recheck import verify_output
from quantize.report import Check, Report, check_table, plan_table
from quantize.view import View

LANGUAGE_QUALITY = Check(
    "language quality", "not_measured", "no evaluation was run", "not part of this command"
)


def demo_verb(view: View, given: dict[str, Any]) -> None:
    """``quantize demo``: the whole line, or the proof of the output that is already there."""
    folder: Path = given["out"]
    with view.stage("build SmolLM2-135M-Instruct in BF16", 0):
        source = build_target(folder / "smollm2-135m-instruct")
    out, draft = folder / "pair", draft_path()
    if out.exists():
        reports = verify_output(out, str(source), None, str(draft), view.stage)
    else:
        reports = _make_demo(view, source, draft, out, restart=given["restart"])
    view.show(*(check_table(name, report) for name, report in reports.items()))
    view.show(check_table("not part of the demo", Report((LANGUAGE_QUALITY,))))
    failed = any(report.failed or report.unmeasured for report in reports.values())
    view.show(f"next: {out}/serve.sh serves the pair where vLLM has a kernel for mxfp4")
    view.result(
        not failed,
        lambda: {
            "source": str(source),
            "output": str(out),
            "checks": {name: report.to_json()["checks"] for name, report in reports.items()},
            "language_quality": "not_measured",
        },
    )


def _make_demo(
    view: View, source: Path, draft: Path, out: Path, *, restart: bool
) -> dict[str, Report]:
    target = open_checkpoint(str(source))
    jobs = (
        prepare_target(target, Options("mxfp4")),
        prepare_draft(open_checkpoint(str(draft)), target, Options("fp8_rowwise"), PairOptions()),
    )
    compute = choose_compute()
    load_engine([job.plan for job in jobs], compute, view.stage)
    view.show(*(plan_table(job.plan) for job in jobs))
    settings = Settings(view.argv, view.stage, 5 * 10**9, compute, restart=restart)
    return run_pair(*jobs, out, settings)
