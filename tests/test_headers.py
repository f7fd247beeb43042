"""Header sets of whole published models, and their plans, in seconds and without a weight."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "headers"))
from make import MODELS, Tensors, nbytes, write

COMPANIONS = ("weight_scale", "weight_scale_inv", "weight_shape")

PUBLISHED = {
    # The Hub's own figures: parameters, and the total_size of the index.
    "llama-3.1-405b": (191, 1137, 405_853_388_800, 811_706_777_600),
    # 684,489,845,504 parameters without scales; 688,586,727,753 bytes of files with headers.
    "deepseek-v3-fp8": (163, 91_991, 684_489_845_504, 688_574_839_360),
    # 208,550 tensors, total_size 595,148,192,736.
    "kimi-k2.5-int4": (64, 208_550, 1_026_879_376_368, 595_148_192_736),
    # hf-mem reads 230,121,630,720 bytes from the published headers.
    "minimax-m2.5-fp8": (126, 96_103, 228_689_764_864, 230_121_630_720),
}
"""Shards, tensors, parameters and bytes."""


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders by model; a few MB each."""
    root = tmp_path_factory.mktemp("headers")
    for name, build in MODELS.items():
        write(build(), root / name)
    return {name: root / name for name in MODELS}


def all_tensors(name: str) -> Tensors:
    return {key: spec for part in MODELS[name]().shards.values() for key, spec in part.items()}


def parameters(tensors: Tensors) -> int:
    """Weights as the model card counts them: packed ones unpacked, scales left out."""
    return sum(
        prod(shape) * (8 if name.endswith("weight_packed") else 1)
        for name, (_, shape) in tensors.items()
        if not name.endswith(COMPANIONS)
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_set_has_the_published_size(name: str) -> None:
    tensors = all_tensors(name)
    found = (len(MODELS[name]().shards), len(tensors), parameters(tensors), nbytes(tensors))
    assert found == PUBLISHED[name]
