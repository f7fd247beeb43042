"""`quantize verify` passes what the line wrote, and every mutant of it fails by name."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from runs import pair, read_header, run, settings, silent
from safetensors.torch import load_file, save_file
from tiny import (
    Tensors,
    draft_config,
    draft_tensors,
    llama_config,
    llama_tensors,
    write,
    write_llama,
)
from tiny import random as gaussian

from quantize.checkpoint import open_checkpoint
from quantize.cli import main
from quantize.errors import BadOutput
from quantize.job import run_one
from quantize.plan import Options
from quantize.prepare import prepare_target
from quantize.recheck import verify_output
from quantize.report import Check, Report

LAYER = "model.layers.0"
UP = f"{LAYER}.mlp.up_proj.weight"
SQUARE = f"{LAYER}.self_attn.o_proj.weight"
NORM = f"{LAYER}.input_layernorm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
TORCH = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class Made:
    """An output and what it was made from."""

    out: Path
    source: Path
    draft_source: Path | None = None

    def verify(self) -> dict[str, Report]:
        """The full proof."""
        draft = str(self.draft_source) if self.draft_source else None
        return verify_output(self.out, str(self.source), None, draft, silent)

    def copy(self, folder: Path) -> Made:
        """The same with an output of its own, to be damaged."""
        return Made(shutil.copytree(self.out, folder / "copy"), self.source, self.draft_source)


def make(folder: Path, scheme: str, **config: Any) -> Made:
    source = write_llama(folder / "model", num_hidden_layers=1, **config)
    run(source, folder / "out", scheme)
    return Made(folder / "out", source)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("mxfp4"), "mxfp4")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("fp8"), "fp8_rowwise")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("tied"), "fp8_rowwise", tie_word_embeddings=True)


def make_pair(folder: Path, config: dict[str, Any], more: Tensors) -> Made:
    target = write_llama(folder / "model", num_hidden_layers=2, intermediate_size=32)
    draft = write(folder / "draft", config, draft_tensors(config) | more)
    pair(target, draft, folder / "out", ("mxfp4", "fp8_rowwise"))
    return Made(folder / "out", target, draft)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A pair whose draft has a head of its own for half of the vocabulary."""
    ids = torch.arange(64) * 2
    more = {
        HEAD: gaussian(64, 64, seed=3),
        "d2t": ids - torch.arange(64),
        "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, ids, True),
    }
    config = draft_config(draft_vocab_size=64, eagle_config=TAPS)
    return make_pair(tmp_path_factory.mktemp("pruned"), config, more)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A pair whose draft came with a copy of the target's head, dropped from the output."""
    head = llama_tensors(llama_config(num_hidden_layers=2))[HEAD]
    config = draft_config(eagle_config=TAPS)
    return make_pair(tmp_path_factory.mktemp("shared"), config, {HEAD: head})


def failures(reports: dict[str, Report]) -> dict[str, Check]:
    return {check.name: check for report in reports.values() for check in report.failed}


def expect_failure(made: Made, *names: str, naming: str = "") -> dict[str, Check]:
    """The checks of these names fail, and each says which tensor or key is at fault."""
    failed = failures(made.verify())
    assert set(names) <= failed.keys()
    for name in names:
        assert naming in f"{failed[name].measured} {failed[name].detail}", failed[name]
    return failed


# --- damage


def edit(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """Change one stored tensor in place."""
    for file in folder.glob("*.safetensors"):
        header, start = read_header(file)
        if name in header:
            data = bytearray(file.read_bytes())
            begin, end = (start + offset for offset in header[name]["data_offsets"])
            region = data[begin:end]
            change(torch.frombuffer(region, dtype=TORCH[header[name]["dtype"]]))
            data[begin:end] = region
            file.write_bytes(data)
            return
    raise AssertionError(f"{name} is not in {folder}")


def edit_rows(made: Made, name: str, rows: int, change: Callable[[torch.Tensor], object]) -> None:
    """Change one stored tensor, seen as a matrix of that many rows."""
    edit(made.out, name, lambda flat: change(flat.view(rows, -1)))


def flip(folder: Path, name: str, byte: int = 0, bit: int = 0) -> None:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8)[byte] ^= 1 << bit

    edit(folder, name, change)


