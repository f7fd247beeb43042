"""A real vLLM server for tests: started, asked, measured, and always taken down again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

CONCURRENCY = 16
COUNTERS = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)_total"
    r"\{(.*)\} (\S+)$",
    re.MULTILINE,
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # stock: no third-party kernels
}


@dataclass(frozen=True)
class Acceptance:
    """What vLLM counted: drafts proposed, draft tokens accepted, and accepted per position."""

    drafts: int
    accepted: int
    per_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Pooled acceptance length: tokens per verification step."""
        return 1 + self.accepted / self.drafts


@dataclass(frozen=True)
class Server:
    """A running server; greedy decoding only."""

    url: str

    def chat(self, prompt: str, max_tokens: int) -> str:
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        request = Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=600) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def chat_all(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(lambda prompt: self.chat(prompt, max_tokens), prompts))

    def acceptance(self) -> Acceptance:
        """All that was counted since the server started."""
        with urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return read_acceptance(answer.read().decode())


def read_acceptance(metrics: str) -> Acceptance:
    """Sum the counters of a Prometheus page over engines; ``_created`` series are timestamps."""
    totals = {"drafts": 0, "accepted_tokens": 0}
    positions: dict[int, int] = {}
    for name, labels, value in COUNTERS.findall(metrics):
        position = re.search(r'position="(\d+)"', labels)
        if position:
            place = int(position[1])
            positions[place] = positions.get(place, 0) + int(float(value))
        else:
            totals[name] += int(float(value))
    per_position = tuple(positions[place] for place in sorted(positions))
    return Acceptance(totals["drafts"], totals["accepted_tokens"], per_position)


@contextmanager
def serve(target: Path, draft: Path | None, log: Path, tokens: int = 3) -> Iterator[Server]:
    """Serve a target, with a draft proposing ``tokens`` at a time; stderr and stdout go to log."""
    port = _free_port()
    # The `vllm` command needs a distribution of that name; the CPU build has another.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target), "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-num-seqs", str(CONCURRENCY), "--max-model-len", "2048", "--enforce-eager"]
    if draft is not None:
        speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": tokens}
        command += ["--speculative-config", json.dumps(speculative)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # its own process group: workers outlive a killed parent
        )
    try:
        _await_health(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        _stop_group(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
    raise RuntimeError(f"vLLM did not start (exit code {process.poll()}):\n{tail}")


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    # The group outlives its leader, so it is signalled even when the server is dead already.
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
