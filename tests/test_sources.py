"""Sources that are stored quantized become the BF16 weights that their publishers mean."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from runs import open_source
from stored import (
    FORMATS,
    FP8,
    INT4_WEIGHTS,
    QUARK_MXFP4,
    bfloat16,
    compressed,
    fp4_codes,
    fp8_block,
    fp8_codes,
    int4,
    mxfp4,
    powers,
    quark,
    restarting,
    scale_bytes,
)
from tiny import Tensors, write

from quantize.errors import ToolError
from quantize.source import Source, read_through
from quantize.sources import base as base_format
from quantize.sources import fp8_block as fp8_block_format
from quantize.sources import fp8_tensor as fp8_tensor_format
from quantize.sources import int4_packed
from quantize.sources import mxfp4 as mxfp4_format

Config = dict[str, Any]


def open_stored(
    folder: Path, stored: Tensors, quantization: Config, shards: int = 1, **config: Any
) -> Source:
    """A source of one weight beside a plain tensor, its companions in the last shard."""
    first, *rest = stored.items()
    other = {"other.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    if len(stored) == 3:  # three shards need an even split
        other["other.bias"] = torch.zeros(4, dtype=torch.bfloat16)
    tensors = dict([first]) | other | dict(rest)
    config |= {"quantization_config": quantization} if quantization else {}
    return open_source(write(folder / "m", config, tensors, shards))


def check_exact(source: Source, name: str, expected: torch.Tensor) -> None:
    """The whole weight, any range of its rows and its bytes are the expected ones."""
    rows = expected.shape[0]
    assert source.specs[name].dtype == "BF16"
    assert source.specs[name].shape == expected.shape
    assert torch.equal(source.tensor(name), expected)
    for start, stop in ((0, 1), (rows // 3, rows - 1), (rows - 1, rows), (1, 1)):
        assert torch.equal(source.tensor(name, start, stop), expected[start:stop])
    assert source.read(name, 1, 2) == expected[1:2].view(torch.uint8).numpy().tobytes()


# Every format against its oracle


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_exact(form: str, shards: int, tmp_path: Path) -> None:
    store, quantization = FORMATS[form]
    stored, expected = store("w.weight", (96, 128), 1)
    source = open_stored(tmp_path, stored, quantization, shards)
    assert set(source.specs) - {"other.bias"} == {"w.weight", "other.weight"}
    assert source.config == {}
    check_exact(source, "w.weight", expected)


@pytest.mark.parametrize("scales", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize(
    ("shape", "block"), [((200, 136), (128, 128)), ((160, 160), (64, 64)), ((64, 96), (16, 32))]
)
def test_fp8_blocks_of_any_size(
    shape: tuple[int, int], block: tuple[int, int], scales: str, tmp_path: Path
) -> None:
    stored, expected = fp8_block("w.weight", shape, 2, block)
    stored[f"w.{scales}"] = stored.pop("w.weight_scale_inv")
    source = open_stored(tmp_path, stored, FP8 | {"weight_block_size": list(block)}, 2)
    check_exact(source, "w.weight", expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.bfloat16])
def test_fp8_blocks_with_other_scales(dtype: torch.dtype, tmp_path: Path) -> None:
    stored, expected = fp8_block("w.weight", (160, 160), 3)
    scale = stored["w.weight_scale_inv"]
    as_bytes = scale_bytes(scale.numpy())
    stored["w.weight_scale_inv"] = (
        scale.to(dtype) if dtype == torch.bfloat16 else as_bytes.view(dtype)
    )
    source = open_stored(tmp_path, stored, FP8 | {"weight_block_size": [64, 64]}, 3)
    check_exact(source, "w.weight", expected)


def test_fp8_rows_that_differ_by_powers_of_two(tmp_path: Path) -> None:
    ones = torch.ones(64, 64).to(torch.float8_e4m3fn)
    scale = 2.0 ** -torch.arange(64.0)[:, None]
    stored = {"w.weight": ones, "w.weight_scale": scale}
    check_exact(open_stored(tmp_path, stored, FP8), "w.weight", scale.expand(64, 64).bfloat16())


def test_mxfp8(tmp_path: Path) -> None:
    elements, values = fp8_codes((8, 96), 4)
    scales = powers((8, 3), 4)
    stored = {"w.weight": elements, "w.weight_scale": scale_bytes(scales)}
    expected = bfloat16(values * np.repeat(scales, 32, axis=1))
    group = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    source = open_stored(tmp_path, stored, compressed("mxfp8-quantized", group))
    check_exact(source, "w.weight", expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (48,), (48, 1)])
@pytest.mark.parametrize("quantization", [FP8, quark(dtype="fp8_e4m3"), {"quant_method": "fp8"}])
def test_fp8_with_every_scale_shape(
    shape: tuple[int, ...], quantization: Config, tmp_path: Path
) -> None:
    elements, values = fp8_codes((48, 64), 5)
    scales = powers(shape, 5)
    stored = {
        "w.weight": elements,
        "w.weight_scale": torch.from_numpy(np.array(scales)),
        "w.input_scale": torch.tensor(1.0),
    }
    source = open_stored(tmp_path, stored, quantization)
    column = scales.reshape(-1, 1)
    check_exact(source, "w.weight", bfloat16(values * column))
    assert list(source.unused) == ["w.input_scale"]


@pytest.mark.parametrize("shape", [(), (3,), (3, 1), (3, 1, 1), (3, 16), (3, 16, 1), (3, 1, 64)])
def test_fp8_experts_with_every_scale_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Read expert by expert, as a family that splits them does; ours has none here."""
    elements, values = fp8_codes((3, 16, 64), 6)
    scales = powers(shape, 6)
    stored = {"w": elements, "w_scale": torch.from_numpy(np.array(scales))}
    source = open_stored(tmp_path, stored, FP8)
    wide = scales.reshape(*shape, *[1] * (3 - len(shape))) if shape else scales
    expected = bfloat16(values * wide)
    for expert in range(3):
        assert torch.equal(read_expert(source, "w", expert), expected[expert])


