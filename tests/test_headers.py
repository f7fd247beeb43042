"""Header sets of whole published models, and their plans, in seconds and without a weight."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import cache
from math import prod
from pathlib import Path

import pytest

from quantize.checkpoint import open_checkpoint
from quantize.estimate import (
    COPY_RATE,
    PROVE_RATE,
    QUANTIZE_RATE,
    estimate,
    estimate_lines,
)
from quantize.plan import Options
from quantize.prepare import prepare_target

sys.path.insert(0, str(Path(__file__).parent / "headers"))
from make import MODELS, Tensors, nbytes, write

COMPANIONS = ("weight_scale", "weight_scale_inv", "weight_shape")

PUBLISHED = {
    # The Hub's own figures: parameters, and the total_size of the index.
    "llama-3.1-405b": (191, 1137, 405_853_388_800, 811_706_777_600),
    # 684,489,845,504 parameters without scales; 688,586,727,753 bytes of files with headers.
    "deepseek-v3-fp8": (163, 91_991, 684_489_845_504, 688_574_839_360),
    # 208,550 tensors, total_size 595,148,192,736.
    "kimi-k2.5-int4": (64, 208_550, 1_026_879_376_368, 595_148_192_736),
    # hf-mem reads 230,121,630,720 bytes from the published headers.
    "minimax-m2.5-fp8": (126, 96_103, 228_689_764_864, 230_121_630_720),
}
"""Shards, tensors, parameters and bytes."""


QUANTIZED = {
    "llama-3.1-405b": r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj",
    # As AMD publishes them: attention, head, router, vision and projector stay as they are.
    "deepseek-v3-fp8": r"model\.layers\.(?!61\.)\d+\.mlp\.((shared_)?experts\.)?(\d+\.)?\w+_proj",
    "kimi-k2.5-int4": r"language_model\..*\.mlp\.((shared_)?experts\.)?(\d+\.)?\w+_proj",
    "minimax-m2.5-fp8": r".*\.block_sparse_moe\.experts\.\d+\.w[123]",
}
"""The modules that a plan for MXFP4 quantizes."""


@cache
def shards(name: str) -> dict[str, Tensors]:
    return MODELS[name]().shards


def all_tensors(name: str) -> Tensors:
    return {key: spec for part in shards(name).values() for key, spec in part.items()}


def weights(name: str) -> dict[str, int]:
    """Elements of every logical weight: packed ones unpacked, scales left out."""
    return {
        tensor.removesuffix("_packed"): prod(shape) * (8 if tensor.endswith("weight_packed") else 1)
        for tensor, (_, shape) in all_tensors(name).items()
        if not tensor.endswith(COMPANIONS)
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_set_has_the_published_size(name: str) -> None:
    tensors = all_tensors(name)
    found = (len(shards(name)), len(tensors), sum(weights(name).values()), nbytes(tensors))
    assert found == PUBLISHED[name]


def after(name: str) -> tuple[int, int]:
    """Tensors and bytes of the output: 17 bytes for 32 weights in MXFP4, BF16 or F32 elsewhere."""
    stored, count, total = all_tensors(name), 0, 0
    for tensor, elements in weights(name).items():
        if re.fullmatch(QUANTIZED[name] + r"\.weight", tensor):
            count, total = count + 2, total + elements // 32 * 17
        else:
            width = 4 if tensor in stored and stored[tensor][0] == "F32" else 2
            count, total = count + 1, total + elements * width
    return count, total


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_of_the_whole_model(name: str, tmp_path: Path) -> None:
    write(MODELS[name](), tmp_path / name)
    start = time.process_time()
    job = prepare_target(open_checkpoint(str(tmp_path / name)), Options("mxfp4"), compare=False)
    seconds = time.process_time() - start
    assert seconds < 30
    plan = job.plan
    stored = [spec for entry in plan.entries for spec in entry.stored]
    assert sum(entry.source_bytes for entry in plan.entries) == PUBLISHED[name][3]
    assert (len(stored), sum(spec.nbytes for spec in stored)) == after(name)
    quantized = {entry.source.name for entry in plan.entries if entry.scheme}
    assert quantized == {t for t in weights(name) if re.fullmatch(QUANTIZED[name] + r"\.weight", t)}


def test_amds_own_kimi_has_as_many_tensors() -> None:
    """amd/Kimi-K2.5-MXFP4: 139,613 tensors, 558,995,180,568 bytes of files with their headers."""
    count, total = after("kimi-k2.5-int4")
    assert count == 139_613
    assert 100 * count < 558_995_180_568 - total < 200 * count


def test_the_command_plans_405_billion_parameters(tmp_path: Path) -> None:
    write(MODELS["llama-3.1-405b"](), tmp_path / "m")
    command = [sys.executable, "-m", "quantize.cli", "plan", str(tmp_path / "m")]
    before = os.times().children_user
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert os.times().children_user - before < 10  # processor time: the machine may be busy
    assert "811706.78" in done.stderr
    assert "221788.41" in done.stderr


def test_the_estimate_is_of_the_plan(tmp_path: Path) -> None:
    """Bytes by hand, from the config's dimensions, times the measured rates."""
    write(MODELS["llama-3.1-405b"](), tmp_path / "m")
    job = prepare_target(open_checkpoint(str(tmp_path / "m")), Options("mxfp4"), compare=False)
    told = estimate(job.plan)
    assert told["largest_tensor_bytes"] == 128_256 * 16_384 * 2
    assert told["largest_tensor"] in ("model.embed_tokens.weight", "lm_head.weight")
    linears = 126 * 2 * (2 * 16384**2 + 2 * 1024 * 16384 + 3 * 53248 * 16384)
    assert told["proof_core_seconds"] == pytest.approx(linears / PROVE_RATE, abs=0.1)
    rest = 811_706_777_600 - linears
    seconds = linears / QUANTIZE_RATE + rest / COPY_RATE
    assert told["core_seconds"] == pytest.approx(seconds, abs=0.1)
    lines = " ".join(estimate_lines(job.plan))
    assert "4.20 GB" in lines
    assert told["measured_on"] in lines
    assert re.search(r"about \d+ min of one core to write and \d+\.\d h to prove", lines)
