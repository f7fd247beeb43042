"""Report and Check: what was measured, what was required, and how both are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

    from quantize.entry import Entry
    from quantize.plan import Plan

Status = Literal["pass", "fail", "not_measured"]


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement and what was measured for it; *not measured* is never *pass*."""

    name: str
    status: Status
    measured: str
    required: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TensorProof:
    """What one quantized weight loses: decibels of signal over quantization noise.

    ``matmul_db`` is over all outputs of the layer, ``worst_row_db`` of its worst output feature;
    ``matmul_error`` is the relative error ‖y - ŷ‖/‖y‖.
    """

    name: str
    scheme: str
    sqnr_db: float
    matmul_error: float
    matmul_db: float
    worst_row_db: float


@dataclass(frozen=True)
class Report:
    """The checks of one checkpoint or pair."""

    checks: tuple[Check, ...]
    tensors: tuple[TensorProof, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "fail")

    @property
    def unmeasured(self) -> tuple[Check, ...]:
        """The checks that could not be made."""
        return tuple(check for check in self.checks if check.status == "not_measured")

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "checks": [asdict(check) for check in self.checks],
            "tensors": [_finite(asdict(proof)) for proof in self.tensors],
        }


def _finite(proof: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an exact match (infinite SQNR) or a total loss is written in words."""
    return {
        key: str(value) if isinstance(value, float) and not isfinite(value) else value
        for key, value in proof.items()
    }


def plan_table(plan: Plan) -> Table:
    """The plan with equal layers folded into one row: ``model.layers.*.mlp.up_proj.weight``."""
    from rich.table import Table

    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in plan.entries:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", entry.source.name)
        shape = f"{entry.source.dtype} {list(entry.source.shape)}"
        fate = entry.scheme or ("preserved" if entry.stored else "dropped")
        groups.setdefault((name, shape, entry.role, fate, entry.reason), []).append(entry)
    table = Table(title=f"{plan.kind}: {plan.family}, {plan.scheme}", title_justify="left")
    for column in ("tensor", "stored as", "role", "scheme", "reason"):
        table.add_column(column, overflow="fold")
    for column in ("count", "MB before", "MB after"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, entries in groups.items():
        table.add_row(*map(escape, key), str(len(entries)), *_megabytes(entries))
    table.add_section()
    table.add_row("total", "", "", "", "", str(len(plan.entries)), *_megabytes(plan.entries))
    return table


def escape(text: str) -> str:
    """Text in which rich finds no markup: shapes such as ``[64, 64]`` look like it."""
    from rich.markup import escape as rich_escape

    return rich_escape(text)


def _megabytes(entries: Iterable[Entry]) -> tuple[str, str]:
    entries = tuple(entries)
    before = sum(entry.source_bytes for entry in entries)
    after = sum(spec.nbytes for entry in entries for spec in entry.stored)
    return f"{before / 1e6:.2f}", f"{after / 1e6:.2f}"


def check_table(title: str, report: Report) -> Table:
    """One row a check; the status is written out, so that colour is never needed."""
    from rich.table import Table

    colours = {"pass": "green", "fail": "bold red", "not_measured": "yellow"}
    table = Table(title=title, title_justify="left")
    for column in ("check", "status", "measured", "required", "detail"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        status = f"[{colours[check.status]}]{check.status}[/]"
        words = (check.measured, check.required, check.detail)
        table.add_row(escape(check.name), status, *map(escape, words))
    return table


def tensor_table(report: Report, rows: int = 5) -> Table:
    """The quantized weights that lose most, least SQNR first."""
    from rich.table import Table

    table = Table(title="least weight SQNR", title_justify="left")
    table.add_column("weight", overflow="fold")
    table.add_column("scheme")
    for column in ("weight dB", "matmul error", "matmul dB", "worst row dB"):
        table.add_column(column, justify="right", no_wrap=True)
    for proof in report.tensors[:rows]:
        numbers = (proof.sqnr_db, proof.matmul_error, proof.matmul_db, proof.worst_row_db)
        formats = ("{:.2f}", "{:.4f}", "{:.2f}", "{:.2f}")
        texts = (form.format(value) for form, value in zip(formats, numbers, strict=True))
        table.add_row(escape(proof.name), proof.scheme, *texts)
    return table


def figure_table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """Rows of figures, each under its column."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def summary(title: str, reports: Mapping[str, Report]) -> str:
    """The checks as Markdown for a job's page: what is not passed first, then every check."""
    marks = {"pass": "✅", "fail": "❌", "not_measured": "⚪"}
    rows = [(name, check) for name, report in reports.items() for check in report.checks]
    rows.sort(key=lambda row: row[1].status == "pass")
    failed = sum(check.status == "fail" for _, check in rows)
    lines = [f"### {title}: {f'{failed} checks failed' if failed else 'no check failed'}", ""]
    lines += ["| | part | check | measured | required | detail |", "|---|---|---|---|---|---|"]
    for name, check in rows:
        words = (name, check.name, check.measured, check.required, check.detail)
        cells = (word.replace("|", "\\|").replace("\n", " ") for word in words)
        lines.append(f"| {marks[check.status]} {check.status} | {' | '.join(cells)} |")
    return "\n".join((*lines, "", ""))


def junit_xml(reports: Mapping[str, Report], *, allow_unmeasured: bool) -> str:
    """The checks in JUnit's XML: a failed one is a failure, one not measured an error.

    With ``allow_unmeasured`` the latter is a skipped case; it is never a passed one.
    """
    from xml.etree import ElementTree as Xml

    suites = Xml.Element("testsuites")
    for name, report in reports.items():
        suite = Xml.SubElement(suites, "testsuite", name=name, tests=str(len(report.checks)))
        suite.set("failures", str(len(report.failed)))
        missing = str(len(report.unmeasured))
        suite.set("errors", "0" if allow_unmeasured else missing)
        suite.set("skipped", missing if allow_unmeasured else "0")
        for check in report.checks:
            case = Xml.SubElement(suite, "testcase", classname=f"pairquant.{name}", name=check.name)
            kind = {"pass": "", "fail": "failure"}.get(
                check.status, "skipped" if allow_unmeasured else "error"
            )
            if kind:
                message = f"{check.status}: {check.measured}, required {check.required}"
                Xml.SubElement(case, kind, message=message).text = check.detail
    Xml.indent(suites)
    return Xml.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"
