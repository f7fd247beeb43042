"""A session as JSON values: what ``acceptance.json``, a pair's ``served`` and ``--json`` hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from quantize.serving.acceptance import CONVENTIONS, Measured, summarize
from quantize.serving.lossless import Lossless
from quantize.serving.retention import Verdict, decide
from quantize.serving.session import Session, Wishes

ACCEPTANCE_REPORT = "acceptance.json"


def to_json(wishes: Wishes, session: Session, digests: Mapping[str, str]) -> dict[str, Any]:
    """The session as JSON values; ``digests`` has the SHA-256 of every checkpoint by folder."""
    seed = wishes.sampling.seed
    return {
        "ok": all(check.status == "pass" for check in session.checks),
        "conventions": list(CONVENTIONS),
        "settings": {
            "method": "eagle3",
            "num_speculative_tokens": len(session.pooled(wishes.cells[0].name).per_position),
            **asdict(wishes.sampling),
            "concurrency": wishes.concurrency,
            "repeats": wishes.repeats,
            "vllm_options": list(wishes.options),
            "url": wishes.url,
        },
        "prompts": {
            "name": wishes.prompts.name,
            "sha256": wishes.prompts.digest,
            "count": len(wishes.prompts.prompts),
            "warnings": list(wishes.prompts.warnings),
        },
        "vllm": dict(session.vllm),
        "cells": {
            cell.name: {
                "target": {"path": cell.target, "sha256": digests.get(cell.target)},
                "draft": {"path": cell.draft, "sha256": digests.get(cell.draft)},
                "kernels": list(session.kernels.get(cell.name, ())),
                **summarize(session.pooled(cell.name), seed),
                "runs": [_run_json(run) for run in session.runs[cell.name]],
            }
            for cell in wishes.cells
        },
        "noise_floor": session.noise_floor,
        "retention": [asdict(retention) for retention in session.retentions],
        "min_retention": wishes.min_retention,
        "verdict": _verdict(wishes, session),
        "lossless": _lossless_json(session.lossless),
        "checks": [asdict(check) for check in session.checks],
    }


def requests_json(session: Session) -> dict[str, Any]:
    """Every request of every run, texts included, by cell."""
    return {
        name: [[asdict(request) for request in run.per_request] for run in runs]
        for name, runs in session.acceptances.items()
    }


def _verdict(wishes: Wishes, session: Session) -> Verdict | None:
    """Of the candidate; None when no retention was asked for."""
    if wishes.min_retention is None:
        return None
    return decide(session.retentions[0].ratio, wishes.min_retention)


def _run_json(run: Measured) -> dict[str, Any]:
    return {
        "length": run.acceptance.length,
        "seconds": run.seconds,
        "tokens": run.tokens,
        "tokens_per_second": run.tokens / run.seconds,
    }


def _lossless_json(result: Lossless | None) -> dict[str, Any] | str:
    if result is None:
        return "not measured"
    differences = []
    for found in result.differences:
        row = asdict(found) | {"near_tie": found.near_tie}
        # JSON has no infinity: where one text just ends, there is no margin.
        differences.append(row | {"margin": found.margin if math.isfinite(found.margin) else None})
    return {"prompts": result.prompts, "differences": differences}
