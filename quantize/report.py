"""Report and Check: what was measured, what was required, and how both are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "fail", "not_measured"]


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement and what was measured for it; *not measured* is never *pass*."""

    name: str
    status: Status
    measured: str
    required: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TensorProof:
    """What one quantized weight loses: decibels of signal over quantization noise.

    ``matmul_db`` is over all outputs of the layer, ``worst_row_db`` of its worst output feature;
    ``matmul_error`` is the relative error ‖y - ŷ‖/‖y‖.
    """

    name: str
    scheme: str
    sqnr_db: float
    matmul_error: float
    matmul_db: float
    worst_row_db: float


@dataclass(frozen=True)
class Report:
    """The checks of one checkpoint or pair."""

    checks: tuple[Check, ...]
    tensors: tuple[TensorProof, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "fail")

    @property
    def unmeasured(self) -> tuple[Check, ...]:
        """The checks that could not be made."""
        return tuple(check for check in self.checks if check.status == "not_measured")

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "checks": [asdict(check) for check in self.checks],
            "tensors": [asdict(proof) for proof in self.tensors],
        }