def rewrite(file: Path, change: Callable[[Tensors], object]) -> None:
    """Write a shard again with other tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data, indent=2))


# --- what the line wrote


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "tied", "pruned", "shared"])
def test_every_check_of_an_undamaged_output_passes(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Else the mutants below would prove nothing."""
    reports = request.getfixturevalue(name).verify()
    assert {c.status for report in reports.values() for c in report.checks} == {"pass"}
    assert list(reports) == (
        ["target", "draft", "pair"] if name in {"pruned", "shared"} else ["checkpoint"]
    )


def test_tensors_are_listed_least_first(mxfp4: Made) -> None:
    (report,) = mxfp4.verify().values()
    assert len(report.tensors) == 7
    values = [proof.sqnr_db for proof in report.tensors]
    assert values == sorted(values)


def test_sqnr_is_that_of_the_stored_bytes(fp8: Made) -> None:
    """By hand: 20·log10(‖w‖ / ‖w - ŵ‖), from the files alone."""
    weight = load_file(fp8.source / "model.safetensors")[UP].double()
    stored = load_file(fp8.out / "model.safetensors")
    meant = stored[UP].double() * stored[f"{UP}_scale"].double()[:, None]
    expected = 20 * torch.log10(weight.norm() / (weight - meant).norm())
    (report,) = fp8.verify().values()
    (proof,) = (proof for proof in report.tensors if proof.name == UP)
    assert proof.sqnr_db == pytest.approx(float(expected), abs=1e-3)


# --- mutants of one tensor


def test_swapped_nibbles(mxfp4: Made, tmp_path: Path) -> None:
    made = mxfp4.copy(tmp_path)

    def swap(data: torch.Tensor) -> None:
        at = int(((data >> 4) != (data & 15)).nonzero()[5])
        data[at] = (data[at] >> 4) | (data[at] << 4)

    edit(made.out, UP, swap)
    expect_failure(made, "quantized bytes", naming=UP)


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_e8m0_scale_off(by: int, mxfp4: Made, tmp_path: Path) -> None:
    made = mxfp4.copy(tmp_path)

    def shift(scale: torch.Tensor) -> None:
        scale[17] += by

    edit(made.out, f"{UP}_scale", shift)
    expect_failure(made, "quantized bytes", naming=f"{UP}_scale")


def test_fp8_scale_transposed_on_a_square_weight(fp8: Made, tmp_path: Path) -> None:
    """Quantized along the other axis: every shape fits, every number is plausible."""
    made = fp8.copy(tmp_path)
    weight = load_file(fp8.source / "model.safetensors")[SQUARE].float()
    scale = weight.abs().amax(dim=0) / 448  # of columns
    elements = (weight / scale).to(torch.float8_e4m3fn)

    def transpose(tensors: Tensors) -> None:
        tensors |= {SQUARE: elements, f"{SQUARE}_scale": scale}

    rewrite(made.out / "model.safetensors", transpose)
    names = ("quantized bytes", "weight SQNR", "matmul SQNR", "matmul SQNR, worst row")
    expect_failure(made, names[0], *(f"{name}, fp8_rowwise" for name in names[1:]), naming=SQUARE)


def test_fp8_scale_permuted(fp8: Made, tmp_path: Path) -> None:
    made = fp8.copy(tmp_path)
    edit(made.out, f"{SQUARE}_scale", lambda scale: scale.copy_(scale.flip(0)))
    failed = expect_failure(made, "quantized bytes", naming=f"{SQUARE}_scale")
    assert "matmul SQNR, worst row, fp8_rowwise" in failed


