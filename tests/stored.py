"""Weights in every stored format, each with the BF16 weight that it means.

Scales are powers of two, another for each block, row or group: the BF16 weight is exact and needs
no rounding rule. Its values come from ml_dtypes' own number types, compressed-tensors' packer and
`numpy.kron`, never from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from tiny import Tensors

Stored = tuple[Tensors, torch.Tensor]
"""The stored tensors of a weight by their names, and the weight, BF16."""

Store = Callable[[str, tuple[int, int], int], Stored]

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
}


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """A config as compressed-tensors writes it, with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_7": group},
        "ignore": ["lm_head"],
    }


def quark(**weight: Any) -> dict[str, Any]:
    """A config as AMD Quark writes it, shortened to what says how weights are stored."""
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "layer_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    }


QUARK_MXFP4 = quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0")


def fp8_codes(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Every finite E4M3 code in turn, shuffled: as torch's tensor and as numbers."""
    codes = np.resize(np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8), shape)
    codes = np.random.default_rng(seed).permuted(codes)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), values


def fp4_codes(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Random FP4 codes, two a byte with the first in the low four bits, and their numbers."""
    codes = np.random.default_rng(seed).integers(0, 16, shape).astype(np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return torch.from_numpy(codes[..., ::2] + 16 * codes[..., 1::2]), values


def powers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A power of two between 2⁻⁹ and 2² for each scale, float32."""
    exponents = np.random.default_rng(seed + 1000).integers(-9, 3, shape)
    return np.ldexp(np.float32(1), exponents).astype(np.float32)


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Every scale repeated over its block, cut to the weight's shape."""
    return np.kron(scales, np.ones(block, np.float32))[: shape[0], : shape[1]]


def bfloat16(values: np.ndarray) -> torch.Tensor:
    """The same numbers in BF16; they must all be there."""
    found = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    assert torch.equal(found.bfloat16().float(), found)
    return found.bfloat16()


def scale_bytes(scales: np.ndarray) -> torch.Tensor:
    """Powers of two as E8M0 bytes."""
    return torch.from_numpy(scales.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))


def fp8_block(
    name: str, shape: tuple[int, int], seed: int, block: tuple[int, int] = (64, 64)
) -> Stored:
    """FP8 in blocks, as DeepSeek stores it."""
    elements, values = fp8_codes(shape, seed)
    scales = powers((-(-shape[0] // block[0]), -(-shape[1] // block[1])), seed)
    stored = {name: elements, f"{name}_scale_inv": torch.from_numpy(scales)}
    return stored, bfloat16(values * spread(scales, block, shape))


def fp8_channel(name: str, shape: tuple[int, int], seed: int) -> Stored:
    """FP8 with a BF16 scale for each row, ``[N, 1]``, as compressed-tensors stores it."""
    elements, values = fp8_codes(shape, seed)
    scales = powers((shape[0], 1), seed)
    stored = {name: elements, f"{name}_scale": torch.from_numpy(scales).bfloat16()}
    return stored, bfloat16(values * scales)


def fp8_tensor(name: str, shape: tuple[int, int], seed: int) -> Stored:
    """FP8 with one scale and a leftover for activations."""
    elements, values = fp8_codes(shape, seed)
    scale = powers((1,), seed)[0]
    companions = {
        f"{name}_scale": torch.tensor(scale),
        f"{name.removesuffix('.weight')}.input_scale": torch.tensor(0.5),
    }
    return {name: elements} | companions, bfloat16(values * scale)


def int4(name: str, shape: tuple[int, int], seed: int) -> Stored:
    """INT4 in groups of 32, packed by compressed-tensors."""
    numbers = np.random.default_rng(seed).integers(-8, 8, shape).astype(np.int8)
    scales = powers((shape[0], shape[1] // 32), seed)
    stored = {
        f"{name}_packed": pack_to_int32(torch.from_numpy(numbers), 4),
        f"{name}_scale": torch.from_numpy(scales).bfloat16(),
        f"{name}_shape": torch.tensor(shape),
    }
    return stored, bfloat16(numbers * spread(scales, (1, 32), shape))


def mxfp4(name: str, shape: tuple[int, int], seed: int, packed: str = "") -> Stored:
    """MXFP4 as AMD Quark stores it; ``packed`` is the suffix of compressed-tensors."""
    elements, values = fp4_codes(shape, seed)
    scales = powers((shape[0], shape[1] // 32), seed)
    stored = {f"{name}{packed}": elements, f"{name}_scale": scale_bytes(scales)}
    return stored, bfloat16(values * spread(scales, (1, 32), shape))


def mxfp4_packed(name: str, shape: tuple[int, int], seed: int) -> Stored:
    """MXFP4 as compressed-tensors stores it."""
    return mxfp4(name, shape, seed, "_packed")


def restarting(name: str, parts: tuple[int, ...], columns: int = 96) -> Stored:
    """A fused weight whose parts were quantized each by itself, in blocks of 64."""
    each = [fp8_block("w", (rows, columns), n) for n, rows in enumerate(parts)]
    elements = torch.cat([made["w"].view(torch.uint8) for made, _ in each])
    stored = {
        name: elements.view(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.cat([made["w_scale_inv"] for made, _ in each]),
    }
    return stored, torch.cat([weight for _, weight in each])


FORMATS: dict[str, tuple[Store, dict[str, Any]]] = {
    "FP8 blocks": (fp8_block, FP8 | {"weight_block_size": [64, 64]}),
    "FP8 per channel": (
        fp8_channel,
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
    "FP8 per tensor": (fp8_tensor, FP8),
    "INT4 packed": (int4, compressed("pack-quantized", INT4_WEIGHTS)),
    "MXFP4 packed": (
        mxfp4_packed,
        compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}),
    ),
    "MXFP4 of Quark": (mxfp4, QUARK_MXFP4),
}
"""Every format that stores linear layers one by one, and the config that says so."""
