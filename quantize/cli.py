"""The command line: parse, call one stage, print; the one place that turns errors into text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from quantize import __version__
from quantize.errors import ToolError
from quantize.options import (
    CONSENT,
    DISPLAY,
    MEASURE,
    OUTPUT,
    PAIR,
    SERVE,
    WORK,
    Verb,
    apply,
    model_argument,
    model_options,
    spellings,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantize")
def cli() -> None:
    """Quantize a target and its EAGLE-3 draft with AMD Quark, for vLLM, and prove the result."""


@cli.command(cls=Verb)
@model_argument("model", "--model-dir")
@click.option("--draft", help="Plan this draft too, and check the pair.")
@click.option("--target", help="The target of MODEL, when MODEL is a draft.")
@apply(model_options("target", "mxfp4"), model_options("draft", "fp8_rowwise"), CONSENT, DISPLAY)
def plan(**given: Any) -> None:
    """Show the fate of every tensor, from headers alone.

    Example: quantize plan org/model --draft org/draft --scheme mxfp4
    """
    from quantize.verbs import plan_verb

    plan_verb(View("plan", given), given)


@cli.command(cls=Verb)
@model_argument("model", "--model-dir")
@OUTPUT
@click.option("--target", help="The draft's target (source or quantized): needed for a draft.")
@apply(model_options("target", None), CONSENT, PAIR, WORK, DISPLAY)
def run(**given: Any) -> None:
    """Quantize one checkpoint.

    Example: quantize run ./model -o ./model-mxfp4 --scheme mxfp4
    """
    from quantize.verbs import run_verb

    run_verb(View("run", given), given)


@cli.command(cls=Verb)
@model_argument("target", "--model-dir")
@model_argument("draft", "--draft-model-dir")
@OUTPUT
@apply(model_options("target", "mxfp4"), model_options("draft", "fp8_rowwise"))
@click.option("--accept", is_flag=True, help="Then serve OUT and its sources, and compare.")
@apply(CONSENT, PAIR, WORK, MEASURE, DISPLAY)
def pair(**given: Any) -> None:
    """Quantize a target and its draft into OUT/target and OUT/draft.

    Example: quantize pair ./model ./draft -o ./pair --scheme mxfp4 --draft-scheme fp8_rowwise
    """
    from quantize.verbs import pair_verb

    pair_verb(View("pair", given), given)


@cli.command(cls=Verb)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--source", help="What OUT (or OUT/target) was made from: needed for the full proof.")
@click.option("--draft", type=click.Path(path_type=Path), help="The draft's output folder.")
@click.option("--draft-source", help="What the draft was made from.")
@click.option("--allow-unmeasured", is_flag=True, help="Exit 0 although some checks lack a source.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write the checks as JUnit XML.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as one HTML file.")
@DISPLAY
def verify(**given: Any) -> None:
    """Prove an output: every byte, every name, and the pair where both halves are given.

    Example: quantize verify ./pair --source ./model --draft-source ./draft
    """
    from quantize.verbs import verify_verb

    verify_verb(View("verify", given), given)


@cli.command(cls=Verb)
@click.argument("target", required=False)
@click.argument("draft", required=False)
@click.option("--baseline-target", help="Compare with this target.")
@click.option("--baseline-draft", help="Compare with this draft.")
@click.option("--url", help="Measure a server that runs; it is not started, nor stopped.")
@click.option("--record", is_flag=True, help="Record it in the pair TARGET and DRAFT belong to.")
@click.option(
    *spellings("--output-dir"),
    "-o",
    "folder",
    type=click.Path(path_type=Path),
    default="acceptance",
    show_default=True,
    help="New folder for the report and the logs.",
)
@apply(MEASURE, DISPLAY)
def accept(**given: Any) -> None:
    """Measure acceptance length in a real vLLM.

    Example: quantize accept ./pair/target ./pair/draft --baseline-draft ./draft
    """
    from quantize.serving_verbs import accept_verb

    accept_verb(View("accept", given), given)


@cli.command(cls=Verb)
@click.argument("target")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_OPTIONS...]")
@click.option("--draft", help="The EAGLE-3 draft of TARGET.")
@click.option("--print", "print_only", is_flag=True, help="Print the script; start nothing.")
@SERVE
@DISPLAY
def serve(**given: Any) -> None:
    """Serve a target and its draft with vLLM, and the settings of this machine's platform.

    Example: quantize serve ./pair/target --draft ./pair/draft --print --platform rocm
    """
    from quantize.serve_verb import serve_verb

    serve_verb(View("serve", given), given)


@cli.command(cls=Verb)
@click.option(
    "-o", "--output-dir", "out", type=click.Path(path_type=Path), default="demo", show_default=True
)
@DISPLAY
def demo(**given: Any) -> None:
    """Run the whole line on SmolLM2-135M-Instruct and a trained EAGLE-3 draft.

    Example: quantize demo -o demo
    """
    from quantize.verbs import demo_verb

    demo_verb(View("demo", given), given)


class View:
    """What the user sees of one command: progress and tables on stderr, results on stdout."""

    def __init__(self, command: str, given: dict[str, Any]) -> None:
        self.command = command
        self.as_json: bool = given.pop("as_json")
        self.quiet: bool = given.pop("quiet")

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line as the user typed it."""
        return ("quantize", *sys.argv[1:])

    @contextmanager
    def stage(self, text: str, size: int) -> Iterator[Any]:
        """A progress bar over ``size`` bytes, or a spinner when the size is 0."""
        if self.quiet:
            yield lambda _: None
            return
        from rich import progress

        with progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            *((progress.DownloadColumn(), progress.TransferSpeedColumn()) if size else ()),
            *((progress.TimeRemainingColumn(),) if size else ()),
            console=self.console,
        ) as bar:
            task = bar.add_task(text, total=size or None)
            yield lambda done: bar.advance(task, done)
            if not size:
                bar.update(task, total=1, completed=1)

    @contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """One line about something of unknown length; without a terminal one every 15 seconds."""
        console = self.console
        if self.quiet:
            yield lambda _: None
        elif console.is_terminal:
            from rich.text import Text  # shown as it is: a path may look like markup

            with console.status(Text(text)) as status:
                yield lambda news: status.update(Text(f"{text}: {news}"))
        else:
            yield _throttle(lambda news: print(f"{text}: {news}", file=sys.stderr, flush=True))

    @property
    def console(self) -> Any:
        """Rich's console on stderr; colour only on a terminal and without NO_COLOR."""
        from rich.console import Console

        return Console(stderr=True, width=None if sys.stderr.isatty() else 160)

    def show(self, *tables: Any) -> None:
        """Print tables and lines for people, unless --quiet."""
        if not self.quiet:
            console = self.console
            for table in tables:
                console.print(table)

    def result(self, ok: bool, parts: Callable[[], dict[str, Any]]) -> None:
        """End the command: one JSON object with --json, and exit code 0 or 1.

        ``parts`` is called for JSON alone: a plan of 70,000 tensors takes a while to spell out.
        """
        if self.as_json:
            from quantize.provenance import provenance

            made = provenance(self.argv)
            head = {"tool": made["tool"], "version": made["version"], "command": self.command}
            body = dict.fromkeys(("source", "output", "plan", "checks"))
            print(json.dumps({**head, "ok": ok, **body, **parts(), "provenance": made}))
        sys.exit(0 if ok else 1)


def _throttle(say: Callable[[str], None], seconds: float = 15) -> Callable[[str], None]:
    """Pass on the first word, and then one every so many seconds."""
    last = float("-inf")

    def speak(news: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            say(news)

    return speak


def main() -> None:
    """Run the command line; exit codes: 0 passed, 1 refused or failed, 2 usage, 130 interrupted."""
    try:
        code = cli(standalone_mode=False)
    except ToolError as error:
        code = _refuse(error)
    except click.UsageError as error:
        error.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    sys.exit(code)


def _refuse(error: ToolError) -> int:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    if "--json" in sys.argv:
        print(
            json.dumps(
                {
                    "tool": "pairquant",
                    "version": __version__,
                    "command": next((arg for arg in sys.argv[1:] if arg in cli.commands), ""),
                    "ok": False,
                    "error": error.message,
                    "hint": error.hint,
                }
            )
        )
    return 1


if __name__ == "__main__":
    main()
