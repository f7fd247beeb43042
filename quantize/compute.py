"""What computes: the engine, the device and the workers. Every choice gives the same bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantize.errors import BadOutput

Engine = Literal["native", "quark"]

MOST_WORKERS = 8
"""Without --workers: each holds two chunks in memory, and more than these wait for the disk."""

GPU_NODES = ("/dev/kfd", "/dev/nvidiactl", "/dev/dxg")
"""Device files of AMD's and NVIDIA's drivers, and of either under WSL."""


@dataclass(frozen=True)
class Compute:
    """``native``: our kernels on a CPU; on another device the schemes' definition, in torch.

    ``quark``: AMD Quark's own operations. ``workers`` are threads.
    """

    engine: Engine = "native"
    device: str = "cpu"
    workers: int = 1

    @property
    def kernels(self) -> bool:
        """Whether our CPU kernels quantize."""
        return (self.engine, self.device) == ("native", "cpu")

    @property
    def name(self) -> str:
        """For reports: what made the bytes."""
        if self.engine == "quark":
            return "AMD Quark's operations"
        return "PairQuant's CPU kernels" if self.kernels else "PairQuant's definition, in torch"


def choose_compute(
    engine: Engine = "native", device: str = "auto", workers: int | None = None
) -> Compute:
    """What the options say, with this machine's values where they say nothing.

    Raises `BadOutput` for a device that torch does not find.
    """
    threads = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    return Compute(engine, _find_device(device), workers or threads)


def _find_device(name: str) -> str:
    if name == "cpu" or (name == "auto" and not any(Path(node).exists() for node in GPU_NODES)):
        return "cpu"  # told without torch, whose import takes seconds
    import torch

    count = torch.cuda.device_count()
    known = {"cuda", *(f"cuda:{number}" for number in range(count))} if count else set()
    if name == "auto":
        return "cuda" if known else "cpu"
    if name not in known:
        raise BadOutput(f"--device {name}: torch finds no such device", "use --device cpu")
    return name
