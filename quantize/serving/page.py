"""The report as one HTML file: no script, no font, no image from elsewhere; light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from quantize.job import PAIR_REPORT, REPORT
from quantize.report import Report
from quantize.serving.intervals import Interval
from quantize.serving.picture import (
    DARK,
    LIGHT,
    Picture,
    baseline_of,
    served_pictures,
    sqnr_picture,
    to_svg,
)
from quantize.serving.plots import Theme

Json = Mapping[str, Any]
Rows = Iterable[Sequence[str]]

MARKS = {"pass": "✓ pass", "fail": "✗ fail", "not_measured": "– not measured"}
LEAST = 10
"""Weights listed by name; the plot has them all."""

STYLE = """
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem; background: var(--page);
       color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line);
     padding-top: 1.2rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
p, figcaption, dd, summary { color: var(--soft); }
figure { margin: 1rem 0; overflow-x: auto; }
figcaption { font-size: .85rem; }
@media (min-width: 50rem) { svg { max-width: 100%; height: auto; } }
svg text { font-family: system-ui, sans-serif !important; }
.wide { overflow-x: auto; margin: .8rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; overflow-wrap: break-word; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.pass { color: var(--three); } .fail { color: var(--two); font-weight: 700; }
.not_measured { color: var(--soft); }
.status { white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .87rem; }
dd { margin: 0; overflow-wrap: anywhere; }
dl.tiles { display: flex; flex-wrap: wrap; gap: .8rem 2.5rem; }
.tiles div { display: flex; flex-direction: column-reverse; }
.tiles dd { color: var(--ink); font-size: 1.5rem; font-variant-numeric: tabular-nums; }
"""


def write_page(path: Path, out: Path, draft: Path | None, reports: Mapping[str, Report]) -> None:
    """Write what `verify` found of ``out`` (and of ``draft``, where that is a folder apart).

    SQNR that this run had no source to measure is that of the time when the folder was written.
    """
    whole = (out / PAIR_REPORT).is_file()
    folders = {"checkpoint": out, "target": out / "target" if whole else out}
    folders["draft"] = draft or out / "draft"
    parts = {}
    for name, report in reports.items():
        stored = _load(folders[name] / REPORT) if name in folders else {}
        fresh = report.to_json()
        before = stored.get("tensors", [])
        parts[name] = {**stored, **fresh, "tensors": fresh["tensors"] or before}
    served = _load(out / PAIR_REPORT)["served"] if whole else None
    measured = served if isinstance(served, dict) else None
    path.write_text(render_page(f"Report of {out}", parts, measured), encoding="utf-8")


def _load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def render_page(title: str, parts: Mapping[str, Json], served: Json | None = None) -> str:
    """The report of a checkpoint or pair as HTML.

    ``parts`` has the content of each checkpoint's ``quantization_report.json`` (a part may hold
    ``checks`` alone), ``served`` that of ``report.json``'s ``served``, None when not measured.
    """
    sections = [_served(served)] if served else []
    sections += [_part(name, part) for name, part in parts.items()]
    made: Json = next((part["provenance"] for part in parts.values() if "provenance" in part), {})
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_colours(LIGHT)}"
        f"@media (prefers-color-scheme: dark) {{\n{_colours(DARK)}}}\n{STYLE}</style>\n"
        f"<h1>{escape(title)}</h1>\n{_provenance(made)}{''.join(sections)}</html>\n"
    )


def _colours(theme: Theme) -> str:
    names = " ".join(f"--{name}: {colour};" for name, colour in asdict(theme).items())
    return f":root {{ {names} }}\n"


def _provenance(made: Json) -> str:
    if not made:
        return ""
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    return f"<p>{escape(made['created'])} · {escape(versions)}</p>\n"


def _served(served: Json) -> str:
    """Acceptance: the figures that matter, the plots, and every number in a table."""
    cells = served["cells"]
    name, first = next(iter(cells.items()))
    facts = {f"acceptance length of {name}": str(Interval(**first["length"]))}
    facts |= {
        f"retention of {row['cell']} against {row['baseline']}": str(Interval(**row["ratio"]))
        for row in served["retention"][:1]
    }
    facts["prompts"] = str(served["prompts"]["count"])
    facts["draft tokens a step"] = str(served["settings"]["num_speculative_tokens"])
    retention = [
        (row["cell"], row["baseline"], str(Interval(**row["ratio"]))) for row in served["retention"]
    ]
    return "".join(
        (
            "<h2>Served acceptance</h2>\n",
            _tiles(facts),
            *map(_figure, served_pictures(served)),
            "<h3>Every number</h3>\n",
            _table(("cell", "AL, pooled", "AL, mean of requests", "rates", "steps"), _cells(cells)),
            _table(("domain", *cells), _domains(cells, baseline_of(served))),
            _table(("cell", "baseline", "retention"), retention) if retention else "",
            _checks(served["checks"]),
            _conditions(served),
        )
    )


def _cells(cells: Json) -> Rows:
    for name, cell in cells.items():
        rates = "  ".join(f"{rate['value']:.3f}" for rate in cell["rates"])
        lengths = (str(Interval(**cell[key])) for key in ("length", "mean_of_requests"))
        yield name, *lengths, rates, str(cell["steps"])


def _domains(cells: Json, baseline: str | None) -> Rows:
    names = cells[baseline or next(iter(cells))]["domains"]
    for domain in names:
        found = [cell["domains"].get(domain) for cell in cells.values()]
        yield domain, *(str(Interval(**f["length"])) if f else "no data" for f in found)


def _conditions(served: Json) -> str:
    floor = served["noise_floor"]
    facts = {
        "prompts": f"{served['prompts']['name']}, SHA-256 {served['prompts']['sha256']}",
        "sampling": ", ".join(f"{key} {value}" for key, value in served["settings"].items()),
        "vLLM": ", ".join(f"{key} {value}" for key, value in served["vllm"].items()),
        "noise floor": "not measured" if floor is None else f"{floor:.4f}",
    }
    for name, cell in served["cells"].items():
        facts[f"kernels of {name}"] = ", ".join(cell["kernels"]) or "none named in the log"
    notes = "".join(f"<li>{escape(line)}</li>" for line in served["conventions"])
    return (
        f"<h3>Conditions</h3>\n{_list(facts)}"
        f"<details><summary>Conventions</summary><ul>{notes}</ul></details>\n"
    )


def _part(name: str, part: Json) -> str:
    """One checkpoint, or the pair: its bytes, its weights' SQNR, and its checks."""
    text = f"<h2>{escape(name.capitalize())}</h2>\n"
    if plan := part.get("plan"):
        facts = {
            "source": part["source"]["origin"],
            "scheme": plan["scheme"],
            "bytes": f"{plan['bytes_after']:,} (source {plan['bytes_before']:,})",
            "made with": " ".join(part["provenance"]["command"]),
        }
        text += _list(facts)
    if tensors := part.get("tensors"):
        text += _figure(sqnr_picture(name, tensors)) + _weights(tensors)
    return text + _checks(part["checks"])


