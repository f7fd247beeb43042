"""The report as a page and its plots: self-contained, readable, and with the report's numbers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import run_quantize
from matplotlib.patches import Rectangle
from PIL import Image
from tiny import write_llama

from quantize.report import Check, Report, TensorProof
from quantize.serving.acceptance import Measured, RequestAcceptance, add_up
from quantize.serving.client import Sampling
from quantize.serving.outcome import to_json
from quantize.serving.page import render_page, write_page
from quantize.serving.picture import (
    DARK,
    LIGHT,
    Picture,
    served_pictures,
    sqnr_picture,
    to_svg,
    write_pngs,
)
from quantize.serving.plots import Theme
from quantize.serving.prompts import Message, Prompt, PromptSet
from quantize.serving.retention import retain
from quantize.serving.session import Session, Wishes

CHECK = Check("wiring", "pass", "0.5", "at least 0.02")
# Accepted at positions 1, 2, 3 of 100 steps; two domains of two prompts each.
COUNTS = {
    "target+draft": ((40, 10, 5), (20, 5, 0), (30, 6, 2), (60, 30, 10)),
    "target+baseline-draft": ((44, 12, 5), (20, 5, 1), (30, 6, 2), (60, 30, 13)),
    "baseline-target+draft": ((44, 12, 6), (20, 5, 1), (30, 6, 2), (60, 31, 13)),
    "baseline-target+baseline-draft": ((44, 12, 6), (22, 5, 1), (30, 6, 2), (60, 31, 13)),
}
DOMAINS = ("math", "math", "qa", "qa")


def run_of(counts: tuple[tuple[int, ...], ...]) -> Measured:
    requests = tuple(
        RequestAcceptance(n, DOMAINS[n], 100, sum(found), 300, 200, "text", "stop", found)
        for n, found in enumerate(counts)
    )
    return Measured(add_up(requests), (), 10.0)


def served(cells: int = 4, checks: tuple[Check, ...] = (CHECK,)) -> dict[str, Any]:
    """A session of one or of four combinations as ``accept`` records it."""
    prompts = tuple(Prompt(n, name, (Message("user", "?"),)) for n, name in enumerate(DOMAINS))
    baseline = "b" if cells > 1 else None
    wishes = Wishes(
        "t",
        "d",
        PromptSet("prompts.jsonl", "0" * 64, prompts, ()),
        Sampling(160, 0, 0),
        Path("acceptance"),
        3,
        16,
        1,
        "python",
        (),
        None,
        600,
        baseline,
        baseline,
    )
    runs = {cell.name: (run_of(COUNTS[cell.name]),) for cell in wishes.cells}
    acceptances = {name: [run.acceptance for run in found] for name, found in runs.items()}
    kept = retain(wishes.cells, acceptances, 0) if cells > 1 else ()
    vllm = {"version": "0.32.0", "platform": "cpu"}
    session = Session(runs, {}, vllm, None, kept, None, checks)
    return dict(json.loads(json.dumps(to_json(wishes, session, {}))))


def proof(name: str, sqnr: float, scheme: str = "mxfp4") -> TensorProof:
    return TensorProof(f"{name}.weight", scheme, sqnr, 0.1, 15.0, 12.0)


def part(*proofs: TensorProof, checks: tuple[Check, ...] = (CHECK,)) -> dict[str, Any]:
    return Report(checks, proofs).to_json()


LAYERS = [
    proof(f"model.layers.{layer}.{module}", 18 + layer / 10 + n)
    for layer in range(3)
    for n, module in enumerate(("self_attn.q_proj", "mlp.up_proj"))
]


class Reader(HTMLParser):
    """What a browser would find: elements with attributes, and the text of table cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.inside in ("td", "th") and self.rows:
            self.rows[-1][-1] += data.strip("\n")

    @property
    def table(self) -> dict[str, list[str]]:
        """Rows by their first cell; the first of several."""
        return {row[0]: row[1:] for row in reversed(self.rows) if row}


@pytest.fixture(scope="module")
def page() -> str:
    proofs = [*LAYERS, proof("model.layers.0.mlp.down_proj", float("inf"))]
    draft = part(proof("midlayer.mlp.up_proj", 31.5, "fp8_rowwise"))
    return render_page("Report", {"target": part(*proofs), "draft": draft}, served())


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|data:", page)
    assert not re.findall(r"url\((?!#)", page)
    for tag, attributes in Reader(page).elements:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed"), tag
        assert not {name for name in attributes if name.startswith(("on", "src", "xmlns"))}
        assert (attributes.get("href") or "#").startswith("#")


