"""``quantize release``: run a recipe's commands one after the other, and go on where it stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from shlex import join
from typing import TYPE_CHECKING, Any

import click

from quantize.errors import ToolError
from quantize.options import STEPS
from quantize.release import (
    Words,
    open_progress,
    read_release,
    refuse_partial,
    refuse_unknown,
    step_words,
)

if TYPE_CHECKING:
    from quantize.view import View


def release_verb(view: View, given: Mapping[str, Any]) -> None:
    """Exit 0 when every step up to ``--until`` passed, or had passed before."""
    recipe = read_release(given["recipe_file"])
    refuse_unknown(given["recipe_file"], recipe, _known_keys())
    refuse_partial(recipe.out)
    wanted = STEPS[: STEPS.index(given["until"]) + 1]
    planned = [(step, step_words(recipe, step, yes=given["yes"])) for step in wanted]
    if given["print_only"]:
        print("\n".join(join(("quantize", *words)) for _, words in planned if words))
        return
    progress = open_progress(recipe.out)
    results = {}
    for step, words in planned:
        if words is None:
            results[step] = "not asked for"
        elif progress.has(step, words):
            results[step] = "had passed"
        else:
            _run(view, step, words)
            progress.add(step, words)
            results[step] = "passed"
        view.show(f"{step}: {results[step]}")
    view.result(True, lambda: {"output": str(recipe.out), "steps": results})


def _known_keys() -> dict[str, set[str]]:
    """What a recipe may name for each step: the long options of its verb, with underscores."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    return {
        step: {
            name.removeprefix("--").replace("-", "_")
            for param in group.commands[step].params
            for name in (*param.opts, *param.secondary_opts)
            if name.startswith("--")
        }
        for step in STEPS
    }


def _run(view: View, step: str, words: Words) -> None:
    """One step; its tables and bars are its own. Raises ToolError when it did not pass."""
    view.show(f"$ {join(('quantize', *words))}")
    command = [sys.executable, "-m", "quantize.cli", *words, *(("--quiet",) if view.quiet else ())]
    done = subprocess.run(command, check=False, stdout=sys.stderr)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise ToolError(
            f"release stopped at {step} (exit code {done.returncode}): see above",
            "the same command goes on with this step; those before it are not repeated",
        )
