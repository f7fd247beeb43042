"""What AMD Quark needs before it can be imported: a C++ extension, compiled on first use.

``import quark.torch`` compiles (or reloads) its ``hw_emulation`` extension whatever the scheme,
through ``torch.utils.cpp_extension``: ninja and a C++ compiler must be on PATH, the result is kept
under ``~/.cache/torch_extensions``. Where torch sees a GPU, Quark compiles its GPU sources too.
This module is light: it imports neither torch nor Quark (except in `import_quark`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

_EXTENSION = "quark_hw_emulation_stable_abi"


def _quark_kernel() -> Path:
    """Folder of the extension's sources in the installed ``quark`` package."""
    spec = importlib.util.find_spec("quark")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("amd-quark is not installed")
    return Path(spec.submodule_search_locations[0]) / "torch" / "kernel" / "hw_emulation"


def _build_folders() -> list[Path]:
    """Where torch may keep the compiled extension, as ``cpp_extension._get_build_directory``."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return [Path(chosen) / _EXTENSION]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return sorted(cache.glob(f"{python}_*/{_EXTENSION}"))


def needs_build() -> bool:
    """Whether importing Quark will compile its extension (10 s to minutes) instead of loading it.

    A guess for the progress display: another torch or another compiler flag also rebuilds.
    Raises ImportError when amd-quark is not installed.
    """
    kernel = _quark_kernel()
    if (kernel / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
        return False
    return not any(
        (folder / f"{_EXTENSION}.so").exists()
        and (folder / ".ninja_log").exists()
        and str(kernel) in (folder / "build.ninja").read_text()
        for folder in _build_folders()
        if (folder / "build.ninja").exists()
    )


def missing_compiler() -> str:
    """The C++ compiler command that torch would call and that is not on PATH; empty when found."""
    command = os.environ.get("CXX", "c++")
    return "" if shutil.which(command) else command


def build_lock() -> Path | None:
    """The lock of a build in progress or killed; importing Quark waits for it without limit."""
    locks = (folder / "lock" for folder in _build_folders())
    return next((lock for lock in locks if lock.exists()), None)


def import_quark() -> None:
    """Import ``quark.torch``, compiling its extension when needed (see `needs_build`).

    Quark logs to stderr, nothing to stdout; its INFO lines are off unless QUARK_LOG_LEVEL asks
    for them. Raises RuntimeError when the extension cannot be compiled or loaded.
    """
    # Two versions of ninja rebuild each other's work on every import (their log formats differ).
    # amd-quark installs one beside the interpreter: let that one always win.
    scripts = sysconfig.get_path("scripts")
    path = os.environ.get("PATH", "").split(os.pathsep)
    if path[0] != scripts:
        os.environ["PATH"] = os.pathsep.join([scripts, *path])
    os.environ.setdefault("QUARK_LOG_LEVEL", "warning")
    import quark.torch  # noqa: F401
