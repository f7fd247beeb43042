"""Outputs of stored sources: those of their BF16 weights, or the very bytes where they are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_quantize
from runs import draft_job, open_source, run, settings, silent, target_job
from safetensors.torch import load_file
from stored import FORMATS, fp8_channel, mxfp4, restarting
from tiny import Tensors, llama_config, llama_tensors, write, write_draft

from quantize.errors import ToolError
from quantize.job import run_one
from quantize.plan import make_plan
from quantize.recheck import verify_output

Config = dict[str, Any]
CONFIG = llama_config(num_hidden_layers=1)
KEPT = {
    "mxfp4": ("MXFP4 packed", "MXFP4 of Quark"),
    "fp8_rowwise": ("FP8 per channel",),
}
CHANNEL = FORMATS["FP8 per channel"][1]


def stored_llama(form: str, config: Config = CONFIG) -> tuple[Tensors, Tensors]:
    """A Llama whose linears are stored in a format, and its BF16 weights."""
    plain = llama_tensors(config)
    stored = dict(plain)
    for seed, (name, tensor) in enumerate(plain.items()):
        if name.endswith("_proj.weight"):
            del stored[name]
            made, plain[name] = FORMATS[form][0](name, (tensor.shape[0], tensor.shape[1]), seed)
            stored |= made
    return stored, plain


def quantized(source: Path, out: Path, scheme: str) -> Tensors:
    """The tensors of one run."""
    run(source, out, scheme)
    return load_file(out / "model.safetensors")


def same(left: Tensors, right: Tensors) -> bool:
    """The same names, dtypes, shapes and bytes."""
    return left.keys() == right.keys() and all(
        (a := left[name]).dtype == (b := right[name]).dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for name in left
    )


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8_rowwise"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_source_in_every_scheme(form: str, scheme: str, tmp_path: Path) -> None:
    stored, plain = stored_llama(form)
    config = CONFIG | {"quantization_config": FORMATS[form][1]}
    made = quantized(write(tmp_path / "stored", config, stored, 3), tmp_path / "out", scheme)
    expected = quantized(write(tmp_path / "plain", CONFIG, plain), tmp_path / "other", scheme)
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("out", "other")]
    assert configs[0] == configs[1]
    if form in KEPT[scheme]:
        names = [name for name in plain if name.endswith("_proj.weight")]
        expected |= {name: stored.get(name, stored.get(f"{name}_packed")) for name in names}  # type: ignore[misc]
        expected |= {f"{name}_scale": stored[f"{name}_scale"] for name in names}
        if scheme == "fp8_rowwise":
            expected |= {f"{n}_scale": stored[f"{n}_scale"].float().flatten() for n in names}
    assert same(made, expected)
    reports = verify_output(tmp_path / "out", str(tmp_path / "stored"), None, None, silent)
    assert {check.status for check in reports["checkpoint"].checks} == {"pass"}


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8_rowwise"])
def test_our_own_output_is_kept(scheme: str, tmp_path: Path) -> None:
    source = write(tmp_path / "m", CONFIG, llama_tensors(CONFIG))
    first = quantized(source, tmp_path / "first", scheme)
    again = quantized(tmp_path / "first", tmp_path / "again", scheme)
    assert same(first, again)
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("first", "again")]
    assert configs[0] == configs[1]
    plain = quantized(tmp_path / "first", tmp_path / "plain", "bf16")
    assert {t.dtype for t in plain.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


def test_mxfp4_becomes_fp8_within_a_floor_for_such_grids(tmp_path: Path) -> None:
    """E4M3 rounds 1, 2 and 4 of a row whose largest is 6 by nearly a sixteenth: 28.9 dB."""
    tensors = llama_tensors(CONFIG)
    worst = "model.layers.0.mlp.up_proj.weight"
    tensors[worst] = torch.tensor([4.0, 2.0, 1.0, 4.0]).repeat(128, 16).bfloat16()
    tensors[worst][:, 0] = 6
    run_one(
        target_job(write(tmp_path / "m", CONFIG, tensors), "mxfp4"), tmp_path / "mx", settings()
    )
    report = run_one(target_job(tmp_path / "mx", "fp8_rowwise"), tmp_path / "fp8", settings())
    found = {check.name: check for check in report.checks}
    assert found["weight SQNR of 4-bit sources, fp8_rowwise"].detail == worst
    assert not report.failed


def test_our_own_mix_is_kept_or_changed_by_layer(tmp_path: Path) -> None:
    source = write(tmp_path / "m", CONFIG, llama_tensors(CONFIG))
    mix = {"layer_schemes": (("*self_attn*", "fp8_rowwise"),)}
    run_one(target_job(source, "mxfp4", **mix), tmp_path / "first", settings())
    run_one(target_job(tmp_path / "first", "mxfp4", **mix), tmp_path / "again", settings())
    first, again = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "again"))
    assert same(first, again)
    other = quantized(tmp_path / "first", tmp_path / "other", "mxfp4")
    attention = {name for name in first if ".self_attn." in name}
    assert attention
    for name in first.keys() - attention:
        assert torch.equal(first[name], other[name])
    assert {other[name].dtype for name in attention} == {torch.uint8}
    config = json.loads((tmp_path / "other/config.json").read_text())["quantization_config"]
    assert config["layer_quant_config"] == {}
    assert config["global_quant_config"]["weight"]["dtype"] == "fp4"


def write_with(folder: Path, form: str, name: str, made: Tensors) -> Path:
    """A stored Llama with one weight replaced."""
    stored, _ = stored_llama(form)
    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(name)} | made
    return write(folder / "m", CONFIG | {"quantization_config": FORMATS[form][1]}, stored)


UP = "model.layers.0.mlp.up_proj.weight"


def test_a_scale_that_quark_never_writes_is_kept(tmp_path: Path) -> None:
    made, _ = mxfp4(UP, (128, 64), 0)
    made[f"{UP}_scale"][5, 1] = 0
    source = write_with(tmp_path, "MXFP4 of Quark", UP, made)
    kept = quantized(source, tmp_path / "out", "mxfp4")
    assert same(made, {name: kept[name] for name in made})


def test_experts_that_were_never_active(tmp_path: Path) -> None:
    """Their scales are zero: kept, or quantized as rows of zeros."""
    made, _ = fp8_channel(UP, (128, 64), 0)
    made[f"{UP}_scale"].zero_()
    source = write_with(tmp_path, "FP8 per channel", UP, made)
    kept = quantized(source, tmp_path / "kept", "fp8_rowwise")
    assert same({UP: made[UP]}, {UP: kept[UP]})
    assert not kept[f"{UP}_scale"].any()
    assert not quantized(source, tmp_path / "out", "mxfp4")[UP].any()


@pytest.mark.parametrize(
    ("form", "scheme", "code"),
    [
        ("MXFP4 of Quark", "mxfp4", 255),
        ("MXFP4 of Quark", "fp8_rowwise", 255),
        ("FP8 per channel", "fp8_rowwise", 0x7F),
        ("FP8 blocks", "mxfp4", 0xFF),
    ],
)
def test_a_nan_in_a_stored_weight_is_refused(
    form: str, scheme: str, code: int, tmp_path: Path
) -> None:
    made, _ = FORMATS[form][0](UP, (128, 64), 0)
    part = f"{UP}_scale" if form.startswith("MXFP4") else UP
    made[part].view(torch.uint8)[9, 1] = code
    source = write_with(tmp_path, form, UP, made)
    with pytest.raises(ToolError, match=r"up_proj.weight\[9, .*\] is nan") as caught:
        run(source, tmp_path / "out", scheme)
    assert UP in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_stored_head_becomes_bf16(tmp_path: Path) -> None:
    stored, _ = stored_llama("FP8 per channel")
    del stored["lm_head.weight"]
    made, head = fp8_channel("lm_head.weight", (128, 64), 50)
    source = write(tmp_path / "m", CONFIG | {"quantization_config": CHANNEL}, stored | made)
    assert torch.equal(quantized(source, tmp_path / "out", "fp8_rowwise")["lm_head.weight"], head)


def test_excluded_weights_of_a_stored_source_become_bf16(tmp_path: Path) -> None:
    stored, plain = stored_llama("FP8 blocks")
    config = CONFIG | {"quantization_config": FORMATS["FP8 blocks"][1]}
    source = write(tmp_path / "m", config, stored, 2)
    job = target_job(source, "mxfp4", exclude=("*mlp*",))
    run_one(job, tmp_path / "out", settings())
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(made[UP], plain[UP])
    exclude = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"][
        "exclude"
    ]
    assert UP.removesuffix(".weight") in exclude


def test_a_draft_of_a_stored_target(tmp_path: Path) -> None:
    config = llama_config()
    stored, _ = stored_llama("INT4 packed", config)
    quantization = {"quantization_config": FORMATS["INT4 packed"][1]}
    target = write(tmp_path / "m", config | quantization, stored, 2)
    job = draft_job(write_draft(tmp_path / "d"), target, "fp8_rowwise")
    assert {check.status for check in job.checks} == {"pass"}


def test_the_plan_counts_stored_bytes(tmp_path: Path) -> None:
    stored, _ = stored_llama("INT4 packed")
    config = CONFIG | {"quantization_config": FORMATS["INT4 packed"][1]}
    source = open_source(write(tmp_path / "m", config, stored, 2))
    from quantize.plan import Options

    plan = make_plan(
        source.specs,
        source.config,
        Options("mxfp4"),
        weights=source.weights,
        unused=source.unused,
    ).to_json()
    assert plan["bytes_before"] == sum(tensor.nbytes for tensor in stored.values())
    up = next(entry for entry in plan["tensors"] if entry["name"] == UP)
    assert up["source_format"] == "int4_packed"
    assert "stored as int4_packed" in up["reason"]


def test_leftovers_are_told(tmp_path: Path) -> None:
    stored, _ = stored_llama("FP8 per tensor")
    config = CONFIG | {"quantization_config": FORMATS["FP8 per tensor"][1]}
    job = target_job(write(tmp_path / "m", config, stored, 2), "mxfp4")
    assert [note for note in job.plan.notes if note.startswith("7 tensors are left out")]


QKV = "model.layers.0.self_attn.qkv_proj.weight"


def write_fused(folder: Path) -> tuple[Path, torch.Tensor]:
    """A decoder with a fused ``qkv_proj`` whose scales start anew after 40 and 60 rows."""
    stored, expected = restarting(QKV, (40, 20, 20), 64)
    kept = {n: t for n, t in llama_tensors(CONFIG).items() if "_proj" not in n or ".o_proj" in n}
    quantization = FORMATS["FP8 blocks"][1]
    config = CONFIG | {"architectures": ["OtherForCausalLM"], "quantization_config": quantization}
    return write(folder / "m", config, kept | stored, 2), expected


def test_rows_of_a_fused_weight_are_given_and_recorded(tmp_path: Path) -> None:
    source, expected = write_fused(tmp_path)
    job = target_job(source, "bf16", fused_rows=(("*.qkv_proj", (40, 20, 20)),))
    run_one(job, tmp_path / "out", settings())
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[QKV], expected)
    reports = verify_output(tmp_path / "out", str(source), None, None, silent)
    assert {check.status for check in reports["checkpoint"].checks} == {"pass"}
    with pytest.raises(ToolError, match="--fused-rows 'qkv' matches no module"):
        rows = (("*.qkv_proj", (40, 20, 20)), ("qkv", (1, 2)))
        target_job(source, "bf16", fused_rows=rows)


def test_rows_on_the_command_line_and_in_a_recipe(tmp_path: Path) -> None:
    source, _ = write_fused(tmp_path)
    plain = ("plan", str(source), "--scheme", "mxfp4", "--json")
    done = run_quantize(*plain, cwd=tmp_path)
    assert done.returncode == 1
    assert "--fused-rows" in done.stderr
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("fused_rows: ['*.qkv_proj', '40,20,20']\n")
    for option in (("--fused-rows", "*.qkv_proj", "40,20,20"), ("--recipe", str(recipe))):
        done = run_quantize(*plain, *option, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert run_quantize(*plain, "--fused-rows", "*", "40,x", cwd=tmp_path).returncode == 2
