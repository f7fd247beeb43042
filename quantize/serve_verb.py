"""``quantize serve``: from parsed options to the command that serves, printed or run."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.errors import BadPair, ToolError
from quantize.hub import HubFiles
from quantize.serving.installed import Installed, check_settings, find_installed, missing_kernels
from quantize.serving.selection import predict_kernels
from quantize.serving.serve import detect_platform, script
from quantize.serving.served import read_served
from quantize.serving.settings import Wishes, choose_settings

if TYPE_CHECKING:
    from quantize.view import View


def serve_verb(view: View, given: dict[str, Any]) -> None:
    """Print the script, or become the server that it starts. Does not return when it serves."""
    target = open_checkpoint(given["target"])
    draft = open_checkpoint(given["draft"]) if given["draft"] else None
    platform = given["platform"] or detect_platform()
    wishes = _wishes(given, target, draft)
    halves = [(_locate(half), read_served(half)) for half in (target, draft) if half]
    _check_roles([served.family.draft for _, served in halves], given)
    served = (halves[0][1], halves[1][1] if draft else None)
    settings = choose_settings(platform, *served, wishes)
    uses = predict_kernels(platform, *served)
    vllm = find_installed(given["vllm_python"] or sys.executable)
    if vllm:
        check_settings(vllm, settings)
        for name in missing_kernels(vllm, uses):
            view.show(f"note: vLLM {vllm.version} has no {name}: its choice is not predicted")
    launch = vllm.launch(platform) if vllm else ()
    text = script(platform, halves[0], halves[1] if draft else None, wishes, launch, given["extra"])
    if view.as_json:
        view.result(
            True,
            lambda: {
                "source": target.files.origin,
                "platform": platform,
                "settings": [asdict(setting) for setting in settings],
                "kernels": [asdict(use) for use in uses],
                "script": text,
            },
        )
    elif given["print_only"]:
        print(text, end="")
    else:
        _run(view, text, vllm)


def _run(view: View, text: str, vllm: Installed | None) -> None:
    if vllm is None:
        raise ToolError(
            "no vLLM is installed beside this command",
            "name the interpreter that has it: --vllm-python PATH; or --print, and run it there",
        )
    if not view.quiet:
        print(text, file=sys.stderr, flush=True)
    os.execv("/bin/sh", ["sh", "-c", text])


def _wishes(given: dict[str, Any], target: Checkpoint, draft: Checkpoint | None) -> Wishes:
    return Wishes(
        num_speculative_tokens=given["num_speculative_tokens"],
        max_model_len=given["max_model_len"],
        kv_cache_dtype=given["kv_cache_dtype"],
        tensor_parallel=given["tensor_parallel_size"],
        draft_tensor_parallel=given["draft_tensor_parallel_size"],
        expert_parallel=given["expert_parallel"],
        revision=_revision(target),
        draft_revision=_revision(draft) if draft else None,
    )


def _locate(checkpoint: Checkpoint) -> str:
    """Where vLLM finds a checkpoint from any folder: its absolute path, or its Hub id."""
    files = checkpoint.files
    return files.repo_id if isinstance(files, HubFiles) else str(Path(files.origin).absolute())


def _revision(checkpoint: Checkpoint) -> str | None:
    return checkpoint.files.commit if isinstance(checkpoint.files, HubFiles) else None


def _check_roles(drafts: list[bool], given: dict[str, Any]) -> None:
    if drafts[0]:
        raise BadPair(
            f"{given['target']} is an EAGLE-3 draft, expected a target",
            "name the target first: quantize serve TARGET --draft DRAFT",
        )
    if drafts[1:] == [False]:
        raise BadPair(
            f"{given['draft']} is no EAGLE-3 draft", "name the draft's folder: --draft OUT/draft"
        )
