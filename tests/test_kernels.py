"""The plug-in's kernels: the schemes' numbers, vLLM's own kernels' numbers, and who gets them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from runs import run
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import random, write_llama

from quantize.activations import seeded_activations
from quantize.serving import plugin
from schemes import fp8_rowwise, mxfp4

N, K = 96, 192
LINEAR = "vllm.model_executor.kernels.linear"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EVEN = "0x200000"
"""What the rule "even" adds to a block's largest magnitude; without it the rule is "floor"."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The module under test, in a process with vLLM configured; fails where vLLM is missing."""
    before = dict(os.environ)
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield import_module("quantize.serving.kernels")
    os.environ.clear()
    os.environ.update(before)  # vLLM's configuration writes variables for its workers


@pytest.fixture
def lists(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Any, Any]]:
    """vLLM's stock lists of kernels for the CPU, MXFP4 and FP8, put back after the test."""
    from vllm.platforms import PlatformEnum

    possible = kernels._POSSIBLE_MXFP4_KERNELS, kernels._POSSIBLE_FP8_KERNELS
    for known in possible:
        stock = [kernel for kernel in known.get(PlatformEnum.CPU, []) if not is_ours(kernel)]
        monkeypatch.setitem(known, PlatformEnum.CPU, stock)
    monkeypatch.setattr(
        kernels.layer_utils, "dispatch_cpu_unquantized_gemm", kernels._dispatch_stock
    )
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    return lambda: tuple(list(known[PlatformEnum.CPU]) for known in possible)


def is_ours(kernel: type) -> bool:
    return kernel.__module__.startswith("quantize.")


def mutate(kernels: ModuleType) -> ModuleType:
    """The module with the floor rule."""
    source = Path(str(kernels.__file__)).read_text()
    assert source.count(EVEN) == 1
    mutant = ModuleType("quantize.serving.floor")
    exec(compile(source.replace(EVEN, "0"), "floor.py", "exec"), mutant.__dict__)
    return mutant


