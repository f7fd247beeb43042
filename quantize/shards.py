"""Which files make up a checkpoint: the index's, or a set that needs none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from shlex import quote
from typing import NoReturn

from quantize.errors import BadCheckpoint
from quantize.files import Files, fetch_again
from quantize.header import LONGEST_NAME, name_fault, read_header, read_json, shown
from quantize.wording import some

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLES = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin", re.ASCII)
_NUMBERED = re.compile(r"(?:pytorch_)?model-(\d{5})-of-(0?\d{5})\.(?:safetensors|bin)", re.ASCII)
"""transformers' names; DeepSeek's and Kimi's count in six digits, MiniMax's begin at 0."""


def find_shards(
    files: Files, sizes: Mapping[str, int], ignore_index: bool
) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """The shards in the order of their names, and the index's map of tensor to shard if used."""
    if index_name(sizes) in sizes and not ignore_index:
        index = _read_index(files, sizes)
        return tuple(sorted(set(index.values()))), index
    found = [name for name in sizes if _is_weights(name, sizes)]
    # `consolidated*` holds the same weights a second time, in the vendor's own layout.
    shards = [name for name in found if not name.startswith("consolidated")] or found
    if not shards:
        _refuse_other_formats(files, sizes)
    if len(shards) > 1 or _NUMBERED.fullmatch(shards[0]):
        _require_whole_set(files, shards)
    return tuple(shards), None


def _is_weights(name: str, sizes: Mapping[str, int]) -> bool:
    """Whether a file holds weights: ``.bin`` counts only where there is no safetensors file."""
    if index_name(sizes) == PICKLE_INDEX:
        return PICKLES.fullmatch(name) is not None
    return name.endswith(".safetensors")


def index_name(sizes: Mapping[str, int]) -> str:
    """The index that the files of a folder go by: that of safetensors, if there are any."""
    newer = any(name == INDEX or name.endswith(".safetensors") for name in sizes)
    return INDEX if newer or not any(map(PICKLES.fullmatch, sizes)) else PICKLE_INDEX


def refuse_index(files: Files, sizes: Mapping[str, int], fault: str, *damaged: str) -> NoReturn:
    """Refuse an index, naming a whole ``model.safetensors`` beside it as the likely truth."""
    index = index_name(sizes)
    message = f"{files.origin}/{index}: the index {fault}"
    hint = fetch_again(files, *(damaged or (index,)))
    if SINGLE in sizes and _is_whole(files, SINGLE, sizes[SINGLE]):
        message += f", while {SINGLE} beside it is whole by itself: the index looks stale"
        hint = f"to read {SINGLE} and not the index, add --ignore-index"
        if numbered := [name for name in sizes if _NUMBERED.fullmatch(name)]:
            hint += f", and first move the other weights out of the folder: {some(numbered)}"
    raise BadCheckpoint(message, hint)


def _is_whole(files: Files, name: str, size: int) -> bool:
    try:
        read_header(files, name, size)
    except BadCheckpoint:
        return False
    return True


def _read_index(files: Files, sizes: Mapping[str, int]) -> dict[str, str]:
    place = index_name(sizes)
    index = read_json(files, place, sizes[place]).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise BadCheckpoint(
            f"{files.origin}/{place}: found no weight_map, expected an object of tensor name to "
            "shard name",
            fetch_again(files, place),
        )
    places = {shard for shard in index.values() if isinstance(shard, str)}
    good = {name for name in places if _is_shard_name(name) and _is_weights(name, sizes)}
    for name, shard in index.items():
        fault = name_fault(name)
        if not fault and not (isinstance(shard, str) and shard in good):
            fault = (
                f"found tensor {name!r} in {shown(str(shard))}, expected the name of a "
                f".{'bin' if place == PICKLE_INDEX else 'safetensors'} file in the same folder"
            )
        if fault:
            raise BadCheckpoint(
                f"{files.origin}/{place}: {fault}",
                f"correct weight_map in {quote(files.origin)}/{place}, or write the model again",
            )
    if missing := sorted(good - sizes.keys()):
        name = next(name for name, shard in index.items() if shard == missing[0])
        fault = f"names {some(missing)} (tensor {name!r}), missing from the folder"
        refuse_index(files, sizes, fault, *missing)
    for name in sizes:
        known = name == SINGLE or _NUMBERED.fullmatch(name)
        if name not in good and known and _is_weights(name, sizes):
            refuse_index(files, sizes, f"omits {name}, which is in the folder")
    return index


def _is_shard_name(name: str) -> bool:
    return len(name) <= LONGEST_NAME and name.isprintable() and not set(name) & set("/\\")


def _require_whole_set(files: Files, shards: list[str]) -> None:
    """Without an index only ``model-00001-of-N`` to ``model-N-of-N``, and nothing else, will do."""
    totals = {match[2] if (match := _NUMBERED.fullmatch(name)) else "" for name in shards}
    total = totals.pop()
    start, end = ("pytorch_model", ".bin") if shards[0].endswith(".bin") else ("model", SINGLE[5:])
    first = 0 if f"{start}-00000-of-{total}{end}" in shards else 1
    numbers = range(first, first + int(total or 0))
    expected = {f"{start}-{number:05}-of-{total}{end}" for number in numbers}
    if totals or not set(shards) <= expected:
        raise BadCheckpoint(
            f"{files.origin}: found several {end} files and no index in use "
            f"({some(shards)}), expected {start}{end} or one whole set of {start}-XXXXX-of-NNNNN",
            f"move those that are not the model out of the folder, or {fetch_again(files, INDEX)}",
        )
    if missing := sorted(expected - set(shards)):
        raise BadCheckpoint(
            f"{files.origin}: found {len(shards)} of {int(total)} shards, missing {some(missing)}",
            fetch_again(files, *missing),
        )


def _refuse_other_formats(files: Files, sizes: Mapping[str, int]) -> NoReturn:
    others = [name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5"))]
    found = f"only {some(others)}" if others else "no weights"
    raise BadCheckpoint(
        f"{files.origin}: found {found}, expected safetensors files or pytorch_model.bin",
        "write it with transformers: model.save_pretrained(FOLDER)",
    )
