"""Recipes: a YAML file that sets any option of a verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantize.unique_yaml import load_yaml


def read_recipe(ctx: click.Context, _: click.Parameter, value: Path | None) -> None:
    """Let a YAML file set any option of the verb; a usage error names a key that cannot be."""
    if value is None:
        return
    import yaml

    try:
        recipe = load_yaml(value.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{value}: not a recipe: {error}") from error
    if not isinstance(recipe, dict):
        raise click.UsageError(f"{value}: expected a mapping of option names to values")
    # Not the negative spelling of a flag: it would turn the recipe's value around.
    known = {
        spelling.lstrip("-").replace("-", "_"): param
        for param in ctx.command.params
        if param.name != "recipe"
        for spelling in param.opts
    }
    chosen: dict[str, Any] = {}
    for key, item in recipe.items():
        param = known.get(str(key).replace("-", "_"))
        if param is None:
            names = ", ".join(sorted(known))
            raise click.UsageError(f"{value}: unknown key {key!r}; known are {names}")
        if param.name in chosen:
            raise click.UsageError(f"{value}: {key!r} sets what another key sets")
        chosen[str(param.name)] = _recipe_value(param, item, f"{value}: {key}")
    ctx.default_map = chosen


def _recipe_value(param: click.Parameter, item: Any, where: str) -> Any:
    """What click takes: a repeatable option's values as a list, where one may stand alone."""

    def fits(one: Any) -> bool:
        if param.nargs == 1:
            return isinstance(one, (str, int, float))
        return (
            isinstance(one, list)
            and len(one) == param.nargs
            and all(isinstance(part, str) for part in one)
        )

    if fits(item):
        return [item] if param.multiple else item
    if param.multiple and isinstance(item, list) and all(map(fits, item)):
        return item
    one = "one value" if param.nargs == 1 else f"a list of {param.nargs} values"
    raise click.UsageError(
        f"{where}: found {item!r}, expected {one}{' or a list of such' if param.multiple else ''}"
    )
