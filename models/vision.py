"""Vision towers and projectors of wrappers: always kept, their linears listed as excluded.

Source: vLLM ``model_executor/models/siglip.py``, ``kimi_k25_vit.py``, ``mllama4.py`` and
``vllm/models/minimax_m3/common/vision_tower.py``.
"""

from __future__ import annotations


def keep_vision(tower: str, projector: str) -> dict[str, str]:
    """Patterns for a tower and its projector, each given as an expression of its first name.

    An embedding, also one for positions, is told from a linear layer by its name.
    """
    return {
        rf"{tower}\.(?:\w+\.)*\w*(?:embedding|pos_emb)\w*(?:\.weight)?": "vision embedding",
        rf"{tower}\..+": "vision",
        rf"{projector}\..+": "projector",
    }
