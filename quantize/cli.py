"""The command line: parse, call one stage, print; the one place that turns errors into text."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from quantize import __version__
from quantize.errors import ToolError
from quantize.options import (
    CONSENT,
    DISPLAY,
    IGNORE_INDEX,
    MEASURE,
    OUTPUT,
    PAIR,
    RESTART,
    SERVE,
    SHOW,
    STEPS,
    WORK,
    Verb,
    apply,
    model_argument,
    model_options,
    spellings,
)
from quantize.publish_options import PUBLISH
from quantize.verify_options import BASELINE
from quantize.view import View


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
@IGNORE_INDEX
@click.option("--sample", is_flag=True, help="SQNR of 32 rows of each weight; every byte as ever.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write the checks as JUnit XML.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as one HTML file.")
@BASELINE
@DISPLAY
def verify(**given: Any) -> None:
    """Prove an output: every byte, every name, and the pair where both halves are given.

    Example: quantize verify ./pair --source ./model --draft-source ./draft
    """
    from quantize.verify_verb import verify_verb

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
@click.argument("out", type=click.Path(path_type=Path))
@PUBLISH
@DISPLAY
def publish(**given: Any) -> None:
    """Verify an output and put it on the Hugging Face Hub, private unless told otherwise.

    Example: quantize publish ./pair --repo-id ORG/MODEL-MXFP4 --draft-repo-id ORG/DRAFT-FP8
    """
    from quantize.publish_verb import publish_verb

    publish_verb(View("publish", given), given)


@cli.command(cls=Verb)
@click.argument(
    "recipe_file", metavar="RECIPE", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--until", type=click.Choice(STEPS), default=STEPS[-1], show_default=True)
@click.option("--yes", is_flag=True, help="Do not ask before publishing.")
@click.option("--print", "print_only", is_flag=True, help="Print the commands; run nothing.")
@SHOW
def release(**given: Any) -> None:
    """Run a whole release from one YAML file: plan, pair, verify, accept and publish.

    Example: quantize release recipes/kimi-k2.5.yaml --until verify
    """
    from quantize.release_verb import release_verb

    release_verb(View("release", given), given)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete this command's words.

    Example: eval "$(quantize completion bash)"
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    print(found(cli, {}, "quantize", "_QUANTIZE_COMPLETE").source())


@cli.command(cls=Verb)
@click.option(
    "-o", "--output-dir", "out", type=click.Path(path_type=Path), default="demo", show_default=True
)
@RESTART
@DISPLAY
def demo(**given: Any) -> None:
    """Run the whole line on SmolLM2-135M-Instruct and a trained EAGLE-3 draft.

    Example: quantize demo -o demo
    """
    from quantize.demo_verb import demo_verb

    demo_verb(View("demo", given), given)


def main() -> None:
    """Run the command line; exit codes: 0 passed, 1 refused or failed, 2 usage, 130 interrupted."""
    # A plan of 200,000 tensors makes a million objects that live on: to look through them for
    # garbage again and again takes a quarter of its time.
    gc.set_threshold(100_000)
    try:
        code = cli(prog_name="quantize", standalone_mode=False)
    except ToolError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        code = _end(1, error.message, error.hint)
    except click.UsageError as error:
        error.show()
        code = _end(2, error.format_message(), "quantize VERB --help tells the options")
    except (click.Abort, KeyboardInterrupt):
        hint = "the same command continues where it stopped"
        print(f"interrupted; {hint}", file=sys.stderr)
        code = _end(130, "interrupted", hint)
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    sys.exit(code)


def _end(code: int, message: str, hint: str) -> int:
    """With --json, an error too is one object on stdout."""
    if "--json" in sys.argv:
        command = next((arg for arg in sys.argv[1:] if arg in cli.commands), "")
        head = {"tool": "pairquant", "version": __version__, "command": command}
        try:
            print(json.dumps({**head, "ok": False, "error": message, "hint": hint}), flush=True)
        except OSError:  # stdout is what failed: stderr has said so
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


if __name__ == "__main__":
    main()
