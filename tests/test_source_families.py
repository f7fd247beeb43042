"""Every family from every stored format in every scheme: the table in the README, cell by cell.

A cell holds when the plan is that of the same model in BF16, and when every weight that the plan
quantizes reads as the BF16 weight which was stored, or keeps bytes that mean it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from families import DRAFTS, TARGETS, materialize
from runs import open_source
from tiny import Tensors, write

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.plan import Options, Plan
from quantize.prepare import Job, PairOptions, prepare_draft, prepare_target
from quantize.roles import find_family
from schemes import SCHEMES
from schemes.base import TensorSpec

Config = dict[str, Any]
Build = Callable[[], tuple[Config, dict[str, tuple[int, ...]]]]

BUILDS: tuple[Build, ...] = (*TARGETS, *DRAFTS)
BLOCKS = "MXFP4 of gpt-oss"
FORMS = (*stored.FORMATS, BLOCKS)
KEPT = {
    "FP8 per channel": "fp8_rowwise",
    "MXFP4 packed": "mxfp4",
    "MXFP4 of Quark": "mxfp4",
    BLOCKS: "mxfp4",
}
README = Path(__file__).parents[1] / "README.md"


def store(build: Build, form: str) -> tuple[Config, Tensors, Tensors]:
    """A family's config, its tensors stored in a format, and the same in BF16."""
    config, shapes = build()
    family = find_family({n: TensorSpec(n, "BF16", shape) for n, shape in shapes.items()}, config)
    plain = materialize(shapes)
    made = dict(plain)
    for seed, (name, shape) in enumerate(shapes.items()):
        fused = len(shape) == 3 and any(rule.match(name) for rule in family.fused_experts)
        role = family.role(name)
        if fused and form not in ("MXFP4 of Quark",):
            parts, plain[name] = store_experts(name, shape, form, seed)
        elif role and role[1] == "quantized" and len(shape) == 2 and form != BLOCKS:
            parts, plain[name] = stored.FORMATS[form][0](name, (shape[0], shape[1]), seed)
        else:
            continue
        del made[name]
        made |= parts
    quantization = stored.FORMATS[form][1] if form in stored.FORMATS else {"quant_method": "mxfp4"}
    return config | {"quantization_config": quantization}, made, plain


def store_experts(
    name: str, shape: tuple[int, ...], form: str, seed: int
) -> tuple[Tensors, torch.Tensor]:
    """Experts in one 3-D tensor, each stored by itself; gpt-oss stores the transpose."""
    experts, rows, columns = shape
    if form != BLOCKS:
        each = [stored.FORMATS[form][0](name, (rows, columns), seed + n) for n in range(experts)]
        parts = {key: torch.stack([made[key] for made, _ in each]) for key in each[0][0]}
        return parts, torch.stack([weight for _, weight in each])
    each = [stored.mxfp4(name, (columns, rows), seed + n) for n in range(experts)]
    blocks = torch.stack([made[name] for made, _ in each])
    scales = torch.stack([made[f"{name}_scale"] for made, _ in each])
    parts = {
        f"{name}_blocks": blocks.reshape(experts, columns, rows // 32, 16),
        f"{name}_scales": scales,
    }
    return parts, torch.stack([weight.T for _, weight in each]).contiguous()


@cache
def bare(build: Build, folder: Path) -> Checkpoint:
    """The family's own BF16 checkpoint."""
    config, shapes = build()
    return open_checkpoint(
        str(write(folder / f"bare {build.__name__}", config, materialize(shapes)))
    )


def prepare(source: Checkpoint, build: Build, scheme: str, folder: Path) -> Job:
    """The job of a checkpoint, from headers alone."""
    if build not in DRAFTS:
        return prepare_target(source, Options(scheme), compare=False)
    target = bare(DRAFTS[build], folder)
    return prepare_draft(source, target, Options(scheme), PairOptions(), compare=False)


@cache
def bare_plan(build: Build, scheme: str, folder: Path) -> Plan:
    """The plan of the family's BF16 checkpoint."""
    return prepare(bare(build, folder), build, scheme, folder).plan


def applies(build: Build, form: str) -> bool:
    """gpt-oss alone has its experts in blocks."""
    return form != BLOCKS or build.__name__ == "gpt_oss"


CELLS = [(build, form) for build in BUILDS for form in FORMS if applies(build, form)]


@pytest.mark.parametrize(
    ("build", "form"), CELLS, ids=[f"{build.__name__}-{form}" for build, form in CELLS]
)
def test_every_family_from_every_format(
    build: Build, form: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config, made, plain = store(build, form)
    source = open_checkpoint(str(write(tmp_path / "stored", config, made, 2)))
    folder = tmp_path_factory.getbasetemp()
    meant = split(tmp_path / "plain", config, plain)
    for scheme in SCHEMES:
        job, twin = (
            prepare(source, build, scheme.NAME, folder),
            bare_plan(build, scheme.NAME, folder),
        )
        assert job.plan.quantization_config == twin.quantization_config
        assert job.plan.stored == twin.stored
        kept = {entry.source.name for entry in job.plan.entries if entry.kept}
        assert bool(kept) == (KEPT.get(form) == scheme.NAME)
        for name, weight in job.source.weights.items():
            assert torch.equal(job.source.tensor(name), meant(name)), name
            if name in kept:
                pieces = job.source.pieces(name, 0, weight.spec.shape[0])
                assert torch.equal(scheme.dequantize(*pieces).bfloat16(), meant(name)), name


def split(folder: Path, config: Config, plain: Tensors) -> Callable[[str], torch.Tensor]:
    """The BF16 weights by logical name: fused experts apart, as a BF16 source has them."""
    fused = {name: tensor for name, tensor in plain.items() if ".experts." in name}
    if not any(tensor.ndim == 3 for tensor in fused.values()):
        return plain.__getitem__
    bare = {key: value for key, value in config.items() if key != "quantization_config"}
    source = open_source(write(folder, bare, fused))
    return lambda name: source.tensor(name) if name in source.specs else plain[name]


def table() -> str:
    """The README's table: what each family's sources are quantized to, ``=`` where bytes stay."""
    head = ["| architecture | BF16 | " + " | ".join(FORMS) + " |", "|---" * (len(FORMS) + 2) + "|"]
    rows = {}
    for build in BUILDS:
        config, _ = build()
        cells = ["M F"]
        for form in FORMS:
            kept = KEPT.get(form)
            marks = (("M", "mxfp4"), ("F", "fp8_rowwise"))
            cell = " ".join(f"{mark}{'=' if kept == name else ''}" for mark, name in marks)
            cells.append(cell if applies(build, form) else "")
        rows[config["architectures"][0]] = " | ".join(cells)
    return "\n".join((*head, *(f"| {name} | {row} |" for name, row in rows.items())))


def test_the_readme_has_the_table() -> None:
    assert table() in README.read_text(encoding="utf-8")
