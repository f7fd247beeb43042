"""Runs of the line inside the test's own process, and the bytes that they leave."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantize.checkpoint import open_checkpoint
from quantize.engine import Advance
from quantize.job import Settings, run_one, run_pair
from quantize.plan import Options
from quantize.prepare import Job, PairOptions, prepare_draft, prepare_target
from quantize.report import Report
from quantize.source import Source, read_through

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+:\d]*")


@contextmanager
def silent(_text: str, _size: int) -> Iterator[Advance]:
    """A stage that shows nothing."""
    yield lambda _done: None


def settings(**changes: Any) -> Settings:
    """Settings for a quiet run on the CPU."""
    return replace(Settings(("quantize", "test"), silent, 5 * 10**9), **changes)


def open_source(path: Path) -> Source:
    """A source as what quantizes it sees it."""
    return read_through(open_checkpoint(str(path)))


def target_job(source: Path, scheme: str, **options: Any) -> Job:
    """The job of a target checkpoint."""
    return prepare_target(open_checkpoint(str(source)), Options(scheme, **options))


def draft_job(source: Path, target: Path, scheme: str, **options: Any) -> Job:
    """The job of a draft checkpoint."""
    draft, opened = (open_checkpoint(str(path)) for path in (source, target))
    return prepare_draft(draft, opened, Options(scheme, **options), PairOptions())


def run(source: Path, out: Path, scheme: str, **changes: Any) -> Report:
    """Quantize one target."""
    return run_one(target_job(source, scheme), out, settings(**changes))


def pair(target: Path, draft: Path, out: Path, schemes: tuple[str, str], **changes: Any) -> None:
    """Quantize a target and its draft."""
    jobs = target_job(target, schemes[0]), draft_job(draft, target, schemes[1])
    run_pair(*jobs, out, settings(**changes))


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; the times in reports and cards, and what hashes them, masked."""
    return {
        str(path.relative_to(folder)): _mask(path) for path in folder.rglob("*") if path.is_file()
    }


def _mask(path: Path) -> bytes:
    data = path.read_bytes()
    if path.name in {"report.json", "quantization_report.json", "README.md"}:
        text = TIME.sub("TIME", data.decode())
        if path.name == "quantization_report.json" and (report := json.loads(text)).get("pair"):
            text = text.replace(report["pair"]["sha256"], "HASH")
        return text.encode()
    return data


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header as JSON, and where the data begins."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), start
