"""What serving needs to know of a checkpoint, read from its config and headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from models.base import Family
from quantize.checkpoint import Checkpoint
from quantize.plan import TENSOR_PARALLEL, read_heads, splits_heads
from quantize.roles import find_family, text_config
from quantize.vllm_names import name_runtime_modules
from schemes import SCHEMES, find_scheme
from schemes.base import TensorSpec

Shape = tuple[int, int]
"""A weight's ``[N, K]``: outputs, inputs."""

EXPERTS = ".experts."


@dataclass(frozen=True)
class Served:
    """A target or draft as vLLM will see it.

    ``weights`` has the scheme and the unpacked shape of every quantized module of the checkpoint;
    ``foreign`` names quantized tensors that are in none of our schemes. ``mla`` is multi-head
    latent attention, ``sparse`` its variant with an indexer (DeepSeek-V3.2).
    """

    family: Family
    weights: Mapping[str, tuple[str, Shape]]
    foreign: tuple[str, ...] = ()
    mla: bool = False
    sparse: bool = False
    experts: bool = False
    heads: tuple[int, int] | None = None
    """Attention and key-value heads, where the config tells them."""

    @property
    def linears(self) -> dict[str, tuple[str, Shape]]:
        """Scheme and shape of every quantized linear as vLLM builds it, fused; no experts."""
        modules = [module for module in self.weights if EXPERTS not in module]
        # The number of a draft's layers changes their names alone.
        runtime = name_runtime_modules(self.family, modules, target_layers=0)
        return {name: self._fuse(members) for name, members in runtime.items()}

    def _fuse(self, members: Iterable[str]) -> tuple[str, Shape]:
        parts = [self.weights[member] for member in members]
        scheme, (_, inputs) = parts[0]
        return scheme, (sum(shape[0] for _, shape in parts), inputs)

    def schemes(self, *, experts: bool) -> tuple[str, ...]:
        """The schemes of its linear layers, or of its experts."""
        used = (used for name, (used, _) in self.weights.items() if (EXPERTS in name) == experts)
        return tuple(dict.fromkeys(used))

    def row_parallel(self, module: str) -> bool:
        """Whether tensor parallelism splits a module's inputs, K, instead of its outputs."""
        return module.rpartition(".")[2] in self.family.row_parallel


def read_served(checkpoint: Checkpoint) -> Served:
    """What serving needs to know of a checkpoint; reads nothing further. Raises `BadPlan`."""
    config = text_config(checkpoint.config)
    weights: dict[str, tuple[str, Shape]] = {}
    foreign = []
    for spec in checkpoint.specs.values():
        if spec.name.endswith((".weight_scale", ".weight_scale_inv", ".weight_packed")):
            weight = checkpoint.specs.get(f"{spec.module}.weight", spec)
            found = recognise(weight, spec)
            if found is None:
                foreign.append(spec.name)
            else:
                weights[spec.module] = found
    return Served(
        family=find_family(checkpoint.specs, checkpoint.config),
        weights=weights,
        foreign=tuple(foreign),
        mla=config.get("kv_lora_rank") is not None,
        sparse=config.get("index_topk") is not None,
        experts=any(EXPERTS in name for name in checkpoint.specs),
        heads=read_heads(config),
    )


def recognise(weight: TensorSpec, scale: TensorSpec) -> tuple[str, Shape] | None:
    """The scheme whose stored tensors these are, and the weight's unpacked shape."""
    if len(weight.shape) != 2:
        return None
    outputs, columns = weight.shape
    for scheme in SCHEMES:
        for inputs in (columns, 2 * columns):
            source = TensorSpec(weight.name, "BF16", (outputs, inputs))
            if not scheme.misfit(source) and scheme.stored(source) == (weight, scale):
                return scheme.NAME, (outputs, inputs)
    return None


def find_misfit(served: Served, size: int, *, expert_parallel: bool) -> str:
    """Why heads or a quantized weight cannot be split between ``size`` ranks; empty when all can.

    Only inputs count: vLLM splits the K of row-parallel layers, and each part must still fit its
    scheme (``QuarkOCP_MX.create_weights``). With expert parallelism experts stay whole.
    """
    if served.heads and not splits_heads(served.heads, size):
        queries, shared = served.heads
        return f"{queries} attention and {shared} key-value heads do not divide by {size}"
    for module, (scheme, (outputs, inputs)) in served.weights.items():
        whole = expert_parallel and EXPERTS in module
        if whole or not served.row_parallel(module):
            continue
        if inputs % size:
            return f"{module} has K = {inputs}, which does not divide by {size}"
        part = TensorSpec(module, "BF16", (outputs, inputs // size))
        if misfit := find_scheme(scheme).misfit(part):
            return f"{module} in {scheme} has K = {inputs}, {inputs // size} on each rank: {misfit}"
    return ""


def fitting_sizes(halves: Iterable[Served], *, expert_parallel: bool = False) -> tuple[int, ...]:
    """The usual tensor-parallel sizes at which every half can be split."""
    halves = tuple(halves)
    return tuple(
        size
        for size in TENSOR_PARALLEL
        if not any(find_misfit(half, size, expert_parallel=expert_parallel) for half in halves)
    )
