"""Writing: chunks, casts, damaged numbers, odd shapes, and files that others can load."""

from __future__ import annotations

import json
from collections import Counter
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from runs import draft_job, pair, read_header, read_tree, run, settings, target_job
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import (
    Tensors,
    draft_config,
    draft_tensors,
    llama_config,
    llama_tensors,
    random,
    write,
    write_llama,
)

from quantize import checkpoint
from quantize.checkpoint import Checkpoint
from quantize.compute import Compute
from quantize.errors import BadCheckpoint, BadOutput, BadPlan
from quantize.job import run_one
from quantize.prepare import Job
from schemes import find_scheme

if TYPE_CHECKING:
    from schemes.base import Bits, Stored

LAYER = "model.layers.0"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
SCHEMES = ("mxfp4", "fp8_rowwise")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target deep enough for a draft that looks at three of its layers."""
    return write_llama(tmp_path_factory.mktemp("eight") / "model")


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a folder, read by the safetensors package."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def write_changed(path: Path, tensors: Tensors) -> Path:
    """A tiny Llama with some tensors replaced or added."""
    config = llama_config(num_hidden_layers=2)
    return write(path, config, llama_tensors(config) | tensors)


# --- chunks


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("chunk", [1, 1000])
def test_bytes_do_not_depend_on_chunks(
    scheme: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one row, and of a few rows with a rest; the default takes whole tensors."""
    source = write_llama(tmp_path / "model", num_hidden_layers=1, intermediate_size=32)
    run(source, tmp_path / "whole", scheme)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", chunk)
    job = target_job(source, scheme)
    reads = count_reads(job, monkeypatch)
    run_one(job, tmp_path / "parts", settings(verify=False))
    assert reads[f"{LAYER}.self_attn.o_proj.weight"] == (64 if chunk == 1 else 10)
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")


