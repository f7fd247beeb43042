"""The files of an output with their sizes and SHA-256: what was proven is what is published.

The card and the report itself are not listed: both change as results arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantize.errors import BadOutput, ToolError
from quantize.files import LocalFiles
from quantize.report import Check

MANIFEST = "files"
"""The key of a report under which its folder's files are listed."""

READ_BYTES = 8 << 20


def make_manifest(
    folder: Path, names: Iterable[str], advance: Callable[[int], None]
) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of each file, as JSON values; ``advance`` counts bytes read."""
    files, names = LocalFiles(folder), tuple(names)
    with ThreadPoolExecutor() as pool:
        marks = pool.map(lambda name: _mark(files, name, advance), names)
        return dict(zip(names, marks, strict=True))


def check_files(folder: Path, listed: Any, advance: Callable[[int], None]) -> Check:
    """Every listed file is there, with its size and bytes; what else lies there is no matter."""
    required = "every file with the size and SHA-256 that it was written with"
    if not isinstance(listed, dict):
        return Check(MANIFEST, "not_measured", "the report lists no files", required)
    problems = [problem for name in listed if (problem := _problem(folder, name, listed[name]))]
    if not problems:
        found = make_manifest(folder, listed, advance)
        problems = [f"{name}: other bytes" for name in listed if found[name] != listed[name]]
    if problems:
        return Check(MANIFEST, "fail", f"{len(problems)} differ", required, "; ".join(problems[:3]))
    return Check(MANIFEST, "pass", f"{len(listed)} files", required)


def require_files(folder: Path, listed: Any) -> None:
    """Every listed file is there; opening the rest would speak of something else. BadOutput."""
    there = LocalFiles(folder).sizes()
    if missing := [name for name in listed or () if name not in there]:
        raise BadOutput(
            f"{folder}: {', '.join(missing[:3])} missing, listed by the folder's own report",
            "the output is not complete: write it again",
        )


def _problem(folder: Path, name: str, mark: Mapping[str, Any]) -> str:
    """Why a listed file cannot be the one that was written; empty when only its bytes can tell."""
    size = LocalFiles(folder).sizes().get(name)
    if size is None:  # also a name such as ../NAME: the folder has no file of that name
        return f"{name}: missing"
    if size != mark.get("size"):
        return f"{name}: {size} bytes, expected {mark.get('size')}"
    try:
        LocalFiles(folder).open(name).close()
    except ToolError as error:
        return error.message
    return ""


def _mark(files: LocalFiles, name: str, advance: Callable[[int], None]) -> dict[str, Any]:
    digest, size = sha256(), 0
    with files.open(name) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            size += len(data)
            advance(len(data))
    return {"size": size, "sha256": digest.hexdigest()}
