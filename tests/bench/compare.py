"""Rates of `quantize run` beside Quark's own export, a plain copy and other settings of ours.

All tools of a source take turns, so that what else the machine does meets all of them; each ratio
is of medians of the same turns. Everything is measured as a whole process, start-up included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TURNS = 3
CLI = [sys.executable, "-m", "quantize.cli"]
QUARK = """
import sys
from quark.torch import LLMTemplate, ModelQuantizer
source, out, scheme = sys.argv[1:]
template = LLMTemplate(model_type="any", exclude_layers_name=["*lm_head", "*embed_tokens"])
config = template.get_config(scheme=scheme)
ModelQuantizer(config).direct_quantize_checkpoint(source, out, device="cpu")
"""
LLMCOMPRESSOR = """
import sys
from llmcompressor import model_free_ptq
source, out, scheme = sys.argv[1:]
names = {"mxfp4": "MXFP4", "ptpc_fp8": "FP8_DYNAMIC"}
model_free_ptq(source, out, scheme=names[scheme], ignore=["re:.*lm_head", "re:.*embed_tokens"])
"""
OTHER_PYTHON = os.environ.get("LLMCOMPRESSOR_PYTHON")
"""An interpreter with llmcompressor, whose requirements do not fit ours; without it, it is left
out."""


@dataclass(frozen=True)
class Usage:
    """One finished process: seconds of wall and of processor time, peak bytes."""

    seconds: float
    processor: float
    peak: int


def tools(source: Path, out: Path, scheme: str) -> dict[str, list[str]]:
    """The command of each tool that makes ``out``; ``scheme`` is Quark's name."""
    ours = [*CLI, "run", str(source), "-o", str(out), "--scheme", scheme, "--quiet"]
    copy = f'cp -r "{source}" "{out}" && sync "{out}"/*'
    found = {
        "ours": [*ours, "--no-verify"],
        "ours, one worker": [*ours, "--no-verify", "--workers", "1"],
        "ours, many shards": [*ours, "--no-verify", "--max-shard-size", "200MB"],
        "ours, verified": ours,
        "cp and sync": ["sh", "-c", copy],
        "Quark": [sys.executable, "-c", QUARK, str(source), str(out), scheme],
    }
    if OTHER_PYTHON:
        found["llmcompressor"] = [OTHER_PYTHON, "-c", LLMCOMPRESSOR, str(source), str(out), scheme]
    return found


def take_turns(source: Path, work: Path, scheme: str) -> dict[str, list[Usage]]:
    """What every tool took, turn by turn; the output is removed each time."""
    out = work / "out"
    used: dict[str, list[Usage]] = {}
    for turn in range(TURNS):
        for tool, command in tools(source, out, scheme).items():
            print(f"{scheme}, {source.name}, turn {turn + 1}: {tool}", file=sys.stderr, flush=True)
            used.setdefault(tool, []).append(run(command))
            shutil.rmtree(out)
    return used


def run(command: list[str]) -> Usage:
    """Run a command to its end; SystemExit with its messages when it fails."""
    start = time.monotonic()
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert child.stderr is not None
    messages = child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} ended with {child.returncode}:\n{messages[-4000:]}")
    seconds = time.monotonic() - start
    return Usage(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


Line = tuple[str, float, str, float | None]
"""Name, value, unit and, where there is one, limit."""


def compare(
    source: Path, work: Path, scheme: str, size: int, largest: int, limits: dict[str, float]
) -> list[Line]:
    """The lines of one source (``size`` bytes, the ``largest`` tensor's) and scheme.

    ``limits`` are of our seconds and of our time as a share of another tool's.
    """
    used = take_turns(source, work, scheme)
    name = f"{source.name} {scheme}"
    lines: list[Line] = []
    for tool, turns in used.items():
        seconds = sorted(turn.seconds for turn in turns)
        limit = limits.get("seconds") if tool == "ours" else None
        lines.append((f"{name}, {tool}: time", median(seconds), "s", limit))
        lines.append((f"{name}, {tool}: spread", seconds[-1] - seconds[0], "s", None))
        processor = median(turn.processor for turn in turns)
        lines.append((f"{name}, {tool}: processor time", processor, "s", None))
        lines.append((f"{name}, {tool}: rate", size / 1e9 / median(seconds), "GB/s", None))
        peak = max(turn.peak for turn in turns)
        most = (600e6 + 3 * largest) / 1e6 if tool.startswith("ours") else None
        lines.append((f"{name}, {tool}: peak memory", peak / 1e6, "MB", most))
    ours = median(turn.seconds for turn in used["ours"])
    for tool in used.keys() - {"ours"}:
        ratio = ours / median(turn.seconds for turn in used[tool])
        lines.append((f"{name}: our time / {tool}", ratio, "", limits.get(tool)))
    return lines
