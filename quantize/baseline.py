"""Figures of an output against those of an earlier one, and against floors: what CI judges by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantize.entry import Entry, entry_from_json
from quantize.errors import BadOutput
from quantize.job import HALVES, PAIR_REPORT, REPORT
from quantize.report import Check, TensorProof
from quantize.wording import some

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """How much worse than the baseline an output may be, and the floors; None asks for none.

    ``sqnr_loss`` in dB for each weight, ``al_loss`` and ``growth`` as shares.
    """

    sqnr_loss: float
    al_loss: float
    growth: float
    min_sqnr: float | None = None
    min_al: float | None = None


def read_baseline(path: Path) -> dict[str, Any]:
    """The figures in an output's folder, in its report, or in what ``verify --json`` printed.

    Raises `BadOutput` when there are none.
    """
    if path.is_dir():
        return read_figures(path, {})
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data.get("figures"), dict):
            return dict(data["figures"])
        if isinstance(data.get("plan"), dict) and "kind" in data["plan"]:
            return _of_report(data, None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadOutput(f"--baseline {path}: not a report ({error})", _HINT) from error
    raise BadOutput(f"--baseline {path}: holds no figures of a checkpoint", _HINT)


_HINT = (
    f"give an output's folder, its {REPORT}, or what quantize verify OUT --source SOURCE --json "
    "printed"
)


def read_figures(
    out: Path, proofs: Mapping[str, Iterable[TensorProof]], draft: Path | None = None
) -> dict[str, Any]:
    """Bytes and SQNR of every tensor by kind (target or draft), and the acceptance length.

    ``proofs`` are those of this run, by kind; where there are none, the recorded ones count.
    """
    pair = (out / PAIR_REPORT).is_file()
    folders = [out / half for half in HALVES] if pair else [out, *([draft] if draft else [])]
    figures: dict[str, Any] = {}
    for folder in folders:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        figures |= _of_report(report, tuple(proofs.get(report["plan"]["kind"], ())))
    return figures


def _of_report(report: Json, proofs: tuple[TensorProof, ...] | None) -> dict[str, Any]:
    recorded = {item["name"]: float(item["sqnr_db"]) for item in report["tensors"]}
    sqnr = {proof.name: proof.sqnr_db for proof in proofs} if proofs else recorded
    entries = [entry_from_json(item) for item in report["plan"]["tensors"]]
    served = report.get("pair", {}).get("served")
    return {
        report["plan"]["kind"]: {
            entry.source.name: {"bytes": _bytes(entry), "sqnr_db": _text(entry, sqnr)}
            for entry in entries
        },
        **({"acceptance": _acceptance(served)} if isinstance(served, Mapping) else {}),
    }


def _bytes(entry: Entry) -> int:
    return sum(spec.nbytes for spec in entry.stored)


def _text(entry: Entry, sqnr: Mapping[str, float]) -> str | None:
    """JSON has no infinity; None where the tensor is not quantized."""
    if entry.scheme is None:
        return None
    return str(sqnr.get(entry.source.name, "not_measured"))


def _acceptance(served: Json) -> dict[str, Any]:
    """Of the candidate, with what makes two lengths comparable."""
    first = next(iter(served["cells"].values()))
    rule = served["settings"]
    return {
        "length": first["length"]["value"],
        "rule": {
            "prompts": served["prompts"]["sha256"],
            **{key: rule[key] for key in ("num_speculative_tokens", "max_tokens", "temperature")},
        },
    }


def judge(now: Json, before: Json | None, limits: Limits) -> tuple[Check, ...]:
    """Every comparison and floor that was asked for."""
    checks: list[Check] = []
    kinds = [kind for kind in HALVES if kind in now]
    for kind in kinds:
        if before is not None and kind in before:
            checks += (_compare_sqnr(kind, now[kind], before[kind], limits.sqnr_loss),)
            checks += (_compare_bytes(kind, now[kind], before[kind], limits.growth),)
        if limits.min_sqnr is not None:
            floor = _require_sqnr(kind, now[kind], limits.min_sqnr)
            checks.append(_insist(floor, "measure it: give --source and --draft-source"))
    if before is not None and not any(kind in before for kind in kinds):
        required = f"figures of a {' and a '.join(kinds)}"
        checks.append(Check("baseline", "not_measured", "none of this kind", required))
    ours = now.get("acceptance")
    if before is not None and "acceptance" in before:
        checks.append(_compare_length(ours, before["acceptance"], limits.al_loss))
    if limits.min_al is not None:
        required = f"at least {limits.min_al}"
        floor = _check_length("floor of acceptance length", ours, limits.min_al, required)
        checks.append(_insist(floor, "serve the pair and record it"))
    return tuple(checks)


def _insist(floor: Check, hint: str) -> Check:
    """A floor that was asked for and has no figure has failed: ``--allow-unmeasured`` is no excuse.

    What a baseline lacks may be excused; a floor is the caller's own demand.
    """
    if floor.status != "not_measured":
        return floor
    detail = "; ".join(filter(None, (floor.detail, f"hint: {hint}")))
    return replace(floor, status="fail", measured=f"not measured: {floor.measured}", detail=detail)


def _compare_sqnr(kind: str, now: Json, before: Json, loss: float) -> Check:
    """No quantized weight may lose more; one that was preserved before may not be quantized."""
    name, required = f"baseline SQNR, {kind}", f"at most {loss:g} dB below the baseline"
    missing, wrong, worst = [], [], -math.inf
    for tensor, figures in now.items():
        if figures["sqnr_db"] is None:
            continue
        earlier = before.get(tensor, {"sqnr_db": None})["sqnr_db"]
        if "not_measured" in (figures["sqnr_db"], earlier):
            missing.append(tensor)
            continue
        ours, theirs = float(figures["sqnr_db"]), math.inf if earlier is None else float(earlier)
        lost = 0.0 if ours == theirs else theirs - ours
        worst = max(worst, lost)
        if not lost <= loss:
            was = "preserved" if earlier is None else f"{theirs:.2f} dB"
            wrong.append((lost, f"{tensor}: {ours:.2f} dB, baseline {was}"))
    if wrong:
        said = [text for _, text in sorted(wrong, key=lambda item: -item[0])]
        return Check(name, "fail", f"{len(wrong)} weights lost more", required, some(said, "; "))
    if missing:
        return Check(name, "not_measured", f"{len(missing)} weights", required, some(missing, "; "))
    return Check(name, "pass", f"largest loss {max(worst, 0):.3f} dB", required)


def _compare_bytes(kind: str, now: Json, before: Json, growth: float) -> Check:
    ours, theirs = (sum(item["bytes"] for item in part.values()) for part in (now, before))
    name, required = f"baseline bytes, {kind}", f"at most {theirs:,} and {growth:.2%} more"
    if ours <= theirs * (1 + growth):
        return Check(name, "pass", f"{ours:,} bytes", required)
    grown = {
        tensor: item["bytes"] - before.get(tensor, {"bytes": 0})["bytes"]
        for tensor, item in now.items()
    }
    most = sorted((item for item in grown.items() if item[1] > 0), key=lambda item: -item[1])
    said = [f"{tensor}: {more:,} bytes more" for tensor, more in most]
    return Check(name, "fail", f"{ours:,} bytes", required, some(said, "; "))


def _require_sqnr(kind: str, now: Json, floor: float) -> Check:
    name, required = f"floor of SQNR, {kind}", f"at least {floor:g} dB"
    found = {tensor: item["sqnr_db"] for tensor, item in now.items() if item["sqnr_db"] is not None}
    if missing := [tensor for tensor, text in found.items() if text == "not_measured"]:
        return Check(name, "not_measured", f"{len(missing)} weights", required, some(missing, "; "))
    values = sorted((float(text), tensor) for tensor, text in found.items())
    low = [f"{tensor}: {value:.2f} dB" for value, tensor in values if not value >= floor]
    least = f"least {values[0][0]:.2f} dB" if values else "nothing is quantized"
    return Check(name, "fail" if low else "pass", least, required, some(low, "; "))


def _compare_length(ours: Json | None, before: Json, loss: float) -> Check:
    name = "baseline acceptance length"
    required = f"at least {before['length']:.3f} less {loss:.2%}"
    if ours is not None and ours["rule"] != before["rule"]:
        return Check(name, "not_measured", "other prompts or settings", required)
    return _check_length(name, ours, before["length"] * (1 - loss), required)


def _check_length(name: str, ours: Json | None, floor: float, required: str) -> Check:
    if ours is None:
        return Check(name, "not_measured", "not served", required, "quantize accept --record")
    good = ours["length"] >= floor
    return Check(name, "pass" if good else "fail", f"{ours['length']:.3f}", required)
