"""A real vLLM server: started, awaited, and stopped whatever happens."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quantize.errors import ToolError
from quantize.serving.client import RequestsFailed, fetch

HOST = "127.0.0.1"
TAIL = 25
GRACE = 10.0
"""Seconds for a server to end by itself after SIGTERM, before SIGKILL."""
CAUSE = re.compile(
    r"^(?:\([^)]*pid=\d+\) )?(?:ERROR [-\d]+ [:\d]+ \[[^]]+\] )?"
    r"((?:\w+\.)*\w+(?:Error|Exception): .+)$",
    re.MULTILINE,
)
"""The last line of a traceback, behind what vLLM puts before the lines of its processes."""
SHORT_OF_MEMORY = "less than desired CPU memory utilization"
"""What vLLM's CPU worker says when too little memory is free for its share (``cpu_worker.py``)."""
GENERIC = ("Engine core initialization failed", "WorkerProc initialization failed")
KERNEL = (
    re.compile(r"Selected (\w+) for (\w+)"),
    re.compile(r"Using (\w+) for ((?:MX|NV)?FP\w* GEMM|mixed-precision linear)"),
)

Say = Callable[[str], None]
"""Tells the user how far something is, in a few words."""


@dataclass(frozen=True)
class Launch:
    """One server to start: the words up to the target, its options, its settings by variable.

    The user's own environment wins over ``variables``. ``timeout`` in seconds.
    """

    words: tuple[str, ...]
    options: tuple[str, ...]
    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    timeout: float = 600


@contextmanager
def serve(launch: Launch, say: Say) -> Iterator[str]:
    """Serve, yield the URL once the server is healthy, and leave no process behind.

    Raises ToolError when the port is taken, when the server dies (then and later, with the tail
    of its log), when it is not healthy in time, and when a process of it outlives SIGKILL.
    """
    port = launch.port or _free_port()
    _refuse_taken(port)
    guard = [sys.executable, "-I", str(Path(__file__).with_name("guard.py"))]
    place = ["--host", HOST, "--port", str(port)]
    with launch.log.open("wb") as log:
        process = subprocess.Popen(
            [*guard, *launch.words, *place, *launch.options],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"VLLM_NO_USAGE_STATS": "1", **launch.variables} | os.environ,
            start_new_session=True,  # a process group of its own, which Ctrl-C does not reach
        )
    try:
        _await_health(process, launch, port, say)
        yield f"http://{HOST}:{port}"
    except RequestsFailed:
        if (code := _wait(process)) is not None:
            raise _died(launch, code) from None
        raise
    finally:
        _stop(process)


def read_kernels(log: Path) -> tuple[str, ...]:
    """Which kernel vLLM says it selected for which scheme, as its log puts it."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = [f"{kernel} for {scheme}" for line in KERNEL for kernel, scheme in line.findall(text)]
    return tuple(dict.fromkeys(found))


def read_device(log: Path) -> str:
    """The device of vLLM's engine, from its own line in the log; ROCm's is called ``cuda``."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"device_config=(\w+)", text)
    return found[1] if found else "not stated in the log"


def read_tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ToolError(
                f"port {port} on {HOST} cannot be used ({error.strerror})",
                "choose another --port, or leave it out: a free one is found",
            ) from error


def _await_health(process: subprocess.Popen[bytes], launch: Launch, port: int, say: Say) -> None:
    start = time.monotonic()
    while (waited := time.monotonic() - start) < launch.timeout:
        say(f"{waited:.0f} s, log in {launch.log}")
        if (code := process.poll()) is not None:
            raise _died(launch, code)
        try:
            fetch(f"http://{HOST}:{port}/health", timeout=5)
            return
        except ToolError:
            time.sleep(0.5)
    raise ToolError(
        f"vLLM was not healthy after {launch.timeout:.0f} s (--start-timeout); its log "
        f"{launch.log} ends with:\n{read_tail(launch.log)}",
        "give it longer with --start-timeout, or read its log",
    )


def _died(launch: Launch, code: int) -> ToolError:
    text = launch.log.read_text(encoding="utf-8", errors="replace")
    causes = [cause for cause in CAUSE.findall(text) if not any(word in cause for word in GENERIC)]
    cause = f": {causes[0]}" if causes else ""
    if code == 128 + signal.SIGKILL:
        cause = ": it was killed, as the kernel does when memory runs out"
    hint = f"read {launch.log}; does vLLM serve the target without the draft?"
    if SHORT_OF_MEMORY in text:
        hint = 'let vLLM take less of the memory: --vllm-args "--gpu-memory-utilization 0.3"'
    return ToolError(
        f"vLLM ended with exit code {code}{cause}\nits log {launch.log} ends with:\n"
        f"{read_tail(launch.log)}",
        hint,
    )


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a server that ends within some seconds, as it does when its engine died."""
    try:
        return process.wait(10)
    except subprocess.TimeoutExpired:
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End every process of the server's group, whether or not its leader is still there."""
    for sign, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience
        while _members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not _members(process.pid):
            break
    if left := _members(process.pid):
        raise ToolError(
            f"processes {', '.join(map(str, left))} of vLLM outlive SIGKILL",
            "they hang in the driver: look at dmesg; a restart of the machine ends them",
        )
    process.wait()


def _members(group: int) -> list[int]:
    """The living processes of a group (a zombie is dead), from Linux's ``/proc/PID/stat``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it ended while we looked
        if int(number) == group and state not in "ZX":
            found.append(int(path.parent.name))
    return found