@pytest.mark.parametrize("row", [0, 77, 127])
@pytest.mark.parametrize("scheme", ["mxfp4", "fp8"])
@pytest.mark.parametrize("up", [True, False])
def test_shifted_scale_of_one_row_fails_the_matmul_alone(
    row: int, scheme: str, up: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """One output feature doubled or halved: its row, and no average, must show it."""
    made = request.getfixturevalue(scheme).copy(tmp_path)

    def shift(scale: torch.Tensor) -> None:
        if scheme == "fp8":
            scale[row] *= 2.0 if up else 0.5
        else:
            scale[row] += 1 if up else -1

    edit_rows(made, f"{UP}_scale", 128, shift)
    name = {"fp8": "fp8_rowwise"}.get(scheme, scheme)
    expect_failure(made, f"matmul SQNR, worst row, {name}", naming=UP)


@pytest.mark.parametrize(
    ("scheme", "value"),
    [("mxfp4", 255), ("mxfp4", 0), ("fp8", float("nan")), ("fp8", 0.0), ("fp8", -1.0)],
)
def test_scale_out_of_range_needs_no_source(
    scheme: str, value: float, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    made = request.getfixturevalue(scheme).copy(tmp_path)

    def spoil(scale: torch.Tensor) -> None:
        scale[9] = value

    edit(made.out, f"{UP}_scale", spoil)
    failed = failures(verify_output(made.out, None, None, None, silent))
    assert f"{UP}_scale" in failed["scales"].detail


@pytest.mark.parametrize(
    ("scheme", "name", "checks"),
    [
        ("mxfp4", HEAD, ("preserved", "head")),
        ("mxfp4", NORM, ("preserved",)),
        ("mxfp4", EMBEDDING, ("preserved",)),
        ("tied", EMBEDDING, ("preserved", "head")),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_one_flipped_bit_of_a_preserved_tensor(
    scheme: str,
    name: str,
    checks: tuple[str, ...],
    last: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    made = request.getfixturevalue(scheme).copy(tmp_path)
    flip(made.out, name, byte=-1 if last else 0, bit=7 if last else 0)
    failed = expect_failure(made, *checks, naming=name)
    assert failed.keys() == {*checks, "files"}


@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit(seed: int, pruned: Made, tmp_path: Path) -> None:
    """Whichever bit of whichever tensor: some check fails and names the tensor."""
    made = pruned.copy(tmp_path)
    chance = random.Random(seed)
    folder = made.out / chance.choice(["target", "draft"])
    header, start = read_header(folder / "model.safetensors")
    header.pop("__metadata__")
    name = chance.choice(sorted(header))
    data = bytearray((folder / "model.safetensors").read_bytes())
    begin, end = header[name]["data_offsets"]
    data[start + chance.randrange(begin, end)] ^= 1 << chance.randrange(8)
    (folder / "model.safetensors").write_bytes(data)
    failed = failures(made.verify())
    assert any(name in check.detail for check in failed.values()), (name, failed)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [NORM, EMBEDDING])
def test_damaged_number_needs_no_source(value: float, name: str, fp8: Made, tmp_path: Path) -> None:
    made = fp8.copy(tmp_path)

    def spoil(tensor: torch.Tensor) -> None:
        tensor[-1] = value

    edit(made.out, name, spoil)
    failed = failures(verify_output(made.out, None, None, None, silent))
    assert name in failed["finite"].detail


# --- mutants of the set of tensors


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("sharded")
    source = write_llama(folder / "model", num_hidden_layers=1)
    run(source, folder / "out", "fp8_rowwise", max_shard_size=40_000)
    return Made(folder / "out", source)


def test_dropped_shard(sharded: Made, tmp_path: Path) -> None:
    made = sharded.copy(tmp_path)
    shards = sorted(made.out.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(BadOutput, match=f"{shards[1].name} missing, listed by"):
        made.verify()


def test_dropped_shard_and_index_to_match(sharded: Made, tmp_path: Path) -> None:
    made = sharded.copy(tmp_path)
    shard = sorted(made.out.glob("*.safetensors"))[1]
    lost = [name for name in read_header(shard)[0] if name != "__metadata__"]
    shard.unlink()

    def forget(index: dict[str, Any]) -> None:
        for name in lost:
            del index["weight_map"][name]

    edit_json(made.out / "model.safetensors.index.json", forget)
    edit_json(made.out / "quantization_report.json", lambda report: report["files"].pop(shard.name))
    failed = expect_failure(made, "headers")
    assert min(lost) in failed["headers"].detail


def test_extra_tensor(fp8: Made, tmp_path: Path) -> None:
    made = fp8.copy(tmp_path)
    extra = {f"{LAYER}.self_attn.q_proj.input_scale": torch.ones(1)}
    rewrite(made.out / "model.safetensors", lambda tensors: tensors.update(extra))
    expect_failure(made, "headers", naming="q_proj.input_scale")


@pytest.mark.parametrize("name", [f"{UP}_scale", NORM])
def test_other_dtype(name: str, fp8: Made, tmp_path: Path) -> None:
    made = fp8.copy(tmp_path)
    rewrite(
        made.out / "model.safetensors", lambda tensors: tensors.update({name: tensors[name].half()})
    )
    expect_failure(made, "headers", naming=name)


# --- mutants of the metadata


def set_exclude(config: dict[str, Any], *names: str) -> None:
    config["quantization_config"]["exclude"] = list(names)


@pytest.mark.parametrize("plan_too", [False, True])
def test_exclusions_of_a_draft_as_quark_writes_them(
    plan_too: bool, pruned: Made, tmp_path: Path
) -> None:
    """``["fc", "lm_head"]``: vLLM asks for ``model.fc`` and would fill it with garbage."""
    made = pruned.copy(tmp_path)
    draft = made.out / "draft"
    edit_json(draft / "config.json", lambda config: set_exclude(config, "fc", "lm_head"))
    if plan_too:
        edit_json(
            draft / "quantization_report.json",
            lambda report: set_exclude(report["plan"], "fc", "lm_head"),
        )
    failed = expect_failure(made, "vLLM names", naming="model.fc")
    assert ("config" in failed) is not plan_too
    assert ("plan" in failed) is plan_too


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["quantization_config"].update(version="0.1"),
        lambda config: config["quantization_config"].update(exclude=[]),
        lambda config: config.pop("quantization_config"),
    ],
)
def test_quantization_config_edited(
    change: Callable[[dict[str, Any]], Any], fp8: Made, tmp_path: Path
) -> None:
    made = fp8.copy(tmp_path)
    edit_json(made.out / "config.json", change)
    expect_failure(made, "config", naming="quantization_config")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("rope_theta", lambda config: config.update(rope_theta=10000.0)),
        ("rms_norm_eps", lambda config: config.pop("rms_norm_eps")),
        ("new_key", lambda config: config.update(new_key=1)),
        ("order", lambda config: config.update(hidden_size=config.pop("hidden_size"))),
    ],
)
def test_other_config_key_edited(
    key: str, change: Callable[[dict[str, Any]], Any], fp8: Made, tmp_path: Path
) -> None:
    made = fp8.copy(tmp_path)
    edit_json(made.out / "config.json", change)
    expect_failure(made, "config", naming=key)


def entry_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in report["plan"]["tensors"] if entry["name"] == name)


