"""Measures acceptance length for every scheme: ``make al-table``; hours on two cores.

Each run is one ``quantize accept`` over the 88 held-out prompts, in ``bench-results/al/RUN``; a run
that is there is not measured again, so an interrupted table continues. ``results/al.json`` gets
every cell's figures with the counts of each prompt, and its ratio to the BF16 pair: a paired
bootstrap over prompts. Arguments name runs; without any: all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from pruned import write_pruned  # noqa: E402

from quantize.demo import build_target, draft_path  # noqa: E402
from quantize.serving.acceptance import (  # noqa: E402
    RequestAcceptance,
    add_up,
    length_ratio,
)
from quantize.serving.intervals import Interval  # noqa: E402
from quantize.serving.retention import noise_floor  # noqa: E402

WORK = ROOT / "bench-results" / "al"
RESULTS = ROOT / "results" / "al.json"
QUANTIZE = [sys.executable, "-m", "quantize.cli"]
# Compiling a model takes minutes and gains nothing here; 1 GiB holds the KV cache of 16 requests.
VLLM_ARGS = "--max-model-len 2048 --enforce-eager"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}

SCHEMES = ("fp8_rowwise", "mxfp4")
TARGETS: dict[str, tuple[str, ...]] = {
    "fp8_rowwise": ("--scheme", "fp8_rowwise"),
    "mxfp4": ("--scheme", "mxfp4"),
}
FP8_ATTENTION = ("--scheme", "mxfp4", "--layer-scheme", "*.self_attn.*", "fp8_rowwise")
RECIPES: dict[str, tuple[str, ...]] = {
    "mxfp4, attention in FP8": FP8_ATTENTION,
    "mxfp4, attention and down in FP8": (
        *FP8_ATTENTION,
        *("--layer-scheme", "*.down_proj", "fp8_rowwise"),
    ),
}
"""Choices of `recipes.py`."""
DRAFTS: dict[str, tuple[str, ...]] = {
    "fp8_rowwise": ("--scheme", "fp8_rowwise"),
    "mxfp4": ("--scheme", "mxfp4"),
    "fp8_rowwise-fc": ("--scheme", "fp8_rowwise", "--layer-scheme", "fc", "fp8_rowwise"),
    "mxfp4-fc": ("--scheme", "mxfp4", "--layer-scheme", "fc", "mxfp4"),
}
BASE = "bf16+bf16"
BARS = {"bf16+fp8_rowwise": 0.995, "bf16+mxfp4": 0.985}
"""Least retention of a quantized draft beside the BF16 target: the point estimate."""
REPEATS = (f"{BASE}#2", f"{BASE}#3")
"""With the first, three runs of one cell: they give the noise floor, and together the baseline."""
CELLS = (
    BASE,
    *(f"bf16+{draft}" for draft in DRAFTS),
    "bf16+8k",
    *(f"{target}+{draft}" for target in TARGETS for draft in ("bf16", *SCHEMES)),
    *(f"{target}+bf16" for target in RECIPES),
)


def main(runs: Sequence[str]) -> int:
    """Measure runs, collect what is there; exit code 1 when a bar is missed."""
    for run in runs or (*CELLS, *REPEATS):
        measure(run)
    reports = {run: read(run) for run in (*CELLS, *REPEATS) if is_measured(run)}
    if BASE not in reports:
        return 0
    results = collect(reports)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    measured = results["cells"]
    return int(
        any(measured[cell]["of_bf16"]["value"] < BARS[cell] for cell in BARS if cell in measured)
    )


def is_measured(run: str) -> bool:
    """Whether the run's report is there."""
    return (WORK / run / "acceptance.json").exists()


def read(run: str) -> dict[str, Any]:
    """The report of a run."""
    report: dict[str, Any] = json.loads((WORK / run / "acceptance.json").read_text())
    return report


