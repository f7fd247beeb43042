"""Which kernel vLLM will select for each scheme, and where it falls back. Pure: no I/O, no vLLM.

Source: vLLM 0.32, the lists ``_POSSIBLE_*_KERNELS`` in ``model_executor/kernels/linear/`` with
each kernel's ``is_supported`` and ``can_implement``, and ``model_executor/layers/fused_moe/``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantize.serving.served import Served
from quantize.serving.settings import Platform
from schemes import fp8_rowwise, mxfp4


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel for the layers of one scheme, and what happens where it does not apply.

    ``where`` is what the machine must have; ``otherwise`` names what vLLM takes instead.
    """

    name: str
    where: str
    otherwise: str
    proven: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """The layers of one half that a kernel computes."""

    role: str
    layers: str
    scheme: str
    kernel: Kernel


EMULATION = (
    "EmulationMxfp4LinearKernel: weights dequantized at every call, products in BF16, "
    "amd-quark needed beside vLLM"
)
REFUSED = "vLLM refuses to load the model"
EXPERT_EMULATION = "OCP_MXQuantizationEmulationTritonExperts: dequantized, products in BF16"

LINEAR: dict[tuple[Platform, str], Kernel] = {
    ("rocm", mxfp4.NAME): Kernel(
        "AiterMxfp4LinearKernel", "gfx950 or gfx1250 with AITER installed", EMULATION
    ),
    ("rocm", fp8_rowwise.NAME): Kernel(
        "RowWiseTorchFP8ScaledMMLinearKernel",
        "gfx942, gfx950 or gfx12, and a BF16 model",
        "ChannelWiseTorchFP8ScaledMMLinearKernel for a float16 model; older GPUs have none",
    ),
    ("cuda", mxfp4.NAME): Kernel(
        "FlashInferMxFp4LinearKernel",
        "sm_100 or later with FlashInfer",
        "MarlinMxFp4LinearKernel: weights alone, activations stay BF16, so its numbers are not "
        "those that `verify` checks",
    ),
    ("cuda", fp8_rowwise.NAME): Kernel(
        "CutlassFP8ScaledMMLinearKernel",
        "sm_89 or later",
        "MarlinFP8ScaledMMLinearKernel: weights alone, activations stay BF16",
    ),
    ("cpu", mxfp4.NAME): Kernel(
        "PairQuantMxfp4LinearKernel",
        "pairquant installed beside vLLM",
        REFUSED,
        proven=True,
    ),
    ("cpu", fp8_rowwise.NAME): Kernel(
        "PairQuantFp8LinearKernel",
        "pairquant installed beside vLLM, and a CPU without AMX",
        "ChannelWiseTorchFP8ScaledMMLinearKernel: the same numbers, slower",
        proven=True,
    ),
}

EXPERTS: dict[tuple[Platform, str], Kernel] = {
    ("rocm", mxfp4.NAME): Kernel(
        "AiterExperts",
        "gfx950",
        "AiterW4A16ExpertsMonolithic on gfx942 and gfx1250: weights alone, activations stay BF16",
    ),
    ("rocm", fp8_rowwise.NAME): Kernel("AiterExperts", "gfx942 or gfx950", REFUSED),
    ("cuda", mxfp4.NAME): Kernel("CutlassExpertsMxfp4", "sm_100", EXPERT_EMULATION),
    ("cuda", fp8_rowwise.NAME): Kernel("TritonOrCutlassExperts", "sm_89 or later", "TritonExperts"),
    ("cpu", mxfp4.NAME): Kernel("CPUExpertsMxfp4", "an x86 CPU with AMX; weights alone", REFUSED),
    ("cpu", fp8_rowwise.NAME): Kernel("no kernel", "a CPU", REFUSED),
}


def predict_kernels(platform: Platform, target: Served, draft: Served | None) -> tuple[Use, ...]:
    """The kernels of both halves with the settings of `settings.choose_settings`."""
    halves = {"target": target} | ({"draft": draft} if draft else {})
    return tuple(use for role, half in halves.items() for use in _uses(platform, role, half))


def _uses(platform: Platform, role: str, half: Served) -> Iterable[Use]:
    linears = [scheme for scheme, _ in half.linears.values()]
    for scheme in half.schemes(experts=False):
        layers = f"{linears.count(scheme)} linear layers"
        yield Use(role, layers, scheme, LINEAR[platform, scheme])
    for scheme in half.schemes(experts=True):
        yield Use(role, "experts", scheme, EXPERTS[platform, scheme])
