"""Measures acceptance length for every scheme: ``make al-table``; hours on two cores.

Each cell is one ``quantize accept`` over the 88 held-out prompts, in ``bench-results/al/CELL``; a
cell that is there is not measured again, so an interrupted run continues. ``results/al.json`` gets
every cell's figures with the counts of each prompt, and what each quantized half keeps: a paired
bootstrap over prompts against the BF16 pair. Arguments name cells; without any: all.
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
from quantize.serving.acceptance import RequestAcceptance, length_ratio  # noqa: E402
from quantize.serving.intervals import Interval  # noqa: E402

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
DRAFTS: dict[str, tuple[str, ...]] = {
    "fp8_rowwise": ("--scheme", "fp8_rowwise"),
    "mxfp4": ("--scheme", "mxfp4"),
    "fp8_rowwise-fc": ("--scheme", "fp8_rowwise", "--layer-scheme", "fc", "fp8_rowwise"),
    "mxfp4-fc": ("--scheme", "mxfp4", "--layer-scheme", "fc", "mxfp4"),
}
BASE = "bf16+bf16"
BARS = {"bf16+fp8_rowwise": 0.995, "bf16+mxfp4": 0.985}
"""Least retention of a quantized draft beside the BF16 target: the point estimate."""
CELLS = (
    BASE,
    *(f"bf16+{draft}" for draft in DRAFTS),
    "bf16+8k",
    *(f"{target}+{draft}" for target in TARGETS for draft in ("bf16", *SCHEMES)),
)
REPEATS = {BASE: 3}
"""Three runs of one cell give the noise floor."""


def main(cells: Sequence[str]) -> int:
    """Measure cells, collect what is there; exit code 1 when a bar is missed."""
    for cell in cells or CELLS:
        measure(cell)
    done = [cell for cell in CELLS if (WORK / cell / "acceptance.json").exists()]
    if BASE not in done:
        return 0
    results = collect(done)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return int(any(results["cells"][cell]["retention"]["value"] < bar for cell, bar in bars(done)))


def bars(done: Iterable[str]) -> Iterable[tuple[str, float]]:
    """The bars of what was measured."""
    return ((cell, BARS[cell]) for cell in done if cell in BARS)


def measure(cell: str) -> None:
    """One session of ``quantize accept``, unless its report is there."""
    out = WORK / cell
    if (out / "acceptance.json").exists():
        return
    target, _, draft = cell.partition("+")
    options = ["--repeats", str(REPEATS.get(cell, 1)), "--vllm-args", VLLM_ARGS]
    options += ["--lossless" if cell == BASE else "--no-lossless"]
    halves = [str(bring_target(target)), str(bring_draft(draft))]
    done = subprocess.run(
        [*QUANTIZE, "accept", *halves, *options, "-o", str(out)],
        env=os.environ | ENVIRONMENT,
        check=False,
    )
    if not (out / "acceptance.json").exists():
        raise SystemExit(f"{cell}: not measured (exit code {done.returncode})")


def bring_target(name: str) -> Path:
    """A target, made if it is not there yet."""
    source = build_target(WORK / "target-bf16")
    return source if name == "bf16" else _run(source, f"target-{name}", TARGETS[name])


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


def collect(done: Iterable[str]) -> dict[str, Any]:
    """What the reports say, and the ratio of every cell to the BF16 pair."""
    reports = {cell: json.loads((WORK / cell / "acceptance.json").read_text()) for cell in done}
    base = reports[BASE]
    return {
        "settings": base["settings"],
        "prompts": base["prompts"],
        "vllm": {key: base["vllm"][key] for key in ("version", "device")},
        "conventions": base["conventions"],
        "noise_floor": base["noise_floor"],
        "lossless": base["lossless"],
        "cells": {cell: _cell(report, base) for cell, report in reports.items()},
    }


def _cell(report: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = report["cells"].values()
    kept = ("length", "mean_of_requests", "rates", "steps", "accepted_per_position", "domains")
    ratio = length_ratio(requests(report), requests(base))
    counts = [[r.prompt_index, r.steps, r.accepted] for r in requests(report)]
    return {
        **{half: {"sha256": found[half]["sha256"]} for half in ("target", "draft")},
        "kernels": found["kernels"],
        **{key: found[key] for key in kept},
        "runs": found["runs"],
        "retention": vars(ratio),
        "prompt_steps_accepted": counts,
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
        "| target | draft | AL | of the BF16 pair | accepted at 1, 2, 3 | tok/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, cell in results["cells"].items():
        target, _, draft = name.partition("+")
        rates = " ".join(f"{rate['value']:.3f}"[1:] for rate in cell["rates"])
        speed = sum(run["tokens_per_second"] for run in cell["runs"]) / len(cell["runs"])
        length, ratio = Interval(**cell["length"]), Interval(**cell["retention"])
        lines.append(f"| {target} | {draft} | {length} | {ratio} | {rates} | {speed:.0f} |")
    floor = results["noise_floor"]
    return "\n".join((*lines, f"\nnoise floor, three repeats of {BASE}: {floor:.2%}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