def _weights(tensors: Sequence[Json]) -> str:
    least = sorted(tensors, key=lambda tensor: float(tensor["sqnr_db"]))[:LEAST]
    fields = ("sqnr_db", "matmul_db", "worst_row_db")
    rows = [
        (tensor["name"], tensor["scheme"], *(f"{float(tensor[key]):.2f}" for key in fields))
        for tensor in least
    ]
    head = ("weight", "scheme", "weight dB", "matmul dB", "worst row dB")
    return (
        f"<details><summary>The {len(rows)} weights that lose most, of {len(tensors)}</summary>"
        f"{_table(head, rows)}</details>\n"
    )


def _checks(checks: Sequence[Json]) -> str:
    rows = "".join(
        f'<tr><td>{escape(check["name"])}<td class="status {check["status"]}">'
        f"{MARKS[check['status']]}"
        + "".join(f"<td>{escape(check[key])}" for key in ("measured", "required", "detail"))
        + "</tr>\n"
        for check in checks
    )
    head = "<tr><th>check<th>status<th>measured<th>required<th>detail</tr>"
    return f'<div class="wide"><table>\n{head}\n{rows}</table></div>\n' if checks else ""


def _figure(picture: Picture) -> str:
    return f"<figure>{to_svg(picture)}<figcaption>{escape(picture.caption)}</figcaption></figure>\n"


def _table(head: Sequence[str], rows: Rows) -> str:
    columns = "".join(f"<th>{escape(name)}" for name in head)
    lines = (("".join(f'<td class="number">{escape(cell)}' for cell in row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide"><table>\n<tr>{columns}</tr>\n{body}</table></div>\n'


def _tiles(facts: Mapping[str, str]) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    return f'<dl class="tiles">{tiles}</dl>\n'


def _list(facts: Mapping[str, str]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    return f"<dl>{items}</dl>\n"
