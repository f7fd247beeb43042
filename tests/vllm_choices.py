"""Run as a script: what vLLM's own code chooses when it is told that it runs on an AMD GPU.

Reads one JSON object (``archs``, ``blocks``: sizes, ``configs``: values of ``--kernel-config`` or
null, ``argv``: command lines) and prints one. The platform is set by hand, and AITER is there in
name alone; lists of kernels, their conditions, the attention backends and the option parser are
vLLM's.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
import types
from typing import Any

TUNED, OTHER = (1024, 1024), (768, 576)
"""Shapes ``[N, K]``: one that AITER would have tuned, one that it would not."""
ATTENTION = (
    "ROCM_AITER_MLA",
    "ROCM_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "TRITON_ATTN",
)


def set_arch(arch: str) -> None:
    """Let the GPU be this one: vLLM asks once, when its module for ROCm is loaded."""
    import torch

    properties = types.SimpleNamespace(gcnArchName=arch)
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    if module := sys.modules.get("vllm.platforms.rocm"):
        importlib.reload(module)


def become_rocm() -> None:
    """Make this process's vLLM one on ROCm with AITER; `set_arch` comes first."""
    from vllm import platforms

    # Built for the CPU: the extensions of other platforms must not be loaded.
    for name in ("vllm._C", "vllm._C_stable_libtorch"):
        sys.modules[name] = None  # type: ignore[assignment]
    from vllm.platforms.rocm import RocmPlatform

    capability = platforms.interface.DeviceCapability(9, 5)
    RocmPlatform.get_device_capability = classmethod(lambda *_, **__: capability)
    platforms._current_platform = RocmPlatform()
    for name in ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.utils"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    from vllm._aiter_ops import rocm_aiter_ops

    rocm_aiter_ops.is_shuffled_per_token_w8a8_gemm_tuned = classmethod(
        lambda _, outputs, inputs, _dtype: (outputs, inputs) == TUNED
    )
    rocm_aiter_ops.is_per_token_w8a8_gemm_tuned = classmethod(lambda *_: False)


def choose_kernels(kernel_config: str | None) -> dict[str, str]:
    """The linear kernels for FP8 row-wise at both shapes, and for MXFP4."""
    import torch
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    given = KernelConfig(**json.loads(kernel_config or "{}"))
    found = {}
    with set_current_vllm_config(VllmConfig(kernel_config=given)):
        for name, shape in (("fp8 tuned", TUNED), ("fp8", OTHER)):
            layer = linear.FP8ScaledMMLinearLayerConfig(
                weight_quant_key=keys.kFp8StaticChannelSym,
                activation_quant_key=keys.kFp8DynamicTokenSym,
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
                weight_shape=shape,
            )
            found[name] = linear.choose_scaled_mm_linear_kernel(
                layer, linear._POSSIBLE_FP8_KERNELS, quantization="fp8_w8a8"
            ).__name__
        kernel = linear.init_mxfp4_linear_kernel(keys.kMxfp4Dynamic)
        found["mxfp4"] = type(kernel).__name__
    return found


def accept_block(size: int) -> dict[str, bool]:
    """Which attention backends take KV-cache blocks of this many tokens."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return {
        name: bool(AttentionBackendEnum[name].get_class().supports_block_size(size))
        for name in ATTENTION
    }


def parse(argv: list[str]) -> dict[str, Any]:
    """What vLLM's server reads from a command line: every option that was given."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    given, default = vars(parser.parse_args(argv)), vars(parser.parse_args([]))
    return {key: repr(value) for key, value in given.items() if value != default[key]}


def choose_for(arch: str, configs: list[str | None]) -> list[dict[str, str]]:
    """The kernels on one GPU, for each ``--kernel-config``."""
    set_arch(arch)
    return [choose_kernels(config) for config in configs]


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    set_arch(asked["archs"][0])
    become_rocm()
    answer = {
        "kernels": {arch: choose_for(arch, asked["configs"]) for arch in asked["archs"]},
        "blocks": [accept_block(size) for size in asked["blocks"]],
        "parsed": [parse(argv) for argv in asked["argv"]],
    }
    print("\n" + json.dumps(answer))
