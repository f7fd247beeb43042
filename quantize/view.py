"""What the user sees of one command: progress and tables on stderr, the result on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quantize.errors import ToolError


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
                if isinstance(table, str):  # a line to copy from: never wrapped, nothing is markup
                    console.print(table, soft_wrap=True, markup=False, highlight=False)
                else:
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
            _print(json.dumps({**head, "ok": ok, **body, **parts(), "provenance": made}))
        sys.exit(0 if ok else 1)


def _print(text: str) -> None:
    """The result on stdout, delivered: a full disk or a closed stream is an error, not silence."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ToolError(f"the result cannot be written to stdout ({error.strerror})") from error
    if sys.stdout is None:
        raise ToolError("the result cannot be written: stdout is closed")


def _throttle(say: Callable[[str], None], seconds: float = 15) -> Callable[[str], None]:
    """Pass on the first word, and then one every so many seconds."""
    last = float("-inf")

    def speak(news: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            say(news)

    return speak
