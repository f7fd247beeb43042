"""What several test files share: the command as a user runs it, and one run of the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUANTIZE = Path(sys.executable).with_name("quantize")


def run_quantize(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed console script, without network for the Hub."""
    return subprocess.run(
        [QUANTIZE, *arguments],
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def demo_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The demo's folder, and the first ``quantize demo --json`` that made it."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_quantize("demo", "-o", "demo", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "demo", done


@pytest.fixture(scope="session")
def demo_dir(demo_run: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """The demo's folder: ``smollm2-135m-instruct`` (BF16) and ``pair``. Read it, never write."""
    return demo_run[0]
