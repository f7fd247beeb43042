"""Run as a script: build models in vLLM without weights and print the names that they ask for."""

from __future__ import annotations

import json
import sys
from typing import Any


def record_asked(pairs: list[list[str]], folder: str) -> list[list[dict[str, Any]]]:
    """Build the models without weights; per model: name asked -> is a linear, fused mapping."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
    from vllm.model_executor.model_loader.utils import initialize_model

    asked: dict[str, Any] = {}
    answer = QuarkConfig.get_quant_method

    def note(self: Any, layer: Any, prefix: str) -> Any:
        asked[prefix] = (isinstance(layer, LinearBase), dict(self.packed_modules_mapping))
        return answer(self, layer, prefix)

    QuarkConfig.get_quant_method = note
    answers: list[list[dict[str, Any]]] = []
    for n, (target, *draft) in enumerate(pairs):
        config = EngineArgs(
            model=target,
            speculative_config={"method": "eagle3", "model": draft[0], "num_speculative_tokens": 1}
            if draft
            else None,
            skip_tokenizer_init=True,
            enforce_eager=True,
        ).create_engine_config()
        models = [config.model_config]
        models += [config.speculative_config.draft_model_config] if draft else []
        answers.append([])
        with set_current_vllm_config(config):
            if n == 0:
                init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                initialize_model_parallel(1, 1)
            for model in models:
                asked.clear()
                initialize_model(config, model_config=model)
                answers[-1].append(dict(asked))
    return answers


if __name__ == "__main__":
    print(json.dumps(record_asked(json.loads(sys.argv[1]), sys.argv[2])))
