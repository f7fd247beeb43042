"""The options that verbs share, with the spellings that people paste from model cards."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]

MANY_VALUES = ("--exclude-layers", "--draft-exclude-layers")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def spellings(*names: str) -> tuple[str, ...]:
    """Each option name with dashes and, where that differs, with underscores."""
    return tuple(
        spelling
        for name in names
        for spelling in dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
    )


class Verb(click.Command):
    """A command whose glob options take several values up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give every value of a glob option its own copy of the option's name."""
        known = spellings(*MANY_VALUES)
        spread: list[str] = []
        option = ""
        for arg, after in zip(args, [*args[1:], "-"], strict=False):
            if arg in known and after.startswith("-"):
                raise click.UsageError(f"{arg} needs at least one value", ctx)
            if arg.startswith("-"):
                option = arg if arg in known else ""
                spread += [] if option else [arg]
            else:
                spread += [option, arg] if option else [arg]
        try:
            return super().parse_args(ctx, spread)
        except click.MissingParameter as error:
            if isinstance(error.param, click.Argument) and any(arg in known for arg in args):
                raise click.UsageError(
                    f"{error.param.make_metavar(ctx)} goes before --exclude-layers, which takes "
                    "every value up to the next option",
                    ctx,
                ) from error
            raise


class Rows(click.ParamType[tuple[int, ...]]):
    """Numbers of rows such as ``1024,256,256``."""

    name = "rows"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """The numbers; a usage error when they cannot be read."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
            self.fail(f"{value!r} is not a list of rows such as 1024,256,256", param, ctx)
        return tuple(map(int, value.split(",")))


class Size(click.ParamType[int]):
    """A number of bytes such as ``5GB``; 1 GB = 10⁹ bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The number of bytes; a usage error when it cannot be read."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value)
        if not match or match[2].upper() not in UNITS:
            self.fail(f"{value!r} is not a size such as 5GB or 500MB", param, ctx)
        return int(float(match[1]) * UNITS[match[2].upper()])


