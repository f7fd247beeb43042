"""A checkpoint as its logical weights: BF16 ``[N, K]`` each, however the files store them.

Planning, quantizing and proving see a `Source` exactly as a plain `Checkpoint`; only here and in
`quantize.sources` is known that a weight may be quantized already, or a slice of fused experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import models
from models.base import Family, FusedExperts
from quantize.checkpoint import Checkpoint
from quantize.errors import BadCheckpoint, BadPlan, ToolError
from quantize.sources import FORMATS, METHODS, find_format
from quantize.sources.base import PLAIN, FusedRows, Quantization, Weight, read_rows
from quantize.sources.unread import (
    LEFTOVERS,
    drop_quantization,
    find_quantization,
    refuse_unread,
)
from schemes.base import TORCH_NAMES, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Source(Checkpoint):
    """A checkpoint seen as logical weights.

    ``specs`` are logical; ``weights`` says how those that are not plain tensors are ``stored``.
    ``unused`` are stored tensors that mean nothing once the weights are BF16, with the reason.
    ``config`` no longer says that the weights are quantized.
    """

    stored: Checkpoint
    weights: Mapping[str, Weight]
    unused: Mapping[str, str]

    def tensor(self, name: str, start_row: int = 0, stop_row: int | None = None) -> Tensor:
        """Rows of a logical weight, BF16 on the CPU; a plain tensor as `Checkpoint.tensor` does."""
        weight = self.weights.get(name)
        if weight is None:
            return self.stored.tensor(name, start_row, stop_row)
        import torch

        rows, columns = weight.spec.shape
        stop = rows if stop_row is None else stop_row
        dtype = getattr(torch, TORCH_NAMES[weight.spec.dtype])
        if start_row == stop:
            return torch.empty(0, columns, dtype=dtype)
        return _decode(self.stored, weight, start_row, stop).to(dtype)

    def read(self, name: str, start_row: int = 0, stop_row: int | None = None) -> bytearray:
        """The bytes of what `tensor` returns."""
        if name not in self.weights:
            return self.stored.read(name, start_row, stop_row)
        import torch

        rows = self.tensor(name, start_row, stop_row)
        return bytearray(rows.contiguous().view(torch.uint8).numpy().data)

    def pieces(self, name: str, start: int, stop: int) -> tuple[Tensor, ...]:
        """Rows of a weight that already holds a scheme's bytes, as that scheme's tensors."""
        weight = self.weights[name]
        low, high = _stored_rows(weight, start, stop)
        pieces = find_format(weight.format).pieces(self.stored, weight, low, high)
        return tuple(piece[:: weight.step] for piece in pieces)

    def chunks(self, name: str) -> Iterator[tuple[int, int]]:
        """A transposed weight is read whole: each of its rows lies in all stored rows."""
        weight = self.weights.get(name)
        if weight is not None and weight.transposed:
            return iter(((0, weight.spec.shape[0]),))
        return super().chunks(name)


def _decode(stored: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    decode = _decoder(weight)
    if weight.transposed:
        columns = decode(stored, weight, 0, weight.stored[0])[:, weight.first :: weight.step]
        return columns[:, start:stop].T.contiguous()
    low, high = _stored_rows(weight, start, stop)
    return decode(stored, weight, low, high)[:: weight.step]


def _stored_rows(weight: Weight, start: int, stop: int) -> tuple[int, int]:
    """The stored rows from the first that logical rows ``start`` to ``stop`` need to the last."""
    return weight.first + start * weight.step, weight.first + (stop - 1) * weight.step + 1


def _decoder(weight: Weight) -> Callable[[Checkpoint, Weight, int, int], Tensor]:
    return _read_plain if weight.format == PLAIN else find_format(weight.format).decode


def _read_plain(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    return read_rows(checkpoint, weight, 0, start, stop)


def read_through(stored: Checkpoint, fused_rows: FusedRows = ()) -> Source:
    """The logical weights of a checkpoint, from its headers and config alone.

    ``fused_rows`` are the parts of fused weights whose scales start anew in each.
    """
    if isinstance(stored, Source):
        return stored
    config = find_quantization(stored.config, stored.files, METHODS)
    weights = _find_weights(stored, Quantization(config, fused_rows))
    parts = _parts(weights)
    unused = {
        name: "of the source's own quantization"
        for name in stored.specs
        if config and name not in parts and name.endswith(LEFTOVERS)
    }
    refuse_unread(stored.files, stored.specs, parts | unused.keys(), config)
    weights = split_experts(_family(stored), stored.specs, weights)
    specs, shard_of = _logical(stored, weights, _parts(weights), unused)
    base = {field.name: getattr(stored, field.name) for field in fields(Checkpoint)}
    base |= {"specs": specs, "shard_of": shard_of, "config": drop_quantization(stored.config)}
    return Source(**base, stored=stored, weights=weights, unused=unused)


def _find_weights(stored: Checkpoint, quantization: Quantization) -> dict[str, Weight]:
    method = quantization.config.get("quant_method")
    found: dict[str, Weight] = {}
    for form in FORMATS:
        if method in form.METHODS:
            with naming(stored):
                found |= form.find(stored.specs, quantization)
    if method and not found:
        raise BadPlan(
            f"{stored.files.origin}/config.json: quant_method {method!r} says that weights are "
            "quantized, and no tensor is stored so",
            "remove quantization_config from config.json if the weights are plain BF16",
        )
    return found


def _parts(weights: Mapping[str, Weight]) -> set[str]:
    return {part for weight in weights.values() for part in weight.parts}


@contextmanager
def naming(checkpoint: Checkpoint) -> Iterator[None]:
    """Put the checkpoint's place before a refusal that speaks of its tensors or its config."""
    origin = checkpoint.files.origin
    try:
        yield
    except ToolError as error:
        # As a word: a folder called "tie" is not named by "tie_word_embeddings".
        if re.search(rf"(?<![\w./-]){re.escape(origin)}(?![\w-])", error.message):
            raise
        raise type(error)(f"{origin}: {error.message}", error.hint) from error


