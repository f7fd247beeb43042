"""Served acceptance: the drafts that we write, in a stock vLLM on this CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pruned import write_pruned
from vllm_server import Acceptance, read_acceptance, serve

from quantize.demo import build_target, draft_path

DATA = Path(__file__).parent / "data"
QUESTION = "What is the capital of France? Answer in one sentence."
PROMPTS = [
    json.loads(line)["prompt"] for line in (DATA / "prompts-heldout.jsonl").read_text().splitlines()
]
# One of each domain: a CPU without BF16 instructions makes some ten tokens a second.
ASKED = PROMPTS[::8]
MAX_TOKENS = 48
LAYOUTS = ("shared head", "pruned head")


@dataclass(frozen=True)
class Served:
    """What a pair answered and how many of its draft's tokens were accepted."""

    answer: str
    acceptance: Acceptance


def measure(target: Path, draft: Path, log: Path, prompts: list[str]) -> Served:
    with serve(target, draft, log) as server:
        answer = server.chat(QUESTION, MAX_TOKENS)
        server.chat_all(prompts, MAX_TOKENS)
        return Served(answer, server.acceptance())


def quantize(*arguments: str | Path) -> None:
    command = [str(Path(sys.executable).with_name("quantize")), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_target(tmp_path_factory.mktemp("serving") / "target")


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pruned = write_pruned(tmp_path_factory.mktemp("drafts") / "pruned", target)
    return dict(zip(LAYOUTS, (draft_path(), pruned), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_draft_is_accepted_like_its_source(
    layout: str, target: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    quantize("run", drafts[layout], "--target", target, "--scheme", "fp8_rowwise", "-o", out)
    source = measure(target, drafts[layout], tmp_path / "source.log", ASKED)
    ours = measure(target, out, tmp_path / "ours.log", ASKED)
    print(f"{layout}: BF16 {source.acceptance}, FP8 row-wise {ours.acceptance}")
    assert "Paris" in ours.answer
    # A draft that vLLM fills with garbage still serves right answers, at length 1.
    assert source.acceptance.length > 1.5
    assert ours.acceptance.length >= 0.98 * source.acceptance.length


def test_all_fp8_pair_answers(target: Path, drafts: dict[str, Path], tmp_path: Path) -> None:
    schemes = ("--scheme", "fp8_rowwise", "--draft-scheme", "fp8_rowwise")
    quantize("pair", target, drafts["shared head"], *schemes, "-o", tmp_path / "pair")
    pair = tmp_path / "pair"
    served = measure(pair / "target", pair / "draft", tmp_path / "server.log", [])
    assert "Paris" in served.answer
    assert served.acceptance.accepted > 0


def test_counters_are_summed_over_engines_and_timestamps_are_not() -> None:
    page = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="model"} 30.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="model"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="model"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="model"} 80.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="model"} 21.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="model"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 0.0
"""
    counted = read_acceptance(page)
    assert counted == Acceptance(drafts=40, accepted=30, per_position=(24, 6))
    assert counted.length == 1.75
