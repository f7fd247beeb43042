"""How a source stores a weight: the values that every stored format shares.

A format is a *module* of this package (see `FORMATS` in ``__init__``) that meets `Format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quantize.errors import BadCheckpoint
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.checkpoint import Checkpoint

PLAIN = "plain"
"""The format of a tensor that is stored as it is used."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A logical weight that is not one stored tensor: quantized, or a slice of fused experts.

    ``spec`` is what planning sees: BF16 ``[N, K]``, or ``[E, N, K]`` before fused experts are
    split. ``parts`` are the stored tensors in the format's order, ``nbytes`` their bytes (the
    share of them, for a slice).

    A slice reads matrix ``expert`` of 3-D parts: its row ``i`` is the stored row ``first + i *
    step``, or the stored *column* when ``transposed``. ``stored`` are the rows and columns of one
    stored matrix, ``block`` the rows and columns that share a scale.
    """

    spec: TensorSpec
    format: str
    parts: tuple[str, ...]
    nbytes: int
    stored: tuple[int, int]
    block: tuple[int, int] = (1, 1)
    expert: int | None = None
    first: int = 0
    step: int = 1
    transposed: bool = False


class Format(Protocol):
    """A way in which sources store weights."""

    NAME: str
    METHODS: tuple[str, ...]
    """The values of ``quant_method`` under which it occurs."""
    SCHEME: str
    """The scheme whose bytes it holds, to be kept when that is asked for; empty: none."""

    def find(
        self, specs: Mapping[str, TensorSpec], quantization: Mapping[str, Any]
    ) -> dict[str, Weight]:
        """The weights stored in this format, by logical name, from headers alone.

        Raises `BadCheckpoint` for a companion that is missing or has another shape.
        """
        ...

    def decode(self, checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
        """Stored rows ``start`` to ``stop`` of the weight's matrix, float32 or BF16, exactly."""
        ...

    def pieces(
        self, checkpoint: Checkpoint, weight: Weight, start: int, stop: int
    ) -> tuple[Tensor, ...]:
        """The same rows as the tensors of `SCHEME`, in its ``stored`` order, bytes unchanged.

        Only called where `SCHEME` is named.
        """
        ...


def read_rows(checkpoint: Checkpoint, weight: Weight, part: int, start: int, stop: int) -> Tensor:
    """Rows of stored tensor number ``part``, which has a row for each row of the matrix.

    ``[stop - start, …]``: of matrix ``weight.expert`` where the tensor holds one per expert.
    """
    name = weight.parts[part]
    if weight.expert is None:
        return checkpoint.tensor(name, start, stop)
    return checkpoint.expert(name, weight.expert, start, stop)


def require(spec: TensorSpec | None, name: str, found: str, expected: str) -> TensorSpec:
    """The companion ``name``. Raises `BadCheckpoint` when there is none."""
    if spec is None:
        raise BadCheckpoint(
            f"{found}: there is no {name}, expected {expected}",
            "a shard is missing, or this is another stored format: download the checkpoint again",
        )
    return spec
