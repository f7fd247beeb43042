"""The options that verbs share, with the spellings that people paste from model cards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from quantize.quantities import Rows, Size
from quantize.recipe import read_recipe

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]

MANY_VALUES = ("--exclude-layers", "--draft-exclude-layers")
STEPS = ("plan", "pair", "verify", "accept", "publish")
"""Of a release, in this order; a release's file has each verb's options under these keys."""


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
    click.option(
        "--engine",
        type=click.Choice(["native", "quark"]),
        default="native",
        show_default=True,
        help="What quantizes: our kernels, or AMD Quark itself. The bytes are the same.",
    ),
    click.option("--max-shard-size", type=Size(), default="5GB", show_default=True),
    click.option("--keep-source", is_flag=True, help="Keep a source on the Hub in the Hub cache."),
    click.option("--no-verify", is_flag=True, help="Skip the proof; recorded as not_measured."),
    RESTART,
    click.option("--file2file_quantization", is_flag=True, hidden=True, expose_value=False),
    click.option(*spellings("--trust-remote-code"), is_flag=True, hidden=True, expose_value=False),
)
SHOW = apply(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
    click.option("--quiet", is_flag=True, help="No progress and no tables."),
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
    SHOW,
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
