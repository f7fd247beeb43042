"""The schemes' definitions against ml_dtypes and blocks worked by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from quantize.activations import seeded_activations
from schemes import SCHEMES, find_scheme, fp8_rowwise, mxfp4, quark_setup
from schemes.base import Scheme, TensorSpec

Array = npt.NDArray[np.float32]
BOTH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.NAME)
HUGE = 1.75 * 2.0**127


def bf16(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).to(torch.bfloat16)


def block(*values: float) -> Tensor:
    """One row of one MXFP4 block, filled up with zeros."""
    return bf16([*values, *[0.0] * (32 - len(values))])


def raw(stored: tuple[Tensor, ...]) -> list[bytes]:
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in stored]


def every_bf16(seed: int, below: float) -> Tensor:
    """Every finite BF16 number with a magnitude under ``below``, in a random order, ``[n, 64]``."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.abs() < below)]
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    return numbers[order][: len(numbers) // 64 * 64].view(-1, 64).contiguous()


def same_size(seed: int) -> Tensor:
    """Rows whose numbers are of similar size, from 2⁻¹¹⁸ to 2¹¹⁹, so that all codes occur."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-118, 120, (4096, 1), generator=generator).double()
    return (torch.randn(4096, 64, generator=generator).double() * 2**exponents).to(torch.bfloat16)


# ---- names, headers, imports -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "scheme"),
    [
        (("mxfp4", "MXFP4", "w_mxfp4_a_mxfp4", "W_MXFP4_A_MXFP4"), mxfp4),
        (("fp8_rowwise", "ptpc_fp8", "PTPC_FP8", "fp8_per_channel", "FP8_DYNAMIC"), fp8_rowwise),
    ],
)
def test_a_scheme_is_found_by_every_name_in_any_case(
    names: tuple[str, ...], scheme: Scheme
) -> None:
    assert all(find_scheme(name) is scheme for name in names)


def test_an_unknown_scheme_is_refused_with_all_names() -> None:
    with pytest.raises(ValueError, match="'fp8'") as refusal:
        find_scheme("fp8")
    for scheme in SCHEMES:
        assert all(name in str(refusal.value) for name in (scheme.NAME, *scheme.ALIASES))


def test_planning_needs_neither_torch_nor_quark() -> None:
    code = """
import sys, json
from schemes import SCHEMES, quark_setup
from schemes.base import TensorSpec
for scheme in SCHEMES:
    scheme.misfit(TensorSpec("w", "BF16", (4, 64)))
    scheme.stored(TensorSpec("w", "BF16", (4, 64)))
    scheme.layer_config()
quark_setup.missing_compiler(), quark_setup.needs_build(), quark_setup.build_lock()
print(json.dumps(sorted({"torch", "quark", "numpy"} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(done.stdout) == []


def test_stored_tensors_and_misfits() -> None:
    weight = TensorSpec("a.weight", "BF16", (8, 64))
    assert mxfp4.stored(weight) == (
        TensorSpec("a.weight", "U8", (8, 32)),
        TensorSpec("a.weight_scale", "U8", (8, 2)),
    )
    assert fp8_rowwise.stored(weight) == (
        TensorSpec("a.weight", "F8_E4M3", (8, 64)),
        TensorSpec("a.weight_scale", "F32", (8,)),
    )
    odd, experts = TensorSpec("a", "BF16", (8, 48)), TensorSpec("a", "BF16", (2, 8, 64))
    assert mxfp4.misfit(weight) == fp8_rowwise.misfit(weight) == fp8_rowwise.misfit(odd) == ""
    assert "48" in mxfp4.misfit(odd)
    assert "3-D" in mxfp4.misfit(experts)
    assert "3-D" in fp8_rowwise.misfit(experts)


@BOTH
def test_stored_specs_are_what_define_returns(scheme: Scheme) -> None:
    specs = scheme.stored(TensorSpec("a.weight", "BF16", (8, 64)))
    names = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    found = scheme.define(same_size(0)[:8])
    assert [(names[t.dtype], tuple(t.shape)) for t in found] == [(s.dtype, s.shape) for s in specs]


def test_layer_config_is_new_each_time() -> None:
    mxfp4.layer_config()["weight"]["dtype"] = "changed"
    assert mxfp4.layer_config()["weight"]["dtype"] == "fp4"


# ---- worked by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "byte"),
    [
        *((1.0, 125), (1.7421875, 125), (1.75, 126), (3.46875, 126), (3.5, 127), (6.90625, 127)),
        *((7.0, 128), (2.0**-124, 1), (2.0**-126, 1), (2.0**-133, 1), (1.5 * 2.0**127, 252)),
    ],
)
def test_mxfp4_scale_steps_up_at_mantissa_one_and_three_quarters(largest: float, byte: int) -> None:
    assert mxfp4.define(block(0.0, -largest))[1].tolist() == [[byte]]


def test_mxfp4_ties_go_to_even_and_large_numbers_saturate() -> None:
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}  # value: E2M1 code
    weight = block(*ties, *(-tie for tie in ties), 6.875, -6.875)
    packed, scale = mxfp4.define(weight)
    # The largest is 6.875: 2² stands for 4, the scale is 2⁰. Low nibble first; no negative zero.
    assert scale.tolist() == [[127]]
    assert packed.tolist() == [[0x20, 0x42, 0x64, 0x06, 0xAA, 0xCC, 0xEE, 0xF7, *[0] * 8]]


def test_mxfp4_block_worked_by_hand() -> None:
    weight = block(1.0, -0.5, 0.0, -0.0, 0.03125, -0.03125, 0.8, -1.6)
    packed, scale = mxfp4.define(weight)
    # Largest 1.6 in BF16 is 1.6015625: scale 2⁰⁻² = 0.25, quotients 4 -2 0 -0 .125 -.125 3.2 -6.4.
    assert (packed.tolist(), scale.tolist()) == ([[0xC6, 0x00, 0x00, 0xF5, *[0] * 12]], [[125]])
    assert mxfp4.dequantize(packed, scale)[0, :8].tolist() == [1, -0.5, 0, 0, 0, 0, 0.75, -1.5]


def test_mxfp4_zero_block_and_its_neighbour() -> None:
    packed, scale = mxfp4.define(torch.cat((block(0.0, -0.0), block(1.0)), dim=1))
    assert scale.tolist() == [[1, 125]]
    assert packed.tolist() == [[0] * 16 + [0x06] + [0] * 15]


def test_fp8_row_worked_by_hand() -> None:
    row = [448.0, -224.0, 1.0, 0.0, -0.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -(2.0**-6)]
    elements, scale = fp8_rowwise.define(bf16(row))
    assert scale.tolist() == [1.0]
    assert raw((elements,))[0] == bytes.fromhex("7e f6 38 00 80 58 5a 01 00 02 88")
    assert fp8_rowwise.dequantize(elements, scale).tolist() == [
        [448, -224, 1, 0, 0, 16, 20, 2.0**-9, 0, 2.0**-8, -(2.0**-6)]
    ]


def test_fp8_zero_row_has_quarks_epsilon() -> None:
    elements, scale = fp8_rowwise.define(bf16([0.0, -0.0], [0.0, 3.0]))
    assert scale.tolist() == pytest.approx([1.1920929e-07, 3 / 448], rel=1e-7)
    assert raw((elements,))[0] == bytes([0x00, 0x80, 0x00, 0x7E])


# ---- against ml_dtypes -------------------------------------------------------------------------


def numbers(weight: Tensor) -> Array:
    return weight.float().numpy()


def bits(weight: Tensor) -> npt.NDArray[np.uint16]:
    return weight.view(torch.uint16).numpy()


def mxfp4_by_ml_dtypes(weight: Array) -> list[bytes]:
    """MXFP4 with frexp and ml_dtypes' casts; Quark's departure for tiny blocks left out."""
    blocks = weight.astype(np.float64).reshape(len(weight), -1, 32)
    fraction, exponent = np.frexp(np.abs(blocks).max(axis=2))  # in [0.5, 1)
    power = np.where(fraction >= 0.875, exponent, exponent - 1) - 2
    scale = np.exp2(np.clip(power, -126, 127)).astype(ml_dtypes.float8_e8m0fnu)
    quotients = np.clip(blocks / scale.astype(np.float64)[:, :, None], -6, 6)
    codes = quotients.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(weight), -1)
    codes[codes == 8] = 0
    return [(codes[:, ::2] | codes[:, 1::2] << 4).tobytes(), scale.tobytes()]


def fp8_by_ml_dtypes(weight: Array) -> list[bytes]:
    """FP8 row-wise with numpy and ml_dtypes' casts: the quotient is rounded to BF16 first."""
    scale = np.abs(weight).max(axis=1) / np.float32(448)
    scale[scale == 0] = np.float32(2.0**-23)
    divisor = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    quotient = (weight / divisor[:, None]).astype(ml_dtypes.bfloat16).astype(np.float32)
    elements = np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return [elements.tobytes(), scale.tobytes()]


@pytest.mark.parametrize("seed", range(3))
def test_mxfp4_equals_ml_dtypes(seed: int) -> None:
    weight = torch.cat((every_bf16(seed, HUGE), same_size(seed)))
    blocks = weight.view(-1, 32)
    weight = blocks[blocks.abs().amax(dim=1) >= 1.75 * 2.0**-125]
    assert len(weight) > 9000
    expected = mxfp4_by_ml_dtypes(numbers(weight))
    assert raw(mxfp4.define(weight)) == expected
    assert [part.tobytes() for part in mxfp4.quantize_bits(bits(weight))] == expected


@pytest.mark.parametrize("seed", range(3))
def test_fp8_equals_ml_dtypes(seed: int) -> None:
    weight = torch.cat((every_bf16(seed, float("inf")), same_size(seed)))
    expected = fp8_by_ml_dtypes(numbers(weight))
    assert raw(fp8_rowwise.define(weight)) == expected
    assert [part.tobytes() for part in fp8_rowwise.quantize_bits(bits(weight))] == expected


def test_mxfp4_dequantizes_every_byte_as_ml_dtypes() -> None:
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)[:, None]
    bytes_ = packed.numpy()
    expected = np.stack((nibbles[bytes_ & 15], nibbles[bytes_ >> 4]), axis=2).reshape(-1, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = expected * np.repeat(scales, 16)[:, None]
    np.testing.assert_array_equal(mxfp4.dequantize(packed, scale).numpy(), expected)


def test_fp8_dequantizes_every_byte_as_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)[None]
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.3)
    elements = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    found = fp8_rowwise.dequantize(elements, torch.tensor([0.3])).numpy()
    np.testing.assert_array_equal(found, expected)


