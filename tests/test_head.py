"""The head: which tensor it is, and tie flags that must tell the truth about it."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tensors, llama_config, llama_tensors, random, write

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.errors import BadPlan
from quantize.plan import Options, Plan
from quantize.prepare import prepare_target

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def make(path: Path, extra: Tensors | None = None, lost: str = "", **changes: Any) -> Checkpoint:
    config = llama_config(num_hidden_layers=1) | changes
    tied = llama_config(num_hidden_layers=1, tie_word_embeddings=True)
    tensors = llama_tensors(tied) | (extra or {})
    return open_checkpoint(
        str(write(path / "model", config, {n: t for n, t in tensors.items() if n != lost}))
    )


def plan(source: Checkpoint, *, compare: bool = True, **options: Any) -> Plan:
    return prepare_target(source, Options("mxfp4", **options), compare=compare).plan


def refuse(source: Checkpoint, *words: str, compare: bool = True) -> str:
    with pytest.raises(BadPlan) as caught:
        plan(source, compare=compare)
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert caught.value.hint
    return caught.value.hint


def embedding() -> torch.Tensor:
    return llama_tensors(llama_config(num_hidden_layers=1))[EMBEDDING]


def other_head() -> Tensors:
    return {HEAD: random(128, 64, seed=77)}


TEXT = {"tie_word_embeddings": True}


def test_a_tied_model_gets_no_head(tmp_path: Path) -> None:
    made = plan(make(tmp_path, tie_word_embeddings=True))
    assert HEAD not in made.stored
    assert made.stored[EMBEDDING].dtype == "BF16"
    assert made.quantization_config is not None
    assert "lm_head" in made.quantization_config["exclude"]


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    source = make(tmp_path, other_head(), tie_word_embeddings=False)
    made = plan(source)
    assert made.stored[HEAD] == source.specs[HEAD]


def test_a_tied_flag_beside_an_equal_head_is_kept_as_it_is(tmp_path: Path) -> None:
    made = plan(make(tmp_path, {HEAD: embedding()}, tie_word_embeddings=True))
    assert {HEAD, EMBEDDING} <= made.stored.keys()


def test_a_folder_that_is_called_like_the_fault_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = llama_config(num_hidden_layers=1, tie_word_embeddings=True)
    write(tmp_path / "tie", config, llama_tensors(config) | other_head())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadPlan) as caught:
        plan(open_checkpoint("tie"))
    assert caught.value.message.startswith("tie: config.json: tie_word_embeddings is true")


def test_a_tied_flag_beside_another_head_is_refused_naming_both(tmp_path: Path) -> None:
    source = make(tmp_path, other_head(), tie_word_embeddings=True)
    hint = refuse(source, "tie_word_embeddings is true", HEAD, EMBEDDING, "drop")
    assert '"tie_word_embeddings": false' in hint
    # Headers alone cannot tell, and the plan says so.
    (check,) = prepare_target(source, Options("mxfp4"), compare=False).checks
    assert check.status == "not_measured"


def test_one_flipped_bit_is_another_head(tmp_path: Path) -> None:
    head = embedding().clone()
    head.view(torch.int16)[-1, -1] ^= 1
    refuse(make(tmp_path, {HEAD: head}, tie_word_embeddings=True), HEAD)


@pytest.mark.parametrize("head", [random(96, 64), random(128, 64).float()])
def test_a_tied_flag_beside_a_head_of_another_form_is_refused_from_headers(
    tmp_path: Path, head: torch.Tensor
) -> None:
    source = make(tmp_path, {HEAD: head}, tie_word_embeddings=True)
    refuse(source, "tie_word_embeddings is true", HEAD, EMBEDDING, compare=False)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"tie_word_embeddings": False, "text_config": TEXT}, "text_config.tie_word_embeddings"),
        (
            {"tie_word_embeddings": False, "a": {"b": TEXT}},
            "a.b.tie_word_embeddings",
        ),
    ],
)
def test_a_flag_at_a_deeper_level_is_compared_too(
    tmp_path: Path, changes: dict[str, Any], path: str
) -> None:
    if "text_config" in changes:
        changes = changes | {"text_config": llama_config(num_hidden_layers=1) | TEXT}
    source = make(tmp_path, other_head(), **changes)
    hint = refuse(source, f"{path} is true", HEAD, EMBEDDING)
    assert path in hint


def test_levels_that_disagree_about_a_missing_head_are_refused(tmp_path: Path) -> None:
    nested = llama_config(num_hidden_layers=1, tie_word_embeddings=False)
    source = make(tmp_path, tie_word_embeddings=True, text_config=nested)
    hint = refuse(source, HEAD, "text_config.tie_word_embeddings: false")
    assert "every level" in hint
    (tmp_path / "agreed").mkdir()
    agreed = make(tmp_path / "agreed", tie_word_embeddings=True, text_config=nested | TEXT)
    assert HEAD not in plan(agreed).stored


@pytest.mark.parametrize("flag", [False, None])
def test_a_missing_head_without_a_tie_flag_is_refused(tmp_path: Path, flag: bool | None) -> None:
    source = make(tmp_path, tie_word_embeddings=flag)
    hint = refuse(source, HEAD, EMBEDDING)
    assert "tie_word_embeddings" in hint
    assert "shard" in hint


def test_no_flag_at_all_and_no_head_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path, tie_word_embeddings=True)
    del source.config["tie_word_embeddings"]
    refuse(source, HEAD, "no tie_word_embeddings flag")


@pytest.mark.parametrize("extra", [{}, other_head()])
def test_a_missing_embedding_is_refused(tmp_path: Path, extra: Tensors) -> None:
    refuse(make(tmp_path, extra, lost=EMBEDDING, tie_word_embeddings=True), EMBEDDING)


# The bytes, through a whole run


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cast_head_is_the_rounded_one_and_recorded(tmp_path: Path, dtype: torch.dtype) -> None:
    from click.testing import CliRunner
    from safetensors.torch import load_file

    from quantize.cli import cli

    head = random(128, 64, seed=4, dtype=torch.float32).to(dtype)
    source = make(tmp_path, {HEAD: head}, tie_word_embeddings=False)
    out = tmp_path / "out"
    before = digests(tmp_path / "model")
    arguments = ["run", str(tmp_path / "model"), "-o", str(out), "--scheme", "bf16", "--quiet"]
    with pytest.raises(BadPlan):
        CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert not out.exists()
    done = CliRunner().invoke(cli, [*arguments, "--cast-head"], catch_exceptions=False)
    assert done.exit_code == 0
    written = load_file(out / "model.safetensors")
    # torch's own rounding, to nearest even, as the IEEE conversion defines it.
    assert torch.equal(written[HEAD], head.to(torch.bfloat16))
    assert torch.equal(written[EMBEDDING], source.tensor(EMBEDDING))
    report = json.loads((out / "quantization_report.json").read_text())
    entry = next(item for item in report["plan"]["tensors"] if item["name"] == HEAD)
    assert str(dtype).endswith({"F16": "float16", "F32": "float32"}[entry["dtype"]])
    assert "cast" in entry["reason"]
    assert report["options"]["cast_head"] is True
    assert digests(tmp_path / "model") == before