def read_expert(source: Source, name: str, expert: int) -> torch.Tensor:
    """One matrix of a fused tensor of experts, as `quantize.source.split_experts` sees it."""
    from dataclasses import replace

    from schemes.base import TensorSpec

    whole = source.weights[name]
    spec = TensorSpec(f"{name}.{expert}", "BF16", whole.spec.shape[1:])
    one = replace(whole, spec=spec, expert=expert)
    return replace(source, weights={spec.name: one}).tensor(spec.name)


def test_int4_as_compressed_tensors_unpacks_it(tmp_path: Path) -> None:
    """Scales with all their digits: the product is rounded to BF16 once, as the package does."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**INT4_WEIGHTS))
    stored, _ = int4("w.weight", (64, 128), 7)
    scale = torch.rand(64, 4, generator=torch.Generator().manual_seed(7)).bfloat16()
    stored["w.weight_scale"] = scale
    theirs = PackedQuantizationCompressor.decompress(
        {name.removeprefix("w."): tensor for name, tensor in stored.items()}, scheme
    )
    source = open_stored(tmp_path, stored, compressed("pack-quantized", INT4_WEIGHTS), 3)
    check_exact(source, "w.weight", theirs["weight"])


def test_int4_by_hand(tmp_path: Path) -> None:
    """One row of 32: -8 to 7, first in the lowest bits, then zeros; the scale is 0.5."""
    words = [0x76543210, -0x01234568, -0x77777778, -0x77777778]
    stored = {
        "w.weight_packed": torch.tensor([words], dtype=torch.int32),
        "w.weight_scale": torch.tensor([[0.5]]),
        "w.weight_shape": torch.tensor([1, 32], dtype=torch.int32),
    }
    source = open_stored(tmp_path, stored, compressed("pack-quantized", INT4_WEIGHTS))
    row = [*(n / 2 for n in range(-8, 8)), *[0.0] * 16]
    assert source.tensor("w.weight").tolist() == [row]


def test_int4_groups_are_found_by_name(tmp_path: Path) -> None:
    quantization = compressed("pack-quantized", INT4_WEIGHTS)
    narrow = INT4_WEIGHTS | {"group_size": 64}
    eight = INT4_WEIGHTS | {"num_bits": 8}
    quantization["config_groups"] |= {
        "8 bits": {"targets": ["re:.*other.*"], "weights": eight},
        "wide": {"targets": ["re:w.*"], "weights": narrow},
    }
    stored, _ = int4("w.weight", (16, 128), 8)
    stored["w.weight_scale"] = torch.tensor([[1.0, 4.0]]).expand(16, 2)
    source = open_stored(tmp_path, stored, quantization)
    ones = torch.tensor(1.0)
    plain = open_stored(
        tmp_path / "ones",
        stored | {"w.weight_scale": ones.expand(16, 2)},
        quantization,
    ).tensor("w.weight")
    assert torch.equal(source.tensor("w.weight")[:, :64], plain[:, :64])
    assert torch.equal(source.tensor("w.weight")[:, 64:], plain[:, 64:] * 4)


def test_a_config_nested_in_text_config(tmp_path: Path) -> None:
    stored, expected = int4("w.weight", (16, 64), 9)
    text = {"hidden_size": 64, "quantization_config": compressed("pack-quantized", INT4_WEIGHTS)}
    source = open_stored(tmp_path, stored, {}, 2, model_type="kimi_k25", text_config=text)
    check_exact(source, "w.weight", expected)
    assert source.config == {"model_type": "kimi_k25", "text_config": {"hidden_size": 64}}


def test_mxfp4_as_compressed_tensors_unpacks_it(tmp_path: Path) -> None:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    stored, _ = mxfp4("w.weight", (64, 128), 10, "_packed")
    theirs = MXFP4PackedCompressor.decompress(
        {name.removeprefix("w."): tensor for name, tensor in stored.items()}, scheme
    )
    source = open_stored(tmp_path, stored, FORMATS["MXFP4 packed"][1])
    check_exact(source, "w.weight", theirs["weight"].bfloat16())


def test_gpt_oss_blocks_as_transformers_converts_them(tmp_path: Path) -> None:
    """transformers gives its experts ``[E, K, 2N]``: ours are the transpose of each."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    elements, _ = fp4_codes((3, 16, 64), 11)
    blocks, scales = elements.reshape(3, 16, 2, 16), scale_bytes(powers((3, 16, 2), 11))
    stored = {"w_blocks": blocks, "w_scales": scales}
    source = open_stored(tmp_path, stored, {"quant_method": "mxfp4"}, 2)
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    for expert in range(3):
        assert torch.equal(read_expert(source, "w.weight", expert), theirs[expert].T)