def _family(stored: Checkpoint) -> Family | None:
    names = stored.config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None  # planning refuses it, by name
    return models.find_family(names[0])


def split_experts(
    family: Family | None, specs: Mapping[str, TensorSpec], weights: Mapping[str, Weight]
) -> dict[str, Weight]:
    """Replace every fused 3-D tensor of experts by a weight ``[N, K]`` for each expert and leaf.

    Raises `BadCheckpoint` for a tensor whose shape does not divide.
    """
    found = dict(weights)
    for rule in family.fused_experts if family else ():
        for name in [name for name in (weights.keys() | specs.keys()) if rule.match(name)]:
            whole = found.pop(name, None) or _plain(specs[name])
            found |= {part.spec.name: part for part in _split(rule, name, whole)}
    return found


def _plain(spec: TensorSpec) -> Weight:
    return Weight(spec, PLAIN, (spec.name,), spec.nbytes, (spec.shape[-2], spec.shape[-1]))


def _split(rule: FusedExperts, name: str, whole: Weight) -> Iterator[Weight]:
    if len(whole.spec.shape) != 3:
        raise BadCheckpoint(f"{name} {list(whole.spec.shape)}: expected experts x rows x columns")
    experts, *matrix = whole.spec.shape
    rows, columns = reversed(matrix) if rule.transposed else matrix
    count = len(rule.leaves)
    if rows % count:
        raise BadCheckpoint(f"{name}: {rows} outputs do not divide into {', '.join(rule.leaves)}")
    for expert in range(experts):
        for number, leaf in enumerate(rule.leaves):
            logical = TensorSpec(
                rule.spell(name, expert, leaf), whole.spec.dtype, (rows // count, columns)
            )
            yield replace(
                whole,
                spec=logical,
                nbytes=whole.nbytes // (experts * count),
                expert=expert,
                first=number if rule.interleaved else number * (rows // count),
                step=count if rule.interleaved else 1,
                transposed=rule.transposed,
            )


def _logical(
    stored: Checkpoint, weights: Mapping[str, Weight], parts: set[str], unused: Mapping[str, str]
) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Logical tensors where the first of their parts is stored, and the shard of each."""
    by_part: dict[str, list[Weight]] = {}
    for weight in weights.values():
        by_part.setdefault(weight.parts[0], []).append(weight)
    specs: dict[str, TensorSpec] = {}
    shard_of = dict(stored.shard_of)
    for name, spec in stored.specs.items():
        for weight in by_part.get(name, ()):
            specs[weight.spec.name] = weight.spec
            shard_of[weight.spec.name] = stored.shard_of[name]
        if name not in parts and name not in unused:
            specs[name] = spec
    return specs, shard_of