@pytest.mark.parametrize(
    "change",
    [
        lambda report: entry_of(report, UP).update(reason="because"),
        lambda report: report["plan"].update(target_layers=3),
        lambda report: report["plan"]["tensors"].reverse(),
        lambda report: report["options"].update(exclude=["*up_proj", "*gate_proj"]),
    ],
)
def test_recorded_plan_edited(
    change: Callable[[dict[str, Any]], Any], fp8: Made, tmp_path: Path
) -> None:
    made = fp8.copy(tmp_path)
    edit_json(made.out / "quantization_report.json", change)
    expect_failure(made, "plan")


@pytest.mark.parametrize("name", [NORM, UP])
def test_tensor_lost_with_the_plan_to_match(name: str, fp8: Made, tmp_path: Path) -> None:
    """The plan says *dropped on purpose*; nothing of a target may be."""
    made = fp8.copy(tmp_path)

    def drop(tensors: Tensors) -> None:
        for lost in (name, f"{name}_scale"):
            tensors.pop(lost, None)

    rewrite(made.out / "model.safetensors", drop)
    edit_json(
        made.out / "quantization_report.json",
        lambda report: entry_of(report, name).update(stored=[], scheme=None, reason="dropped: x"),
    )
    expect_failure(made, "plan")


def test_draft_tensor_lost_with_the_plan_to_match(pruned: Made, tmp_path: Path) -> None:
    made = pruned.copy(tmp_path)
    rewrite(made.out / "draft" / "model.safetensors", lambda tensors: tensors.pop("norm.weight"))
    edit_json(
        made.out / "draft" / "quantization_report.json",
        lambda report: entry_of(report, "norm.weight").update(stored=[], reason="dropped: x"),
    )
    expect_failure(made, "plan")