def as_layer(weight: torch.Tensor, scale: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    return layer


def load_mxfp4(kernel: type, weight: torch.Tensor, quantized: bool = True) -> Callable[..., Any]:
    """The kernel of a layer, loaded as `QuarkOCP_MX` does."""
    from vllm.model_executor.kernels.linear import MxFp4LinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic

    loaded = kernel(MxFp4LinearLayerConfig(kMxfp4Dynamic if quantized else None))
    layer = as_layer(*mxfp4.define(weight))
    loaded.process_weights_after_loading(layer)
    return lambda x, bias=None: loaded.apply_weights(layer, x, bias)


def load_fp8(kernel: type, weight: torch.Tensor) -> Callable[..., Any]:
    """The kernel of a layer, loaded as `QuarkW8A8Fp8` does: ``[K, N]`` and scales ``[N, 1]``."""
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.utils import quant_utils

    keys = quant_utils.kFp8DynamicTokenSym, quant_utils.kFp8StaticChannelSym
    dtypes = torch.bfloat16, torch.bfloat16
    loaded = init_fp8_linear_kernel(*keys, *dtypes, tuple(weight.shape), force_kernel=kernel)
    assert type(loaded) is kernel
    elements, scale = fp8_rowwise.define(weight)
    layer = as_layer(elements.t(), scale.view(-1, 1))
    loaded.process_weights_after_loading(layer)
    return lambda x, bias=None: loaded.apply_weights(layer, x, bias)


def exceeds_rounding(
    found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> bool:
    """Whether BF16 results differ by more than one BF16 step and the error of a float32 sum."""
    ulp = torch.ldexp(torch.ones((), dtype=torch.float64), expected.double().frexp()[1] - 8)
    float32 = x.double().abs() @ weight.double().abs().t() * x.shape[-1] * 2.0**-24
    return bool(((found.double() - expected.double()).abs() > ulp + float32).any())


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return random(N, K, seed=3)


@pytest.fixture(scope="module", params=[1, 3, 16, 40])
def x(request: pytest.FixtureRequest) -> torch.Tensor:
    return seeded_activations("kernels", request.param, K)


def every_bfloat16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def finite_blocks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    every = every_bfloat16()[every_bfloat16().isfinite()]
    alone = torch.zeros(len(every), 32, dtype=torch.bfloat16)
    alone[:, 5] = every
    order = torch.randperm(len(every), generator=generator)
    gaussian = torch.randn(2**14, 32, generator=generator)
    exponents = torch.randint(-130, 126, (2**14, 1), generator=generator)
    return {
        "each number alone": alone,
        "neighbours together": every.view(-1, 32),
        "all mixed": every[order].view(-1, 32),
        "gaussian": gaussian.to(torch.bfloat16),
        "of every size": torch.ldexp(gaussian, exponents).to(torch.bfloat16),
    }


@pytest.mark.parametrize("blocks", finite_blocks().values(), ids=finite_blocks())
def test_activations_are_the_schemes(kernels: ModuleType, blocks: torch.Tensor) -> None:
    found = kernels.round_to_mxfp4(blocks)
    expected = mxfp4.dequantize(*mxfp4.define(blocks))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # signs of zero too


def test_activations_that_are_no_numbers_stay_so(kernels: ModuleType) -> None:
    blocks = torch.ones(2**16, 32, dtype=torch.bfloat16)
    blocks[:, 0] = every_bfloat16()
    lost = ~blocks[:, 0].isfinite()
    assert kernels.round_to_mxfp4(blocks)[lost, 0].isnan().all()


def test_floor_rule_is_caught(kernels: ModuleType, weight: torch.Tensor) -> None:
    floor = mutate(kernels)
    x = seeded_activations("floor", 16, K)
    expected = mxfp4.dequantize(*mxfp4.define(x))
    assert not torch.equal(floor.round_to_mxfp4(x), expected)
    found = load_mxfp4(floor.PairQuantMxfp4LinearKernel, weight)(x)
    values = mxfp4.dequantize(*mxfp4.define(weight))
    assert exceeds_rounding(found, mxfp4.matmul(x, *mxfp4.define(weight)), x, values)


def test_mxfp4_is_the_schemes_matmul(
    kernels: ModuleType, weight: torch.Tensor, x: torch.Tensor
) -> None:
    found = load_mxfp4(kernels.PairQuantMxfp4LinearKernel, weight)(x)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, mxfp4.matmul(x, *mxfp4.define(weight)))


def test_mxfp4_adds_the_bias_before_rounding(kernels: ModuleType, weight: torch.Tensor) -> None:
    x, bias = seeded_activations("bias", 6, K), random(N, seed=9)
    found = load_mxfp4(kernels.PairQuantMxfp4LinearKernel, weight)(x.view(2, 3, K), bias)
    values = [mxfp4.dequantize(*mxfp4.define(each)) for each in (x, weight)]
    exact = values[0].double() @ values[1].double().t() + bias.double()
    assert found.shape == (2, 3, N)
    assert not exceeds_rounding(found.view(6, N), exact.to(torch.bfloat16), *values)


def test_weight_only_leaves_activations_alone(kernels: ModuleType, weight: torch.Tensor) -> None:
    x = seeded_activations("weight only", 16, K)
    found = load_mxfp4(kernels.PairQuantMxfp4LinearKernel, weight, quantized=False)(x)
    values = mxfp4.dequantize(*mxfp4.define(weight))
    exact = (x.double() @ values.double().t()).to(torch.bfloat16)
    assert not exceeds_rounding(found, exact, x, values)
    assert exceeds_rounding(found, mxfp4.matmul(x, *mxfp4.define(weight)), x, values)


def decode_with_vllm(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What stored MXFP4 means, in vLLM's words."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import _upcast_e8m0_to_fp32
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import break_fp4_bytes

    elements = break_fp4_bytes(packed, torch.float32).view(*scale.shape, 32)
    return (elements * _upcast_e8m0_to_fp32(scale)[..., None]).flatten(1)


def test_mxfp4_is_vllms_emulation(
    kernels: ModuleType, weight: torch.Tensor, x: torch.Tensor
) -> None:
    """Quark quantizes, vLLM decodes and multiplies.

    On a CPU vLLM's kernel multiplies, but Quark's operations that it quantizes and decodes with
    refuse ("only implemented in CUDA devices"); Quark's export quantizes the same on a CPU.
    """
    from vllm.model_executor.kernels.linear import (
        EmulationMxfp4LinearKernel,
        MxFp4LinearLayerConfig,
    )

    activations = decode_with_vllm(*mxfp4.quantize(x))
    assert torch.equal(kernels.round_to_mxfp4(x), activations)
    packed, scale = mxfp4.quantize(weight)
    values = decode_with_vllm(packed, scale)
    emulation = EmulationMxfp4LinearKernel(MxFp4LinearLayerConfig(None))
    layer = as_layer(values.to(torch.bfloat16), scale)  # as its option "dequantize at load" does
    expected = emulation.apply_weights(layer, activations.to(torch.bfloat16))
    found = load_mxfp4(kernels.PairQuantMxfp4LinearKernel, weight)(x)
    assert not exceeds_rounding(found, expected, activations, values)


@pytest.mark.parametrize("bias", [None, random(N, seed=9)], ids=["no bias", "bias"])
def test_fp8_is_the_stock_kernel_bit_for_bit(
    kernels: ModuleType, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
) -> None:
    stock = kernels.ChannelWiseTorchFP8ScaledMMLinearKernel
    found, expected = (
        load_fp8(kernel, weight)(x, bias) for kernel in (kernels.PairQuantFp8LinearKernel, stock)
    )
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_fp8_is_the_schemes_matmul(
    kernels: ModuleType, weight: torch.Tensor, x: torch.Tensor
) -> None:
    found = load_fp8(kernels.PairQuantFp8LinearKernel, weight)(x)
    stored = fp8_rowwise.define(weight)
    assert not exceeds_rounding(
        found, fp8_rowwise.matmul(x, *stored), x, fp8_rowwise.dequantize(*stored)
    )


def load_bf16(
    dispatch: Callable[..., None], weight: torch.Tensor, keep: bool = False
) -> Callable[..., Any]:
    """A layer as `UnquantizedLinearMethod` loads it, or as the embedding that is also the head."""
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    dispatch(layer, remove_weight=not keep)
    return lambda x, bias=None: cpu_unquantized_gemm(layer, x, layer.weight, bias)


@pytest.mark.parametrize("keep", [False, True], ids=["linear", "head"])
@pytest.mark.parametrize("bias", [None, random(N, seed=9)], ids=["no bias", "bias"])
def test_bf16_is_vllms_own_product(
    kernels: ModuleType,
    weight: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    keep: bool,
) -> None:
    found = load_bf16(kernels.dispatch_bf16, weight, keep)(x, bias)
    # Without BF16 instructions oneDNN refuses, and this is `torch.nn.functional.linear`.
    stock = load_bf16(kernels._dispatch_stock, weight, keep)(x, bias)
    assert found.dtype is torch.bfloat16
    assert not exceeds_rounding(found, stock, x, weight)


def test_layers_that_are_not_bf16_keep_vllms_own_product(kernels: ModuleType) -> None:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.eye(4), requires_grad=False)
    kernels.dispatch_bf16(layer, remove_weight=False)
    assert "multiply_bf16" not in layer.cpu_linear.__code__.co_names


def test_compiled_kernels_compute_the_same(kernels: ModuleType, weight: torch.Tensor) -> None:
    x = seeded_activations("compiled", 16, K)
    layers = (
        load_mxfp4(kernels.PairQuantMxfp4LinearKernel, weight),
        load_fp8(kernels.PairQuantFp8LinearKernel, weight),
        load_bf16(kernels.dispatch_bf16, weight),
    )
    for layer in layers:
        assert torch.equal(torch.compile(layer, fullgraph=True, dynamic=True)(x), layer(x))


def test_registration_adds_one_kernel_each(kernels: ModuleType, lists: Callable[[], Any]) -> None:
    stock_mxfp4, stock_fp8 = lists()
    plugin.register()
    plugin.register()
    found_mxfp4, found_fp8 = lists()
    assert stock_mxfp4 == []
    assert found_mxfp4 == [kernels.PairQuantMxfp4LinearKernel]
    assert [kernel for kernel in found_fp8 if not is_ours(kernel)] == stock_fp8
    # Kernels with instructions of their own go first, then ours, then the one it stands in for.
    names = [kernel.__name__ for kernel in found_fp8]
    ours = names.index("PairQuantFp8LinearKernel")
    assert names.index("CPUFP8W8A8ScaledMMLinearKernel") < ours
    assert names[ours + 1] == "ChannelWiseTorchFP8ScaledMMLinearKernel"
    native = torch.cpu._is_avx512_bf16_supported()
    ours = kernels._dispatch_stock if native else kernels.dispatch_bf16
    assert kernels.layer_utils.dispatch_cpu_unquantized_gemm is ours


def test_vllm_selects_the_registered_kernels(kernels: ModuleType, lists: Callable[[], Any]) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    def select_fp8(activation: Any, weight: Any) -> str:
        dtypes = torch.bfloat16, torch.bfloat16
        return type(linear.init_fp8_linear_kernel(activation, weight, *dtypes, (N, K))).__name__

    row_wise = keys.kFp8DynamicTokenSym, keys.kFp8StaticChannelSym
    per_tensor = keys.kFp8DynamicTensorSym, keys.kFp8StaticTensorSym
    with pytest.raises(ValueError, match="Failed to find a kernel"):
        linear.init_mxfp4_linear_kernel(keys.kMxfp4Dynamic)
    stock = select_fp8(*row_wise), select_fp8(*per_tensor)
    plugin.register()
    for activation in (keys.kMxfp4Dynamic, None):
        chosen = linear.init_mxfp4_linear_kernel(activation)
        assert type(chosen) is kernels.PairQuantMxfp4LinearKernel
    with pytest.raises(ValueError, match="activations must be MXFP4 or unquantized"):
        linear.init_mxfp4_linear_kernel(keys.kMxfp6E2M3Dynamic)
    native = torch.cpu._is_amx_tile_supported()
    assert select_fp8(*row_wise) == (stock[0] if native else "PairQuantFp8LinearKernel")
    assert select_fp8(*per_tensor) == stock[1]


def test_vllms_own_mxfp4_kernel_is_left_alone(
    kernels: ModuleType, lists: Callable[[], Any]
) -> None:
    from vllm.model_executor.kernels.linear import EmulationMxfp4LinearKernel
    from vllm.platforms import PlatformEnum

    kernels.register_linear_kernel(EmulationMxfp4LinearKernel, PlatformEnum.CPU, "mxfp4")
    plugin.register()
    assert lists()[0] == [EmulationMxfp4LinearKernel]


def test_switch_leaves_vllm_as_it_is(
    lists: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = lists()
    monkeypatch.setenv(plugin.SWITCH, "0")
    plugin.register()
    assert lists() == stock
    from vllm.model_executor.layers import utils

    assert utils.dispatch_cpu_unquantized_gemm.__module__ == utils.__name__


def test_other_platforms_are_left_as_they_are(
    lists: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    stock = lists()
    monkeypatch.setattr(platforms, "current_platform", UnspecifiedPlatform())
    plugin.register()
    assert lists() == stock


def test_vllm_finds_the_plugin() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="pairquant")
    assert found.load() is plugin.register


def test_plugin_imports_nothing_heavy() -> None:
    code = "import quantize.serving.plugin, sys; assert not {'torch', 'vllm'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [(mxfp4, "PairQuantMxfp4LinearKernel"), (fp8_rowwise, "PairQuantFp8LinearKernel")],
    ids=["mxfp4", "fp8_rowwise"],
)
def test_served_layers_are_the_schemes_matmul(scheme: Any, kernel: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 2}
    source = write_llama(tmp_path / "source", **sizes)
    run(source, tmp_path / "out", scheme.NAME)
    script = Path(__file__).with_name("served_layers.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "out", tmp_path / "served.safetensors"],
        env=os.environ | {"VLLM_PLUGINS": "pairquant", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    served = load_file(tmp_path / "served.safetensors")
    with safe_open(tmp_path / "served.safetensors", "pt") as file:
        names = {key: value for key, value in file.metadata().items() if key in served}
    if scheme is mxfp4 or not torch.cpu._is_amx_tile_supported():
        assert set(names.values()) == {kernel}
    assert len(served) == 2 * 4
    for name, found in served.items():
        parent, _, leaf = name.rpartition(".")
        parts = [f"{parent}.{part}.weight" for part in FUSED.get(leaf, (leaf,))]
        elements, scale = (
            torch.cat([stored[part + suffix] for part in parts]) for suffix in ("", "_scale")
        )
        values = scheme.dequantize(elements, scale)
        x = seeded_activations(name, len(found), values.shape[1])
        assert not exceeds_rounding(found, scheme.matmul(x, elements, scale), x, values), name
