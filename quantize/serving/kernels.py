"""Linear layers for vLLM's CPU build, with the numbers of the kernels they stand in for.

Loaded by `quantize.serving.plugin` inside vLLM, never by the command. Weights are kept in
float32, four bytes each: the values of MXFP4, FP8 and BF16 are exact there, their products are
too, and a CPU without BF16 instructions multiplies float32 some ten times faster than BF16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_FP8_KERNELS,
    _POSSIBLE_MXFP4_KERNELS,
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kMxfp4Dynamic,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from schemes import mxfp4

Verdict = tuple[bool, str | None]
"""vLLM's answer to "can it?": yes or no, and why not."""
_ANCHOR = 6291456.0
"""1.5·2²²: between 2²² and 2²³ float32 numbers lie half apart."""
_dispatch_stock = layer_utils.dispatch_cpu_unquantized_gemm


def register_kernels() -> None:
    """Offer both kernels to vLLM's selection on the CPU; a second call changes nothing.

    vLLM takes the first kernel of a list that fits, and `register_linear_kernel` appends. The FP8
    kernel must come before the stock one, and after those with instructions of their own. For
    unquantized layers vLLM has no list: where its BF16 product is emulated, ours replaces it.
    """
    if not _POSSIBLE_MXFP4_KERNELS.get(PlatformEnum.CPU):
        register_linear_kernel(PairQuantMxfp4LinearKernel, PlatformEnum.CPU, "mxfp4")
    fp8 = _POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    if PairQuantFp8LinearKernel not in fp8:
        stock = fp8.index(ChannelWiseTorchFP8ScaledMMLinearKernel)
        fp8.insert(stock, PairQuantFp8LinearKernel)
    if not torch.cpu._is_avx512_bf16_supported():
        layer_utils.dispatch_cpu_unquantized_gemm = dispatch_bf16


def dispatch_bf16(layer: Any, remove_weight: bool) -> None:
    """Give a BF16 layer ``[N, K]``, the head included, its product; others get vLLM's own.

    Stands in for ``dispatch_cpu_unquantized_gemm``, which `UnquantizedLinearMethod` and
    `UnquantizedEmbeddingMethod` call by that name once a layer is loaded.
    """
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16:
        _dispatch_stock(layer, remove_weight)
        return
    values = weight.detach().float()
    layer.cpu_linear = lambda x, _, bias=None: multiply_bf16(x, values, bias)
    if remove_weight:
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)


def multiply_bf16(x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + bias`` of a BF16 weight's float32 values, summed in float32, in the dtype of `x`."""
    bias = bias if bias is None else bias.float()
    return linear(x.float(), values, bias).to(x.dtype)


def round_to_mxfp4(x: Tensor) -> Tensor:
    """What MXFP4 keeps of activations ``[..., K]``: the same values, in float32.

    Equal to ``mxfp4.dequantize(*mxfp4.define(x))`` for every finite BF16 `x`, in fewer steps:
    added to a number whose float32 neighbours lie one step apart, a ratio loses all but whole
    steps, ties to even.
    The rule "even" never scales a block's largest magnitude to 7 or more, so nothing saturates.
    NaN and infinity become NaN, never a finite number.
    """
    blocks = x.float().reshape(-1, mxfp4.BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True).view(torch.int32)
    # From mantissa 1.75 on, the sum carries into the exponent; that power of two stands for 4.
    exponent = ((largest + 0x200000) >> 23) - 2
    ratios = blocks * ((254 - exponent.clamp(min=0)) << 23).view(torch.float32)
    # E2M1 has one mantissa bit: a step is half the ratio's power of two, and half of 1 below 1.
    powers = (ratios.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=1.0)
    anchors = powers * _ANCHOR
    elements = (ratios + anchors) - anchors
    scale = (exponent.clamp(min=1) << 23).view(torch.float32)
    return (elements * scale).view(x.shape)


class PairQuantMxfp4LinearKernel(MxFp4LinearKernel):  # type: ignore[misc]  # vLLM has no types
    """MXFP4 as vLLM's `EmulationMxfp4LinearKernel`, its weights dequantized once, at load."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Verdict:
        """Everywhere; `register_kernels` offers it on the CPU."""
        return True, None

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> Verdict:
        """Activations in MXFP4 or as they are."""
        if config.activation_quant_key not in {None, kMxfp4Dynamic}:
            return False, "activations must be MXFP4 or unquantized"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weight U8 ``[N, K/2]`` by its values, float32 ``[N, K]``."""
        weight = mxfp4.dequantize(layer.weight.data, layer.weight_scale.data)
        replace_parameter(layer, "weight", weight)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x Wᵀ + bias`` for ``[..., K]`` activations, summed in float32, in the dtype of `x`."""
        if self.config.activation_quant_key != kMxfp4Dynamic:
            return multiply_bf16(x, layer.weight, bias)
        bias = bias if bias is None else bias.float()
        return linear(round_to_mxfp4(x), layer.weight, bias).to(x.dtype)


class PairQuantFp8LinearKernel(ChannelWiseTorchFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 row-wise as its base class, the stock kernel, but with float32 weights made at load.

    Without AMX, ``torch._scaled_mm`` on the CPU turns the weights into float32 for every product
    (``_scaled_mm_out_cpu_emulated`` in ``aten/src/ATen/native/Blas.cpp``); this kernel multiplies
    the same float32 numbers, and scales the product in the stock kernel's order.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Verdict:
        """On CPUs where the stock kernel emulates."""
        if torch.cpu._is_amx_tile_supported():
            return False, "torch._scaled_mm is native on this CPU"
        return True, None

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> Verdict:
        """One scale per weight row, and one per token."""
        keys = config.weight_quant_key, config.activation_quant_key
        if keys != (kFp8StaticChannelSym, kFp8DynamicTokenSym):
            return False, "scales must be per weight row and per token"
        return True, None

    def get_output_padding(self) -> int | None:
        """No padding rows: they serve ``torch._scaled_mm``."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the E4M3 weight ``[K, N]`` by its values in float32; scales stay apart."""
        name = self.layer_param_names[0]
        replace_parameter(layer, name, getattr(layer, name).data.float().contiguous())

    def apply_scaled_mm(
        self,
        *,
        A: Tensor,  # noqa: N803  # vLLM's names
        B: Tensor,  # noqa: N803
        out_dtype: torch.dtype,
        As: Tensor,  # noqa: N803
        Bs: Tensor,  # noqa: N803
        bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:
        """The product of E4M3 tokens ``[M, K]`` and the float32 weight, scaled and biased."""
        output = (A.float() @ B) * As * Bs.t()
        if bias is not None:
            output = output + bias
        return output.to(out_dtype).view(*output_shape)