# ---- properties --------------------------------------------------------------------------------


@BOTH
def test_rows_are_independent(scheme: Scheme) -> None:
    weight = same_size(7)[:96]
    whole = scheme.define(weight)
    parts = [scheme.define(weight[start : start + 37]) for start in range(0, 96, 37)]
    joined = [b"".join(pieces) for pieces in zip(*map(raw, parts), strict=True)]
    assert joined == raw(whole)
    assert raw((scheme.dequantize(*whole)[5:9],)) == raw(
        (scheme.dequantize(*(tensor[5:9] for tensor in whole)),)
    )


def test_check_scale() -> None:
    good = torch.tensor([[1, 252]], dtype=torch.uint8)
    assert mxfp4.check_scale(good) == ""
    for byte in (0, 253, 254, 255):
        assert str(byte) in mxfp4.check_scale(torch.tensor([[127, byte]], dtype=torch.uint8))
    assert fp8_rowwise.check_scale(torch.tensor([1e-7, 3.0])) == ""
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        assert "row 1" in fp8_rowwise.check_scale(torch.tensor([1.0, scale]))


def test_mxfp4_matmul_multiplies_quantized_numbers() -> None:
    x, weight = seeded_activations("layer", 16, 64), torch.randn(8, 64).to(torch.bfloat16)
    operands = [mxfp4.dequantize(*mxfp4.define(part)).double() for part in (x, weight)]
    found = mxfp4.matmul(x, *mxfp4.define(weight)).double()
    torch.testing.assert_close(found, operands[0] @ operands[1].T, rtol=2**-8, atol=1e-6)


