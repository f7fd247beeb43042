"""SQNR by weight row: against float64 written out, at any magnitude; and what is sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from runs import run
from runs import settings as quiet
from tiny import write_llama
from torch import Tensor

from quantize import energies
from quantize.activations import TOKENS, seeded_activations
from quantize.energies import Energies, Inputs, by_feature, compare_types, measure
from quantize.prove import SAMPLE_ROWS, sample_rows
from quantize.recheck import verify_output
from schemes import SCHEMES
from schemes.base import Scheme

BOTH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.NAME)


def layer(power: int) -> Tensor:
    """A BF16 weight of two blocks of rows and a rest, around ``2 ** power``; one row is zero."""
    weight = torch.randn(530, 96, generator=torch.Generator().manual_seed(power + 200)).double()
    weight[3] = 0
    return (weight * 2.0**power).to(torch.bfloat16)


def measured(scheme: Scheme, weight: Tensor) -> tuple[Energies, Tensor, Tensor]:
    """Our energies, and both SQNRs by row or feature from float64 and the scheme's `matmul`."""
    x = seeded_activations("layer", TOKENS, weight.shape[1])
    stored = scheme.define(weight)
    found = measure(weight, scheme.dequantize(*stored), Inputs(x.float(), scheme.activations(x)))
    lost = weight.double() - scheme.dequantize(*stored).double()
    y = x.double() @ weight.double().T
    noise = y - scheme.matmul(x, *stored).double()
    ratios = ((weight, lost, 1), (y, noise, 0))
    return found, *(
        10 * torch.log10(a.double().square().sum(dim) / b.square().sum(dim)) for a, b, dim in ratios
    )


@BOTH
@pytest.mark.parametrize("power", [-110, -45, 0, 45, 100])
def test_energies_are_those_of_float64_at_any_magnitude(scheme: Scheme, power: int) -> None:
    found, rows, features = measured(scheme, layer(power))
    some = torch.arange(530) != 3
    ours = 10 * torch.log10(found.signal / found.noise)
    torch.testing.assert_close(ours[some], rows[some], atol=1e-3, rtol=0)
    torch.testing.assert_close(by_feature(found)[some], features[some], atol=1e-3, rtol=0)
    assert by_feature(found)[3] == float("inf")  # a zero row is met exactly


def test_a_tiny_number_beside_a_zero_row_is_noise() -> None:
    """Its square is too small for float32."""
    weight, stored = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(2, 32)
    stored[1, 3] = 2.0**-125
    found = measure(weight, stored, Inputs(torch.ones(4, 32), torch.ones(4, 32)))
    assert by_feature(found).tolist() == [float("inf"), -float("inf")]
    assert found.noise.tolist() == [0, 2.0**-250]


def test_by_feature_tells_what_is_not_finite() -> None:
    numbers = torch.tensor([0.0, 0.0, 1.0, 1.0, 100.0, float("inf")], dtype=torch.float64)
    noise = torch.tensor([0.0, 1.0, float("inf"), float("nan"), 1.0, 0.0], dtype=torch.float64)
    found = by_feature(Energies(numbers, noise, numbers, noise))
    infinite = float("inf")
    assert found.tolist() == [infinite, -infinite, -infinite, -infinite, 20, infinite]


@BOTH
def test_float32_is_held_against_float64(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = layer(0), seeded_activations("layer", TOKENS, 96)
    inputs = Inputs(x.float(), scheme.activations(x))
    stored = scheme.dequantize(*scheme.define(weight))
    assert compare_types(weight, stored, inputs) < 1e-4
    large = layer(100)
    assert compare_types(large, large.float(), inputs) == 0  # never measured in float32
    right = energies.measure_in

    def coarse(dtype: torch.dtype, *rest: Tensor | Inputs) -> Energies:
        good = right(dtype, *rest)  # type: ignore[arg-type]
        factor = 1.01 if dtype == torch.float32 else 1.0
        return Energies(good.signal, good.noise, good.out_signal, good.out_noise * factor)

    monkeypatch.setattr(energies, "measure_in", coarse)
    assert compare_types(weight, stored, inputs) > energies.MAY_DIFFER_DB


def test_sampled_rows_are_both_ends_and_some_between() -> None:
    for rows in (1, 8, SAMPLE_ROWS):
        assert sample_rows("a", rows).tolist() == list(range(rows))
    found = sample_rows("a", 1000)
    assert len(set(found.tolist())) == SAMPLE_ROWS
    assert (np.diff(found) > 0).all()
    assert found[:8].tolist() == list(range(8))
    assert found[-8:].tolist() == list(range(992, 1000))
    assert found.tolist() == sample_rows("a", 1000).tolist() != sample_rows("b", 1000).tolist()


def test_a_sampled_proof_says_so_and_still_compares_every_byte(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", num_hidden_layers=1)
    run(source, tmp_path / "out", "mxfp4", verify=False)
    stage = quiet().stage
    reports = [
        verify_output(tmp_path / "out", str(source), None, None, stage, sample=sample)["checkpoint"]
        for sample in (False, True)
    ]
    whole, some = ({c.name: c for c in report.checks} for report in reports)
    assert not any(report.failed or report.unmeasured for report in reports)
    assert whole.keys() == some.keys()
    assert whole["quantized bytes"] == some["quantized bytes"]
    for name in ("weight SQNR, mxfp4", "matmul SQNR, worst row, mxfp4"):
        assert f"{SAMPLE_ROWS} rows of each" in some[name].measured
        assert "rows" not in whole[name].measured
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    report = verify_output(tmp_path / "out", str(source), None, None, stage, sample=True)
    assert report["checkpoint"].failed
