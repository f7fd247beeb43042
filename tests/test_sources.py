"""Sources that are stored quantized become the BF16 weights that their publishers mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run
from safetensors.torch import load_file
from tiny import Tensors, llama_config, llama_tensors, write

from quantize.errors import ToolError
from quantize.source import open_source

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def exact_fp8(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> Tensors:
    """An FP8 weight whose blocks have a power-of-two scale each, and the BF16 weight it means.

    Every product is exact in BF16, so the oracle needs no rounding: it repeats each scale by hand.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-96, 97, (rows, columns), generator=generator).float()
    elements = (codes / 8).to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    powers = torch.randint(-9, 3, grid, generator=generator)
    oracle = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            power = int(powers[row // block[0], column // block[1]])
            oracle[row, column] = float(elements[row, column]) * 2.0**power
    return {"weight": elements, "scale": 2.0 ** powers.float(), "oracle": oracle.bfloat16()}


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "block"), [((200, 136), (128, 128)), ((160, 160), (64, 64)), ((64, 96), (16, 32))]
)
def test_fp8_blocks_are_exact(
    shape: tuple[int, int], block: tuple[int, int], shards: int, tmp_path: Path
) -> None:
    made = exact_fp8(*shape, block)
    tensors = {
        "w.weight": made["weight"],
        "other.weight": torch.zeros(4, 4, dtype=torch.bfloat16),
        "w.weight_scale_inv": made["scale"],
    }
    config: dict[str, Any] = {"quantization_config": FP8 | {"weight_block_size": list(block)}}
    source = open_source(str(write(tmp_path / "m", config, tensors, shards)))
    assert set(source.specs) == {"w.weight", "other.weight"}
    assert source.config == {}
    assert torch.equal(source.tensor("w.weight"), made["oracle"])
    assert torch.equal(source.tensor("w.weight", 30, 61), made["oracle"][30:61])
    assert source.read("w.weight", 1, 2) == made["oracle"][1:2].view(torch.uint8).numpy().tobytes()


def test_fp8_source_makes_the_same_output_as_its_bf16_weights(tmp_path: Path) -> None:
    config = llama_config(num_hidden_layers=1)
    tensors = llama_tensors(config)
    stored = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if name.endswith("_proj.weight"):
            made = exact_fp8(*tensor.shape, (64, 64), seed=number)
            tensors[name] = made["oracle"]
            stored |= {name: made["weight"], f"{name}_scale_inv": made["scale"]}
        else:
            stored[name] = tensor
    quantization = {"quantization_config": FP8 | {"weight_block_size": [64, 64]}}
    plain = write(tmp_path / "bf16", config, tensors)
    block = write(tmp_path / "fp8", config | quantization, stored, 2)
    for path in (plain, block):
        run(path, tmp_path / f"out-{path.name}", "mxfp4")
    bf16, fp8 = (load_file(tmp_path / f"out-{n}" / "model.safetensors") for n in ("bf16", "fp8"))
    assert bf16.keys() == fp8.keys()
    assert all(torch.equal(bf16[name], fp8[name]) for name in bf16)


def test_a_grid_of_another_block_size_is_refused(tmp_path: Path) -> None:
    made = exact_fp8(160, 160, (64, 64))
    tensors = {"w.weight": made["weight"], "w.weight_scale_inv": made["scale"]}
    config = {"quantization_config": FP8 | {"weight_block_size": [128, 128]}}
    with pytest.raises(ToolError, match=r"w.weight_scale_inv \[3, 3\] does not fit .* \[2, 2\]"):
        open_source(str(write(tmp_path / "m", config, tensors)))
