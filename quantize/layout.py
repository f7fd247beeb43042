"""Where every output tensor will lie: shard, offset and header bytes, all known from the plan.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header,
data without holes).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantize.errors import BadPlan
from schemes.base import ITEM_BYTES, TensorSpec

ENTRY_BYTES = 128
"""Upper bound of a header entry's bytes beside the tensor's name."""
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """One output file: its header bytes and the absolute offset of every tensor in it."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def lay_out(groups: Iterable[tuple[TensorSpec, ...]], max_bytes: int) -> tuple[Shard, ...]:
    """Fill shards of at most ``max_bytes`` in order; the tensors of a group stay together.

    Raises `BadPlan` when a group alone is larger than a shard may be.
    """
    parts: list[list[TensorSpec]] = []
    room = 0
    for group in groups:
        need = sum(spec.nbytes + len(spec.name.encode()) + ENTRY_BYTES for spec in group)
        if need + ENTRY_BYTES > max_bytes:
            raise BadPlan(
                f"{group[0].name} needs {need + ENTRY_BYTES} bytes, more than --max-shard-size "
                f"{max_bytes}",
                "raise --max-shard-size",
            )
        if not parts or need > room:
            parts.append([])
            room = max_bytes - ENTRY_BYTES
        parts[-1] += group
        room -= need
    if len(parts) == 1:
        return (_shard("model.safetensors", parts[0]),)
    total = len(parts)
    return tuple(
        _shard(f"model-{number:05}-of-{total:05}.safetensors", part)
        for number, part in enumerate(parts, 1)
    )


def _shard(name: str, specs: list[TensorSpec]) -> Shard:
    # Widest items first, as safetensors itself does, so that every tensor is aligned.
    ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins = {}
    position = 0
    for spec in ordered:
        begins[spec.name] = position
        end = position + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(header) + begin for tensor, begin in begins.items()}
    return Shard(name, header, offsets, len(header) + position)


def index_json(shards: Iterable[Shard], specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """The content of ``model.safetensors.index.json``; ``total_size`` counts tensor bytes."""
    weight_map = {name: shard.name for shard in shards for name in sorted(shard.offsets)}
    total = sum(spec.nbytes for spec in specs)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
