"""Which settings vLLM needs to serve a pair on a platform, and why. Pure: no I/O, no vLLM.

Source: vLLM 0.32, ``envs.py``, ``config/`` (speculative, kernel), ``_aiter_ops.py``, and the
attention backends. *Proven* means that we ran it; the rest was read there and never ran on a GPU
of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from quantize.errors import ToolError
from quantize.serving.served import Served, find_misfit, fitting_sizes
from schemes import fp8_rowwise, mxfp4

VLLM = "0.32"
"""The version of vLLM that all of this was read from."""

Platform = Literal["rocm", "cuda", "cpu"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)

DRAFT = "DRAFT"
"""Stands for the draft's location in the value of ``--speculative-config``."""

MLA_BLOCK = 16
"""Tokens per KV-cache block: AITER's MLA takes any number, and every backend that an EAGLE-3
draft can get on ROCm takes 16 (``supports_block_size`` of ``ROCM_ATTN``, ``ROCM_AITER_FA``,
``ROCM_AITER_UNIFIED_ATTN``, ``TRITON_ATTN``)."""

ASM_ROWS, ASM_COLUMNS = 32, 256
"""Multiples of N and K that the FP4 assembly GEMM needs: scales of 32 rows and 8 columns
(``_asm_fp4_scale_swizzle_supported`` in ``model_executor/kernels/linear/mxfp4/aiter.py``)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option (``--name``) or environment variable (``NAME``); an empty value is a flag."""

    name: str
    value: str
    reason: str
    proven: bool

    @property
    def is_option(self) -> bool:
        """An option of the command line, not a variable of its environment."""
        return self.name.startswith("-")


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; sizes count ranks, ``max_model_len`` tokens.

    A revision is the commit of a half that is on the Hub.
    """

    num_speculative_tokens: int = 3
    max_model_len: int | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int = 1
    draft_tensor_parallel: int | None = None
    expert_parallel: bool = False
    revision: str | None = None
    draft_revision: str | None = None


def choose_settings(
    platform: Platform, target: Served, draft: Served | None, wishes: Wishes
) -> tuple[Setting, ...]:
    """Every setting that differs from vLLM's default, in reading order.

    Raises ToolError for sizes at which a quantized weight cannot be split, and for wishes that
    this target or vLLM cannot meet.
    """
    _check(target, draft, wishes)
    chosen = [*_platform_settings(platform, target, draft, wishes)]
    if wishes.revision:
        chosen.append(_read("--revision", wishes.revision, "the target's commit on the Hub"))
    if draft is not None:
        chosen.append(_speculate(wishes))
    if wishes.tensor_parallel > 1:
        reason = "as asked; every rank's part of a quantized weight still fits its scheme"
        chosen.append(_read("--tensor-parallel-size", wishes.tensor_parallel, reason))
    if wishes.expert_parallel:
        reason = "whole experts on each rank: no expert's weight is split"
        chosen.append(_read("--enable-expert-parallel", "", reason))
    if wishes.max_model_len:
        reason = "as asked; the draft's limit follows the target's"
        chosen.append(Setting("--max-model-len", str(wishes.max_model_len), reason, proven=True))
    if wishes.kv_cache_dtype:
        reason = "as asked; the draft's cache takes the same type"
        chosen.append(_read("--kv-cache-dtype", wishes.kv_cache_dtype, reason))
    return tuple(chosen)


def _speculate(wishes: Wishes) -> Setting:
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": DRAFT,
        "num_speculative_tokens": wishes.num_speculative_tokens,
    }
    tokens = wishes.num_speculative_tokens
    reason = f"{tokens} draft tokens a step; vLLM would guess the method from the folder's name"
    if wishes.draft_tensor_parallel:
        config["draft_tensor_parallel_size"] = wishes.draft_tensor_parallel
        reason += "; the draft's ranks as asked"
    if wishes.draft_revision:
        config["revision"] = wishes.draft_revision
    proven = wishes.tensor_parallel == 1
    return Setting("--speculative-config", json.dumps(config), reason, proven)


def _platform_settings(
    platform: Platform, target: Served, draft: Served | None, wishes: Wishes
) -> Iterable[Setting]:
    if platform != "rocm":
        return
    halves = [half for half in (target, draft) if half]
    reason = "AITER's attention, GEMM and MoE kernels; off by default"
    yield _read("VLLM_ROCM_USE_AITER", 1, reason)
    if mxfp4.NAME in _linear_schemes(halves):
        reason = f"FP4 GEMM in assembly, on gfx950; {_assembly(target, draft, wishes)}"
        yield _read("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", 1, reason)
    if fp8_rowwise.NAME in _linear_schemes(halves):
        reason = (
            "FP8 by RowWiseTorchFP8ScaledMMLinearKernel for every shape; without this line, "
            "AITER's own FP8 kernels take the shapes that AITER has tuned"
        )
        config = {"linear_backend_per_quant": {"fp8_w8a8": "torch"}}
        yield _read("--kernel-config", json.dumps(config), reason)
    if target.schemes(experts=True):
        reason = "experts by AITER; the automatic choice falls back to emulation and goes on"
        yield _read("--moe-backend", "aiter", reason)
    if target.mla and not target.sparse:
        reason = "AITER's MLA for the target, or an error; the draft's backend is chosen apart"
        yield _read("--attention-backend", "ROCM_AITER_MLA", reason)
        if draft is not None:
            reason = "tokens per cache block that AITER's MLA and an EAGLE-3 draft both take"
            yield _read("--block-size", MLA_BLOCK, reason)


def _read(name: str, value: object, reason: str) -> Setting:
    return Setting(name, str(value), reason, proven=False)


def _linear_schemes(halves: Iterable[Served]) -> set[str]:
    return {scheme for half in halves for scheme in half.schemes(experts=False)}


def _assembly(target: Served, draft: Served | None, wishes: Wishes) -> str:
    """How many MXFP4 layers the assembly GEMM cannot take, at the asked number of ranks."""
    size = wishes.tensor_parallel
    shapes = _rank_shapes(target, size)
    if draft is not None:
        shapes += _rank_shapes(draft, wishes.draft_tensor_parallel or size)
    left = sum(bool(outputs % ASM_ROWS or inputs % ASM_COLUMNS) for outputs, inputs in shapes)
    if not left:
        return f"all {len(shapes)} MXFP4 layers fit it"
    return (
        f"{left} of {len(shapes)} MXFP4 layers fall back to AITER's Triton GEMM "
        f"(N % {ASM_ROWS} or K % {ASM_COLUMNS} is not 0)"
    )


def _rank_shapes(half: Served, size: int) -> list[tuple[int, int]]:
    """``[N, K]`` of each MXFP4 linear on one rank."""
    return [
        (outputs, inputs // size) if half.row_parallel(name) else (outputs // size, inputs)
        for name, (scheme, (outputs, inputs)) in half.linears.items()
        if scheme == mxfp4.NAME
    ]


def _check(target: Served, draft: Served | None, wishes: Wishes) -> None:
    size, draft_size = wishes.tensor_parallel, wishes.draft_tensor_parallel
    if wishes.expert_parallel and not target.experts:
        raise ToolError(
            "--expert-parallel: the target has no experts", "leave --expert-parallel out"
        )
    _check_size("--tensor-parallel-size", "target", target, size, wishes)
    if draft is None:
        if draft_size:
            raise ToolError(
                "--draft-tensor-parallel-size was given without a draft", "add --draft DRAFT"
            )
        return
    if draft_size not in (None, 1, size):
        raise ToolError(
            f"--draft-tensor-parallel-size {draft_size}: vLLM takes 1 or the target's, {size}",
            f"use --draft-tensor-parallel-size 1 or {size}",
        )
    _check_size("--draft-tensor-parallel-size", "draft", draft, draft_size or size, wishes)


def _check_size(option: str, role: str, half: Served, size: int, wishes: Wishes) -> None:
    parallel = wishes.expert_parallel
    if misfit := find_misfit(half, size, expert_parallel=parallel):
        fitting = ", ".join(map(str, fitting_sizes([half], expert_parallel=parallel)))
        raise ToolError(
            f"{option} {size}: the {role}'s {misfit}", f"sizes that fit the {role}: {fitting}"
        )
