"""Proves an output: every stored byte against the scheme's definition and the source.

Streams both checkpoints in row ranges; imports neither Quark nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import models
from models.base import Family
from quantize.checkpoint import Checkpoint
from quantize.energies import MAY_DIFFER_DB
from quantize.errors import ToolError
from quantize.metadata import edit_config, linear_modules
from quantize.plan import Plan
from quantize.prove import SAMPLE_ROWS, Findings, prove_entry
from quantize.report import Check, Report, TensorProof
from quantize.source import Source
from quantize.sources import COARSE
from quantize.vllm_names import (
    find_layer_config,
    get_matching_fused,
    name_runtime_modules,
    name_scheme,
    rename_entries,
)
from quantize.wording import some
from schemes import SCHEMES


def verify_checkpoint(
    out: Checkpoint,
    plan: Plan,
    source: Source | None,
    advance: Callable[[int], None],
    found: Findings | None = None,
    *,
    sample: bool = False,
) -> Report:
    """Every check of one checkpoint; what needs the source is not_measured without it.

    ``found`` is what a pass over the tensors has found already, while they were written. With
    ``sample`` SQNR is measured on some rows of each weight.
    """
    headers = _check_headers(out, plan)
    checks = [headers, _check_config(out, plan, source), *_check_names(out, plan)]
    if headers.status == "fail":
        return Report((*checks, *_unread()))
    if found is None:
        found = Findings()
        for entry in plan.entries:
            if entry.stored:
                prove_entry(out, entry, source, found, sample=sample)
            advance(entry.source.nbytes)
    proofs = tuple(sorted(found.proofs, key=lambda proof: proof.sqnr_db))
    return Report((*checks, *_judge(plan, found, source is not None, sample)), proofs)


def _check_headers(out: Checkpoint, plan: Plan) -> Check:
    """Names, dtypes and shapes are those of the plan, and nothing else is there."""
    planned = plan.stored
    wrong = [
        f"{name}: {_say(out.specs.get(name))}, expected {_say(planned.get(name))}"
        for name in sorted(planned.keys() | out.specs.keys())
        if planned.get(name) != out.specs.get(name)
    ]
    measured = f"{len(out.specs)} tensors" if not wrong else f"{len(wrong)} differ"
    return _check("headers", wrong, measured, "names, dtypes and shapes of the plan")


def _say(spec: Any) -> str:
    return f"{spec.dtype} {list(spec.shape)}" if spec else "absent"


def _check_config(out: Checkpoint, plan: Plan, source: Checkpoint | None) -> Check:
    required = "the source's config.json with the plan's quantization_config"
    ours = out.config.get("quantization_config")
    if ours != plan.quantization_config:
        return Check("config", "fail", "quantization_config differs", required, "config.json")
    if source is None:
        return _not_measured("config", required)
    wrong = [
        f"{key}: {out.config.get(key)!r}, source {source.config.get(key)!r}"
        for key in (out.config | source.config)
        if key != "quantization_config" and out.config.get(key) != source.config.get(key)
    ]
    if not wrong and list(out.config) != list(edit_config(source.config, ours)):
        wrong = ["the order of the keys changed"]
    return _check("config", wrong, "every key kept", required)


def _check_names(out: Checkpoint, plan: Plan) -> Iterable[Check]:
    """Every linear resolves in vLLM to the scheme that its bytes have."""
    family = find_family(plan.family)
    schemes = linear_modules(family, plan.entries)
    config = out.config.get("quantization_config")
    required = "vLLM finds for every linear the scheme of its bytes"
    if config is None:
        wrong = [name for name, scheme in schemes.items() if scheme]
        yield _check("vLLM names", wrong, "not quantized", required)
        return
    wrong = []
    count = 0
    config = rename_entries(family, config)
    for name, members in name_runtime_modules(family, schemes, plan.target_layers).items():
        expected = {schemes[member] for member in members}
        found = _resolve(name, config, family)
        count += 1
        if expected != {found}:
            wrong.append(f"{name}: vLLM reads {found or 'BF16'}, its bytes are {_join(expected)}")
    yield _check("vLLM names", wrong, f"{count} modules", required)


def find_family(name: str) -> Family:
    """The family that a plan names."""
    return next(family for family in models.FAMILIES if family.name == name)


def _resolve(name: str, config: dict[str, Any], family: Family) -> str | None:
    try:
        return name_scheme(find_layer_config(name, config, get_matching_fused(family)), SCHEMES)
    except ToolError as error:
        return f"an error ({error.message})"


def _join(schemes: set[str | None]) -> str:
    return " and ".join(sorted(scheme or "BF16" for scheme in schemes))


def _judge(plan: Plan, found: Findings, measured: bool, sample: bool) -> Iterable[Check]:
    kept = sum(entry.scheme is None and bool(entry.stored) for entry in plan.entries)
    made = sum(entry.scheme is not None for entry in plan.entries)
    yield _check("finite", found.finite, f"{kept} preserved tensors", "no NaN or Inf")
    yield _check("scales", found.scales, f"{made} weights", "finite and in the scheme's range")
    if not measured:
        yield from (_not_measured(name, required) for name, required in NEEDS_SOURCE)
        return
    sizes = f"{kept} tensors, {found.preserved_bytes} bytes"
    yield _check("preserved", found.changed, sizes, NEEDS_SOURCE[0][1])
    yield _judge_head(plan, found)
    sizes = (
        f"{made} weights, {found.quantized_bytes} bytes; {found.sampled_rows} rows by two "
        "implementations"
    )
    yield _check("quantized bytes", found.quantized, sizes, NEEDS_SOURCE[2][1])
    if found.proofs:
        yield _judge_float32(found)
    rows = f", {SAMPLE_ROWS} rows of each" if sample else ""
    coarse = {e.source.name for e in plan.entries if e.source_format in COARSE}
    yield from _judge_floors([p for p in found.proofs if p.name not in coarse], rows)
    yield from _judge_floors([p for p in found.proofs if p.name in coarse], rows, coarse=True)


NEEDS_SOURCE = (
    ("preserved", "bit-identical to the source"),
    ("head", "bit-identical to the source's"),
    ("quantized bytes", "every byte as the scheme's definition gives it, or kept as stored"),
    ("weight SQNR", "the scheme's floor"),
    ("matmul SQNR", "the scheme's floor"),
    ("matmul SQNR, worst row", "the scheme's floor"),
)


def _judge_head(plan: Plan, found: Findings) -> Check:
    """The tensor that vLLM uses as head: the model's own, or the embedding of a tied target."""
    family = find_family(plan.family)
    stored = {entry.source.name: entry for entry in plan.entries if entry.stored}
    name = family.head if family.head in stored or family.draft else family.embedding
    if name not in stored:
        dropped = [entry.reason for entry in plan.entries if entry.role == "head"]
        return Check("head", "pass", "no tensor", "shared with the target", "".join(dropped))
    wrong = [name] if name in found.changed else []
    tied = "" if name == family.head else " (tied)"
    measured = f"{name}{tied}, {stored[name].stored[0].nbytes} bytes equal"
    return _check("head", wrong, measured, NEEDS_SOURCE[1][1])


