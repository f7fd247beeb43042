"""Our bytes and our config equal those of AMD Quark's public file-to-file export."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from schemes import SCHEMES, fp8_rowwise, mxfp4, quark_setup
from schemes.base import Scheme
from schemes.quark_config import quantization_config

BOTH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.NAME)
Export = Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def quark() -> None:
    quark_setup.import_quark()


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Quark's public export of a checkpoint folder: the tensors and config.json it writes."""

    def run(
        source: Path, scheme: Scheme, exclude: tuple[str, ...] = (), **options: Any
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        from quark.torch import LLMTemplate, ModelQuantizer

        template = LLMTemplate(model_type="any", exclude_layers_name=list(exclude))
        config = template.get_config(scheme=scheme.QUARK_SCHEME, **options)
        # Quark deletes its output folder first: only ever a new one.
        out = tmp_path / "quark"
        ModelQuantizer(config).direct_quantize_checkpoint(str(source), str(out), device="cpu")
        tensors: dict[str, Tensor] = {}
        for shard in sorted(out.glob("*.safetensors")):
            tensors |= load_file(shard)
        return tensors, json.loads((out / "config.json").read_text())

    return run


def raw(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


def assert_same_tensors(
    exported: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    scheme: Scheme,
    preserved: tuple[str, ...],
) -> None:
    """Every 2-D weight not preserved equals all of ours; every other tensor its source."""
    seen, due = set(), 0
    for name, weight in source.items():
        if weight.dim() != 2 or name in preserved:
            assert raw(exported[name]) == raw(weight), name
            seen.add(name)
            continue
        due += 1
        theirs = [raw(exported[name]), raw(exported[f"{name}_scale"])]
        assert [raw(tensor) for tensor in scheme.quantize(weight)] == theirs, name
        assert [raw(tensor) for tensor in scheme.define(weight)] == theirs, name
        native = scheme.quantize_bits(weight.view(torch.uint16).numpy())
        assert [part.tobytes() for part in native] == [data for _, _, data in theirs], name
        assert scheme.check_scale(exported[f"{name}_scale"]) == ""
        seen |= {name, f"{name}_scale"}
    assert due
    assert seen == set(exported)


# ---- bytes -------------------------------------------------------------------------------------


@BOTH
def test_a_llama_has_the_bytes_of_quark(scheme: Scheme, export: Export, tmp_path: Path) -> None:
    source = tiny.write_llama(tmp_path / "source", shards=2, num_hidden_layers=2)
    exported, _ = export(source, scheme, exclude=("lm_head",))
    tensors = tiny.llama_tensors(tiny.llama_config(num_hidden_layers=2))
    preserved = ("lm_head.weight", "model.embed_tokens.weight")
    assert_same_tensors(exported, tensors, scheme, preserved)


def pruned_draft(folder: Path) -> Path:
    """The demo draft in the layout with a pruned head: ``lm_head``, ``d2t`` and ``t2d``."""
    demo = files("models") / "smollm2_eagle3"
    tensors = load_file(str(demo / "model.safetensors"))
    config = json.loads((demo / "config.json").read_text()) | {"draft_vocab_size": 512}
    kept = torch.arange(512) * 96
    tensors["lm_head.weight"] = tiny.random(512, config["hidden_size"], seed=5)
    tensors["d2t"] = kept - torch.arange(512)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
    tensors["t2d"][kept] = True
    return tiny.write(folder, config, tensors)


def shared_draft(folder: Path) -> Path:
    """The demo draft as it is: no head of its own."""
    shutil.copytree(str(files("models") / "smollm2_eagle3"), folder)
    return folder


@BOTH
@pytest.mark.parametrize("layout", [shared_draft, pruned_draft])
def test_a_draft_has_the_bytes_of_quark(
    scheme: Scheme, layout: Callable[[Path], Path], export: Export, tmp_path: Path
) -> None:
    source = layout(tmp_path / "source")
    exported, _ = export(source, scheme, exclude=("fc", "lm_head"))
    tensors = load_file(source / "model.safetensors")
    assert_same_tensors(exported, tensors, scheme, ("fc.weight", "lm_head.weight"))


def every_number(least: float, below: float) -> Tensor:
    """Every BF16 number with a magnitude in ``[least, below)`` and zeros, shuffled, ``[n, 64]``."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    magnitudes = numbers.float().abs()
    numbers = numbers[(magnitudes < below) & ((magnitudes >= least) | (magnitudes == 0))]
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(3))
    return numbers[order][: len(numbers) // 64 * 64].view(-1, 64).contiguous()


def wide_range(low: int, high: int) -> Tensor:
    """Blocks of 32 Gaussian numbers, each block at its own power of two."""
    generator = torch.Generator().manual_seed(4)
    powers = torch.randint(low, high, (2048, 2), generator=generator).repeat_interleave(32, dim=1)
    numbers = torch.randn(2048, 64, generator=generator).clamp(-3.9, 3.9).double()
    return (numbers * 2.0**powers).to(torch.bfloat16)


def ties(power: int) -> Tensor:
    """Each BF16 number from 2⁻⁷ to 8 beside each largest number around E8M0's step, scaled."""
    numbers = torch.arange(0x3C00, 0x4100).to(torch.int16).view(torch.bfloat16)
    rows = []
    for largest in (4.0, 5.0, 6.0, 6.96875, 7.0, 7.03125, 7.96875):
        smaller = numbers[numbers <= largest]
        values = torch.cat((smaller, -smaller, torch.tensor([-0.0])))
        values = values[: len(values) // 31 * 31].view(-1, 31)
        rows.append(torch.cat((values, torch.full((len(values), 1), largest)), dim=1))
    return (torch.cat(rows).double() * 2.0**power).to(torch.bfloat16)


def one_large() -> Tensor:
    """One huge number among small ones in each row; a zero row; a row of negative zeros."""
    weight = tiny.random(66, 256, seed=8)
    weight[torch.arange(64), torch.arange(64) * 4] = 3e4
    weight[64], weight[65] = 0.0, -0.0
    return weight


def test_adversarial_weights_have_the_bytes_of_quark_in_mxfp4(
    export: Export, tmp_path: Path
) -> None:
    tensors = {
        "numbers.weight": every_number(0.0, 1.75 * 2.0**127),
        "wide.weight": wide_range(-140, 125),
        "tiny.weight": wide_range(-136, -120),
        "one_large.weight": one_large(),
    } | {f"ties_{power + 200}.weight": ties(power) for power in (0, -8, -123, -126, -129, 120)}
    source = tiny.write(tmp_path / "source", tiny.llama_config(), tensors)
    exported, _ = export(source, mxfp4)
    assert_same_tensors(exported, tensors, mxfp4, ())


def test_adversarial_weights_have_the_bytes_of_quark_in_fp8(export: Export, tmp_path: Path) -> None:
    tensors = {
        "numbers.weight": every_number(0.0, float("inf")),
        "wide.weight": wide_range(-114, 125),
        "one_large.weight": one_large(),
        "zero.weight": torch.zeros(4, 32, dtype=torch.bfloat16),
    } | {f"ties_{power + 200}.weight": ties(power) for power in (0, -8, -119, 120)}
    source = tiny.write(tmp_path / "source", tiny.llama_config(), tensors)
    exported, _ = export(source, fp8_rowwise)
    assert_same_tensors(exported, tensors, fp8_rowwise, ())


@BOTH
def test_rows_are_independent(scheme: Scheme) -> None:
    weight = wide_range(-100, 100)[:96]
    whole = scheme.quantize(weight)
    parts = [scheme.quantize(weight[start : start + 37]) for start in range(0, 96, 37)]
    for tensor, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert raw(tensor)[2] == b"".join(raw(piece)[2] for piece in pieces)


# ---- where Quark's numbers are no use ----------------------------------------------------------


def test_quark_stores_nan_for_the_fp8_rows_we_refuse(export: Export, tmp_path: Path) -> None:
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    weight[:, 0] = torch.tensor([1.0, 448 * 2.0**-126, 2.1875 * 2.0**-125, 2.0**-126])
    weight[2, 1] = weight[2, 0] / 2
    accepted = [raw(tensor) for tensor in fp8_rowwise.quantize(weight[:2])]
    assert accepted == [raw(tensor) for tensor in fp8_rowwise.define(weight[:2])]
    with pytest.raises(ValueError, match="row 2"):
        fp8_rowwise.quantize(weight)
    source = tiny.write(tmp_path / "source", tiny.llama_config(), {"a.weight": weight})
    exported, _ = export(source, fp8_rowwise)
    # The scale of row 2 has no digits left in BF16, that of row 3 is zero.
    stored = fp8_rowwise.dequantize(exported["a.weight"], exported["a.weight_scale"])
    assert stored[2, 1] > 1.2 * weight[2, 1].float()
    assert stored.isnan().any(dim=1).tolist() == [False, False, False, True]
    assert raw(fp8_rowwise.define(weight)[0][:3]) == raw(exported["a.weight"][:3])


def test_quark_stores_infinity_for_the_mxfp4_weights_we_refuse(
    export: Export, tmp_path: Path
) -> None:
    weight = torch.zeros(1, 32, dtype=torch.bfloat16)
    weight[0, 0] = 1.75 * 2.0**127
    with pytest.raises(ValueError, match="overflow"):
        mxfp4.quantize(weight)
    source = tiny.write(tmp_path / "source", tiny.llama_config(), {"a.weight": weight})
    exported, _ = export(source, mxfp4)
    assert "254" in mxfp4.check_scale(exported["a.weight_scale"])
    stored = mxfp4.dequantize(exported["a.weight"], exported["a.weight_scale"])
    assert stored[0, 0] == float("inf")


# ---- config ------------------------------------------------------------------------------------


def in_order(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=1)


@BOTH
def test_the_config_is_what_quark_writes(scheme: Scheme, export: Export, tmp_path: Path) -> None:
    source = tiny.write_llama(tmp_path / "source", num_hidden_layers=1)
    _, config = export(source, scheme, exclude=("*lm_head",))
    ours = quantization_config(scheme.layer_config(), ["lm_head"], {})
    assert in_order(ours) == in_order(config["quantization_config"])


def test_the_config_of_mixed_schemes_is_what_quark_writes(export: Export, tmp_path: Path) -> None:
    source = tiny.write_llama(tmp_path / "source", num_hidden_layers=1)
    exported, config = export(
        source, mxfp4, exclude=("lm_head",), layer_config={"*self_attn*": "ptpc_fp8"}
    )
    layers = {"*self_attn*": fp8_rowwise.layer_config()}
    ours = quantization_config(mxfp4.layer_config(), ["lm_head"], layers)
    assert in_order(ours) == in_order(config["quantization_config"])
    prefix = "model.layers.0."
    tensors = tiny.llama_tensors(tiny.llama_config(num_hidden_layers=1))
    for name, scheme in (("self_attn.o_proj", fp8_rowwise), ("mlp.up_proj", mxfp4)):
        ours_ = scheme.quantize(tensors[f"{prefix}{name}.weight"])
        theirs = [exported[f"{prefix}{name}.weight{suffix}"] for suffix in ("", "_scale")]
        assert [raw(tensor) for tensor in ours_] == [raw(tensor) for tensor in theirs]


# ---- activations -------------------------------------------------------------------------------


def test_mxfp4_activations_are_quantized_as_quark_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's MXFP4 emulation calls Quark for them; its kernel needs a GPU, its reference not."""
    from quark.torch import LLMTemplate
    from quark.torch.quantization import tensor_quantize

    monkeypatch.setattr(tensor_quantize, "QUARK_DISABLE_COMPILE", True)
    config = LLMTemplate(model_type="any").get_config(scheme="mxfp4").global_quant_config
    quantizer = tensor_quantize.FakeQuantizeBase.get_fake_quantize(config.input_tensors)
    x = torch.cat((ties(0)[:512, :32], wide_range(-60, 60)[:512, :32]))
    theirs = quantizer.fake_quantize(x.float())
    assert torch.equal(mxfp4.dequantize(*mxfp4.define(x)), theirs)


def test_fp8_product_is_the_one_of_vllm() -> None:
    """vLLM's own per-token quantization and row-wise kernel, called without an engine."""
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
        RowWiseTorchFP8ScaledMMLinearKernel,
    )
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8

    x, weight = tiny.random(32, 256, seed=1), tiny.random(96, 256, seed=2)
    x[3] = 0.0
    elements, scale = fp8_rowwise.quantize(weight)
    per_token = SimpleNamespace(
        is_group_quant=False,
        static=False,
        group_shape=GroupShape.PER_TOKEN,
        num_token_padding=None,
    )
    tokens, token_scale = QuantFP8.forward_native(per_token, x)
    theirs = RowWiseTorchFP8ScaledMMLinearKernel.apply_scaled_mm(
        SimpleNamespace(),
        A=tokens,
        B=elements.t(),
        out_dtype=torch.bfloat16,
        As=token_scale,
        Bs=scale,
        bias=None,
        output_shape=[32, 96],
    )
    assert torch.equal(fp8_rowwise.matmul(x, elements, scale), theirs)


# ---- setting up --------------------------------------------------------------------------------


def test_the_first_import_builds_and_the_next_does_not(tmp_path: Path) -> None:
    """In a cache of its own: the user's is shared by all environments of the machine."""
    code = """
from schemes.quark_setup import import_quark, needs_build
before = needs_build()
import_quark()
raise SystemExit(f"{before} {needs_build()}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    assert done.stderr.rstrip().splitlines()[-1] == "True False"


def test_quark_fails_without_a_compiler(tmp_path: Path) -> None:
    code = "from schemes.quark_setup import import_quark; import_quark()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CXX": "no-such-c++", "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("RuntimeError: Stable-ABI")
