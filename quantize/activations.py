"""Seeded inputs for the matmul check, shaped like the activations of a language model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 256
"""Rows of the matmul check: enough that no output feature's error is luck (σ ≈ 0.5 dB)."""
_CHANNELS_PER_OUTLIER, _CHANNEL_GAIN = 64, 4.0
_TOKENS_PER_OUTLIER, _TOKEN_GAIN = 16, 2.0


def seed_of(name: str) -> int:
    """A number of 64 bits that is always the same for a name, on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def seeded_activations(name: str, rows: int, columns: int) -> Tensor:
    """BF16 activations ``[rows, columns]`` (tokens, channels), always the same for a name.

    Gaussian; one channel in 64 is four times as large for every token and one token in 16 twice
    as large, after the outlier features of Dettmers et al., LLM.int8() (2022), section 4. The
    schemes' floors are calibrated on exactly these: with larger outliers a few numbers decide an
    output feature's error, and a wrong row scale no longer stands out.
    """
    import torch

    generator = torch.Generator().manual_seed(seed_of(name) >> 1)
    x = torch.randn(rows, columns, generator=generator)
    channels = torch.randperm(columns, generator=generator)[: -(-columns // _CHANNELS_PER_OUTLIER)]
    tokens = torch.randperm(rows, generator=generator)[: -(-rows // _TOKENS_PER_OUTLIER)]
    x[:, channels] *= _CHANNEL_GAIN
    x[tokens] *= _TOKEN_GAIN
    return x.to(torch.bfloat16)
