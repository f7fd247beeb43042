"""Small checkpoints, and every way to break them: the edit, and what a refusal must name."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import write

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

Edit = Callable[[Path], object]


def pair(path: Path) -> Path:
    """Two shards with an index: a and b in the first, c and d in the second."""
    tensors = {name: torch.arange(6.0).reshape(2, 3) + n for n, name in enumerate("abcd")}
    return write(path, {"model_type": "llama"}, tensors, shards=2)


def single(path: Path) -> Path:
    return write(path, {"model_type": "llama"}, {"a": torch.ones(2, 3), "b": torch.zeros(4)})


def raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int = -1) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length < 0 else length) + text + data)


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def edit_index(path: Path, **changes: str | None) -> None:
    index = json.loads((path / INDEX).read_text())
    weight_map = index["weight_map"] | changes
    index["weight_map"] = {name: shard for name, shard in weight_map.items() if shard}
    (path / INDEX).write_text(json.dumps(index))


def header(value: bytes | dict[str, Any], data: bytes = b"", length: int = -1) -> Edit:
    """An edit that replaces model.safetensors."""
    return lambda path: raw(path / "model.safetensors", value, data, length)


def text(name: str, content: str) -> Edit:
    return lambda path: (path / name).write_text(content)


def chop(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1)


def trail(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"!")


def fifo(name: str) -> Edit:
    def edit(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return edit


def move_out(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "elsewhere")
    (path / "model.safetensors").symlink_to(path.parent / "elsewhere")


def dangle(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("nowhere")


def loop(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("model.safetensors")


SINGLE_FILE: dict[str, tuple[Edit, list[str], list[str]]] = {
    "no config": (
        lambda path: (path / "config.json").unlink(),
        ["config.json"],
        ["hf download ORG/NAME config.json --local-dir"],
    ),
    "config not JSON": (text("config.json", "{'a': 1}"), ["config.json", "line 1"], []),
    "config a list": (text("config.json", "[1]"), ["config.json", "list", "object"], []),
    "config key twice": (text("config.json", '{"x": {"k": 1, "k": 2}}'), ["'k' twice"], []),
    "config too deep": (text("config.json", '{"a":' + "[" * 100_000), ["config.json"], []),
    "config pointer": (text("config.json", POINTER), ["config.json", "LFS"], ["lfs pull"]),
    "config a pipe": (fifo("config.json"), ["config.json", "regular file"], ["ls -l"]),
    "weights pointer": (
        text("model.safetensors", POINTER),
        ["model.safetensors", "LFS"],
        ["git -C ", "lfs pull"],
    ),
    "tokenizer pointer": (text("tokenizer.json", POINTER), ["tokenizer.json"], ["lfs pull"]),
    "tokenizer a pipe": (fifo("tokenizer.json"), ["tokenizer.json", "regular file"], []),
    "weights a pipe": (fifo("model.safetensors"), ["model.safetensors", "regular file"], []),
    "link out": (move_out, ["model.safetensors", "elsewhere"], ["cp --remove-destination"]),
    "link to nowhere": (dangle, ["model.safetensors", "No such file"], ["ls -lL"]),
    "link to itself": (loop, ["model.safetensors", "cannot be read"], []),
    "empty": (text("model.safetensors", ""), ["model.safetensors", "0 bytes"], ["hf download"]),
    "length too large": (header(b"{}", length=100_000_001), ["100,000,001", "100,000,000"], []),
    "length past end": (header(b"{}", length=99), ["99", "truncated"], ["hf download"]),
    "not JSON": (header(b"{'a'}"), ["model.safetensors", "line 1"], []),
    "not an object": (header(b"[]"), ["model.safetensors", "'{'"], []),
    "blank before": (header(b" {}"), ["model.safetensors", "'{'"], []),
    "not UTF-8": (header(b'{"\xff":1}'), ["model.safetensors", "utf-8"], []),
    "lone surrogate": (header(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
                       ["surrogate"], []),
    "metadata": (header({"__metadata__": {"step": 1}}), ["__metadata__"], []),
    "no tensor": (header({}), ["no tensor", "model.safetensors"], []),
    "tensor twice": (
        header(b'{"t":%b,"t":%b}' % ((json.dumps(entry(0, 1, [1])).encode(),) * 2), b"x"),
        ["'t' twice"],
        [],
    ),
    "field missing": (header({"t": {"dtype": "U8", "shape": [1]}}), ["'t'", "data_offsets"], []),
    "entry a number": (header({"t": 5}), ["'t'", "5"], []),
    "sub-byte dtype": (header({"t": entry(0, 1, [2], "F4")}, b"x"), ["'t'", "'F4'", "BF16"], []),
    "dtype a list": (header({"t": entry(0, 1, [1], ["U8"])}, b"x"), ["'t'", "dtype"], []),
    "shape negative": (header({"t": entry(0, 1, [-1, -1])}, b"x"), ["'t'", "[-1, -1]"], []),
    "shape a float": (header({"t": entry(0, 1, [1.0])}, b"x"), ["'t'", "[1.0]"], []),
    "shape a bool": (header({"t": entry(0, 1, [True])}, b"x"), ["'t'", "[True]"], []),
    "shape overflows": (header({"t": entry(0, 0, [0, 2**62, 4])}), ["'t'", "shape"], []),
    "shape too long": (header({"t": entry(0, 0, [0, *[2**62] * 20_000])}), ["'t'", "shape"], []),
    "shape a number": (header({"t": {**entry(0, 1, []), "shape": 1}}, b"x"), ["'t'", "shape"], []),
    "ends before begin": (header({"t": entry(1, 0, [1])}, b"x"), ["'t'", "begin <= end"], []),
    "three offsets": (
        header({"t": {**entry(0, 1, [1]), "data_offsets": [0, 1, 2]}}, b"x"),
        ["'t'", "[0, 1, 2]"],
        [],
    ),
    "size of other dtype": (
        header({"t": entry(0, 4, [4], "BF16")}, b"1234"),
        ["'t'", "expected 8"],
        [],
    ),
    "overlap": (
        header({"s": entry(0, 2, [2]), "t": entry(1, 3, [2])}, b"123"),
        ["'t'", "overlaps 's'"],
        [],
    ),
    "hole": (
        header({"s": entry(0, 1, [1]), "t": entry(2, 3, [1])}, b"123"),
        ["'t'", "hole after 's'"],
        [],
    ),
    "hole before": (header({"t": entry(1, 2, [1])}, b"12"), ["'t'", "hole"], []),
    "truncated data": (chop, ["model.safetensors", "truncated", "'b'"], ["hf download"]),
    "trailing bytes": (trail, ["model.safetensors", "trailing", "'b'"], []),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        ["no weights", "safetensors"],
        ["save_pretrained"],
    ),
    "another file beside": (
        lambda path: save_file({"x": torch.ones(1)}, path / "mtp.safetensors"),
        ["mtp.safetensors", "model.safetensors", "no index"],
        [INDEX],
    ),
    "stale index, shards gone": (
        text(INDEX, json.dumps({"weight_map": {"a": FIRST, "b": SECOND}})),
        [INDEX, FIRST, "model.safetensors beside it is whole", "stale"],
        ["--ignore-index"],
    ),
    "stale index, tensor gone": (
        text(INDEX, json.dumps({"weight_map": dict.fromkeys("abz", "model.safetensors")})),
        [INDEX, "'z'", "model.safetensors beside it"],
        ["--ignore-index"],
    ),
}  # fmt: skip


def remove_index(path: Path) -> None:
    (path / INDEX).unlink()


def unnumbered(*lost: str) -> Edit:
    def edit(path: Path) -> None:
        remove_index(path)
        for name in lost:
            (path / name).unlink()

    return edit


def duplicate(path: Path) -> None:
    save_file({"c": torch.ones(1), "d": torch.ones(1), "a": torch.ones(1)}, path / SECOND)


TWO_SHARDS: dict[str, tuple[Edit, list[str], list[str]]] = {
    "shard missing": (
        lambda path: (path / SECOND).unlink(),
        [INDEX, SECOND, "'c'", "missing"],
        [f"hf download ORG/NAME {SECOND} --local-dir"],
    ),
    "shard lacks a tensor": (
        lambda path: edit_index(path, z=SECOND),
        [INDEX, "'z'", SECOND, "lacks"],
        [],
    ),
    "index omits a tensor": (lambda path: edit_index(path, d=None), [INDEX, "'d'", "omits"], []),
    "index names another shard": (
        lambda path: edit_index(path, d=FIRST),
        [INDEX, "'d'", FIRST, f"{SECOND} holds it"],
        [],
    ),
    "index omits a shard": (
        lambda path: edit_index(path, c=None, d=None),
        [INDEX, "omits", SECOND],
        [],
    ),
    "two shards, one tensor": (duplicate, ["'a'", FIRST, SECOND, "two shards"], ["move"]),
    "one file and an index": (
        lambda path: save_file({"x": torch.ones(1)}, path / "model.safetensors"),
        [INDEX, "omits model.safetensors"],
        ["--ignore-index", FIRST],
    ),
    "index pointer": (text(INDEX, POINTER), [INDEX, "LFS"], ["lfs pull"]),
    "index not JSON": (text(INDEX, "{"), [INDEX], []),
    "index without map": (text(INDEX, '{"weights": {}}'), [INDEX, "weight_map"], []),
    "index map a list": (text(INDEX, '{"weight_map": ["a"]}'), [INDEX, "weight_map"], []),
    "index map of numbers": (text(INDEX, '{"weight_map": {"a": 3}}'), [INDEX, "'a'", "'3'"], []),
    "index key twice": (
        text(INDEX, f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}'),
        [INDEX, "'a' twice"],
        [],
    ),
    "second shard only": (
        unnumbered(FIRST),
        ["1 of 2 shards", FIRST],
        [f"hf download ORG/NAME {FIRST}"],
    ),
    "no index, one more file": (
        lambda path: (remove_index(path), shutil.copy(path / FIRST, path / "extra.safetensors")),
        ["no index", "extra.safetensors"],
        ["move", INDEX],
    ),
    "no index, two sets": (
        lambda path: (
            remove_index(path),
            shutil.copy(path / FIRST, path / "model-00001-of-00003.safetensors"),
        ),
        ["no index", "model-00001-of-00003.safetensors"],
        ["move"],
    ),
}
for bad in ("../m/" + FIRST, "/etc/x.safetensors", "sub/x.safetensors", "..", "a\0.safetensors",
            "a\\b.safetensors", "", "pytorch_model.bin"):  # fmt: skip
    TWO_SHARDS[f"shard name {bad!r}"] = (
        text(INDEX, json.dumps({"weight_map": {"a": FIRST, "evil": bad}})),
        [INDEX, "'evil'", repr(bad)],
        ["weight_map"],
    )
