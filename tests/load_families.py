"""Run as a script: let vLLM build checkpoints, note how it resolves every name, load the weights.

Usage: load_families.py PAIRS FOLDER, PAIRS a JSON list of [TARGET] or [TARGET, DRAFT]. Prints a
JSON list with, for each model, ``asked`` (module -> class, weight dtype or null, fused mapping),
``loaded`` (an error, or null) and ``renamed``.
"""

from __future__ import annotations

import json
import sys
import traceback
import types
from typing import Any

import torch

asked: dict[str, list[Any]] = {}


def watch() -> None:
    """Note every module for which vLLM asks, and how `QuarkConfig` resolves it."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
    from vllm.model_executor.models import registry

    answer = QuarkConfig.get_quant_method

    def note(self: Any, layer: Any, prefix: str) -> Any:
        kind = next((k.__name__ for k in (LinearBase, RoutedExperts) if isinstance(layer, k)), None)
        if kind:
            _, _, method = self.get_quant_method_target(prefix, type(layer))
            quantized = method is not None and "Unquantized" not in method.__name__
            matched = self._find_matched_config(prefix, layer) if quantized else None
            dtype = matched["weight"]["dtype"] if matched else None
            asked[prefix] = [kind, dtype, dict(self.packed_modules_mapping)]
        return answer(self, layer, prefix)

    QuarkConfig.get_quant_method = note
    # Else every architecture is looked at in a process of its own, which imports all of vLLM.
    registry._run_in_subprocess = lambda look: look()


def stand_in_for_torchvision() -> None:
    """Only the preparation of images needs it, which is never reached; no build fits this torch."""
    import transformers.image_utils  # noqa: F401  (looks for the real one, once)

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    for name in ("", ".io", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        module = types.ModuleType("torchvision" + name)
        module.__getattr__ = missing  # type: ignore[method-assign]
        module.__path__ = []
        sys.modules.setdefault(module.__name__, module)


def describe(built: Any, part: Any, failed: str | None) -> dict[str, Any]:
    """What is printed for one model; ``renamed`` has the excluded names as its class reads them."""
    mapper = getattr(built, "hf_to_vllm_mapper", None)
    names = getattr(part.hf_config, "quantization_config", {}).get("exclude", [])
    rename = mapper.get_rename_mapper().map_name if mapper else str
    return {
        "asked": dict(asked),
        "loaded": failed,
        "renamed": {name: rename(name) for name in names},
    }


def load(target: str, draft: str | None) -> list[dict[str, Any]]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=target,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 1}
        if draft
        else None,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()
    models = [config.model_config]
    models += [config.speculative_config.draft_model_config] if draft else []
    found = []
    with set_current_vllm_config(config):
        for part in models:
            asked.clear()
            with set_default_torch_dtype(torch.bfloat16):
                built = initialize_model(config, model_config=part)
                failed = None
                try:
                    DefaultModelLoader(config.load_config).load_weights(built, part)
                except Exception:
                    failed = traceback.format_exc()[-1500:]
            found.append(describe(built, part, failed))
    return found


def main(pairs: list[list[str]], folder: str) -> list[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    stand_in_for_torchvision()
    watch()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
    answers: list[Any] = []
    for target, *draft in pairs:
        try:
            answers.append(load(target, draft[0] if draft else None))
        except Exception:
            answers.append(traceback.format_exc())
    return answers


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), sys.argv[2])))
