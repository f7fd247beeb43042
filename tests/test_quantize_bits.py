"""The CPU kernels: their bytes are `define`'s, wherever the two could differ; so are refusals.

`test_schemes` holds both equal to ml_dtypes and `test_quark_contract` to Quark's public export.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemes import SCHEMES, fp8_rowwise, mxfp4
from schemes.base import NotFinite, Scheme

Bits = npt.NDArray[np.uint16]
BOTH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.NAME)
TOO_LARGE = 0x7F60
"""1.75·2¹²⁷, the least magnitude that MXFP4 refuses."""
INFINITE = 0x7F80
LEAST_FP8 = 0x04E0
"""448·2⁻¹²⁶, the least largest magnitude of a row that FP8 accepts."""


def by_kernel(scheme: Scheme, bits: Bits) -> list[bytes]:
    return [stored.tobytes() for stored in scheme.quantize_bits(bits)]


def by_definition(scheme: Scheme, bits: Bits) -> list[bytes]:
    weight = torch.from_numpy(bits).view(torch.bfloat16)
    return [stored.view(torch.uint8).numpy().tobytes() for stored in scheme.define(weight)]


def signed(magnitudes: Bits, seed: int = 0) -> Bits:
    """Magnitudes with random signs."""
    signs = np.random.default_rng(seed).integers(0, 2, magnitudes.shape, dtype=np.uint16)
    return magnitudes | (signs << 15).astype(np.uint16)


def under(largest: int, width: int) -> Bits:
    """Rows ``[n, width]`` of every magnitude up to ``largest``, which each row begins with."""
    rest = np.arange(largest + 1, dtype=np.uint16)
    rest = np.resize(rest, -(-len(rest) // (width - 1)) * (width - 1)).reshape(-1, width - 1)
    return np.hstack((np.full((len(rest), 1), largest, np.uint16), rest))


# ---- everything that decides a byte ------------------------------------------------------------


def test_mxfp4_scale_of_every_largest_magnitude() -> None:
    bits = np.zeros((TOO_LARGE, 32), np.uint16)
    bits[:, 17] = np.arange(TOO_LARGE)
    assert by_kernel(mxfp4, signed(bits)) == by_definition(mxfp4, signed(bits))


@pytest.mark.parametrize("last", [0x5F, 0x60, 0xDF])
def test_mxfp4_code_of_every_number_under_every_scale(last: int) -> None:
    """A code depends on the number and its block's scale alone, so these are all there are."""
    step = 1 if last == 0x60 else 16
    for largest in range(last, TOO_LARGE, 0x80 * step):
        bits = signed(under(largest, 32), largest)
        assert by_kernel(mxfp4, bits) == by_definition(mxfp4, bits), hex(largest)


def test_fp8_scale_of_every_largest_magnitude() -> None:
    bits = np.zeros((INFINITE - LEAST_FP8 + 1, 3), np.uint16)
    bits[1:, 1] = np.arange(LEAST_FP8, INFINITE)
    assert by_kernel(fp8_rowwise, signed(bits)) == by_definition(fp8_rowwise, signed(bits))


@pytest.mark.parametrize("exponent", [0x04E0, 0x0500, 0x0F80, 0x3F80, 0x4380, 0x7F00])
def test_fp8_code_of_every_number_under_every_mantissa_of_the_scale(exponent: int) -> None:
    """From the least largest magnitude that is accepted to the largest that is finite."""
    for largest in range(exponent, exponent + 0x80):
        bits = signed(np.unique(under(largest, 64))[None], largest)
        assert by_kernel(fp8_rowwise, bits) == by_definition(fp8_rowwise, bits), hex(largest)


