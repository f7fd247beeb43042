"""Mistral, dense and text only: Llama's names.

Source: vLLM ``model_executor/models/mistral.py``. The ``consolidated`` files beside some of its
checkpoints spell other names and are not read.
"""

from __future__ import annotations

from dataclasses import replace

from models import llama

FAMILY = replace(llama.FAMILY, name="mistral", architectures=("MistralForCausalLM",))
