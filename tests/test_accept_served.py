"""`quantize accept` on real vLLM servers: measured, refused, interrupted, none left running."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import QUANTIZE
from runs import pair as write_pair
from runs import silent
from tiny import write_draft, write_llama

from quantize.demo import draft_path
from quantize.errors import ToolError
from quantize.recheck import verify_output
from quantize.serving.client import Sampling, ask_all, fetch
from quantize.serving.process import Launch, read_kernels, serve
from quantize.serving.prompts import Message, Prompt, default_prompts
from quantize.serving_verbs import record_served

TOKENS = 32
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "What is the capital of France?",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "200",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
EAGER = "--max-model-len 1024 --enforce-eager"  # compiling takes minutes on two cores
SMALL = ("--max-tokens", str(TOKENS), "--concurrency", "8", "--vllm-args", EAGER)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def target(demo_dir: Path) -> Path:
    return demo_dir / "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight prompts of as many domains; the last asks for two turns."""
    lines = [json.loads(line) for line in default_prompts().read_text().splitlines()[::11]]
    more = {"role": "user", "content": "Say that again in other words."}
    last = [{"role": "user", "content": lines[-1].pop("prompt")}, more]
    lines[-1] |= {"messages": last}
    path = tmp_path_factory.mktemp("prompts") / "eight.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def accept(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(QUANTIZE), "accept", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def servers(port: int) -> list[psutil.Process]:
    """Every living process that names a server's port in its command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or ()
        if str(port) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return [process for process in found if "--speculative-config" in process.info["cmdline"]]


def group(number: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            same = os.getpgid(process.pid) == number
        except ProcessLookupError:
            continue
        if same and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def is_healthy(url: str) -> bool:
    try:
        fetch(f"{url}/health", timeout=5)
    except ToolError:
        return False
    return True


def await_true(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(met)


@pytest.fixture(scope="module")
def session(
    target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One whole session, lossless check included, and its folder."""
    out = tmp_path_factory.mktemp("session") / "report"
    return accept(target, draft_path(), "--prompts", prompts, *SMALL, "-o", out, "--json"), out


def test_session_measures_what_vllm_counted(
    session: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = session
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)["served"]
    (cell,) = served["cells"].values()
    assert 1.3 < cell["length"]["value"] < 2.2
    assert cell["length"]["low"] < cell["length"]["value"] < cell["length"]["high"]
    assert cell["length"]["value"] == pytest.approx(1 + cell["accepted"] / cell["steps"])
    assert sum(cell["accepted_per_position"]) == cell["accepted"]
    assert cell["requests"] == 9, "eight prompts, one of them with two turns"
    assert len(cell["domains"]) == 8
    (run,) = cell["runs"]
    assert 9 < run["tokens"] <= 9 * TOKENS
    assert served["vllm"]["version"] == version("vllm-cpu")
    assert served["vllm"]["device"] == "cpu"
    assert all(len(cell[half]["sha256"]) == 64 for half in ("target", "draft"))
    requests = json.loads((out / "acceptance.json").read_text())["per_request"]
    texts = [request["text"] for request in requests["target+draft"][0]]
    assert len(set(texts)) == 9
    assert all(texts)
    assert "bonus" not in done.stderr
    assert "bootstrap over prompts" in done.stderr, "the conventions are printed"


