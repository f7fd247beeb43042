"""What a result was made with: versions, sources and the command, for reports and cards."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quantize import __version__

PACKAGES = ("amd-quark", "numba", "torch", "safetensors", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions of this tool, of Python and of what computes; read from package metadata."""
    found = {"pairquant": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def provenance(command: Iterable[str]) -> dict[str, Any]:
    """Who made it, when, and by which command line."""
    return {
        "tool": "pairquant",
        "version": __version__,
        "command": list(command),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
