"""What a model family is: the role of every tensor of an architecture, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any


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
class Experts:
    """The routed experts of a family, which vLLM runs as one module in every sparse layer.

    ``module`` holds them inside a layer, ``leaves`` are the linears of each, and ``count`` is the
    key of the (text) config that tells their number. ``sparse`` tells whether a layer has them.
    """

    module: str
    count: str
    sparse: Callable[[Mapping[str, Any], int], bool]
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    beside: tuple[str, ...] = ()
    """Modules that every sparse layer has beside them, such as its router."""
    quantized_only: bool = False
    """Whether vLLM's loader for a Quark checkpoint takes them quantized and in no other way."""
    dense: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linears that a layer without experts has instead, as in `Family.linears`."""


@dataclass(frozen=True)
class Mtp:
    """Layers for multi-token prediction, numbered on after ``num_hidden_layers``.

    ``count`` is the config's key for their number; ``modules`` are what they have beside the parts
    of a decoder layer. Published checkpoints may come without them.
    """

    count: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Renames:
    """How vLLM renames the modules of a wrapper, and the entries of its quantization config.

    Source: ``WeightsMapper.get_rename_mapper`` in ``model_executor/models/utils.py`` (vLLM 0.32);
    every entry is applied once, substrings first.
    """

    substrings: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    suffixes: Mapping[str, str] = field(default_factory=dict)

    def apply(self, name: str) -> str:
        """The new name of a module, or of an entry that is written like one."""
        for old, new in self.substrings.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        for old, new in self.suffixes.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name


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
    joined: Mapping[str, str] = field(default_factory=dict)
    """Leaves that are loaded into a fused module which vLLM's own mapping does not tell of."""
    renames: Renames = Renames()
    asked: Mapping[str, str] = field(default_factory=dict)
    """Expressions and replacements: modules that vLLM asks for by another name than it maps to."""
    row_parallel: tuple[str, ...] = ("o_proj", "down_proj")
    """Linears whose input dimension vLLM splits between tensor-parallel ranks."""
    linears: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linears that every decoder layer must have: ``{"mlp": ("gate_proj", …)}``."""
    needs: Callable[[Mapping[str, Any], bool], tuple[str, ...]] = lambda _config, _sparse: ()
    """Names inside a layer, sparse or not, that this (text) config asks for besides."""
    varies: str = "$."
    """Matches the names inside a layer that some layers have and others, rightly, have not."""
    norms: tuple[str, ...] = ()
    """Norms that every decoder layer must have."""
    required: tuple[str, ...] = ("model.embed_tokens.weight",)
    """Tensors outside the layers that every checkpoint must have; the head may be shared."""
    draft: bool = False
    tied: bool = False
    """Whether a config without a tie flag means that the head is the embedding."""
    experts: Experts | None = None
    mtp: Mtp | None = None
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


def wrap(
    family: Family,
    name: str,
    architectures: tuple[str, ...],
    preserved: Mapping[str, str],
    prefix: str = "language_model.",
) -> Family:
    """A family inside a wrapper that adds ``preserved`` modules and puts a prefix before its names.

    Every name of the inner family begins with the prefix, its head included.
    """

    def spell(patterns: Mapping[str, str]) -> dict[str, str]:
        return {re.escape(prefix) + pattern: role for pattern, role in patterns.items()}

    return replace(
        family,
        name=name,
        architectures=architectures,
        quantized=spell(family.quantized),
        optional=spell(family.optional),
        preserved=spell(family.preserved) | dict(preserved),
        head=prefix + family.head,
        embedding=prefix + family.embedding,
        layers=re.escape(prefix) + family.layers,
        required=tuple(prefix + required for required in family.required),
        fused_experts=tuple(
            replace(rule, pattern="(" + re.escape(prefix) + rule.pattern.removeprefix("("))
            for rule in family.fused_experts
        ),
    )