def test_mxfp4_by_hand(tmp_path: Path) -> None:
    """Two blocks: 0.5, 1.5, -6 and zeros at 2¹, then sixteen pairs of 1 and -1 at 2⁻³."""
    packed = [0x31, 0x0F, *[0x00] * 14, *[0xA2] * 16]
    stored = {
        "w.weight": torch.tensor([packed], dtype=torch.uint8),
        "w.weight_scale": torch.tensor([[128, 124]], dtype=torch.uint8),
    }
    source = open_stored(tmp_path, stored, QUARK_MXFP4)
    row = [1.0, 3.0, -12.0, *[0.0] * 29, *[0.125, -0.125] * 16]
    assert source.tensor("w.weight").tolist() == [row]


# Fused weights whose scales start anew in each part


@pytest.mark.parametrize("parts", [(96, 48, 48), (100, 120)])
def test_a_restarting_grid_needs_its_rows(parts: tuple[int, ...], tmp_path: Path) -> None:
    stored, expected = restarting("a.qkv_proj.weight", parts)
    path = tmp_path / "m"
    blocks = FP8 | {"weight_block_size": [64, 64]}
    with pytest.raises(ToolError) as caught:
        open_stored(tmp_path, stored, blocks)
    assert "a.qkv_proj.weight" in caught.value.message
    assert "--fused-rows" in caught.value.hint
    from quantize.checkpoint import open_checkpoint

    source = read_through(open_checkpoint(str(path)), (("*.qkv_proj", parts),))
    check_exact(source, "a.qkv_proj.weight", expected)
    with pytest.raises(ToolError, match="expected a sum of"):
        read_through(open_checkpoint(str(path)), (("*.qkv_proj", (64,)),))