def count_reads(job: Job, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the reads of every source tensor from now on."""
    reads: Counter[str] = Counter()
    original = Checkpoint.read

    def read(self: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        reads[name] += self is job.source.stored
        return original(self, name, start, stop)

    monkeypatch.setattr(Checkpoint, "read", read)
    return reads


def same_tensors(left: Path, right: Path) -> bool:
    """Whether two outputs hold the same tensors, in whatever order."""
    ours, theirs = tensors_of(left), tensors_of(right)
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype
        and torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))
        for name, tensor in ours.items()
    )


# --- engines, devices and workers


HERE = Compute("native", "cpu", 3)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "compute",
    [
        HERE,
        Compute("native", "cpu:0", 3),  # to torch a device as any other: the GPU's path
        Compute("quark", "cpu", 2),
        pytest.param(Compute("native", "cuda", 2), marks=GPU),
        pytest.param(Compute("quark", "cuda", 2), marks=GPU),
    ],
)
def test_bytes_do_not_depend_on_what_computes(
    scheme: str, compute: Compute, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "one", scheme, verify=False)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1000)
    run(source, tmp_path / "other", scheme, compute=compute)
    assert same_tensors(tmp_path / "one", tmp_path / "other")
    reports = [
        json.loads((tmp_path / name / "quantization_report.json").read_text())["provenance"]
        for name in ("one", "other")
    ]
    assert [report["engine"] for report in reports] == ["PairQuant's CPU kernels", compute.name]
    assert "Quark" in Compute("quark").name
    assert "torch" in Compute("native", "cuda").name


@GPU
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_definition_is_the_same_on_a_gpu(scheme: str) -> None:
    numbers = torch.arange(0x7F60).repeat(2).to(torch.int16).view(torch.bfloat16)
    numbers[0x7F60:] *= -1
    numbers = numbers[torch.randperm(len(numbers))].view(-1, 64)
    ours, theirs = (find_scheme(scheme).define(numbers.to(d)) for d in ("cpu", "cuda"))
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left.view(torch.uint8), right.cpu().view(torch.uint8))


@pytest.mark.parametrize("compute", [HERE, Compute("native", "cpu:0", 3), Compute("quark")])
def test_every_engine_names_the_first_damage(compute: Compute, tmp_path: Path) -> None:
    """The first in the order of tensors, whichever worker is ahead; and what no scheme holds."""
    good = llama_tensors(llama_config())
    damaged = {name: good[name].clone() for name in (UP, f"{LAYER}.self_attn.q_proj.weight")}
    for tensor in damaged.values():
        tensor[9, 5] = nan
    source = write_changed(tmp_path / "damaged", damaged)
    with pytest.raises(BadCheckpoint, match=r"0\.self_attn\.q_proj\.weight\[9, 5\] is nan"):
        run(source, tmp_path / "out", "mxfp4", compute=compute, restart=True)
    large = good[UP].clone()
    large[2, 3] = 3e38
    source = write_changed(tmp_path / "large", {UP: large})
    with pytest.raises(BadCheckpoint, match=r"3e\+38 overflows") as caught:
        run(source, tmp_path / "out", "mxfp4", compute=compute, restart=True)
    assert UP in caught.value.message
    assert "--exclude-layers" in caught.value.hint
    assert not (tmp_path / "out").exists()


# --- NaN and Inf


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize(
    ("name", "dtype", "index"),
    [
        (UP, torch.bfloat16, [0, 0]),
        (UP, torch.bfloat16, [127, 63]),
        (EMBEDDING, torch.bfloat16, [77, 5]),
        ("lm_head.weight", torch.bfloat16, [127, 0]),
        (NORM, torch.float32, [63]),
        (NORM, torch.bfloat16, [1]),
        (NORM, torch.float16, [0]),
    ],
)
def test_damaged_number_is_named(
    name: str, dtype: torch.dtype, index: list[int], value: float, tmp_path: Path
) -> None:
    tensor = llama_tensors(llama_config())[name].to(dtype)
    tensor[tuple(index)] = value
    tensor[(*index[:-1], -1)] = value  # a later one: the first must be named
    expect_damage(tmp_path, name, tensor, index, value)


@pytest.mark.parametrize("name", [UP, EMBEDDING, NORM])
def test_damage_in_a_later_chunk_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 16)
    tensor = llama_tensors(llama_config())[name]
    index = [size - 2 for size in tensor.shape]
    tensor[tuple(index)] = nan
    expect_damage(tmp_path, name, tensor, index, nan)


def expect_damage(
    tmp_path: Path, name: str, tensor: torch.Tensor, index: list[int], value: float
) -> None:
    source = write_changed(tmp_path / "model", {name: tensor})
    with pytest.raises(BadCheckpoint) as caught:
        run(source, tmp_path / "out", "fp8_rowwise")
    assert f"{name}{index} is {value}" in caught.value.message
    assert "model.safetensors" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_infinity_made_by_a_cast_is_refused(tmp_path: Path) -> None:
    """The largest float32 is finite and rounds to infinity in BF16."""
    for name, consent in ((UP, "cast_weights"), ("lm_head.weight", "cast_head")):
        tensor = llama_tensors(llama_config())[name].float()
        tensor[3, 4] = torch.finfo(torch.float32).max
        source = write_changed(tmp_path / consent, {name: tensor})
        job = target_job(source, "fp8_rowwise", **{consent: True})
        with pytest.raises(BadCheckpoint) as caught:
            run_one(job, tmp_path / f"{consent} out", settings(verify=False))
        assert f"{name}[3, 4] is inf when rounded to BF16" in caught.value.message
        assert not (tmp_path / f"{consent} out").exists()


# --- casts, by consent


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cast_weights_gives_the_bytes_of_rounded_weights(
    dtype: torch.dtype, scheme: str, tmp_path: Path
) -> None:
    wide = random(128, 64, seed=5, dtype=torch.float32).to(dtype)
    source = write_changed(tmp_path / "wide", {UP: wide})
    rounded = write_changed(tmp_path / "rounded", {UP: wide.to(torch.bfloat16)})
    with pytest.raises(BadPlan, match="expected BF16") as caught:
        run(source, tmp_path / "refused", scheme)
    assert UP in caught.value.message
    assert not list(tmp_path.glob("refused*"))
    run_one(target_job(source, scheme, cast_weights=True), tmp_path / "out", settings())
    run(rounded, tmp_path / "expected", scheme)
    assert same_tensors(tmp_path / "expected", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_cast_head_stores_the_rounded_head_and_records_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    wide = random(128, 64, seed=5, dtype=torch.float32).to(dtype)
    source = write_changed(tmp_path / "wide", {"lm_head.weight": wide})
    with pytest.raises(BadPlan) as caught:
        run(source, tmp_path / "refused", "bf16")
    assert "lm_head.weight" in caught.value.message
    assert "--cast-head" in caught.value.hint
    run_one(target_job(source, "bf16", cast_head=True), tmp_path / "out", settings())
    stored = tensors_of(tmp_path / "out")["lm_head.weight"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored, wide.to(torch.bfloat16))
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    (entry,) = (e for e in report["plan"]["tensors"] if e["name"] == "lm_head.weight")
    assert "cast" in entry["reason"]
    assert report["options"]["cast_head"] is True


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_preserved_tensors_keep_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    norm = random(64, seed=5, dtype=torch.float32).to(dtype)
    embedding = random(128, 64, seed=6, dtype=torch.float32).to(dtype)
    source = write_changed(tmp_path / "model", {NORM: norm, EMBEDDING: embedding})
    run(source, tmp_path / "out", "fp8_rowwise")
    stored = tensors_of(tmp_path / "out")
    for name, tensor in ((NORM, norm), (EMBEDDING, embedding)):
        assert stored[name].dtype == dtype
        assert torch.equal(stored[name], tensor)


# --- odd shapes


@pytest.mark.parametrize("scheme", ["bf16", *SCHEMES])
def test_empty_and_zero_dimensional_tensors_survive(scheme: str, tmp_path: Path) -> None:
    odd = {NORM: torch.tensor(1.5, dtype=torch.float32)} | {
        f"model.layers.{n}.mlp.up_proj.bias": torch.empty(0, 3, dtype=torch.bfloat16)
        for n in range(2)
    }
    run(write_changed(tmp_path / "model", odd), tmp_path / "out", scheme)
    stored = tensors_of(tmp_path / "out")
    for name, tensor in odd.items():
        assert (stored[name].dtype, stored[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(stored[name], tensor)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 64), (128, 0)])
def test_empty_weight_survives(scheme: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """A weight without rows or columns holds nothing to quantize; its layer stays loadable."""
    source = write_changed(tmp_path / "model", {UP: torch.empty(shape, dtype=torch.bfloat16)})
    run(source, tmp_path / "out", scheme)
    assert tensors_of(tmp_path / "out")[UP].numel() == 0


# --- what others load


@pytest.mark.parametrize("scheme", ["bf16", *SCHEMES])
def test_shards_load_and_stay_within_their_size(scheme: str, source: Path, tmp_path: Path) -> None:
    limit = 40_000
    run(source, tmp_path / "out", scheme, max_shard_size=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for file in files:
        assert file.stat().st_size <= limit
        with safe_open(file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            found |= {name: (file.name, shard.get_tensor(name)) for name in shard.keys()}  # noqa: SIM118
    assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in found.values())
    stored = json.loads((tmp_path / "out" / "quantization_report.json").read_text())["plan"]
    assert found.keys() == {spec["name"] for e in stored["tensors"] for spec in e["stored"]}


def test_one_shard_has_no_index(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", "bf16")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == [
        "model.safetensors"
    ]


def test_weight_and_scale_lie_in_one_shard(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", "fp8_rowwise", max_shard_size=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = index["weight_map"]
    scales = [name for name in files if name.endswith("_scale")]
    assert len(scales) == 14
    assert all(files[name] == files[name.removesuffix("_scale")] for name in scales)


def test_tensor_larger_than_a_shard_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BadPlan) as caught:
        run(source, tmp_path / "out", "bf16", max_shard_size=10_000)
    assert "lm_head.weight" in caught.value.message
    assert "--max-shard-size" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    """FP8 weights of an odd number of bytes would push what follows off its own size."""
    source = write_llama(
        tmp_path / "model", num_hidden_layers=1, hidden_size=33, intermediate_size=31
    )
    run(source, tmp_path / "out", "fp8_rowwise", verify=False)
    header, start = read_header(tmp_path / "out" / "model.safetensors")
    sizes = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    assert {entry["dtype"] for entry in entries} == set(sizes)
    assert any(entry["shape"] == [31, 33] for entry in entries)
    for entry in entries:
        assert (start + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0


def test_side_files_travel_and_stale_ones_do_not(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", num_hidden_layers=1)
    kept = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "generation_config.json": ""}
    stale = ("pytorch_model.bin", "hf_quant_config.json", "training_args.bin", "notes.txt")
    for name, text in kept.items():
        (source / name).write_text(text)
    for name in stale:
        (source / name).write_bytes(b"stale")
    run(source, tmp_path / "out", "bf16")
    out = tmp_path / "out"
    assert {name: (out / name).read_text() for name in kept} == kept
    assert not [name for name in stale if (out / name).exists()]


def test_pair_is_two_checkpoints_and_a_way_to_serve_them(eight: Path, tmp_path: Path) -> None:
    config = draft_config()
    draft = write(tmp_path / "draft", config, draft_tensors(config))
    pair(eight, draft, tmp_path / "pair", ("mxfp4", "fp8_rowwise"))
    names = {name for name in read_tree(tmp_path / "pair") if not name.endswith(".safetensors")}
    half = {"config.json", "quantization_report.json", "README.md"}
    assert names == {
        "report.json",
        "serve.sh",
        *(f"{name}/{file}" for name in ("target", "draft") for file in half),
    }
    run(eight, tmp_path / "alone", "mxfp4")
    run_one(draft_job(draft, eight, "fp8_rowwise"), tmp_path / "draft alone", settings())
    assert same_tensors(tmp_path / "alone", tmp_path / "pair" / "target")
    assert same_tensors(tmp_path / "draft alone", tmp_path / "pair" / "draft")


# --- what stops a run


@pytest.mark.parametrize("place", ["equal", "inside", "above", "linked"])
def test_out_may_not_touch_the_source(place: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "home" / "model", num_hidden_layers=1)
    (tmp_path / "link").symlink_to(source)
    out = {
        "equal": source,
        "inside": source / "out",
        "above": source.parent,
        "linked": tmp_path / "link" / "out",
    }[place]
    before = read_tree(tmp_path / "home")
    with pytest.raises(BadOutput, match="inside, above or equal"):
        run(source, out, "bf16")
    assert read_tree(tmp_path) == {f"home/{name}": data for name, data in before.items()} | {
        name: data for name, data in read_tree(tmp_path).items() if name.startswith("link")
    }


def test_out_may_not_hold_anything(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(BadOutput, match=r"mine\.txt"):
        run(source, tmp_path / "out", "bf16")
    assert read_tree(tmp_path) == {"out/mine.txt": b"mine"}


def test_out_may_not_be_named_like_unfinished_work(source: Path, tmp_path: Path) -> None:
    """Else one run could take the interrupted work of another for its own output."""
    state = tmp_path / "out.partial" / ".pairquant"
    state.mkdir(parents=True)
    (state / "checkpoint.journal").write_text("model.norm.weight\n")
    with pytest.raises(BadOutput, match="unfinished"):
        run(source, tmp_path / "out.partial", "bf16")
    assert (state / "checkpoint.journal").exists()


def test_empty_out_is_used(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run(source, tmp_path / "out", "bf16")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_no_verify_is_not_measured(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out", "bf16", verify=False)
    written = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert written["checks"] == report.to_json()["checks"]
    assert [check.name for check in report.checks if check.status != "not_measured"] == ["tie flag"]
    assert [check.name for check in report.unmeasured] == ["verify"]


def test_failed_check_leaves_the_partial_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheme that computes one wrong byte: the proof refuses it before OUT appears."""
    from schemes import fp8_rowwise

    right = fp8_rowwise.quantize_bits

    def wrong(bits: Bits) -> tuple[Stored, ...]:
        elements, scale = right(bits)
        elements[0, 0] += 1
        return elements, scale

    monkeypatch.setattr(fp8_rowwise, "quantize_bits", wrong)
    with pytest.raises(BadOutput, match="quantized bytes") as caught:
        run(source, tmp_path / "out", "fp8_rowwise")
    assert "--restart" in caught.value.hint
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / "model.safetensors").exists()
    monkeypatch.setattr(fp8_rowwise, "quantize_bits", right)
    run(source, tmp_path / "out", "fp8_rowwise", restart=True)
    assert not (tmp_path / "out.partial").exists()