def test_every_reference_in_the_plots_is_on_the_page(page: str) -> None:
    elements = Reader(page).elements
    known = {attributes["id"] for _, attributes in elements if "id" in attributes}
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', page))
    assert used
    assert used <= known


def test_every_colour_follows_the_readers_choice(page: str) -> None:
    style, _, body = page.partition("</style>")
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;\" ])", re.sub(r'href="[^"]*"', "", body))
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert used <= set(asdict(LIGHT))
    light, dark = re.findall(r":root \{ (.*?) \}", style)
    assert f"--ink: {LIGHT.ink};" in light
    assert f"--ink: {DARK.ink};" in dark
    assert style.index("prefers-color-scheme: dark") < style.index(dark)


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.1."""
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_and_marks_stand_out(theme: Theme) -> None:
    """WCAG 2.1: 4.5 for text, 3 for graphical objects."""
    page = luminance(theme.page)
    for least, colours in ((4.5, (theme.ink, theme.soft)), (3, (theme.base, *theme.series))):
        for colour in colours:
            low, high = sorted((page, luminance(colour)))
            assert (high + 0.05) / (low + 0.05) >= least, colour


def test_the_tables_hold_the_reports_numbers(page: str) -> None:
    """By hand: 40+10+5 and so on of 400 steps."""
    table = Reader(page).table
    pooled, mean, rates, steps = table["target+draft"][:4]
    assert pooled.startswith("1.545 [")  # 1 + (55 + 25 + 38 + 100) / 400
    assert mean.startswith("1.545 [")
    assert rates.split() == ["0.375", "0.128", "0.043"]  # 150, 51 and 17 of 400
    assert steps == "400"
    assert table["math"][0].startswith("1.400 [")  # 1 + 80 / 200
    assert table["qa"][3].startswith("1.710 [")  # 1 + (38 + 104) / 200
    assert "0.978 [" in page  # (400 + 218) / (400 + 232)
    assert table["model.layers.0.self_attn.q_proj.weight"] == [
        "mxfp4",
        "18.00",
        "15.00",
        "12.00",
    ]
    assert table["wiring"] == ["✓ pass", "0.5", "at least 0.02", ""]


def points(line: Any) -> tuple[list[float], list[float]]:
    """The x and the y of a line."""
    return list(line.get_xdata()), list(line.get_ydata())


def xy(picture: Picture) -> list[list[tuple[str, list[float], list[float]]]]:
    """Label, x and y of every line of every panel."""
    return [
        [(str(line.get_label()), *points(line)) for line in axes.lines]
        for axes in picture.draw(LIGHT).axes
    ]


def test_the_plots_draw_the_reports_numbers() -> None:
    found = served()
    acceptance, domains = served_pictures(found)
    figure = acceptance.draw(LIGHT)
    first, *positions = figure.axes
    assert [tick.get_text() for tick in first.get_yticklabels()] == list(COUNTS)
    lengths = [line for line in first.lines if line.get_marker() == "o"]
    assert [points(line)[0][0] for line in lengths] == [1.545, 1.5700, 1.5750, 1.58]
    for n, axes in enumerate(positions):
        widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
        counted = [sum(request[n] for request in counts) / 400 for counts in COUNTS.values()]
        assert widths == pytest.approx(counted)
        assert [text.get_text() for text in axes.texts] == [f"{value:.3f}" for value in counted]
    panels = domains.draw(LIGHT).axes
    assert [axes.get_title() for axes in panels] == list(COUNTS)[:3]
    math = found["cells"]["target+draft"]["domains"]["math"]["length"]
    row = [tick.get_text() for tick in panels[0].get_yticklabels()].index("math")
    ours = [line for line in panels[0].lines if line.get_marker() == "s"][row]
    assert points(ours)[0] == [math["value"]]
    assert [math["low"], math["high"]] in [points(line)[0] for line in panels[0].lines]


def test_sqnr_is_drawn_by_layer_and_of_experts_the_least() -> None:
    experts = [
        proof(f"model.layers.{layer}.mlp.experts.{n}.up_proj", 17 + n - layer)
        for layer in (0, 1)
        for n in (0, 1, 2)
    ]
    exact = proof("model.layers.1.self_attn.v_proj", float("inf"))
    tensors = part(*LAYERS, *experts, exact)["tensors"]
    panels = xy(sqnr_picture("target", tensors))
    lines = {label: (x, y) for panel in panels for label, x, y in panel if label[0] != "_"}
    assert lines["q_proj"] == ([0, 1, 2], [18.0, 18.1, 18.2])
    assert ([0, 1], [17, 16]) in [(x, y) for panel in panels for _, x, y in panel]
    assert "v_proj" not in lines  # exact: no noise to draw
    assert len(panels) == 3


def test_a_single_layer_is_drawn_by_name() -> None:
    proofs = [proof("midlayer.mlp.up_proj", 31.5, "fp8_rowwise"), proof("midlayer.fc", 19.25)]
    picture = sqnr_picture("draft", part(*proofs)["tensors"])
    [axes] = picture.draw(LIGHT).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["midlayer.fc", "mlp.up_proj"]
    assert {"19.25", "31.50"} <= {text.get_text() for text in axes.texts}


def test_one_combination_and_one_prompt_can_be_drawn() -> None:
    found = served(cells=1)
    found["cells"]["target+draft"]["length"] |= {"low": None, "high": None}
    page = render_page("Report", {}, found)
    assert Reader(page).table["target+draft"][0] == "1.545"
    assert "retention" not in page


def test_what_was_not_measured_is_not_shown() -> None:
    page = render_page("Report", {"pair": part(checks=(CHECK,))})
    assert "Served" not in page
    assert "<svg" not in page


def test_names_cannot_become_markup() -> None:
    evil = Check("<script>", "fail", "<b>", "&lt;", '" onload="x')
    page = render_page("<i>", {"<u>": part(checks=(evil,))}, served(checks=(evil,)))
    tags = {tag for tag, _ in Reader(page).elements}
    assert not {"script", "b", "i", "u"} & tags
    assert Reader(page).table["<script>"] == ["✗ fail", "<b>", "&lt;", '" onload="x']


def test_the_same_numbers_give_the_same_picture() -> None:
    picture = sqnr_picture("target", part(*LAYERS)["tensors"])
    assert to_svg(picture) == to_svg(picture)


def test_pngs_decode_in_both_themes(tmp_path: Path) -> None:
    paths = write_pngs(tmp_path, served_pictures(served()))
    names = ["acceptance.png", "acceptance-dark.png", "domains.png", "domains-dark.png"]
    assert [path.name for path in paths] == names
    for path in paths:
        with Image.open(path) as image:
            image.load()
            theme = DARK if path.stem.endswith("-dark") else LIGHT
            corner = image.convert("RGB").getpixel((0, 0))
            assert corner == tuple(bytes.fromhex(theme.page[1:]))
            assert min(image.size) > 200
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50


def test_verify_writes_the_page(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    made = run_quantize("run", source, "-o", "out", "--scheme", "bf16", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    command = ("verify", "out", "--source", source, "--html", "report.html", "--json")
    done = run_quantize(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = Reader((tmp_path / "report.html").read_text(encoding="utf-8")).table
    for check in json.loads(done.stdout)["checks"]["checkpoint"]:
        assert table[check["name"]][1:] == [
            check[key] for key in ("measured", "required", "detail")
        ]


def test_the_page_of_a_pair_has_what_was_served_and_what_was_measured_before(
    tmp_path: Path,
) -> None:
    for half, value in (("target", 18.0), ("draft", 31.5)):
        (tmp_path / half).mkdir()
        stored = part(proof("model.layers.0.mlp.up_proj", value))
        (tmp_path / half / "quantization_report.json").write_text(json.dumps(stored))
    (tmp_path / "report.json").write_text(json.dumps({"served": served()}))
    reports = {name: Report((CHECK,)) for name in ("target", "draft", "pair")}
    write_page(tmp_path / "page.html", tmp_path, None, reports)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Served acceptance" in text
    assert {"18.00", "31.50"} <= {cell for row in Reader(text).rows for cell in row}
    (tmp_path / "report.json").write_text(json.dumps({"served": "not measured"}))
    write_page(tmp_path / "page.html", tmp_path, None, reports)
    assert "Served" not in (tmp_path / "page.html").read_text(encoding="utf-8")
