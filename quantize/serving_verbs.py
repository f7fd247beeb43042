"""The verbs that serve: from parsed options to a session and its result."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quantize.checkpoint import bring_local, open_checkpoint
from quantize.errors import BadOutput, ToolError
from quantize.job import HALVES, PAIR_REPORT, link_halves
from quantize.provenance import provenance
from quantize.report import Report, check_table, figure_table
from quantize.serving.acceptance import CONVENTIONS
from quantize.serving.client import Sampling
from quantize.serving.intervals import Interval
from quantize.serving.outcome import ACCEPTANCE_REPORT, requests_json, to_json
from quantize.serving.picture import served_pictures, write_pngs
from quantize.serving.prompts import default_prompts, read_prompts
from quantize.serving.session import Session, Wishes, prepare, run_session
from quantize.workdir import write_json

if TYPE_CHECKING:
    from quantize.view import View

BASELINES = ("baseline_target", "baseline_draft")
MODELS = ("target", "draft", *BASELINES)


def accept_verb(view: View, given: Mapping[str, Any]) -> None:
    """``quantize accept``: exit 0 when every check passed."""
    wishes = _wishes(view, given)
    if given["record"] and wishes.url:
        raise ToolError("--record needs to know what was served", "leave out --url")
    pair = _pair_of(wishes) if given["record"] else None
    served = accept(view, wishes)
    if pair:
        record_served(pair, served, wishes.folder)
    view.result(
        served["ok"],
        lambda: {
            "source": {"target": wishes.target, "draft": wishes.draft},
            "output": str(wishes.folder),
            "checks": served["checks"],
            "served": served,
        },
    )


def accept_pair(
    view: View, given: Mapping[str, Any], out: Path, sources: tuple[str, str]
) -> dict[str, Any]:
    """What ``quantize pair --accept`` adds: OUT against its sources, recorded in OUT's report.

    OUT stays complete whatever comes of it; a ToolError says how to measure it again.
    """
    halves = [str(out / half) for half in HALVES]
    models = dict(zip(MODELS, (*halves, *sources), strict=True))
    try:
        wishes = _wishes(view, {**given, **models, "url": None, "folder": out / "served"})
        served = accept(view, wishes)
    except ToolError as error:
        again = shlex.join(["quantize", "accept", *halves, "--record"])
        baselines = shlex.join(["--baseline-target", sources[0], "--baseline-draft", sources[1]])
        raise ToolError(
            f"{out} is written and proven, its acceptance is not: {error.message}",
            f"{error.hint or 'see above'}; then: {again} {baselines}",
        ) from error
    record_served(out, served, wishes.folder)
    return served


def accept(view: View, wishes: Wishes) -> dict[str, Any]:
    """Measure, write the report's folder, show it; the session as JSON values."""
    view.show(*(f"warning: {warning}" for warning in wishes.prompts.warnings))
    prepare(wishes)
    with _stoppable():
        digests = {} if wishes.url else _digests(view, wishes)
        session = run_session(wishes, view.waiting)
    served = {"provenance": provenance(view.argv), **to_json(wishes, session, digests)}
    write_json(wishes.folder / ACCEPTANCE_REPORT, served | {"per_request": requests_json(session)})
    _show(view, wishes, session, served)
    return served


def record_served(pair: Path, served: Mapping[str, Any], folder: Path) -> None:
    """Put a session into the pair's report; link both halves and their cards to it, with plots."""
    path = pair / PAIR_REPORT
    digest = sha256((folder / ACCEPTANCE_REPORT).read_bytes()).hexdigest()
    details = {"report": str(folder), "sha256": digest}
    report = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, report | {"served": dict(served) | {"details": details}})
    pictures = served_pictures(served)
    for half in HALVES:
        write_pngs(pair / half, pictures)
    link_halves(pair, {f"{each.name}.png": each.caption for each in pictures})


def _wishes(view: View, given: Mapping[str, Any]) -> Wishes:
    prompts = read_prompts(given["prompts"] or default_prompts())
    models = {name: given[name] for name in MODELS}
    if given["url"]:
        _refuse_with_url(given)
    elif not (models["target"] and models["draft"]):
        raise ToolError("TARGET and DRAFT are missing", "quantize accept TARGET DRAFT")
    else:
        models = {name: _local(view, model) if model else None for name, model in models.items()}
    if given["lossless"] and given["temperature"]:
        raise ToolError("--lossless compares greedy texts", "leave out --temperature")
    return Wishes(
        target=models["target"] or "",
        draft=models["draft"] or "",
        prompts=prompts,
        sampling=Sampling(given["max_tokens"], given["temperature"], given["seed"]),
        folder=given["folder"],
        num_speculative_tokens=given["num_speculative_tokens"],
        concurrency=given["concurrency"],
        repeats=given["repeats"] or (2 if any(map(models.get, BASELINES)) else 1),
        python=given["vllm_python"] or sys.executable,
        options=_split(given["vllm_args"]),
        port=given["port"],
        timeout=given["start_timeout"],
        baseline_target=models["baseline_target"],
        baseline_draft=models["baseline_draft"],
        min_retention=given["min_retention"],
        lossless=given["lossless"],
        url=given["url"] and given["url"].rstrip("/"),
    )


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ToolError(f"--vllm-args {text!r}: {error}", "close every quote") from error