def test_mxfp4_block_and_position_do_not_matter() -> None:
    bits = signed(np.tile(np.arange(96, dtype=np.uint16) * 331 % TOO_LARGE, (5, 1)), 3)
    whole = mxfp4.quantize_bits(bits)
    for block in range(3):
        for shift in range(0, 32, 2):
            one = np.ascontiguousarray(np.roll(bits[:, 32 * block : 32 * block + 32], shift, 1))
            packed, scale = mxfp4.quantize_bits(one)
            ours = np.roll(whole[0][:, 16 * block : 16 * block + 16], shift // 2, 1)
            assert (packed == ours).all()
            assert (scale[:, 0] == whole[1][:, block]).all()


# ---- any weight --------------------------------------------------------------------------------


@BOTH
@settings(deadline=None, max_examples=200)
@given(data=st.data(), rows=st.integers(0, 5), blocks=st.integers(1, 3), extra=st.integers(0, 31))
def test_any_weight(
    scheme: Scheme, data: st.DataObject, rows: int, blocks: int, extra: int
) -> None:
    """Numbers within a few powers of two of each other, or any."""
    columns = 32 * blocks + (extra if scheme is fp8_rowwise else 0)
    low = data.draw(st.integers(LEAST_FP8, TOO_LARGE - 1))
    high = data.draw(st.integers(low, TOO_LARGE - 1))
    seed = data.draw(st.integers(0, 1 << 32))
    magnitudes = np.random.default_rng(seed).integers(low, high + 1, (rows, columns), np.uint16)
    zero = np.random.default_rng(seed).random((rows, columns)) < data.draw(st.floats(0, 1))
    magnitudes[zero] = 0
    bits = signed(magnitudes, seed)
    assert by_kernel(scheme, bits) == by_definition(scheme, bits)


@BOTH
def test_threads_do_not_disturb_each_other(scheme: Scheme) -> None:
    parts = [signed(under(largest, 64), largest) for largest in range(0x3F80, 0x4000, 4)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda bits: by_kernel(scheme, bits), parts))
    assert found == [by_kernel(scheme, bits) for bits in parts]


# ---- refusals ----------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
@pytest.mark.parametrize("place", [(0, 0), (2, 63), (1, 33)])
def test_nan_and_inf_are_refused(scheme: Scheme, value: int, place: tuple[int, int]) -> None:
    bits = np.full((3, 64), 0x3F80, np.uint16)
    bits[0, 1] = 0xBF80  # a sign bit is no large magnitude
    scheme.quantize_bits(bits)
    bits[place] = value
    with pytest.raises(NotFinite):
        scheme.quantize_bits(bits)


def refusal(function: object, *arguments: object) -> str:
    with pytest.raises(ValueError, match="magnitude") as caught:
        function(*arguments)  # type: ignore[operator]
    assert not isinstance(caught.value, NotFinite)
    return str(caught.value)


def test_mxfp4_refuses_what_quark_cannot_store_in_the_same_words() -> None:
    bits = np.zeros((2, 64), np.uint16)
    bits[1, 40] = TOO_LARGE - 1 + 0x8000
    mxfp4.quantize_bits(bits)
    bits[1, 40] += 1
    weight = torch.from_numpy(bits).view(torch.bfloat16)
    said = refusal(mxfp4.quantize_bits, bits)
    assert said == refusal(mxfp4.quantize, weight)
    assert "2.98e+38 overflows" in said


def test_fp8_refuses_what_quark_cannot_store_in_the_same_words() -> None:
    bits = np.zeros((4, 64), np.uint16)
    bits[1, 40] = LEAST_FP8 + 0x8000
    fp8_rowwise.quantize_bits(bits)
    for row, largest in ((2, LEAST_FP8 - 1), (1, 1)):
        bits[row] = 0
        bits[row, 3] = largest
        weight = torch.from_numpy(bits).view(torch.bfloat16)
        said = refusal(fp8_rowwise.quantize_bits, bits)
        assert said == refusal(fp8_rowwise.quantize, weight)
        assert said.startswith(f"row {row}:")


# ---- the cache of compiled code ----------------------------------------------------------------

USE = """
import sys
import numpy as np
from schemes import mxfp4, kernels
packed, scale = mxfp4.quantize_bits(np.full((1, 32), 0x3F80, np.uint16))
assert not {"torch", "quark", "transformers"} & set(sys.modules)
hits = sum(kernels.quantize_mxfp4.stats.cache_hits.values())
print(packed.tobytes().hex(), scale.tobytes().hex(), hits)
"""
ONES = "66" * 16 + " 7d "


def use_copy(package: Path, home: Path) -> str:
    """The result of a fresh interpreter that imports a copy of our package."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG"))}
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=package.parent,
        env=environment | {"HOME": str(home), "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip("\n")


def test_compiled_code_is_kept_where_there_is_a_place(tmp_path: Path) -> None:
    """Beside the module, else in the user's cache folder, else nowhere."""
    root = Path(mxfp4.__file__).parent
    package, home = tmp_path / "lib" / "schemes", tmp_path / "home"
    shutil.copytree(root, package, ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir()
    assert use_copy(package, home) == f"{ONES}0"
    assert list((package / "__pycache__").glob("*.nbi"))
    assert not list(home.iterdir())
    assert use_copy(package, home) == f"{ONES}1"
    shutil.rmtree(package / "__pycache__")
    (package / "__pycache__").touch()  # as a read-only folder, also for root
    assert use_copy(package, home) == f"{ONES}0"
    assert use_copy(package, home) == f"{ONES}1"
    shutil.rmtree(home)
    home.touch()
    assert use_copy(package, home) == f"{ONES}0"
