"""`run` and `pair`: from jobs that `quantize.prepare` made to complete, verified folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantize.card import NOT_SERVED, read_source_card, refresh_card
from quantize.checkpoint import CONFIG, Checkpoint, fingerprint, open_checkpoint
from quantize.compute import Compute
from quantize.engine import Stage, check_disk, write_tensors
from quantize.errors import BadCheckpoint, BadOutput
from quantize.files import copy_file
from quantize.layout import INDEX_NAME, Shard, index_json, lay_out
from quantize.manifest import MANIFEST, make_manifest
from quantize.metadata import edit_config
from quantize.pair import check_pair
from quantize.plan import Plan
from quantize.prepare import Job
from quantize.prove import Findings
from quantize.provenance import provenance
from quantize.report import Check, Report
from quantize.serving.serve import pair_script
from quantize.stream import open_window, write_and_prove
from quantize.verify import verify_checkpoint
from quantize.workdir import (
    STATE,
    check_out,
    finish,
    open_journal,
    open_partial,
    write_json,
    write_text,
)

REPORT = "quantization_report.json"
PAIR_REPORT = "report.json"
HALVES = ("target", "draft")
ONE_THREAD = Compute()


@dataclass(frozen=True)
class Settings:
    """How to work; nothing here changes a tensor, and only the shard size changes files."""

    command: tuple[str, ...]
    stage: Stage
    max_shard_size: int
    compute: Compute = ONE_THREAD
    verify: bool = True
    restart: bool = False


def check_place(out: Path, jobs: Iterable[Job]) -> None:
    """The output folder may be used: told before anything slow. Raises `BadOutput`."""
    check_out(out, [path for job in jobs for path in _folders(job)])


def run_one(job: Job, out: Path, settings: Settings) -> Report:
    """Write one checkpoint to ``out``. Raises `BadOutput` when a check fails; OUT never appears."""
    shards = _lay_out(job.plan, settings)
    check_out(out, _folders(job))
    with open_partial(out, _identity(job, settings), restart=settings.restart) as partial:
        check_disk(partial, shards)
        report = _complete(job, shards, partial, "checkpoint", settings)
        _refuse_failed(report, partial)
        finish(partial, out)
    return report


def run_pair(target: Job, draft: Job, out: Path, settings: Settings) -> dict[str, Report]:
    """Write ``out/target``, ``out/draft``, ``out/report.json`` and ``out/serve.sh``.

    Returns the reports of both halves and of the ``pair``, which is checked as it was written.
    Raises `BadOutput` when a check fails; OUT never appears.
    """
    jobs = dict(zip(HALVES, (target, replace(draft, checks=())), strict=True))
    layouts = {name: _lay_out(job.plan, settings) for name, job in jobs.items()}
    check_out(out, [*_folders(target), *_folders(draft)])
    identity = {name: _identity(job, settings) for name, job in jobs.items()}
    with open_partial(out, identity, restart=settings.restart) as partial:
        check_disk(partial, [shard for shards in layouts.values() for shard in shards])
        reports = {}
        for name, job in jobs.items():
            (partial / name).mkdir(exist_ok=True)
            reports[name] = _complete(job, layouts[name], partial / name, name, settings)
        reports["pair"] = _check_written(partial, settings)
        write_json(partial / PAIR_REPORT, _pair_report(reports["pair"], settings))
        link_halves(partial)
        halves = (open_checkpoint(str(partial / name)) for name in HALVES)
        write_text(partial / "serve.sh", pair_script(*halves))
        (partial / "serve.sh").chmod(0o755)
        for report in reports.values():
            _refuse_failed(report, partial)
        finish(partial, out)
    return reports


def _check_written(partial: Path, settings: Settings) -> Report:
    if not settings.verify:
        return Report((Check("pair", "not_measured", "--no-verify", "target and draft fit"),))
    target, draft = (open_checkpoint(str(partial / name)) for name in HALVES)
    return Report(check_pair(target, draft))


def _pair_report(report: Report, settings: Settings) -> dict[str, Any]:
    return {
        "provenance": provenance(settings.command),
        "checks": report.to_json()["checks"],
        "served": NOT_SERVED,
    }


def link_halves(pair: Path, pictures: Mapping[str, str] | None = None) -> None:
    """Each half's report names the pair's report and its hash, and repeats what was served.

    ``pictures`` of it, captions by file name, are in each half.
    """
    text = (pair / PAIR_REPORT).read_bytes()
    digest, served = sha256(text).hexdigest(), json.loads(text)["served"]
    for name in HALVES:
        path = pair / name / REPORT
        data = json.loads(path.read_text(encoding="utf-8"))
        link = {"report": f"../{PAIR_REPORT}", "sha256": digest, "served": served}
        link |= {"pictures": pictures} if pictures else {}
        write_json(path, data | {"pair": link})
        refresh_card(pair / name, data | {"pair": link})


def _complete(
    job: Job, shards: tuple[Shard, ...], folder: Path, name: str, settings: Settings
) -> Report:
    """Write all files of one checkpoint and prove them."""
    state = (folder if name == "checkpoint" else folder.parent) / STATE
    before = fingerprint(job.source)
    _write_metadata(job, shards, folder)
    found = _write(job, shards, folder, name, state, settings)
    report = _prove(job, folder, name, found, settings)
    report = replace(report, checks=(*report.checks, *job.checks))
    _check_unchanged(job.source, before)
    data = _report(job, report, settings) | {MANIFEST: _manifest(job, shards, folder, settings)}
    write_json(folder / REPORT, data)
    refresh_card(folder, data)
    return report


def _write(
    job: Job, shards: tuple[Shard, ...], folder: Path, name: str, state: Path, settings: Settings
) -> Findings | None:
    """Write every tensor; of a source on the Hub also the proof, which cannot be made later."""
    size = sum(entry.source.nbytes for entry in job.plan.entries)
    proofs = state / f"{name}.proofs" if settings.verify else None
    with (
        open_journal(state.parent, name) as journal,
        settings.stage(f"quantize {name}", size) as advance,
    ):
        if job.source.path is not None:
            write_tensors(job.source, job.plan, shards, folder, journal, settings.compute, advance)
            return None
        with open_window(job.source, state / f"{name}.source") as source:
            return write_and_prove(
                source, job.plan, shards, folder, journal, proofs, settings.compute, advance
            )


def _write_metadata(job: Job, shards: tuple[Shard, ...], folder: Path) -> None:
    source = job.source
    write_json(folder / CONFIG, edit_config(source.config, job.plan.quantization_config))
    if len(shards) > 1:
        write_json(folder / INDEX_NAME, index_json(shards, job.plan.stored.values()))
    sizes = source.files.sizes()
    for name in source.side_files:
        copy_file(source.files, name, sizes[name], folder / name)


def _manifest(
    job: Job, shards: tuple[Shard, ...], folder: Path, settings: Settings
) -> dict[str, dict[str, Any]]:
    index = (INDEX_NAME,) if len(shards) > 1 else ()
    names = (CONFIG, *index, *(shard.name for shard in shards), *job.source.side_files)
    with settings.stage("hash the files", sum(shard.size for shard in shards)) as advance:
        return make_manifest(folder, names, advance)


def _prove(job: Job, folder: Path, name: str, found: Findings | None, settings: Settings) -> Report:
    if not settings.verify:
        return Report((Check("verify", "not_measured", "--no-verify", "every check passes"),))
    size = sum(entry.source.nbytes for entry in job.plan.entries)
    with settings.stage(f"verify {name}", size) as advance:
        out = open_checkpoint(str(folder))
        return verify_checkpoint(out, job.plan, job.source, advance, found)


def _check_unchanged(source: Checkpoint, before: Mapping[str, Any]) -> None:
    after = fingerprint(source)
    changed = sorted(name for name in before if before[name] != after.get(name))
    if changed:
        raise BadCheckpoint(
            f"{source.files.origin}: {', '.join(changed)} changed while it was read",
            "let the source rest and repeat the command with --restart",
        )


def _report(job: Job, report: Report, settings: Settings) -> dict[str, Any]:
    return {
        "provenance": {**provenance(settings.command), "engine": settings.compute.name},
        "source": {
            "origin": job.source.files.origin,
            "files": fingerprint(job.source),
            "card": read_source_card(job.source.files),
        },
        "target": job.target.files.origin if job.target else None,
        "options": asdict(job.options),
        "plan": job.plan.to_json(),
        **report.to_json(),
    }


def _refuse_failed(report: Report, partial: Path) -> None:
    if report.failed:
        worst = report.failed[0]
        raise BadOutput(
            f"{len(report.failed)} checks failed, first {worst.name}: {worst.measured}, expected "
            f"{worst.required} ({worst.detail})",
            f"{partial} is left for inspection; --restart writes it anew",
        )


def _lay_out(plan: Plan, settings: Settings) -> tuple[Shard, ...]:
    return lay_out(
        (entry.stored for entry in plan.entries if entry.stored), settings.max_shard_size
    )


def _identity(job: Job, settings: Settings) -> dict[str, Any]:
    """What makes two runs the same: sources, every option that changes a byte, and the engine."""
    return {
        "source": fingerprint(job.source),
        "target": fingerprint(job.target) if job.target else None,
        "options": asdict(job.options),
        "dropped tensors": [e.source.name for e in job.plan.entries if not e.stored],
        "max shard size": settings.max_shard_size,
        "engine": settings.compute.name,
    }


def _folders(job: Job) -> list[Path]:
    return [found.path for found in (job.source, job.target) if found and found.path]