def _refuse_with_url(given: Mapping[str, Any]) -> None:
    """One running server is one combination, and its own settings are what they are."""
    for name in ("baseline_target", "baseline_draft", "lossless", "port", "vllm_args"):
        if given[name]:
            option = name.replace("_", "-")
            raise ToolError(
                f"--{option} needs servers of our own, and --url names one that runs",
                f"leave out --url, or --{option}",
            )


def _local(view: View, model: str) -> str:
    """The folder of a model; one on the Hub is downloaded."""
    checkpoint = open_checkpoint(model)
    if checkpoint.path is None:
        with view.stage(f"download {model}", 0):
            checkpoint = bring_local(checkpoint)
    return str(checkpoint.path)


def _digests(view: View, wishes: Wishes) -> dict[str, str]:
    """The SHA-256 of every checkpoint that is served, by its folder."""
    folders = {Path(place) for cell in wishes.cells for place in (cell.target, cell.draft)}
    with view.stage("hash the checkpoints", 0):
        return {str(folder): content_digest(folder) for folder in sorted(folders)}


def content_digest(folder: Path) -> str:
    """SHA-256 over the lines "file, SHA-256 of its bytes" of ``config.json`` and all weights."""
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        lines = [f"{p.name} {d}\n" for p, d in zip(paths, pool.map(digest, paths), strict=True)]
    return sha256("".join(lines).encode()).hexdigest()


def _pair_of(wishes: Wishes) -> Path:
    target, draft = Path(wishes.target).resolve(), Path(wishes.draft).resolve()
    whole = target.parent
    if (target.name, draft) != (HALVES[0], whole / HALVES[1]) or not (whole / PAIR_REPORT).exists():
        raise BadOutput(
            f"--record: {wishes.target} and {wishes.draft} are not the halves of one pair",
            "give OUT/target and OUT/draft of what quantize pair wrote",
        )
    return whole


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that servers are stopped; then say so."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in signals]
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stopped:
        print("interrupted; no server is left running", file=sys.stderr)
        code = stopped.code if isinstance(stopped, SystemExit) else 128 + signal.SIGINT
        raise SystemExit(code) from None
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _show(view: View, wishes: Wishes, session: Session, served: Mapping[str, Any]) -> None:
    cells = served["cells"]
    view.show(_cell_table(cells), _domain_table(cells))
    for row in session.retentions:
        view.show(f"retention of {row.cell} against {row.baseline}: {row.ratio}")
    if session.noise_floor is not None:
        view.show(f"noise floor: repeats of one cell differ by at most {session.noise_floor:.2%}")
    for name, kernels in session.kernels.items():
        view.show(f"kernels of {name}: {', '.join(kernels) or 'none named in the log'}")
    view.show(check_table("checks", Report(session.checks)))
    view.show(*(f"note: {line}" for line in CONVENTIONS))
    view.show(f"report and logs: {wishes.folder}")


def _cell_table(cells: Mapping[str, Any]) -> Any:
    rows = [
        (
            name,
            str(Interval(**cell["length"])),
            str(Interval(**cell["mean_of_requests"])),
            "  ".join(f"{rate['value']:.3f}" for rate in cell["rates"]),
            str(cell["requests"]),
            f"{sum(run['tokens_per_second'] for run in cell['runs']) / len(cell['runs']):.0f}",
        )
        for name, cell in cells.items()
    ]
    columns = ("cell", "AL, pooled", "AL, mean of requests", "rate at 1, 2, …", "requests", "tok/s")
    return figure_table("acceptance", columns, rows)


def _domain_table(cells: Mapping[str, Any]) -> Any:
    domains = dict.fromkeys(domain for cell in cells.values() for domain in cell["domains"])
    rows = [
        (domain, *(_domain_length(cell, domain) for cell in cells.values())) for domain in domains
    ]
    return figure_table("AL by domain, pooled", ("domain", *cells), rows)


def _domain_length(cell: Mapping[str, Any], domain: str) -> str:
    found = cell["domains"].get(domain)
    return str(Interval(**found["length"])) if found else "no data"