def test_fp8_matmul_multiplies_quantized_numbers() -> None:
    x, weight = seeded_activations("layer", 16, 64), torch.randn(8, 64).to(torch.bfloat16)
    token = x.float().numpy()
    scale = np.abs(token).max(axis=1, keepdims=True) / np.float32(448)
    codes = np.clip(token * (np.float32(1) / scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    tokens = torch.from_numpy(codes.astype(np.float64) * scale)
    stored = fp8_rowwise.define(weight)
    expected = tokens @ fp8_rowwise.dequantize(*stored).double().T
    found = fp8_rowwise.matmul(x, *stored).double()
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-6)


def test_a_zero_weight_multiplies_to_zero() -> None:
    weight = torch.zeros(4, 64, dtype=torch.bfloat16)
    for scheme in SCHEMES:
        assert not scheme.matmul(seeded_activations("zero", 8, 64), *scheme.define(weight)).any()


# ---- what Quark needs --------------------------------------------------------------------------


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quark_setup.missing_compiler() == ""
    monkeypatch.setenv("CXX", "no-such-c++")
    assert quark_setup.missing_compiler() == "no-such-c++"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", os.devnull)
    assert quark_setup.missing_compiler() == "c++"


def test_a_missing_build_and_a_lock_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("extensions")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(empty))
    assert quark_setup.needs_build()
    assert quark_setup.build_lock() is None
    lock = empty / "quark_hw_emulation_stable_abi" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert quark_setup.build_lock() == lock
