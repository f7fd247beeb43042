"""What a run of a plan takes in memory and time, from rates that were measured.

``make bench`` measures the same again, and how far these estimates are from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantize.plan import Plan

MEASURED_ON = "BF16 sources on an AMD EPYC"
QUANTIZE_RATE = 1e9
"""Bytes of BF16 weights that one core reads, quantizes and writes in a second."""
PROVE_RATE = 16e6
"""Bytes of BF16 weights that one core proves in a second."""
COPY_RATE = 330e6
"""Bytes of preserved tensors that one core copies and compares in a second."""
PEAK_BYTES = 800_000_000
"""Memory of a run with its proof: tensors are handled in pieces of about 8 MB.

Of experts that lie transposed in a 3-D tensor, one matrix is held whole and comes on top.
"""


def estimate(plan: Plan) -> dict[str, Any]:
    """Largest stored tensor, peak memory and seconds of one core, as JSON values."""
    largest = max(plan.entries, key=lambda entry: entry.source_bytes)
    quantized = sum(entry.source.nbytes for entry in plan.entries if entry.scheme)
    preserved = sum(entry.source_bytes for entry in plan.entries if not entry.scheme)
    return {
        "largest_tensor": largest.source.name,
        "largest_tensor_bytes": largest.source_bytes,
        "peak_memory_bytes": PEAK_BYTES,
        "core_seconds": round(quantized / QUANTIZE_RATE + preserved / COPY_RATE, 1),
        "proof_core_seconds": round(quantized / PROVE_RATE, 1),
        "measured_on": MEASURED_ON,
    }


def estimate_lines(plan: Plan) -> Iterator[str]:
    """The estimate in words, with what it rests on."""
    found = estimate(plan)
    size, peak = found["largest_tensor_bytes"] / 1e9, found["peak_memory_bytes"] / 1e9
    yield (
        f"{plan.kind}: largest tensor {found['largest_tensor']}, {size:.2f} GB; peak memory about "
        f"{peak:.1f} GB, as tensors are handled in pieces"
    )
    write, prove = found["core_seconds"], found["proof_core_seconds"]
    yield (
        f"{plan.kind}: about {_duration(write)} of one core to write and {_duration(prove)} to "
        f"prove, where the disk keeps up (rates measured with {MEASURED_ON})"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