def read_recipe(ctx: click.Context, _: click.Parameter, value: Path | None) -> None:
    """Let a YAML file set any option of the verb; a usage error names a key that cannot be."""
    if value is None:
        return
    import yaml

    try:
        recipe = yaml.safe_load(value.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{value}: this is not YAML: {error}") from error
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


def apply(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Several options as one decorator, in reading order."""

    def wrap(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return wrap


def model_options(role: str, scheme: str | None) -> Decorator[Any]:
    """The options that decide one checkpoint's plan; a draft's begin with ``--draft-``."""
    dash = "--draft-" if role == "draft" else "--"
    key = "draft_" if role == "draft" else ""
    names = [f"{dash}scheme", f"{dash}quant-scheme"]
    return apply(
        click.option(
            *spellings(*names),
            f"{key}scheme",
            metavar="SCHEME",
            show_default=True,
            # To click, a default of None would be a value: nothing would be required.
            **({"default": scheme} if scheme else {"required": True}),
            help=f"mxfp4, fp8_rowwise or bf16, for the {role}.",
        ),
        click.option(
            *spellings(f"{dash}exclude-layers"),
            f"{key}exclude",
            metavar="GLOB...",
            multiple=True,
            help=f"Modules of the {role} that stay BF16.",
        ),
        click.option(
            *spellings(f"{dash}layer-scheme", f"{dash}layer-quant-scheme"),
            f"{key}layer_schemes",
            nargs=2,
            multiple=True,
            metavar="GLOB SCHEME",
            help=f"Another scheme for some modules of the {role}.",
        ),
    )


IGNORE_INDEX = click.option(
    "--ignore-index", is_flag=True, help="Read a source's shards without their index."
)
CONSENT = apply(
    click.option("--allow-unmatched", is_flag=True, help="Accept globs that match nothing."),
    click.option("--cast-weights", is_flag=True, help="Round F16/F32 weights to BF16 first."),
    click.option("--cast-head", is_flag=True, help="Store an F16/F32 head rounded to BF16."),
    click.option(
        *spellings("--fused-rows"),
        type=(str, Rows()),
        multiple=True,
        metavar="GLOB ROWS",
        help="Parts of a fused FP8 weight whose scales start anew in each, as 1024,256,256.",
    ),
    IGNORE_INDEX,
    click.option("--revision", help="Hub revision of MODEL or TARGET."),
)
PAIR = apply(
    click.option(
        "--dedupe-head/--no-dedupe-head",
        default=True,
        show_default=True,
        help="Drop the draft's copies of the target's head and embedding.",
    ),
    click.option("--require-shared-head", is_flag=True, help="Fail when the heads differ."),
)
OUTPUT = click.option(
    *spellings("--output-dir"),
    "-o",
    "out",
    type=click.Path(path_type=Path),
    required=True,
    help="New folder.",
)
RESTART = click.option("--restart", is_flag=True, help="Begin an interrupted run anew.")
WORK = apply(
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda[:N]."),
    click.option("--workers", type=click.IntRange(min=1), help="Threads. [default: all cores]"),
    click.option("--max-shard-size", type=Size(), default="5GB", show_default=True),
    click.option("--no-verify", is_flag=True, help="Skip the proof; recorded as not_measured."),
    RESTART,
    click.option("--file2file_quantization", is_flag=True, hidden=True, expose_value=False),
    click.option(*spellings("--trust-remote-code"), is_flag=True, hidden=True, expose_value=False),
)
DISPLAY = apply(
    click.option(
        "--recipe",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=read_recipe,
        help="YAML file that sets options.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
    click.option("--quiet", is_flag=True, help="No progress and no tables."),
)


MEASURE = apply(
    click.option(
        "--prompts",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSONL with prompt or messages, and domain.  [default: 88 held-out prompts]",
    ),
    click.option(
        *spellings("--num-speculative-tokens"),
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
    ),
    click.option(
        *spellings("--max-tokens"), type=click.IntRange(min=1), default=160, show_default=True
    ),
    click.option(
        "--temperature", type=click.FloatRange(min=0), default=0, help="[default: greedy]"
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    click.option("--concurrency", type=click.IntRange(min=1), default=16, show_default=True),
    click.option(
        "--repeats",
        type=click.IntRange(min=1),
        help="Runs of each combination.  [default: 2 with a baseline, otherwise 1]",
    ),
    click.option(
        *spellings("--min-retention"),
        type=click.FloatRange(min=0, min_open=True),
        help="Fail unless this much of the baseline's acceptance length is kept, such as 0.97.",
    ),
    click.option(
        "--lossless/--no-lossless",
        default=None,
        help="Compare the greedy text with the target's alone.  [default: where it is greedy]",
    ),
    click.option(*spellings("--vllm-python"), help="Interpreter with vLLM.  [default: our own]"),
    click.option(
        *spellings("--vllm-args"),
        default="",
        metavar="TEXT",
        help='More options for vLLM, such as "--tensor-parallel-size 4".',
    ),
    click.option("--port", type=click.IntRange(1, 65535), help="[default: a free one]"),
    click.option(
        *spellings("--start-timeout"),
        type=click.FloatRange(min=0, min_open=True),
        default=600,
        show_default=True,
        help="Seconds until a server must be healthy.",
    ),
)


SERVE = apply(
    click.option(
        "--platform",
        type=click.Choice(["rocm", "cuda", "cpu"]),
        help="Where it will run.  [default: this machine]",
    ),
    click.option(
        *spellings("--num-speculative-tokens"),
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
        help="Draft tokens a step.",
    ),
    click.option(
        *spellings("--max-model-len"), type=click.IntRange(min=1), help="Tokens of one request."
    ),
    click.option(
        *spellings("--kv-cache-dtype"), metavar="TYPE", help="Of both KV caches, such as fp8."
    ),
    click.option(
        *spellings("--tensor-parallel-size"),
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
    ),
    click.option(
        *spellings("--draft-tensor-parallel-size"),
        type=click.IntRange(min=1),
        help="1 or the target's.  [default: the target's]",
    ),
    click.option("--expert-parallel", is_flag=True, help="Keep each expert whole on one rank."),
    click.option(*spellings("--vllm-python"), help="Interpreter with vLLM.  [default: our own]"),
)


def model_argument(name: str, option: str) -> Decorator[Any]:
    """A positional checkpoint that may also be given as an option, as in Quark's scripts."""
    return apply(
        click.argument(name, required=False),
        click.option(*spellings(option), f"{name}_option", metavar="MODEL", hidden=True),
    )