def _judge_float32(found: Findings) -> Check:
    """The arithmetic that the decibels below rest on."""
    good = found.float32_db <= MAY_DIFFER_DB
    return Check(
        "float32 reference",
        "pass" if good else "fail",
        f"{found.float32_db:.1g} dB from float64",
        f"at most {MAY_DIFFER_DB:g} dB, {SAMPLE_ROWS} rows of each weight",
    )


def _judge_floors(proofs: list[TensorProof], rows: str, *, coarse: bool = False) -> Iterable[Check]:
    """The least value of each scheme against its floor; ``rows`` says which were measured."""
    said = " of 4-bit sources" if coarse else ""
    for scheme in SCHEMES:
        ours = [proof for proof in proofs if proof.scheme == scheme.NAME]
        for name, field, floor in (
            (
                f"weight SQNR{said}",
                "sqnr_db",
                scheme.COARSE_SQNR_FLOOR_DB if coarse else scheme.SQNR_FLOOR_DB,
            ),
            (f"matmul SQNR{said}", "matmul_db", scheme.MATMUL_FLOOR_DB),
            (f"matmul SQNR{said}, worst row", "worst_row_db", scheme.MATMUL_ROW_FLOOR_DB),
        ):
            values = sorted((float(getattr(proof, field)), proof.name) for proof in ours)
            if values:
                low = [f"{tensor}: {value:.2f} dB" for value, tensor in values if value < floor]
                yield Check(
                    f"{name}, {scheme.NAME}",
                    "fail" if low else "pass",
                    f"least {values[0][0]:.2f} dB{rows}",
                    f"at least {floor:.2f} dB",
                    some(low, "; ") if low else values[0][1],
                )


def _unread() -> Iterable[Check]:
    names = (("finite", "no NaN or Inf"), ("scales", "in range"), *NEEDS_SOURCE)
    return (Check(name, "not_measured", "headers are wrong", required) for name, required in names)


def _not_measured(name: str, required: str) -> Check:
    return Check(name, "not_measured", "needs --source", required)


def _check(name: str, wrong: list[str], measured: str, required: str) -> Check:
    if wrong:
        return Check(name, "fail", f"{len(wrong)} wrong", required, some(wrong, "; "))
    return Check(name, "pass", measured, required)
