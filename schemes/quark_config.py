"""The ``quantization_config`` that AMD Quark 0.13 writes into ``config.json``, as data.

A contract test holds it equal to Quark's own config objects and to the file its public
file-to-file export writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

QUARK_VERSION = "0.13"


def layer_config(input_tensors: dict[str, Any], weight: dict[str, Any]) -> dict[str, Any]:
    """A layer's configuration in Quark's key order, from its two tensor configurations."""
    return {
        "input_tensors": dict(input_tensors),
        "output_tensors": None,
        "weight": dict(weight),
        "bias": None,
        "target_device": None,
    }


def quantization_config(
    global_config: dict[str, Any],
    exclude: Sequence[str],
    layer_configs: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """The whole ``quantization_config`` in Quark's key order.

    ``global_config`` is the default scheme's ``layer_config()``; ``layer_configs`` maps a module
    pattern to another scheme's. ``export`` must be there for vLLM to accept the config.
    """
    return {
        "global_quant_config": global_config,
        "exclude": list(exclude),
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_method": "quark",
        "layer_type_quant_config": {},
        "layer_quant_config": dict(layer_configs),
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "quant_mode": "eager_mode",
        "version": QUARK_VERSION,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }
