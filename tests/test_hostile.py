"""Hostile checkpoints meet the command line: one message, one hint, nothing touched or written."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from broken import FIRST, INDEX, SECOND, Edit
from hostile import (
    CONFIG,
    DRAFT,
    HEADER,
    NAMES,
    RUN,
    SHARDS,
    UP,
    WEIGHTS,
    Case,
    both,
    config,
    opened_files,
    pruned,
)
from runs import run
from safetensors.torch import load_file
from tiny import llama_config, llama_tensors, random, write, write_draft, write_llama

from quantize.checkpoint import open_checkpoint
from quantize.cli import main
from quantize.errors import BadCheckpoint

LONGEST = 2000
"""Characters that a refusal may take, whatever the checkpoint says."""


def call(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The command as the console script runs it: exit code, stdout, stderr."""
    before, sys.argv = sys.argv, ["quantize", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as caught:
            main()
    finally:
        sys.argv = before
    return caught.value.code, *capsys.readouterr()  # type: ignore[return-value]


def refused(
    case: Case, *arguments: str | Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """Assert the refusal of one case; its message."""
    _, in_message, in_hint = case
    code, stdout, stderr = call(*arguments, "--json", "--quiet", capsys=capsys)
    assert code == 1, stderr
    error, _, hint = stderr.removesuffix("\n").partition("\nhint: ")
    assert error.startswith("error: ")
    assert stderr.replace("\n", "").isprintable(), repr(stderr)
    assert error.count("\n") == 0
    assert len(stderr) < LONGEST
    for word in in_message:
        assert word in error, error
    assert hint
    for word in in_hint:
        assert word in hint, hint
    answer = json.loads(stdout)
    assert (answer["ok"], f"error: {answer['error']}", answer["hint"]) == (False, error, hint)
    assert not out.exists()
    return error


def tree(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """Kind, size, mtime and content of all that lies below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        small = path.is_file() and not path.is_symlink() and state.st_size < 1 << 30
        content = sha256(path.read_bytes()).hexdigest() if small else ""
        found[str(path)] = (state.st_mode, state.st_size, state.st_mtime_ns, content)
    return found


HEADERS = [HEADER, NAMES, CONFIG, SHARDS]


@pytest.mark.parametrize(
    ("shards", "case"),
    [(2 if table is SHARDS else 1, case) for table in HEADERS for case in table.values()],
    ids=[name for table in HEADERS for name in table],
)
def test_refused_from_headers(
    tmp_path: Path, shards: int, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_llama(tmp_path / "m", shards, num_hidden_layers=1), tmp_path / "out"
    assert call("plan", source, "--quiet", capsys=capsys)[0] == 0
    case[0](source)
    before = tree(tmp_path)
    said = refused(case, "plan", source, out=out, capsys=capsys)
    arguments = ("run", source, "-o", out, "--scheme", "bf16")
    assert refused(case, *arguments, out=out, capsys=capsys) == said
    assert str(source) in said
    assert tree(tmp_path) == before


@pytest.mark.parametrize("case", RUN.values(), ids=RUN)
def test_refused_from_weights(
    tmp_path: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_llama(tmp_path / "m", num_hidden_layers=1), tmp_path / "out"
    case[0](source)
    before = tree(source)
    said = refused(case, "run", source, "-o", out, "--scheme", "bf16", out=out, capsys=capsys)
    assert str(source) in said
    assert tree(source) == before


@pytest.mark.parametrize("case", DRAFT.values(), ids=DRAFT)
def test_refused_beside_its_target(
    tmp_path: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_llama(tmp_path / "target"), write_draft(tmp_path / "draft")
    out = tmp_path / "out"
    assert call("plan", target, "--draft", draft, "--quiet", capsys=capsys)[0] == 0
    case[0](draft)
    before = tree(tmp_path)
    arguments = ("--scheme", "bf16", "--draft-scheme", "bf16")
    said = refused(case, "pair", target, draft, "-o", out, *arguments, out=out, capsys=capsys)
    assert str(draft) in said
    assert tree(tmp_path) == before


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without the superuser's right to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("config.json", 0, "config.json: cannot be read (Permission denied)"),
        ("model.safetensors", 0, "model.safetensors: cannot be read (Permission denied)"),
        (".", 0o444, "the folder cannot be listed (Permission denied)"),
        (".", 0o111, "the folder cannot be listed (Permission denied)"),
    ],
)
def test_what_may_not_be_read_is_named(name: str, mode: int, words: str) -> None:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        source = write_llama(Path(folder) / "m", num_hidden_layers=1)
        (source / name).chmod(mode)
        with unprivileged(), pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(str(source))
        (source / name).chmod(0o755)
    assert words in caught.value.message
    assert "ls -l" in caught.value.hint


# What looks wrong and is right: read by safetensors, the output holds the same.


def same_tensors(left: Path, right: Path) -> bool:
    """Whether safetensors reads the same names, dtypes and bits from two single files."""
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def test_a_folder_below_is_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m", num_hidden_layers=1)
    write(source / "original", llama_config(), {"tok_embeddings.weight": random(9, 9)}, index=True)
    with opened_files() as opened:
        run(source, tmp_path / "out", "bf16")
    assert str(source / WEIGHTS) in opened
    assert not [name for name in opened if name.startswith(str(source / "original"))]
    assert same_tensors(tmp_path / "out" / WEIGHTS, source / WEIGHTS)
    assert not (tmp_path / "out" / "original").exists()


@pytest.mark.parametrize("total", [0, -1, 10**30, "many", None])
def test_a_wrong_total_size_is_not_passed_on(tmp_path: Path, total: object) -> None:
    source = write_llama(tmp_path / "m", 2, num_hidden_layers=1)
    index = json.loads((source / INDEX).read_text())
    right = index["metadata"]["total_size"]
    index["metadata"]["total_size"] = total
    (source / INDEX).write_text(json.dumps(index))
    run(source, tmp_path / "out", "bf16", max_shard_size=60_000)
    written = json.loads((tmp_path / "out" / INDEX).read_text())
    assert written["metadata"]["total_size"] == right
    assert len(set(written["weight_map"].values())) > 1


def test_a_stale_index_is_read_past_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_llama(tmp_path / "m", num_hidden_layers=1), tmp_path / "out"
    (source / INDEX).write_text(json.dumps({"weight_map": {"old": FIRST}}))
    arguments = ("run", source, "-o", out, "--scheme", "bf16", "--quiet")
    code, _, stderr = call(*arguments, capsys=capsys)
    assert code == 1
    assert "the index looks stale" in stderr
    assert "--ignore-index" in stderr
    assert call(*arguments, "--ignore-index", capsys=capsys)[0] == 0
    assert same_tensors(out / WEIGHTS, source / WEIGHTS)


def test_shards_whose_names_differ_in_their_case_are_two(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m", 2, num_hidden_layers=1)
    parts = {name: load_file(source / name) for name in (FIRST, SECOND)}
    (source / FIRST).rename(source / "part.safetensors")
    (source / SECOND).rename(source / "PART.safetensors")
    if len(list(source.iterdir())) < 4:
        pytest.skip("this disk does not tell the case of names apart")
    places = {FIRST: "part.safetensors", SECOND: "PART.safetensors"}
    index = {name: places[shard] for shard, part in parts.items() for name in part}
    (source / INDEX).write_text(json.dumps({"weight_map": index}))
    run(source, tmp_path / "out", "bf16")
    out = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(out[n], t) for part in parts.values() for n, t in part.items())


@pytest.mark.parametrize("place", ["blobs", "inside"])
def test_links_of_the_hub_cache_and_within_the_folder(tmp_path: Path, place: str) -> None:
    source = write_llama(tmp_path / "m", num_hidden_layers=1)
    snapshot = tmp_path / "models--o--n" / "snapshots" / "0123"
    store = tmp_path / "models--o--n" / "blobs" if place == "blobs" else snapshot / "files"
    snapshot.mkdir(parents=True)
    store.mkdir()
    for file in source.iterdir():
        shutil.copy(file, store / f"{file.name}-blob")
        (snapshot / file.name).symlink_to(os.path.relpath(store / f"{file.name}-blob", snapshot))
    run(snapshot, tmp_path / "out", "bf16")
    assert same_tensors(tmp_path / "out" / WEIGHTS, source / WEIGHTS)
    assert not (tmp_path / "out" / WEIGHTS).is_symlink()


def test_a_config_keeps_what_it_says(tmp_path: Path) -> None:
    """Both spellings of RoPE side by side, Infinity, and texts in any script."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}
    odd = {
        "rope_theta": 5e5,
        "rope_scaling": scaling,
        "limit": [0.0, float("inf")],
        "é": "\U0001f600",
    }
    source = write_llama(tmp_path / "m", num_hidden_layers=1, **odd)
    run(source, tmp_path / "out", "bf16")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(written.items()) == list(json.loads((source / "config.json").read_text()).items())
    assert odd.items() <= written.items()


PREFIX = torch.zeros(64, dtype=torch.int64)
SHUFFLED = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:64]


@pytest.mark.parametrize(
    "edit",
    [
        config(draft_vocab_size=None),
        pruned(PREFIX, t2d=torch.arange(128) < 64),
        pruned(PREFIX),
        pruned(SHUFFLED - torch.arange(64)),
        both(config(tie_word_embeddings=True)),
    ],
    ids=["full vocabulary, no d2t", "first ids", "first ids, no t2d", "unsorted", "tied, no head"],
)
def test_drafts_that_vllm_reads_right(
    tmp_path: Path, edit: Edit, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_llama(tmp_path / "target"), write_draft(tmp_path / "draft")
    edit(draft)
    schemes = ("--scheme", "bf16", "--draft-scheme", "bf16")
    arguments = ("pair", target, draft, "-o", tmp_path / "out", *schemes, "--quiet")
    code, _, stderr = call(*arguments, capsys=capsys)
    assert code == 0, stderr
    assert same_tensors(tmp_path / "out" / "draft" / WEIGHTS, draft / WEIGHTS)


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8_rowwise"])
def test_zero_rows_blocks_and_layers(tmp_path: Path, scheme: str) -> None:
    """A pruned feature, a dead block, an expert never trained: all pass, and read as zeros."""
    weights = llama_tensors(llama_config(num_hidden_layers=1))
    weights[UP][5] = 0
    weights[UP][9, 32:] = 0
    weights["model.layers.0.mlp.down_proj.weight"].zero_()
    source = write(tmp_path / "m", llama_config(num_hidden_layers=1), weights)
    report = run(source, tmp_path / "out", scheme)
    assert {check.status for check in report.checks} == {"pass"}
    stored = load_file(tmp_path / "out" / WEIGHTS)
    down = stored["model.layers.0.mlp.down_proj.weight"]
    assert not down.view(torch.uint8).any()
    assert not stored[UP].view(torch.uint8)[5].any()
    assert not stored[UP].view(torch.uint8)[9, 16 if scheme == "mxfp4" else 32 :].any()
    assert bool(stored["model.layers.0.mlp.down_proj.weight_scale"].float().isfinite().all())
