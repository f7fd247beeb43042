"""The schemes' floors: real and random layers meet them, wrong scales and nibbles do not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantize.activations import TOKENS, seeded_activations
from schemes import SCHEMES, fp8_rowwise, mxfp4
from schemes.base import Scheme

BOTH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.NAME)


def test_activations_are_the_same_for_a_name_and_have_outliers() -> None:
    x = seeded_activations("model.layers.0.mlp.up_proj", TOKENS, 640)
    assert x.dtype == torch.bfloat16
    assert torch.equal(x, seeded_activations("model.layers.0.mlp.up_proj", TOKENS, 640))
    assert not torch.equal(x, seeded_activations("model.layers.1.mlp.up_proj", TOKENS, 640))
    channels, tokens = (x.float().square().mean(dim=dim).sqrt() for dim in (0, 1))
    assert (channels > 2.5 * channels.median()).sum() == 10
    assert (tokens > 1.5 * tokens.median()).sum() == 16


def decibels(signal: Tensor, noise: Tensor) -> Tensor:
    return 10 * torch.log10(signal.double().square().sum(0) / noise.double().square().sum(0))


def losses(scheme: Scheme, weight: Tensor, stored: tuple[Tensor, ...]) -> tuple[float, ...]:
    """SQNR in dB of the weight, of all outputs and of the worst output feature."""
    x = seeded_activations("layer", TOKENS, weight.shape[1])
    y = x.double() @ weight.double().T
    noise = y - scheme.matmul(x, *stored).double()
    kept = scheme.dequantize(*stored)
    return (
        float(decibels(weight.flatten(), (weight.double() - kept.double()).flatten())),
        float(decibels(y.flatten(), noise.flatten())),
        float(decibels(y, noise).min()),
    )


def floors(scheme: Scheme) -> tuple[float, ...]:
    return scheme.SQNR_FLOOR_DB, scheme.MATMUL_FLOOR_DB, scheme.MATMUL_ROW_FLOOR_DB


def random_layers() -> Iterator[Tensor]:
    """Gaussian and heavy-tailed (Student-t, 4 degrees of freedom) weights of several sizes."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((64, 64), (256, 128), (128, 2048), (2048, 512)):
        gauss = torch.randn(rows, columns, generator=generator) * 0.02
        chi = torch.randn(4, rows, columns, generator=generator).square().mean(0).sqrt()
        yield gauss.to(torch.bfloat16)
        yield (gauss / chi).to(torch.bfloat16)


@pytest.fixture(scope="module")
def layers(draft: dict[str, Tensor]) -> list[Tensor]:
    return [*draft.values(), *random_layers()]


@pytest.fixture(scope="module")
def draft() -> dict[str, Tensor]:
    folder = files("models") / "smollm2_eagle3" / "model.safetensors"
    return {name: t for name, t in load_file(str(folder)).items() if t.dim() == 2}


@BOTH
def test_the_demo_draft_and_random_layers_meet_the_floors(
    scheme: Scheme, layers: list[Tensor]
) -> None:
    assert len(layers) == 8 + 8
    for weight in layers:
        for found, floor in zip(
            losses(scheme, weight, scheme.define(weight)), floors(scheme), strict=True
        ):
            assert found >= floor


def shifted(scheme: Scheme, stored: tuple[Tensor, ...], row: int, step: int) -> tuple[Tensor, ...]:
    """The stored tensors with one row's scales doubled (step 1) or halved (step -1)."""
    elements, scale = stored[0], stored[1].clone()
    if scheme.NAME == "mxfp4":
        scale[row] += step
    else:
        scale[row] *= 2.0**step
    return elements, scale


@BOTH
@pytest.mark.parametrize("step", [1, -1])
def test_one_row_of_shifted_scales_fails_the_row_floor(
    scheme: Scheme, step: int, layers: list[Tensor]
) -> None:
    for weight in layers:
        rows = weight[:48]
        mutant = shifted(scheme, scheme.define(rows), 24, step)
        assert losses(scheme, rows, mutant)[2] < scheme.MATMUL_ROW_FLOOR_DB - 1


def test_swapped_nibbles_and_shifted_scales_fail_every_floor(draft: dict[str, Tensor]) -> None:
    weight = draft["midlayer.self_attn.o_proj.weight"]
    packed, scale = mxfp4.define(weight)
    mutants = [((packed << 4) | (packed >> 4), scale)]
    mutants += [(packed, scale + step) for step in (1, 2, 254, 255)]
    for mutant in mutants:
        found = losses(mxfp4, weight, mutant)
        assert all(loss < floor for loss, floor in zip(found, floors(mxfp4), strict=True))


def test_transposed_fp8_fails_every_floor(draft: dict[str, Tensor]) -> None:
    weight = draft["midlayer.self_attn.o_proj.weight"]
    elements, scale = fp8_rowwise.define(weight)
    mutant = (elements, scale.flip(0))
    found = losses(fp8_rowwise, weight, mutant)
    assert all(loss < floor for loss, floor in zip(found, floors(fp8_rowwise), strict=True))
