"""Quantizes a weight with AMD Quark's own operations: the numbers are Quark's, not ours.

The one module that computes with Quark; `quantize_with_quark` imports it on first use.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from schemes.quark_setup import import_quark

if TYPE_CHECKING:
    from torch import Tensor


@cache
def _weight_config(quark_scheme: str) -> Any:
    """Quark's ``QTensorConfig`` for the weights of a scheme, as file-to-file mode adapts it."""
    import_quark()
    from quark.torch import LLMTemplate
    from quark.torch.quantization.config.type import ScaleType

    layer = LLMTemplate(model_type="any").get_config(scheme=quark_scheme).global_quant_config
    config = copy.deepcopy(layer.weight)  # the registry's own object: never change it
    if config.scale_format != "e8m0" and config.scale_type == ScaleType.float:
        config.scale_type = ScaleType.float32
    return config


def quantize_with_quark(quark_scheme: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The stored weight and scale of a BF16 weight ``[N, K]``, on the weight's device.

    Mirrors ``_single_stage_quantize_weight`` of Quark 0.13
    (``quark/torch/quantization/file2file_quantization.py``): the same operations in the same
    order. A contract test holds the bytes equal to Quark's public file-to-file export.
    """
    config = _weight_config(quark_scheme)
    import quark.torch.kernel
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase
    from quark.torch.utils.numerics import to_e8m0_uint8
    from quark.torch.utils.pack import create_pack_method

    observer = FakeQuantizeBase.get_fake_quantize(config)
    observer.enable_observer()
    observer.disable_fake_quant()
    observer(weight)
    quantized = quark.torch.kernel.scaled_real_quantize(
        config.dtype.value,
        weight,
        observer.scale,
        observer.zero_point,
        config.ch_axis,
        config.group_size,
        observer.quant_min,
        observer.quant_max,
        config.round_method.value,
        config.qscheme.value,
    )
    packer = create_pack_method(qscheme=config.qscheme.value, dtype=config.dtype.value)
    e8m0 = config.scale_format == "e8m0"
    scale = to_e8m0_uint8(observer.scale) if e8m0 else observer.scale
    return packer.pack(quantized, False), scale.contiguous()
