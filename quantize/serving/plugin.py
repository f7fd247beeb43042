"""The vLLM plug-in: kernels for checkpoints that its CPU build cannot serve, or only slowly.

vLLM loads it by the entry point group ``vllm.general_plugins``, so it works where this package
and vLLM share one environment; a GPU server needs no plug-in. Nothing heavy is imported here.
"""

from __future__ import annotations

import os

SWITCH = "PAIRQUANT_CPU_KERNELS"
"""Environment variable; ``0`` leaves vLLM as it is."""


def register() -> None:
    """Offer the kernels to vLLM, on the CPU only; a second call changes nothing.

    vLLM calls this in each of its processes, possibly several times
    (``vllm/plugins/__init__.py``, ``load_general_plugins``).
    """
    if os.environ.get(SWITCH) == "0":
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from quantize.serving.kernels import register_kernels

        register_kernels()
