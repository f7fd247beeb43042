"""Compares the CPU plug-in with stock vLLM: ``make cpu-kernels``; about ten minutes.

Eight held-out prompts of as many domains, the BF16 draft, and targets with and without the
plug-in's kernels (``PAIRQUANT_CPU_KERNELS=0``): acceptance length, tokens per second, and how many
answers are the same text. Results go to ``results/cpu-kernels.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from al_table import ENVIRONMENT, QUANTIZE, ROOT, VLLM_ARGS, bring_draft, bring_target

from quantize.serving.plugin import SWITCH
from quantize.serving.prompts import default_prompts

RESULTS = ROOT / "results" / "cpu-kernels.json"
TARGETS = {"bf16": ("0", "1"), "fp8_rowwise": ("0", "1"), "mxfp4": ("1",)}
"""Stock vLLM has no MXFP4 for the CPU."""
TOKENS = 32


def main() -> int:
    """Measure every combination, one after the other; write and print them."""
    results: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[str]] = {}
    with TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "eight.jsonl"
        prompts.write_text("\n".join(default_prompts().read_text().splitlines()[::11]))
        for target, switches in TARGETS.items():
            for switch in switches:
                name = f"{target}, {'plug-in' if switch == '1' else 'stock'}"
                report = ask(target, switch, prompts, Path(scratch) / name)
                results[name], texts[name] = summarize(report)
            both = list(texts.values())[-len(switches) :]
            if len(both) == 2:
                same = sum(a == b for a, b in zip(*both, strict=True))
                results[name]["same_text_as_stock"] = same
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 0


def ask(target: str, switch: str, prompts: Path, out: Path) -> Any:
    """One session of ``accept``; its report."""
    halves = [str(bring_target(target)), str(bring_draft("bf16"))]
    options = ["--prompts", str(prompts), "--max-tokens", str(TOKENS), "--no-lossless"]
    options += ["--vllm-args", VLLM_ARGS, "-o", str(out)]
    environment = os.environ | ENVIRONMENT | {SWITCH: switch}
    subprocess.run([*QUANTIZE, "accept", *halves, *options], env=environment, check=True)
    return json.loads((out / "acceptance.json").read_text())


def summarize(report: Any) -> tuple[dict[str, Any], list[str]]:
    """The figures of a report's one cell, and its texts."""
    (cell,) = report["cells"].values()
    (run,) = cell["runs"]
    (requests,) = next(iter(report["per_request"].values()))
    figures = {
        "kernels": cell["kernels"],
        "length": cell["length"]["value"],
        "tokens": run["tokens"],
        "tokens_per_second": round(run["tokens_per_second"], 1),
    }
    return figures, [request["text"] for request in requests]


if __name__ == "__main__":
    sys.exit(main())
