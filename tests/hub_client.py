"""The command line with the Hub's real client, in one process that serves many commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOP = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from quantize.cli import main
answers = sys.stdout
for line in sys.stdin:
    job = json.loads(line)
    for name, value in job["env"].items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["quantize", *job["args"]]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    answer = {"code": code, "out": out.getvalue(), "err": err.getvalue(),
              "heavy": sorted({"quark", "vllm"} & sys.modules.keys())}
    print(json.dumps(answer), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Done:
    """How one command ended; ``heavy`` names what it should not have imported."""

    code: int
    out: str
    err: str
    heavy: list[str]

    @property
    def json(self) -> dict[str, Any]:
        """The object on stdout."""
        return dict(json.loads(self.out))


@dataclass
class Client:
    """``run`` takes the words after ``quantize``."""

    process: subprocess.Popen[str]

    def run(self, *args: str | Path, token: str | None = "hf_write") -> Done:
        """One command, with this token in the environment."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"args": [str(arg) for arg in args], "env": {"HF_TOKEN": token}}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return Done(**json.loads(self.process.stdout.readline()))


def environment(url: str, home: Path, token: str | None = "hf_write") -> dict[str, str]:
    """Where a client finds this Hub, and its own cache and login."""
    kept = {name: text for name, text in os.environ.items() if "HF_" not in name}
    return (
        kept
        | {
            "HF_ENDPOINT": url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "160",
        }
        | ({"HF_TOKEN": token} if token else {})
    )


@contextmanager
def start_client(url: str, home: Path) -> Iterator[Client]:
    """A client of the Hub at ``url`` until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(url, home),
        cwd=home,
    )
    with process:
        try:
            yield Client(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