@pytest.mark.parametrize("text", ["", "{}", '{"plan": {"tensors": 7}}', "[]"])
def test_folder_without_a_report_of_ours(text: str, fp8: Made, tmp_path: Path) -> None:
    made = fp8.copy(tmp_path)
    (made.out / "quantization_report.json").write_text(text)
    with pytest.raises(BadOutput, match=r"quantization_report\.json"):
        made.verify()


# --- mutants of the pair


def test_draft_ids_edited(pruned: Made, tmp_path: Path) -> None:
    made = pruned.copy(tmp_path)

    def shift(d2t: torch.Tensor) -> None:
        d2t[5] += 1

    edit(made.out / "draft", "d2t", shift)
    expect_failure(made, "preserved", "d2t", naming="d2t")


def test_draft_head_replaced(pruned: Made, tmp_path: Path) -> None:
    made = pruned.copy(tmp_path)
    edit(made.out / "draft", HEAD, lambda head: head.copy_(gaussian(64, 64, seed=4).view(-1)))
    expect_failure(made, "preserved", "head", naming=HEAD)


def test_head_given_to_a_draft_that_shares(shared: Made, tmp_path: Path) -> None:
    made = shared.copy(tmp_path)
    head = {HEAD: gaussian(128, 64, seed=4)}
    rewrite(made.out / "draft" / "model.safetensors", lambda tensors: tensors.update(head))
    expect_failure(made, "headers", naming=HEAD)


def test_target_head_edited_after_the_draft_dropped_its_copy(shared: Made, tmp_path: Path) -> None:
    made = shared.copy(tmp_path)
    flip(made.out / "target", HEAD)
    expect_failure(made, "head", "dropped tensors", naming=HEAD)


@pytest.mark.parametrize("layers", [1, 3])
def test_draft_beside_a_target_of_other_depth(layers: int, pruned: Made, tmp_path: Path) -> None:
    """VLLM numbers the draft's layers after the target's: the exclusions would miss them."""
    source = write_llama(tmp_path / "model", num_hidden_layers=layers, intermediate_size=32)
    run(source, tmp_path / "out", "mxfp4")
    reports = verify_output(
        tmp_path / "out", str(source), pruned.out / "draft", str(pruned.draft_source), silent
    )
    assert reports["target"].failed == reports["draft"].failed == ()
    assert [check.name for check in reports["pair"].failed if "target layers" in check.name]


@pytest.mark.parametrize("file", ["report.json", "target/quantization_report.json"])
def test_pair_reports_are_linked_by_hash(file: str, pruned: Made, tmp_path: Path) -> None:
    made = pruned.copy(tmp_path)

    def edit_report(report: dict[str, Any]) -> None:
        report.pop("served", None) or report["pair"].update(sha256="0" * 64)

    edit_json(made.out / file, edit_report)
    assert failures(made.verify()).keys() == {"link"}


