"""A day-0 release from one file: which commands it means, and which of them are done.

Every step is the command that a person would type, run in a process of its own: what `release`
does can be repeated, or gone on with, by hand.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantize.errors import ToolError
from quantize.job import HALVES
from quantize.options import STEPS
from quantize.unique_yaml import load_yaml
from quantize.workdir import PARTIAL, write_json

PAIR_KEYS = ("target", "draft", "out", "revision")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """What is released: the pair's models, its folder, and each verb's own options."""

    target: str
    draft: str
    out: Path
    revision: str | None
    sections: Mapping[str, Mapping[str, Any]]


def read_release(path: Path) -> Recipe:
    """The recipe in a YAML file; ``out`` is relative to where the command runs.

    Raises `ToolError` for keys that are missing, unknown or there twice. The names of options are
    checked by `refuse_unknown`, their values by the verbs.
    """
    import yaml

    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ToolError(f"{path}: not a recipe ({error})", _HINT) from error
    if not isinstance(data, dict):
        raise ToolError(f"{path}: expected a mapping with target, draft and out", _HINT)
    unknown = sorted(map(str, data.keys() - {*PAIR_KEYS, *STEPS}))
    missing = [key for key in PAIR_KEYS[:3] if not isinstance(data.get(key), str)]
    if unknown or missing:
        faults = [*(f"unknown key {key!r}" for key in unknown), *(f"no {key}" for key in missing)]
        known = ", ".join((*PAIR_KEYS, *STEPS))
        raise ToolError(f"{path}: {'; '.join(faults)}; known are {known}", _HINT)
    sections = {name: data[name] or {} for name in STEPS if name in data}
    wrong = [name for name, section in sections.items() if not isinstance(section, dict)]
    if wrong:
        raise ToolError(f"{path}: {wrong[0]}: expected a mapping of option names to values", _HINT)
    revision = data.get("revision")
    return Recipe(data["target"], data["draft"], Path(data["out"]), revision, sections)


_HINT = "the folder recipes/ of this project has examples"


def refuse_unknown(path: Path, recipe: Recipe, known: Mapping[str, Collection[str]]) -> None:
    """Raise `ToolError` for an option that its step does not have; ``known`` are those by step.

    Before the first step runs: a word misspelt for the last one is not to be found hours later.
    """
    from difflib import get_close_matches

    for step, section in recipe.sections.items():
        if len(_spell_keys(section)) < len(section):
            raise ToolError(f"{path}: {step}: one option has two spellings", "leave one of them")
        for key, value in section.items():
            if value is False and f"no_{_spell(key)}" in known[step]:
                raise ToolError(
                    f"{path}: {step}: {key}: false would be no option at all",
                    f"write no_{_spell(key)}: true",
                )
            if _spell(key) not in known[step]:
                nearest = get_close_matches(str(key), sorted(known[step]), n=1, cutoff=0)
                raise ToolError(
                    f"{path}: {step}: unknown key {str(key)!r}; the nearest known one is "
                    f"{nearest[0]!r}",
                    f"quantize {step} --help tells the options",
                )


def _spell(key: Any) -> str:
    return str(key).replace("-", "_")


def _spell_keys(section: Mapping[Any, Any]) -> dict[str, Any]:
    """A step's options by their names with underscores, in whatever way they were spelled."""
    return {_spell(key): value for key, value in section.items()}


def step_words(recipe: Recipe, step: str, *, yes: bool) -> Words | None:
    """The words after ``quantize`` for one step; None for one that the recipe does not ask for."""
    out, models = str(recipe.out), (recipe.target, recipe.draft)
    pinned = ("--revision", recipe.revision) if recipe.revision else ()
    own = _spell_keys(recipe.sections.get(step, {}))
    if step == "plan":
        pair = _spell_keys(recipe.sections.get("pair", {}))
        shared = {key: value for key, value in pair.items() if key in PLAN_OPTIONS}
        words = ("plan", models[0], "--draft", models[1], *pinned)
        return (*words, *option_words(shared | own))
    if step == "pair":
        return ("pair", *models, "-o", out, *pinned, *option_words(own))
    if step == "verify":
        source = f"{models[0]}@{recipe.revision}" if recipe.revision else models[0]
        sources = ("--source", source, "--draft-source", models[1])
        return ("verify", out, *sources, *option_words(own))
    if step not in recipe.sections:
        return None
    if step == "accept":
        halves = [str(recipe.out / half) for half in HALVES]
        where = ("--record", "-o", str(_free(Path(f"{out}.accept"))))
        return ("accept", *halves, *where, *option_words(own))
    return ("publish", out, *option_words(own), *(("--yes",) if yes else ()))


PLAN_OPTIONS = (
    *("scheme", "exclude_layers", "layer_scheme", "draft_scheme", "draft_exclude_layers"),
    *("draft_layer_scheme", "allow_unmatched", "cast_weights", "cast_head", "ignore_index"),
    "fused_rows",
)
"""Options of ``pair`` that ``plan`` has too."""


def option_words(options: Mapping[str, Any]) -> Words:
    """Options as a command line spells them; a list repeats the option, true is a flag."""
    words: list[str] = []
    for key, value in options.items():
        name = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            words += [name] if value else []
            continue
        for item in value if isinstance(value, list) else [value]:
            parts = item if isinstance(item, list) else [item]
            words += [name, *map(str, parts)]
    return tuple(words)


def _free(folder: Path) -> Path:
    """The folder, or the first that is not there: results of earlier tries are kept."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


@dataclass
class Progress:
    """The steps that passed, in ``OUT.release.json``: a step counts for the words it ran with."""

    path: Path
    done: dict[str, list[str]]

    def has(self, step: str, words: Words) -> bool:
        """Whether the step passed with these words (whatever the folder of its results)."""
        return self.done.get(step) == _essence(words)

    def add(self, step: str, words: Words) -> None:
        """Note a step; those that build on it are to be done again."""
        later = STEPS[STEPS.index(step) + 1 :]
        self.done = {name: said for name, said in self.done.items() if name not in later}
        self.done[step] = _essence(words)
        write_json(self.path, self.done)


def open_progress(out: Path) -> Progress:
    """What is known of an output's release; nothing counts while OUT is not there."""
    path = out.with_name(f"{out.name}.release.json")
    if not path.exists():
        return Progress(path, {})
    try:
        done = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ToolError(f"{path}: not a release's progress ({error})", f"remove {path}") from error
    return Progress(path, done if out.exists() else {})


def _essence(words: Iterable[str]) -> list[str]:
    return [word for word in words if ".accept" not in word and word != "--yes"]


def refuse_partial(out: Path) -> None:
    """OUT itself is the folder that ``pair`` writes; the unfinished one is no place to release."""
    if out.name.endswith(PARTIAL):
        raise ToolError(f"out: {out} ends in {PARTIAL}", "name the folder itself")
