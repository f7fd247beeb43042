"""Load a checkpoint into vLLM, in this process, and write what its quantized layers compute.

Usage: served_layers.py CHECKPOINT OUT. Each layer gets `seeded_activations` of its own name; the
metadata of OUT names the kernel of each.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from safetensors.torch import save_file

from quantize.activations import seeded_activations

ROWS = 33


def compute(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Outputs ``[ROWS, N]`` and kernel names of the layers that Quark's scheme serves."""
    layers: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "scheme")}
    outputs, names = {}, {}
    for name, layer in layers.items():
        x = seeded_activations(name, ROWS, layer.input_size)
        outputs[name] = layer.quant_method.apply(layer, x, None)
        kernel = getattr(layer.scheme, "ocp_mx_linear", None) or layer.scheme.fp8_linear
        names[name] = type(kernel).__name__
    return outputs, names


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        disable_log_stats=True,
    )
    greedy = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    answer = llm.generate({"prompt_token_ids": [1, 2, 3]}, greedy, use_tqdm=False)
    assert len(answer[0].outputs[0].token_ids) == 4
    (found,) = llm.apply_model(compute)
    save_file(found[0], sys.argv[2], metadata=found[1])
