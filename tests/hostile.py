"""Checkpoints that are wrong on purpose: the edit of a good one, and what its refusal must say.

Those that concern the opener alone are in `broken`; these meet the whole command line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from broken import FIRST, INDEX, SECOND, Edit, fifo, raw, text
from safetensors.torch import load_file, save_file
from tiny import random

Words = tuple[str, ...]
Case = tuple[Edit, Words, Words]

WEIGHTS = "model.safetensors"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
AGAIN = ("hf download ORG/NAME model.safetensors --local-dir",)
CONFIG_AGAIN = ("hf download ORG/NAME config.json --local-dir",)
TEN_MB = 10_000_000
EMPTY = {"dtype": "BF16", "shape": [0, 64], "data_offsets": [0, 0]}


def config(**changes: Any) -> Edit:
    """Change some keys of config.json; None removes one."""

    def edit(path: Path) -> None:
        values = json.loads((path / "config.json").read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (path / "config.json").write_text(json.dumps(kept))

    return edit


def config_text(more: str) -> Edit:
    """Add text before the last brace of config.json."""

    def edit(path: Path) -> None:
        whole = (path / "config.json").read_text().rstrip()
        (path / "config.json").write_text(whole[:-1] + more + "}")

    return edit


def entries(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change the header of model.safetensors and leave its data."""

    def edit(path: Path) -> None:
        data = (path / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        change(header)
        raw(path / WEIGHTS, header, data[end:])

    return edit


def field(name: str, **changes: Any) -> Edit:
    """Change fields of one tensor's header entry."""
    return entries(lambda header: header[name].update(changes))


def offsets(move: Callable[[int, int], list[Any]]) -> Edit:
    """Change the data_offsets of one weight."""
    return entries(lambda h: h[UP].update(data_offsets=move(*h[UP]["data_offsets"])))


def rename(new: str) -> Edit:
    """Give a norm another name."""
    return entries(lambda header: header.update({new: header.pop(NORM)}))


def tensors(**changes: torch.Tensor | None) -> Edit:
    """Replace, add or remove tensors; a dot in a name is written as two underscores."""

    def edit(path: Path) -> None:
        found = load_file(path / WEIGHTS)
        for name, tensor in changes.items():
            found.pop(name.replace("__", "."), None)
            if tensor is not None:
                found[name.replace("__", ".")] = tensor
        save_file(found, path / WEIGHTS)

    return edit


def poke(name: str, value: float, *index: int) -> Edit:
    """Set one element of a tensor."""

    def edit(path: Path) -> None:
        found = load_file(path / WEIGHTS)
        found[name][index] = value
        save_file(found, path / WEIGHTS)

    return edit


def sparse(name: str, size: int, start: bytes = b"") -> Edit:
    """A file of ``size`` bytes that takes no room on the disk."""

    def edit(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(start)
        os.truncate(path / name, size)

    return edit


def as_folder(name: str) -> Edit:
    """A folder in the place of a file."""
    return lambda path: ((path / name).unlink(missing_ok=True), (path / name).mkdir())


def link_out(name: str) -> Edit:
    """A link to a file beside the checkpoint's folder."""

    def edit(path: Path) -> None:
        target = path.parent / "secret"
        target.write_text("{}")
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(f"../{target.name}")

    return edit


def twice(key: str) -> Edit:
    """A header in which one tensor stands twice."""
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    whole = f"{{{json.dumps(key)}:{entry},{json.dumps(key)}:{entry}}}"
    return lambda path: raw(path / WEIGHTS, whole.encode())


def both(*edits: Edit) -> Edit:
    """Several edits, one after the other."""
    return lambda path: [edit(path) for edit in edits]


def weight_map(**changes: Any) -> Edit:
    """Change entries of the index; a dot in a name is written as two underscores."""

    def edit(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"] |= {name.replace("__", "."): to for name, to in changes.items()}
        (path / INDEX).write_text(json.dumps(index))

    return edit


def ids(*values: int) -> torch.Tensor:
    """``d2t`` for 64 draft ids: offset 64 everywhere, but for the first ones given."""
    return torch.tensor([*values, *[64] * (64 - len(values))])


@cache
def _watch() -> list[list[str]]:
    """What is being collected; cached, because an audit hook stays for good."""
    lists: list[list[str]] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if lists and event == "open" and isinstance(args[0], str | bytes):  # not a descriptor
            lists[-1].append(os.fsdecode(args[0]))

    sys.addaudithook(watch)
    return lists


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The paths that this process opens inside the block, as the interpreter reports them."""
    lists = _watch()
    lists.append([])
    try:
        yield lists[-1]
    finally:
        lists.pop()


DEEP = '{"a":' * 900 + "1" + "}" * 900

HEADER: dict[str, Case] = {
    "header of 2^63 bytes": (
        sparse(WEIGHTS, 1 << 42, (1 << 63).to_bytes(8, "little")),
        ("header length 9,223,372,036,854,775,808", "at most 100,000,000"),
        AGAIN,
    ),
    "header of 2^64 - 1 bytes": (
        lambda p: (p / WEIGHTS).write_bytes(b"\xff" * 64),
        ("18,446,744,073,709,551,615",),
        AGAIN,
    ),
    "header of zeros": (
        sparse(WEIGHTS, 1 << 42, (99_999_999).to_bytes(8, "little")),
        ("does not start with '{'",),
        AGAIN,
    ),
    "header of no bytes": (
        lambda p: (p / WEIGHTS).write_bytes(bytes(8) + b"{}"),
        ("'{'",),
        AGAIN,
    ),
    "header too deep": (
        lambda p: raw(p / WEIGHTS, b'{"a":' * 100_000),
        (WEIGHTS, "recursion"),
        AGAIN,
    ),
    "entry too deep": (
        lambda p: raw(p / WEIGHTS, b'{"t":' + DEEP.encode() + b"}"),
        (WEIGHTS, "'t'", "expected dtype, shape and data_offsets"),
        AGAIN,
    ),
    "a web page": (text(WEIGHTS, "<!DOCTYPE html><html>"), (WEIGHTS, "header length"), AGAIN),
    "a renamed pickle": (
        lambda p: torch.save({"a": torch.ones(9)}, p / WEIGHTS),
        (WEIGHTS, "header length"),
        AGAIN,
    ),
    "a number too long": (
        lambda p: raw(p / WEIGHTS, b'{"t":{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}"),
        (WEIGHTS, "4300 digits"),
        AGAIN,
    ),
    "a tensor's key of 10 MB twice": (twice("k" * TEN_MB), ("twice", "10,000,000"), AGAIN),
    "dtype unknown": (field(UP, dtype="BF17"), (UP, "'BF17'", "BF16"), AGAIN),
    "dtype of another vendor": (field(UP, dtype="F8_E4M3FNUZ"), (UP, "'F8_E4M3FNUZ'"), AGAIN),
    "shape negative": (field(UP, shape=[-128, -64]), (UP, "[-128, -64]"), AGAIN),
    "shape of 2^63 elements": (field(UP, shape=[1 << 62, 2]), (UP, "2^40"), AGAIN),
    "shape of 2^62 empty rows": (
        entries(lambda h: h.update(e={"dtype": "F32", "shape": [1 << 62, 0],
                                      "data_offsets": [0, 0]})),
        ("'e'", "[4611686018427387904, 0]", "2^40"),
        AGAIN,
    ),
    "shape of another size": (field(UP, shape=[128, 65]), (UP, "16,384", "16,640"), AGAIN),
    "offsets reversed": (offsets(lambda b, e: [e, b]), (UP, "begin <= end"), AGAIN),
    "offsets negative": (offsets(lambda b, e: [-1, e - b - 1]), (UP, "begin <= end"), AGAIN),
    "offsets beyond the file": (
        offsets(lambda b, e: [b + (1 << 40), e + (1 << 40)]),
        ("hole",),
        AGAIN,
    ),
    "offsets of 2^63": (
        offsets(lambda b, e: [(1 << 63) + b, (1 << 63) + e]),
        (UP, "begin <= end"),
        AGAIN,
    ),
    "offsets shifted": (offsets(lambda b, e: [b + 2, e + 2]), ("expected", "it"), AGAIN),
    "offsets shared": (
        entries(lambda h: h.update(alias=dict(h[UP]))),
        ("'alias'", f"overlaps '{UP}'"),
        AGAIN,
    ),
    "offsets as text": (offsets(lambda b, e: [str(b), str(e)]), (UP, "data_offsets"), AGAIN),
    "offsets as fractions": (offsets(lambda b, e: [float(b), float(e)]), (UP, "begin"), AGAIN),
    "a field too many": (field(UP, strides=[64, 1]), (UP, "expected dtype, shape"), AGAIN),
    "metadata nested": (
        entries(lambda h: h.update(__metadata__={"a": {"b": "c"}})),
        ("__metadata__", "object of strings"),
        AGAIN,
    ),
    "last byte missing": (
        lambda p: os.truncate(p / WEIGHTS, (p / WEIGHTS).stat().st_size - 1),
        (WEIGHTS, "truncated"),
        AGAIN,
    ),
}  # fmt: skip
"""Of the file model.safetensors."""

NAMES: dict[str, Case] = {
    "name with a line break": (rename("a\nb"), ("'a\\nb'", "printable ASCII"), AGAIN),
    "name with NUL": (rename("a\0b"), ("'a\\x00b'", "printable ASCII"), AGAIN),
    "name with an escape sequence": (rename("\x1b[2Ja"), ("'\\x1b[2Ja'",), AGAIN),
    "name that is empty": (rename(""), ("the tensor name ''",), AGAIN),
    "name of 10 MB": (rename("n" * TEN_MB), ("'nnnn", "(10,000,000 characters)"), AGAIN),
    "name with another script's digit": (
        rename("model.layers.\u0660.mlp.up_proj.weight"),
        ("\\u0660", "printable ASCII"),
        AGAIN,
    ),
    "name written from right to left": (rename("a\u202eb"), ("\\u202e",), AGAIN),
    "name with a lone surrogate": (rename("a\ud800"), ("surrogate",), AGAIN),
    "name that is a path upwards": (
        rename("../../../etc/cron.d/x"),
        ("no role for ../../../etc/cron.d/x",),
        ("models/",),
    ),
    "name that is a path": (rename("/etc/cron.d/x"), ("no role for /etc/cron.d/x",), ("models/",)),
    "layer number of 400 digits": (
        entries(lambda h: h.update({f"model.layers.{'9' * 400}.mlp.up_proj.weight": EMPTY})),
        ("num_hidden_layers is 1, found tensors of 2 layers",),
        (),
    ),
}

CONFIG: dict[str, Case] = {
    "config empty": (text("config.json", ""), ("config.json", "Expecting value"), CONFIG_AGAIN),
    "config with NaN": (config_text(', "x": NaN'), ("config.json", "NaN"), CONFIG_AGAIN),
    "config with a byte order mark": (
        lambda p: (p / "config.json").write_bytes(
            b"\xef\xbb\xbf" + (p / "config.json").read_bytes()
        ),
        ("config.json", "byte order mark"),
        ("sed -i",),
    ),
    "config in UTF-16": (
        lambda p: (p / "config.json").write_text("{}", encoding="utf-16"),
        ("config.json", "utf-8"),
        CONFIG_AGAIN,
    ),
    "config with a lone surrogate": (
        config_text(', "x": "\\uDBFF"'),
        ("config.json", "surrogate"),
        CONFIG_AGAIN,
    ),
    "config with 900 levels": (
        config_text(f', "x": {DEEP}'),
        ("config.json", "more than 64 levels"),
        CONFIG_AGAIN,
    ),
    "config of 4 TB": (
        sparse("config.json", 1 << 42),
        ("config.json", "4,398,046,511,104 bytes", "at most 100,000,000"),
        CONFIG_AGAIN,
    ),
    "config with a key twice": (
        config_text(', "vocab_size": 9'),
        ("config.json", "'vocab_size' twice"),
        CONFIG_AGAIN,
    ),
    "config a folder": (as_folder("config.json"), ("found no config.json",), CONFIG_AGAIN),
    "config elsewhere": (
        link_out("config.json"),
        ("config.json", "leaves the checkpoint folder"),
        ("cp --remove-destination",),
    ),
    "layers 10^9": (config(num_hidden_layers=10**9), ("num_hidden_layers is 1000000000",), ()),
    "layers 2, one stored": (config(num_hidden_layers=2), ("num_hidden_layers is 2",), ()),
    "layers negative": (config(num_hidden_layers=-1), ("num_hidden_layers is -1",), ()),
    "layers a fraction": (config(num_hidden_layers=1.0), ("num_hidden_layers is 1.0",), ()),
    "layers true": (config(num_hidden_layers=True), ("num_hidden_layers is True",), ()),
    "layers infinite": (
        both(config(num_hidden_layers=None), config_text(', "num_hidden_layers": Infinity')),
        ("num_hidden_layers is inf",),
        (),
    ),
    "no architecture": (config(architectures=None), ("architectures is None",), ("class",)),
    "two architectures": (
        config(architectures=["LlamaForCausalLM", "Qwen2ForCausalLM"]),
        ("architectures is ['LlamaForCausalLM', 'Qwen2ForCausalLM']",),
        ("class",),
    ),
    "architecture a number": (config(architectures=[7]), ("architectures is [7]",), ()),
    "tie flag a text": (
        config(tie_word_embeddings="false"),
        ("tie_word_embeddings is 'false'", "true or false"),
        ('"tie_word_embeddings": false',),
    ),
    "tie flags that disagree": (
        config(tie_word_embeddings=True, text_config={"tie_word_embeddings": False,
                                                      "num_hidden_layers": 1}),
        ("tie_word_embeddings is true and text_config.tie_word_embeddings is false", HEAD),
        ('set "tie_word_embeddings": false in config.json (tie_word_embeddings)',),
    ),
    "not tied, no head": (
        tensors(lm_head__weight=None),
        (f"no {HEAD}", "tie_word_embeddings: false"),
        ("at every level", "shard"),
    ),
    "no embedding": (
        tensors(model__embed_tokens__weight=None),
        (EMBEDDING,),
        ("incomplete",),
    ),
}  # fmt: skip

SHARDS: dict[str, Case] = {
    "index names a path upwards": (
        weight_map(evil="../secret.safetensors"),
        (INDEX, "'evil'", "'../secret.safetensors'"),
        ("weight_map",),
    ),
    "index names the root": (
        weight_map(evil="/etc/x.safetensors"),
        (INDEX, "'/etc/x.safetensors'"),
        ("weight_map",),
    ),
    "index names no weights": (weight_map(evil="config.json"), (INDEX, "'config.json'"), ()),
    "index names a folder": (
        both(lambda p: (p / "d.safetensors").mkdir(), weight_map(evil="d.safetensors")),
        (INDEX, "d.safetensors", "missing from the folder"),
        (),
    ),
    "index names a place of 10 MB": (
        weight_map(evil="x" * TEN_MB + ".safetensors"),
        (INDEX, "'xxxx", "(10,000,012 characters)"),
        ("weight_map",),
    ),
    "index names a place with an escape sequence": (
        weight_map(evil="\x1b]0;x\x07.safetensors"),
        (INDEX, "'\\x1b]0;x\\x07.safetensors'"),
        ("weight_map",),
    ),
    "index with a tensor name of 10 MB": (
        weight_map(**{"n" * TEN_MB: FIRST}),
        (INDEX, "(10,000,000 characters)"),
        (),
    ),
    "index with a lone surrogate": (weight_map(**{"a\ud800": FIRST}), (INDEX, "surrogate"), ()),
    "index too deep": (
        text(INDEX, f'{{"weight_map": {{"a": {DEEP}}}}}'),
        (INDEX, "more than 64 levels"),
        (),
    ),
    "index of 4 TB": (sparse(INDEX, 1 << 42), (INDEX, "at most 100,000,000"), ()),
    "index a pipe": (fifo(INDEX), (INDEX, "regular file"), ("ls -l",)),
    "index empty": (text(INDEX, '{"weight_map": {}}'), (INDEX, "weight_map"), ()),
    "index of 1000 absent shards": (
        weight_map(**{f"t{n}": f"s{n}.safetensors" for n in range(1000)}),
        (INDEX, "s0.safetensors, s1.safetensors, s10.safetensors and 997 more"),
        (),
    ),
    "index in other letters": (
        weight_map(model__norm__weight=SECOND.upper().replace("SAFETENSORS", "safetensors")),
        (INDEX, "MODEL-00002-OF-00002.safetensors", "missing"),
        (),
    ),
    "shard a pipe": (fifo(SECOND), (SECOND, "regular file"), ("ls -l",)),
    "shard elsewhere": (
        link_out(SECOND),
        (SECOND, "leaves the checkpoint folder"),
        ("cp --remove-destination",),
    ),
    "shard a device": (
        lambda p: ((p / SECOND).unlink(), (p / SECOND).symlink_to("/dev/zero")),
        (SECOND, "leaves the checkpoint folder (to /dev/zero)"),
        (),
    ),
    "shard cut in half": (
        lambda p: os.truncate(p / SECOND, (p / SECOND).stat().st_size // 2),
        (SECOND, "truncated"),
        (f"hf download ORG/NAME {SECOND}",),
    ),
    "the same shard twice": (
        lambda p: shutil.copy(p / FIRST, p / SECOND),
        ("two shards", FIRST, SECOND),
        ("move",),
    ),
    "tokenizer elsewhere": (
        link_out("tokenizer.json"),
        ("tokenizer.json", "leaves the checkpoint folder"),
        (),
    ),
    "tokenizer of 4 TB": (
        sparse("tokenizer.json", 1 << 42),
        ("tokenizer.json", "4,398,046,511,104 bytes", "at most 1,000,000,000"),
        ("move it out",),
    ),
    "file name that is no text": (
        lambda p: Path(os.fsdecode(os.fsencode(p) + b"/tokenizer\xff.json")).touch(),
        ("'tokenizer\\udcff.json'", "printable"),
        ("rename",),
    ),
    "file name with an escape sequence": (
        lambda p: (p / "tokenizer\x1b[2J.json").touch(),
        ("'tokenizer\\x1b[2J.json'", "printable"),
        ("rename",),
    ),
}
"""Of a checkpoint of two shards with an index."""

RUN: dict[str, Case] = {
    "a weight NaN": (
        poke(UP, float("nan"), 3, 5),
        (f"{UP}[3, 5] is nan", "finite"),
        ("good copy",),
    ),
    "a norm infinite": (poke(NORM, float("inf"), 9), (f"{NORM}[9] is inf",), ("good copy",)),
    "the head infinite": (
        poke(HEAD, float("-inf"), 127, 63),
        (f"{HEAD}[127, 63] is -inf",),
        ("good copy",),
    ),
    "tied, another head": (
        config(tie_word_embeddings=True),
        ("tie_word_embeddings is true", HEAD, EMBEDDING),
        ('"tie_word_embeddings": false',),
    ),
    "head in F32": (
        tensors(lm_head__weight=random(128, 64, dtype=torch.float32)),
        (HEAD, "F32", "expected BF16"),
        ("--cast-head",),
    ),
}
"""What only the weights tell: `plan` reads headers alone."""

OWN_HEAD = tensors(lm_head__weight=random(128, 64, seed=7))


def pruned(d2t: torch.Tensor | None, **more: torch.Tensor | None) -> Edit:
    """A draft of 64 ids with a head of its own."""
    head = random(64, 64, seed=8)
    return both(tensors(lm_head__weight=head, d2t=d2t, **more), config(draft_vocab_size=64))


DRAFT: dict[str, Case] = {
    "pruned without a head": (
        both(config(draft_vocab_size=64), tensors(d2t=ids())),
        ("shared head", "no lm_head and draft_vocab_size 64", "full vocabulary 128"),
        ("first rows", "wrong ids"),
    ),
    "pruned without d2t": (pruned(None), ("no d2t, and 64 of 128 ids",), ("repair d2t",)),
    "d2t beyond the vocabulary": (pruned(ids(200)), ("target ids", "outside 0 to 127"), ("d2t",)),
    "d2t before the vocabulary": (pruned(ids(-1)), ("ids -1 to 127",), ("d2t",)),
    "d2t that overflows": (pruned(ids(64, 2**63 - 1)), ("outside 0 to 127",), ("d2t",)),
    "d2t with one id twice": (pruned(ids(65)), ("two draft ids to one",), ("d2t",)),
    "d2t of target ids": (pruned(torch.arange(64, 128)), ("absolute target ids",), ("offset",)),
    "d2t in F32": (pruned(ids().float()), ("d2t is F32 [64]", "I64 [64]"), ("d2t",)),
    "d2t in I32": (pruned(ids().int()), ("d2t is I32 [64]", "I64 [64]"), ("d2t",)),
    "d2t too short": (pruned(ids()[:-1]), ("d2t is I64 [63]", "I64 [64]"), ("d2t",)),
    "t2d that marks others": (
        pruned(ids(), t2d=torch.arange(128) < 64),
        ("t2d marks other target ids",),
        ("d2t",),
    ),
    "d2t beside a full vocabulary": (
        tensors(d2t=torch.ones(128, dtype=torch.int64)),
        ("d2t that is not the identity",),
        ("d2t",),
    ),
    "vocabulary of 10^12": (
        config(draft_vocab_size=10**12, vocab_size=10**12),
        ("vocab_size 1000000000000",),
        ("another target",),
    ),
    "tied as its target was": (
        both(OWN_HEAD, config(tie_word_embeddings=True)),
        ("tie flag", "tie_word_embeddings is true", "differs from model.embed_tokens.weight"),
        ('"tie_word_embeddings": false in the draft',),
    ),
    "tie flag a number": (config(tie_word_embeddings=1), ("tie_word_embeddings is '1'",), ()),
    "eagle_config a text": (config(eagle_config="x"), ("eagle_config 'x'", "an object"), ()),
    "layers a text": (
        config(eagle_aux_hidden_state_layer_ids="2,4,5"),
        ("eagle_aux_hidden_state_layer_ids '2,4,5'", "a list of layer numbers"),
        (),
    ),
    "layers of texts": (
        config(eagle_config={"eagle_aux_hidden_state_layer_ids": ["2", "4", "5"]}),
        ("eagle_aux_hidden_state_layer_ids", "a list of layer numbers"),
        (),
    ),
    "a million layers": (
        config(eagle_aux_hidden_state_layer_ids=[1] * 10**6),
        ("eagle_aux_hidden_state_layer_ids", "at most 64 layers"),
        (),
    ),
    "10^9 states": (
        config(num_aux_hidden_states=10**9, fc_norm=True),
        ("num_aux_hidden_states 1000000000", "at most 64"),
        (),
    ),
    "states a text": (config(num_aux_hidden_states="3"), ("num_aux_hidden_states '3'",), ()),
    "hidden_size true": (config(hidden_size=True), ("hidden_size True", "a number"), ()),
    "hidden_size missing": (config(hidden_size=None), ("hidden_size None", "a number"), ()),
    "fc with one dimension": (tensors(fc__weight=random(64)), ("fc [64]", "3 x 64"), ()),
    "embedding of another vocabulary": (
        tensors(embed_tokens__weight=random(64, 64)),
        ("embed_tokens.weight [64, 64]", "[128, 64]"),
        ("another target",),
    ),
    "a target in its place": (
        lambda p: (shutil.rmtree(p), shutil.copytree(p.parent / "target", p)),
        ("is not a draft", "LlamaForCausalLM"),
        ("target first",),
    ),
}  # fmt: skip
"""Of an EAGLE-3 draft beside its good target."""