# What cannot be read is refused by name


def test_a_grid_of_another_block_size_is_refused(tmp_path: Path) -> None:
    stored, _ = fp8_block("w.weight", (160, 160), 0)
    with pytest.raises(ToolError, match=r"w.weight_scale_inv \[3, 3\] does not fit .* \[2, 2\]"):
        open_stored(tmp_path, stored, FP8 | {"weight_block_size": [128, 128]})


F8 = torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
U8 = torch.zeros(8, 32, dtype=torch.uint8)
I32 = torch.zeros(8, 8, dtype=torch.int32)
SCALE = torch.ones(8, 2)
SHAPE = torch.tensor([8, 64])
INT4 = compressed("pack-quantized", INT4_WEIGHTS)
PACKED = {"w.weight_packed": I32, "w.weight_scale": SCALE, "w.weight_shape": SHAPE}

REFUSED: dict[str, tuple[Tensors, Config, str]] = {
    "GPTQ": ({"w.qweight": I32}, {"quant_method": "gptq"}, "'gptq'"),
    "AWQ": ({"w.qweight": I32}, {"quant_method": "awq"}, "'awq'"),
    "bitsandbytes": ({"w.weight": U8}, {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
    "ModelOpt": ({"w.weight": F8}, {"quant_method": "modelopt"}, "'modelopt'"),
    "no method": ({"w.weight": F8}, {"bits": 4}, "quant_method None"),
    "a config that is no object": ({"w.weight": F8}, "fp8", "'fp8'"),  # type: ignore[dict-item]
    "a config without such weights": ({}, FP8, "no tensor is stored so"),
    "GPTQ without a config": ({"w.qweight": I32}, {}, "GPTQ or AWQ"),
    "bitsandbytes without a config": ({"w.weight.absmax": SCALE}, {}, "bitsandbytes"),
    "U8 without a config": ({"w.weight": U8}, {}, "w.weight U8"),
    "I32 without a config": ({"w.weight_packed": I32}, {}, "w.weight_packed I32"),
    "FP8 without a config": ({"w.weight": F8}, {}, "w.weight F8_E4M3"),
    "a scale without a config": ({"w.weight_scale_inv": SCALE}, {}, "w.weight_scale_inv"),
    "E5M2": (
        {"w.weight": F8.to(torch.float8_e5m2), "w.weight_scale": SCALE[:, :1]},
        FP8,
        "w.weight F8_E5M2|no tensor is stored so",
    ),
    "FP8 without its scale": (
        {"v.weight": F8.clone(), "v.weight_scale": SCALE[:, :1], "w.weight": F8},
        FP8,
        "no w.weight_scale_inv",
    ),
    "FP8 in blocks of an unknown size": (
        {"w.weight": F8, "w.weight_scale_inv": SCALE},
        FP8,
        "names no weight_block_size",
    ),
    "blocks of a wrong form": (
        {"w.weight": F8, "w.weight_scale_inv": SCALE},
        FP8 | {"weight_block_size": [128]},
        "expected two numbers",
    ),
    "INT8": (PACKED, compressed("pack-quantized", INT4_WEIGHTS | {"num_bits": 8}), "8 bits"),
    "zero points": (
        PACKED,
        compressed("pack-quantized", INT4_WEIGHTS | {"symmetric": False}),
        "zero points",
    ),
    "reordered groups": (PACKED | {"w.weight_g_idx": torch.arange(64)}, INT4, "weight_g_idx"),
    "INT4 without its scale": ({"w.weight_packed": I32}, INT4, "no w.weight_scale"),
    "INT4 without its shape": (
        {"w.weight_packed": I32, "w.weight_scale": SCALE},
        INT4,
        "no w.weight_shape",
    ),
    "INT4 in other groups": (PACKED | {"w.weight_scale": SCALE[:, :1]}, INT4, "groups of 32"),
    "NVFP4": (
        {"w.weight_packed": U8, "w.weight_scale": F8[:, :4], "w.weight_global_scale": SCALE[0]},
        compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
        "no tensor is stored so",
    ),
    "AMD FP4": (
        {"w.weight": U8, "w.weight_scale": U8[:, :2]},
        quark(dtype="fp4", group_size=32, scale_format="e5m3"),
        "no tensor is stored so",
    ),
    "MXFP6": (
        {"w.weight": U8, "w.weight_scale": U8[:, :2]},
        quark(dtype="fp6_e3m2", group_size=32, scale_format="e8m0"),
        "no tensor is stored so",
    ),
    "MXFP4 of another width": (
        {"w.weight": U8, "w.weight_scale": U8[:, :3]},
        QUARK_MXFP4,
        r"expected U8 \[8, 2\]",
    ),
    "rotated weights": (
        {"w.weight": U8, "w.weight_scale": U8[:, :2]},
        QUARK_MXFP4 | {"algo_config": [{"name": "rotation"}]},
        "transformed by rotation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case: str, tmp_path: Path) -> None:
    stored, quantization, said = REFUSED[case]
    with pytest.raises(ToolError, match=said) as caught:
        open_stored(tmp_path, {"first": torch.zeros(1)} | stored, quantization)
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint


STRANGE: dict[str, Config] = {
    "groups in a list": {"config_groups": [INT4_WEIGHTS]},
    "a group that is text": {"config_groups": {"a": "INT4"}},
    "weights that are text": {"config_groups": {"a": {"targets": ["Linear"], "weights": "INT4"}}},
    "targets that are numbers": {"config_groups": {"a": {"targets": [1], "weights": {}}}},
    "no targets": {"config_groups": {"a": {"weights": INT4_WEIGHTS}}},
    "bits that are text": compressed("x", INT4_WEIGHTS | {"num_bits": "4"}),
    "groups of no size": compressed("x", INT4_WEIGHTS | {"group_size": [32]}),
    "a pattern that is none": {"config_groups": {"a": {"targets": ["re:("], "weights": {}}}},
    "a pattern without end": {"config_groups": {"a": {"targets": ["re:(a+)+$"], "weights": {}}}},
    "transforms that are text": INT4 | {"transform_config": "Hadamard"},
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_config_of_another_form_is_refused(case: str, tmp_path: Path) -> None:
    quantization = {"quant_method": "compressed-tensors"} | STRANGE[case]
    with pytest.raises(ToolError, match=r"config\.json|w\.weight_packed"):
        open_stored(tmp_path, PACKED, quantization)


@pytest.mark.parametrize("found", [[], "x", {"weight": 4}, {"weight": {"dtype": ["fp4"]}}])
def test_a_quark_config_of_another_form_is_refused(found: Any, tmp_path: Path) -> None:
    stored = {"w.weight": U8, "w.weight_scale": U8[:, :2].clone()}
    for key in ("global_quant_config", "layer_quant_config", "algo_config"):
        with pytest.raises(ToolError, match="no tensor is stored so"):
            open_stored(tmp_path, stored, {"quant_method": "quark", key: found})


def test_model_opt_is_named_by_its_own_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {}, {"w.weight": F8, "w.weight_scale": torch.tensor(1.0)})
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ToolError, match="ModelOpt"):
        open_source(path)


def test_configs_that_differ_are_refused(tmp_path: Path) -> None:
    stored, quantization = (
        fp8_block("w.weight", (64, 64), 0)[0],
        FP8 | {"weight_block_size": [64, 64]},
    )
    text = {"quantization_config": quantization}
    with pytest.raises(ToolError, match=r"quantization_config differ"):
        open_stored(tmp_path, stored, FP8, text_config=text)
    source = open_stored(tmp_path / "same", stored, quantization, text_config=text)
    assert source.config == {"text_config": {}}


def test_an_int4_shape_that_differs_is_refused(tmp_path: Path) -> None:
    stored = PACKED | {"w.weight_shape": torch.tensor([8, 60])}
    source = open_stored(tmp_path, stored, INT4)
    with pytest.raises(ToolError, match=r"w.weight_shape is \[8, 60\], expected \[8, 64\]"):
        source.tensor("w.weight")


# Mutants: the mistakes that other readers have made must not pass unseen

MUTANTS = {
    "INT4: last element in the lowest bits": (
        "INT4 packed",
        int4_packed,
        "torch.arange(0, 32, 4",
        "torch.arange(28, -4, -4",
    ),
    "INT4: no zero offset": ("INT4 packed", int4_packed, "- ZERO", "- 7"),
    "FP8: blocks counted from the range's first row": (
        "FP8 blocks",
        fp8_block_format,
        "torch.arange(start, stop) // tall",
        "torch.arange(stop - start) // tall",
    ),
    "FP8: rows and columns of blocks exchanged": (
        "FP8 blocks, 32 x 64",
        fp8_block_format,
        "weight.block[1], 1)",
        "weight.block[0], 1)",
    ),
    "FP8: the scale of the first row": (
        "FP8 per channel",
        fp8_tensor_format,
        "weight, 1, start, stop), scale",
        "weight, 1, 0, stop - start), scale",
    ),
    "MXFP4: second element in the low nibble": (
        "MXFP4 of Quark",
        mxfp4_format,
        "packed.reshape(stop - start, -1)",
        "((packed >> 4) | (packed << 4)).reshape(stop - start, -1)",
    ),
}


@pytest.mark.parametrize("case", MUTANTS)
def test_a_mutant_is_noticed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, module, old, new = MUTANTS[case]
    if form in FORMATS:
        (stored, expected), quantization = (
            FORMATS[form][0]("w.weight", (96, 128), 1),
            FORMATS[form][1],
        )
    else:
        stored, expected = fp8_block("w.weight", (96, 128), 1, (32, 64))
        quantization = FP8 | {"weight_block_size": [32, 64]}
    source = open_stored(tmp_path, stored, quantization)
    check_exact(source, "w.weight", expected)
    monkeypatch.setattr(module, "decode", mutate(module, old, new)["decode"])
    with pytest.raises((AssertionError, RuntimeError)):
        check_exact(source, "w.weight", expected)


def test_the_mutant_that_reads_the_first_expert_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements, values = fp8_codes((3, 16, 64), 6)
    scales = powers((3, 1, 1), 6)
    stored = {"w": elements, "w_scale": torch.from_numpy(scales)}
    source = open_stored(tmp_path, stored, FP8)
    expected = bfloat16(values * scales)[2]
    assert torch.equal(read_expert(source, "w", 2), expected)
    for module, old, new in (
        (fp8_tensor_format, "weight.expert, weight.expert + 1", "0, 1"),
        (base_format, "checkpoint.expert(name, weight.expert,", "checkpoint.expert(name, 0,"),
    ):
        mutant = mutate(module, old, new)
        with monkeypatch.context() as patch:
            if module is base_format:
                patch.setattr(fp8_tensor_format, "read_rows", mutant["read_rows"])
            else:
                patch.setattr(module, "decode", mutant["decode"])
            assert not torch.equal(read_expert(source, "w", 2), expected)


def mutate(module: ModuleType, old: str, new: str) -> dict[str, Any]:
    """The names of a module whose text was changed in one place."""
    text = inspect.getsource(module)
    assert text.count(old) == 1
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(text.replace(old, new), "mutant", "exec"), names)
    return names