def test_session_is_lossless(session: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    served = json.loads((session[1] / "acceptance.json").read_text())
    assert served["lossless"]["prompts"] == 8
    assert all(found["near_tie"] for found in served["lossless"]["differences"])
    assert {check["name"]: check["status"] for check in served["checks"]} == {
        "wiring of target+draft": "pass",
        "lossless": "pass",
    }


def test_pair_records_a_session(
    session: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    """The pair's report holds it, and both halves link to that report anew."""
    out = tmp_path / "pair"
    write_pair(write_llama(tmp_path / "t"), write_draft(tmp_path / "d"), out, ("bf16", "bf16"))
    mine = "edited by hand\n"
    (out / "draft" / "README.md").write_text(mine)
    served = json.loads((session[1] / "acceptance.json").read_text())
    record_served(out, served, session[1])
    report = json.loads((out / "report.json").read_text())
    assert report["served"]["prompts"]["sha256"] == served["prompts"]["sha256"]
    assert report["served"]["cells"] == served["cells"]
    (link,) = [
        check
        for check in verify_output(out, None, None, None, silent)["pair"].checks
        if check.name == "link"
    ]
    assert link.status == "pass"
    length = f"{served['cells']['target+draft']['length']['value']:.3f}"
    for half in ("target", "draft"):
        card = (out / half / "README.md").read_text()
        assert f"| target+draft | {length} [" in card
        pictures = re.findall(r"!\[.+\]\((\S+)\)", card)
        assert pictures == ["acceptance.png", "domains.png"]
        for name in pictures:
            assert (out / half / name).read_bytes().startswith(b"\x89PNG")
    assert (out / "draft" / "README.md").read_text().endswith(mine)


def test_poisoned_draft_is_a_wiring_fault_on_a_running_server(
    demo_dir: Path, target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Exclusions as Quark writes them: vLLM takes `fc` for FP8 and leaves its scales unset."""
    poisoned = tmp_path / "poisoned"
    shutil.copytree(demo_dir / "pair" / "draft", poisoned)
    config = json.loads((poisoned / "config.json").read_text())
    config["quantization_config"]["exclude"] = ["fc"]
    (poisoned / "config.json").write_text(json.dumps(config))
    speculative = {"method": "eagle3", "model": str(poisoned), "num_speculative_tokens": 3}
    options = (
        *("--speculative-config", json.dumps(speculative)),
        *("--per-request-spec-decode-metrics", "summary"),
        *EAGER.split(),
    )
    words = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target))
    launch = Launch(words, options, tmp_path / "log")
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"prompt": "word " * n}) + "\n" for n in (5, 2000)))
    few = ("--max-tokens", "8", "--concurrency", "8")
    with serve(launch, lambda _: None) as url:
        done = accept("--url", url, "--prompts", prompts, *few, "-o", tmp_path / "report")
        partial = accept("--url", url, "--prompts", long, *few, "-o", tmp_path / "partial")
        fetch(f"{url}/health")
    assert done.returncode == 1
    assert "wiring fault" in done.stderr
    assert "exclusions" in done.stderr
    assert not (tmp_path / "report" / "target+draft-1.log").exists()
    assert partial.returncode == 1
    assert "error: 1 of 2 prompts failed; first prompt 1: " in partial.stderr
    assert "HTTP 400" in partial.stderr
    assert not (tmp_path / "partial" / "acceptance.json").exists()


@pytest.mark.parametrize(
    ("sign", "code", "until"),
    [
        (signal.SIGINT, 130, ""),
        (signal.SIGTERM, 143, "EngineCore pid"),
        (signal.SIGKILL, -9, "version"),
    ],
)
def test_no_server_survives(
    sign: signal.Signals, code: int, until: str, target: Path, tmp_path: Path
) -> None:
    port, out = free_port(), tmp_path / "report"
    command = [QUANTIZE, "accept", target, draft_path(), "--port", str(port), "-o", out]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    log = out / "target+draft-1.log"
    assert await_true(lambda: servers(port) and until in log.read_text(), 400)
    number = os.getpgid(servers(port)[0].pid)
    assert number != os.getpgid(process.pid)
    assert len(group(number)) >= 2
    process.send_signal(sign)
    assert process.wait(60) == code
    # Only a killed command leaves the end of its servers to the guard.
    assert await_true(lambda: not group(number), 5 if sign == signal.SIGKILL else 0)
    assert servers(port) == []
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_serve_answers_with_readmes_recipe_and_ends_with_ctrl_c(
    target: Path, demo_dir: Path, tmp_path: Path
) -> None:
    """MXFP4 with attention and `down_proj` in FP8; MXFP4 everywhere answers "France"."""
    out, log, port = tmp_path / "target", tmp_path / "log", free_port()
    recipe = ("--layer-scheme", "*.self_attn.*", "fp8_rowwise")
    recipe += ("--layer-scheme", "*.down_proj", "fp8_rowwise")
    run = [QUANTIZE, "run", target, "--scheme", "mxfp4", *recipe, "-o", out]
    subprocess.run(run, check=True, capture_output=True)
    serving = [QUANTIZE, "serve", out, "--draft", demo_dir / "pair" / "draft", "--"]
    with log.open("w") as stdout:  # as in a terminal: an interrupt reaches the whole group
        process = subprocess.Popen(
            [*serving, "--port", str(port), *EAGER.split()],
            stdout=stdout,
            stderr=stdout,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        assert await_true(lambda: is_healthy(url), 600), log.read_text()[-3000:]
        prompts = [Prompt(0, "", (Message("user", question),)) for question in QUESTIONS]
        for answer in ask_all(url, prompts, Sampling(48, 0, 0), 1, lambda _: None):
            assert "Paris" in answer.text
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        assert await_true(lambda: not group(process.pid), 10)
    finally:
        if group(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    kernels = {kernel.split()[0] for kernel in read_kernels(log)}
    assert {"PairQuantMxfp4LinearKernel", "PairQuantFp8LinearKernel"} <= kernels


def test_port_that_is_taken(target: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = accept(target, draft_path(), "--port", str(port), "-o", tmp_path / "report")
    assert done.returncode == 1
    assert f"error: port {port} on 127.0.0.1 cannot be used" in done.stderr
    assert "choose another --port" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_that_fails_to_load(tmp_path: Path) -> None:
    """A target without a tokenizer."""
    port = free_port()
    models = write_llama(tmp_path / "target"), write_draft(tmp_path / "draft")
    done = accept(*models, "--port", str(port), "-o", tmp_path / "report")
    assert done.returncode == 1
    assert "error: vLLM ended with exit code 1: ValueError: Couldn't instantiate" in done.stderr
    assert "target+draft-1.log" in done.stderr
    assert servers(port) == []


def test_too_little_free_memory(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    all_of_it = "--enforce-eager --gpu-memory-utilization 1.0"
    done = accept(target, draft_path(), "--vllm-args", all_of_it, "-o", tmp_path / "report")
    assert done.returncode == 1
    assert "hint: let vLLM take less of the memory: --vllm-args" in done.stderr
    assert "--gpu-memory-utilization 0.3" in done.stderr


def test_server_that_is_never_healthy(target: Path, tmp_path: Path) -> None:
    port, report = free_port(), tmp_path / "report"
    done = accept(target, draft_path(), "--port", str(port), "--start-timeout", "2", "-o", report)
    assert done.returncode == 1
    assert "error: vLLM was not healthy after 2 s" in done.stderr
    assert "--start-timeout" in done.stderr
    assert servers(port) == []


def test_interpreter_without_vllm(target: Path, tmp_path: Path) -> None:
    options = ("--vllm-python", "/nowhere/python", "-o", tmp_path / "report")
    done = accept(target, draft_path(), *options)
    assert done.returncode == 1
    assert "error: /nowhere/python is no Python that runs" in done.stderr


def test_url_where_nothing_listens(tmp_path: Path) -> None:
    done = accept("--url", f"http://127.0.0.1:{free_port()}", "-o", tmp_path / "report")
    assert done.returncode == 1
    assert "Connection refused" in done.stderr
    assert "is the server up?" in done.stderr


def test_folder_that_is_not_empty(target: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = accept(target, draft_path(), "-o", tmp_path)
    assert done.returncode == 1
    assert "is not empty (it holds mine.txt)" in done.stderr