def measure(run: str) -> None:
    """One session of ``quantize accept``, unless its report is there."""
    if is_measured(run):
        return
    target, draft = run.partition("#")[0].split("+")
    halves = [str(bring_target(target)), str(bring_draft(draft))]
    options = ["--no-lossless", "--vllm-args", VLLM_ARGS, "-o", str(WORK / run)]
    done = subprocess.run(
        [*QUANTIZE, "accept", *halves, *options], env=os.environ | ENVIRONMENT, check=False
    )
    if not is_measured(run):
        raise SystemExit(f"{run}: not measured (exit code {done.returncode})")


def bring_target(name: str) -> Path:
    """A target, made if it is not there yet."""
    source = build_target(WORK / "target-bf16")
    options = {**TARGETS, **RECIPES}
    return source if name == "bf16" else _run(source, f"target-{name}", options[name])


def bring_draft(name: str) -> Path:
    """A draft, made if it is not there yet."""
    target = bring_target("bf16")
    if name == "bf16":
        return draft_path()
    if name == "8k":
        pruned = WORK / "draft-8k"
        return pruned if pruned.exists() else write_pruned(pruned, target)
    return _run(draft_path(), f"draft-{name}", ("--target", str(target), *DRAFTS[name]))


def _run(source: Path, name: str, options: Iterable[str]) -> Path:
    out = WORK / name
    if not out.exists():
        command = [*QUANTIZE, "run", str(source), "-o", str(out), *options]
        subprocess.run(command, env=os.environ | ENVIRONMENT, check=True)
    return out


def collect(reports: Mapping[str, Any]) -> dict[str, Any]:
    """What the reports say, the noise floor, and the ratio of every cell to the BF16 pair."""
    first = reports[BASE]
    repeats = [requests(reports[run]) for run in (BASE, *REPEATS) if run in reports]
    base = [request for run in repeats for request in run]
    return {
        "settings": first["settings"],
        "prompts": first["prompts"],
        "vllm": {key: first["vllm"][key] for key in ("version", "device")},
        "conventions": first["conventions"],
        "noise_floor": noise_floor({BASE: [add_up(run) for run in repeats]}),
        "repeats": [add_up(run).length for run in repeats],
        "cells": {
            cell: _cell(reports[cell], base, repeats[0]) for cell in CELLS if cell in reports
        },
    }


def _cell(
    report: Mapping[str, Any],
    base: Sequence[RequestAcceptance],
    first: Sequence[RequestAcceptance],
) -> dict[str, Any]:
    (found,) = report["cells"].values()
    (run,) = found["runs"]
    ours = requests(report)
    kept = ("length", "mean_of_requests", "rates", "steps", "accepted_per_position", "domains")
    return {
        **{half: {"sha256": found[half]["sha256"]} for half in ("target", "draft")},
        "kernels": found["kernels"],
        **{key: found[key] for key in kept},
        "tokens_per_second": run["tokens_per_second"],
        "of_bf16": vars(length_ratio(ours, base)),
        "same_text_as_bf16": sum(a.text == b.text for a, b in zip(ours, first, strict=True)),
        "steps_accepted_by_prompt": [[r.steps, r.accepted] for r in ours],
    }


def requests(report: Mapping[str, Any]) -> list[RequestAcceptance]:
    """Every request of every run of a report's one cell."""
    (runs,) = report["per_request"].values()
    return [
        RequestAcceptance(**request | {"per_position": tuple(request["per_position"])})
        for run in runs
        for request in run
    ]


def table(results: Mapping[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| target | draft | AL | of the BF16 pair's | accepted at 1, 2, 3 |",
        "|---|---|---|---|---|",
    ]
    for name, cell in results["cells"].items():
        target, draft = name.split("+")
        rates = " ".join(f"{rate['value']:.3f}"[1:] for rate in cell["rates"])
        length, ratio = Interval(**cell["length"]), Interval(**cell["of_bf16"])
        lines.append(f"| {target} | {draft} | {length} | {ratio} | {rates} |")
    if (floor := results["noise_floor"]) is not None:
        lines.append(f"\nnoise floor, {len(results['repeats'])} runs of {BASE}: {floor:.2%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
