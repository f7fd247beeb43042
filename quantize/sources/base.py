"""How a source stores a weight: the values that every stored format shares.

A format is a *module* of this package (see `FORMATS` in ``__init__``) that meets `Format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from quantize.sources.groups import Group, read_groups
from schemes.base import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantize.checkpoint import Checkpoint

FusedRows = tuple[tuple[str, tuple[int, ...]], ...]
"""Globs over module names, each with the rows of the parts that such a fused weight is made of."""

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
    stored matrix, ``block`` the rows and columns that share a scale, whose grid restarts after each
    of ``chunks`` (rows) where a fused tensor was quantized part by part.

    ``scheme`` is the scheme whose bytes it holds row by row, to be kept when that one is asked for;
    empty: none.
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
    chunks: tuple[int, ...] = ()
    scheme: str = ""


@dataclass(frozen=True)
class Quantization:
    """What is known of a source's quantization beside its tensors."""

    config: Mapping[str, Any]
    """Its ``quantization_config``, empty when there is none."""
    fused_rows: FusedRows = ()

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of a compressed-tensors config."""
        return read_groups(self.config)

    def chunks(self, module: str) -> tuple[int, ...]:
        """The rows of each part of a fused module, as the user gave them; empty: not given."""
        return next((rows for glob, rows in self.fused_rows if fnmatchcase(module, glob)), ())


class Format(Protocol):
    """A way in which sources store weights."""

    NAME: str
    METHODS: tuple[str, ...]
    """The values of ``quant_method`` under which it occurs."""

    def find(
        self, specs: Mapping[str, TensorSpec], quantization: Quantization
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
        """The same rows as the tensors of ``weight.scheme``, in its ``stored`` order.

        Only called for a weight that names one, so only a format that does has this.
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


def find_scale(specs: Mapping[str, TensorSpec], name: str) -> TensorSpec | None:
    """The scale that is stored beside the FP8 weight ``name``, under any of its usual names."""
    names = (f"{name}_scale_inv", f"{name}_scale", f"{name}.weight_scale", f"{name}_weight_scale")
    sibling = f"{name.removesuffix('.weight')}.scale"
    return next((specs[known] for known in (*names, sibling) if known in specs), None)


def say(spec: TensorSpec) -> str:
    """A tensor as refusals name it: ``w.weight F8_E4M3 [64, 64]``."""
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"
