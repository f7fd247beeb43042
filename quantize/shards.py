"""Which safetensors files make up a checkpoint: the index's, or a set that needs none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from shlex import quote
from typing import Any, NoReturn

from quantize.errors import BadCheckpoint
from quantize.files import LFS_POINTER, Files, LocalFiles, fetch_again, read_at, refuse_pointer
from quantize.header import LONGEST_NAME, name_fault, read_header, read_json, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"model-(\d{5})-of-(0?\d{5})\.safetensors", re.ASCII)
"""transformers' names; DeepSeek's and Kimi's count in six digits, MiniMax's begin at 0."""

_CONVERT = """\
import pathlib, torch
from safetensors.torch import save_file
for file in sorted(pathlib.Path(".").glob("pytorch_model*.bin")):
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    tensors = {name: t.contiguous().clone() for name, t in tensors.items()}
    name = file.stem.removeprefix("pytorch_") + ".safetensors"
    save_file(tensors, name, metadata={"format": "pt"})"""


def find_shards(
    files: Files, sizes: Mapping[str, int], ignore_index: bool
) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """The shards in the order of their names, and the index's map of tensor to shard if used."""
    if INDEX in sizes and not ignore_index:
        index = _read_index(files, sizes)
        return tuple(sorted(set(index.values()))), index
    found = [name for name in sizes if name.endswith(".safetensors")]
    # `consolidated*` holds the same weights a second time, in the vendor's own layout.
    shards = [name for name in found if not name.startswith("consolidated")] or found
    if not shards:
        _refuse_other_formats(files, sizes)
    if len(shards) > 1 or _NUMBERED.fullmatch(shards[0]):
        _require_whole_set(files, shards)
    return tuple(shards), None


def refuse_index(files: Files, sizes: Mapping[str, int], fault: str, *damaged: str) -> NoReturn:
    """Refuse an index, naming a whole ``model.safetensors`` beside it as the likely truth."""
    message = f"{files.origin}/{INDEX}: the index {fault}"
    hint = fetch_again(files, *(damaged or (INDEX,)))
    if SINGLE in sizes and _is_whole(files, SINGLE, sizes[SINGLE]):
        message += f", while {SINGLE} beside it is whole by itself: the index looks stale"
        hint = f"to read {SINGLE} and not the index, add --ignore-index"
        if numbered := [name for name in sizes if _NUMBERED.fullmatch(name)]:
            hint += f", and first move the other weights out of the folder: {_few(numbered)}"
    raise BadCheckpoint(message, hint)


def _is_whole(files: Files, name: str, size: int) -> bool:
    try:
        read_header(files, name, size)
    except BadCheckpoint:
        return False
    return True


def _read_index(files: Files, sizes: Mapping[str, int]) -> dict[str, str]:
    index = read_json(files, INDEX, sizes[INDEX]).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise BadCheckpoint(
            f"{files.origin}/{INDEX}: found no weight_map, expected an object of tensor name to "
            "shard name",
            fetch_again(files, INDEX),
        )
    for name, shard in index.items():
        fault = name_fault(name)
        if not fault and not _is_shard_name(shard):
            fault = (
                f"found tensor {name!r} in {shown(str(shard))}, expected the name of a "
                ".safetensors file in the same folder"
            )
        if fault:
            raise BadCheckpoint(
                f"{files.origin}/{INDEX}: {fault}",
                f"correct weight_map in {quote(files.origin)}/{INDEX}, or write the model again",
            )
    shards = set(index.values())
    if missing := sorted(shards - sizes.keys()):
        name = next(name for name, shard in index.items() if shard == missing[0])
        fault = f"names {_few(missing)} (tensor {name!r}), missing from the folder"
        refuse_index(files, sizes, fault, *missing)
    for name in sizes:
        if name not in shards and (name == SINGLE or _NUMBERED.fullmatch(name)):
            refuse_index(files, sizes, f"omits {name}, which is in the folder")
    return index


def _is_shard_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and len(name) <= LONGEST_NAME
        and name.isprintable()
        and not set(name) & set("/\\")
    )


def _require_whole_set(files: Files, shards: list[str]) -> None:
    """Without an index only ``model-00001-of-N`` to ``model-N-of-N``, and nothing else, will do."""
    totals = {match[2] if (match := _NUMBERED.fullmatch(name)) else "" for name in shards}
    total = totals.pop()
    first = 0 if f"model-00000-of-{total}.safetensors" in shards else 1
    numbers = range(first, first + int(total or 0))
    expected = {f"model-{number:05}-of-{total}.safetensors" for number in numbers}
    if totals or not set(shards) <= expected:
        raise BadCheckpoint(
            f"{files.origin}: found several .safetensors files and no index in use "
            f"({_few(shards)}), expected {SINGLE} or one whole set of model-XXXXX-of-NNNNN",
            f"move those that are not the model out of the folder, or {fetch_again(files, INDEX)}",
        )
    if missing := sorted(expected - set(shards)):
        raise BadCheckpoint(
            f"{files.origin}: found {len(shards)} of {int(total)} shards, missing {_few(missing)}",
            fetch_again(files, *missing),
        )


def _refuse_other_formats(files: Files, sizes: Mapping[str, int]) -> NoReturn:
    pickles = [name for name in sizes if fnmatchcase(name, "pytorch_model*.bin")]
    others = [name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5"))]
    for name in pickles:
        refuse_pointer(files, name, read_at(files, name, 0, min(sizes[name], len(LFS_POINTER))))
    hint = "write it with transformers: model.save_pretrained(FOLDER)"
    if pickles:
        folder = quote(files.origin) if isinstance(files, LocalFiles) else "FOLDER"
        hint = f"convert them (executes no code from them): cd {folder} && python -c '{_CONVERT}'"
    found = f"only {_few(pickles or others)}" if others else "no weights"
    raise BadCheckpoint(f"{files.origin}: found {found}, expected safetensors files", hint)


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
