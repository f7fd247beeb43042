"""What a model family is: the role of every tensor of an architecture, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class FusedExperts:
    """Experts that a source stores as one 3-D tensor, where vLLM loads one weight for each.

    ``pattern`` matches the whole tensor name, its group 1 the module of the experts; ``leaves``
    share the output dimension in this order, row by row when ``interleaved``. A matrix is
    ``[outputs, inputs]``, or ``[inputs, outputs]`` when ``transposed``.
    """

    pattern: str
    leaves: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False

    def match(self, name: str) -> bool:
        """Whether the rule is about this tensor."""
        return re.fullmatch(self.pattern, name) is not None

    def spell(self, name: str, expert: int, leaf: str) -> str:
        """The name of one expert's weight: ``….experts.7.down_proj.weight``."""
        found = re.fullmatch(self.pattern, name)
        if found is None:
            raise ValueError(f"{name} does not match {self.pattern}")
        return f"{found[1]}.{expert}.{leaf}.weight"


@dataclass(frozen=True)
class Family:
    """The tensors of an architecture, and which of them vLLM can run quantized.

    ``quantized``, ``optional`` and ``preserved`` map a regular expression over whole tensor
    names to a role. Together they cover every tensor of the architecture: a name that matches
    none of them is an error. ``optional`` are linear layers that stay BF16 unless the user asks.
    """

    name: str
    architectures: tuple[str, ...]
    quantized: Mapping[str, str]
    preserved: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"
    layers: str = r"model\.layers\.(\d+)\."
    """Matches the start of a decoder layer's tensor names; group 1 is the layer number."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules that vLLM fuses: ``{"qkv_proj": ("q_proj", "k_proj", "v_proj")}``."""
    row_parallel: tuple[str, ...] = ("o_proj", "down_proj")
    """Linears whose input dimension vLLM splits between tensor-parallel ranks."""
    linears: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linears that every decoder layer must have: ``{"mlp": ("gate_proj", …)}``."""
    norms: tuple[str, ...] = ()
    """Norms that every decoder layer must have."""
    required: tuple[str, ...] = ("model.embed_tokens.weight",)
    """Tensors outside the layers that every checkpoint must have; the head may be shared."""
    draft: bool = False
    fused_experts: tuple[FusedExperts, ...] = ()

    @cached_property
    def _compiled(self) -> tuple[tuple[re.Pattern[str], str, str], ...]:
        groups = (
            ("quantized", self.quantized),
            ("optional", self.optional),
            ("preserved", self.preserved),
        )
        return tuple(
            (re.compile(pattern), role, kind)
            for kind, patterns in groups
            for pattern, role in patterns.items()
        )

    def role(self, name: str) -> tuple[str, str] | None:
        """The role of a tensor, and ``quantized``, ``optional`` or ``preserved``; None: unknown."""
        for pattern, role, kind in self._compiled:
            if pattern.fullmatch(name):
                return role, kind
        return None