def test_wrong_source(fp8: Made, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", num_hidden_layers=1)
    flip(other, UP, byte=1, bit=0)
    made = Made(fp8.out, other)
    expect_failure(made, "quantized bytes", naming=UP)


# --- zeros


@pytest.fixture(scope="module", params=["mxfp4", "fp8_rowwise"])
def zeros(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One weight of zeros alone, and one zero row in another."""
    folder = tmp_path_factory.mktemp("zeros")
    config = llama_config(num_hidden_layers=1)
    tensors = llama_tensors(config)
    tensors[SQUARE].zero_()
    tensors[UP][5] = 0
    source = write(folder / "model", config, tensors)
    run(source, folder / "out", request.param)
    return Made(folder / "out", source)


def test_zeros_pass_by_equality(zeros: Made) -> None:
    (report,) = zeros.verify().values()
    assert {check.status for check in report.checks} == {"pass"}
    assert next(p for p in report.tensors if p.name == SQUARE).matmul_error == 0


@pytest.mark.parametrize(("name", "rows", "row"), [(SQUARE, 64, 63), (UP, 128, 5)])
def test_one_element_that_is_not_zero_fails(
    name: str, rows: int, row: int, zeros: Made, tmp_path: Path
) -> None:
    made = zeros.copy(tmp_path)
    edit_rows(made, name, rows, lambda data: data.view(torch.uint8)[row, 3].fill_(0x22))
    failed = expect_failure(made, "quantized bytes", naming=name)
    assert any(check.startswith("matmul SQNR, worst row") for check in failed)


# --- the command


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``quantize verify`` with these arguments, in this process."""

    def command(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["quantize", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return Done(caught.value.code, *capsys.readouterr())

    return command


def read_strictly(text: str) -> dict[str, Any]:
    """One JSON object as RFC 8259 has it: without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    data = json.loads(text, parse_constant=refuse)
    assert isinstance(data, dict)
    return data


def statuses(data: dict[str, Any], report: str) -> dict[str, str]:
    return {check["name"]: check["status"] for check in data["checks"][report]}


NEED_SOURCE = {
    *("plan", "config", "preserved", "head", "quantized bytes"),
    *("weight SQNR", "matmul SQNR", "matmul SQNR, worst row"),
}


def test_without_a_source(verify: Any, fp8: Made) -> None:
    done = verify(fp8.out, "--json")
    data = read_strictly(done.out)
    assert (done.code, data["ok"]) == (1, False)
    found = statuses(data, "checkpoint")
    assert {name for name, status in found.items() if status == "not_measured"} == NEED_SOURCE
    assert {name for name, status in found.items() if status == "pass"} == {
        *("files", "headers", "vLLM names", "finite", "scales")
    }
    assert "--source" in done.err
    excused = verify(fp8.out, "--json", "--allow-unmeasured")
    assert (excused.code, statuses(read_strictly(excused.out), "checkpoint")) == (0, found)


def test_one_source_of_two(verify: Any, shared: Made) -> None:
    done = verify(shared.out, "--source", shared.source, "--json")
    data = read_strictly(done.out)
    assert done.code == 1
    assert set(statuses(data, "target").values()) == {"pass"}
    assert statuses(data, "draft")["preserved"] == "not_measured"
    assert statuses(data, "pair")["dropped tensors"] == "not_measured"


def test_allow_unmeasured_excuses_no_failure(verify: Any, fp8: Made, tmp_path: Path) -> None:
    made = fp8.copy(tmp_path)
    edit(made.out, f"{UP}_scale", lambda scale: scale.fill_(-1))
    done = verify(made.out, "--allow-unmeasured", "--json")
    assert (done.code, read_strictly(done.out)["ok"]) == (1, False)


def test_both_halves_apart(verify: Any, pruned: Made) -> None:
    """As two `run`s leave them; the pair's checks need both."""
    target, draft = pruned.out / "target", pruned.out / "draft"
    sources = ("--source", pruned.source, "--draft-source", str(pruned.draft_source))
    alone = verify(target, "--source", pruned.source, "--json")
    assert alone.code == 0
    assert list(read_strictly(alone.out)["checks"]) == ["checkpoint"]
    both = verify(target, "--draft", draft, *sources, "--json")
    assert both.code == 0
    assert list(read_strictly(both.out)["checks"]) == ["target", "draft", "pair"]


def test_mutants_in_the_table(verify: Any, mxfp4: Made, tmp_path: Path) -> None:
    made = mxfp4.copy(tmp_path)
    flip(made.out, HEAD)
    flip(made.out, UP, byte=100)
    done = verify(made.out, "--source", made.source)
    assert (done.code, done.out) == (1, "")
    rows = {line.split("│")[1].strip(): line for line in done.err.splitlines() if "│" in line}
    assert "fail" in rows["head"]
    assert HEAD in rows["head"]
    assert "fail" in rows["quantized bytes"]
    assert UP in rows["quantized bytes"]
    assert "pass" in rows["scales"]


def test_dropped_shard_by_the_command(verify: Any, sharded: Made, tmp_path: Path) -> None:
    made = sharded.copy(tmp_path)
    shard = sorted(made.out.glob("*.safetensors"))[1]
    shard.unlink()
    done = verify(made.out, "--source", made.source)
    assert done.code == 1
    assert shard.name in done.err
    assert "Traceback" not in done.err


def test_zeros_are_valid_json_and_a_readable_table(verify: Any, zeros: Made) -> None:
    done = verify(zeros.out, "--source", zeros.source, "--json")
    data = read_strictly(done.out)
    assert done.code == 0
    values = {t["name"]: t["sqnr_db"] for t in data["tensors"]["checkpoint"]}
    assert values[SQUARE] == "inf"
    assert isinstance(values[UP], float)


@pytest.mark.parametrize("allow", [True, False])
def test_junit_tells_failed_from_not_measured(
    allow: bool, verify: Any, fp8: Made, tmp_path: Path
) -> None:
    made = fp8.copy(tmp_path)
    edit(made.out, f"{UP}_scale", lambda scale: scale.fill_(-1))
    file = tmp_path / "junit.xml"
    options = ("--allow-unmeasured",) if allow else ()
    assert verify(made.out, "--junit", file, *options).code == 1
    (suite,) = ElementTree.parse(file).getroot()
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    other = "skipped" if allow else "error"
    assert cases == {
        **{name: [other] for name in NEED_SOURCE},
        **{name: [] for name in ("headers", "vLLM names", "finite")},
        **{name: ["failure"] for name in ("files", "scales")},
    }
    counts = {name: int(suite.get(name, "")) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {
        "tests": len(cases),
        "failures": 2,
        "errors": 0 if allow else len(NEED_SOURCE),
        "skipped": len(NEED_SOURCE) if allow else 0,
    }
    (failure,) = suite.findall("testcase[@name='scales']/failure")
    assert f"{UP}_scale" in f"{failure.get('message')} {failure.text}"


def test_the_proof_uses_neither_quark_nor_vllm(mxfp4: Made) -> None:
    """It is independent of what made the bytes."""
    script = (
        "import sys\n"
        "from quantize.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as done:\n"
        "    print(done.code, [name for name in ('quark', 'vllm') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(mxfp4.out), "--source", str(mxfp4.source)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0 []\n"


def test_stale_index_of_a_source_is_ignored_on_request(verify: Any, tmp_path: Path) -> None:
    """As `run --ignore-index` did: else its output could never be proven."""
    source = write_llama(tmp_path / "model", num_hidden_layers=1)
    index = {"weight_map": {"gone.weight": "model-00001-of-00001.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_checkpoint(str(source), ignore_index=True)
    run_one(prepare_target(opened, Options("bf16")), tmp_path / "out", settings())
    refused = verify(tmp_path / "out", "--source", source)
    assert refused.code == 1
    assert "--ignore-index" in refused.err
    assert verify(tmp_path / "out", "--source", source, "--ignore-index").code == 0
