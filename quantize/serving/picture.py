"""Pictures of what was measured: acceptance, acceptance by domain, SQNR by layer; SVG and PNG.

Input are the JSON values of ``report.json`` (``served``) and ``quantization_report.json``
(``tensors``). An SVG takes its colours from the page that holds it, by CSS variables.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Xml

from quantize.serving.plots import Theme, draw_cells, draw_domains, draw_sqnr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]


LIGHT = Theme(
    page="#ffffff",
    ink="#1f2328",
    soft="#59636e",
    line="#d1d9e0",
    base="#7d8590",
    one="#0a67b7",
    two="#c8510b",
    three="#0f8a63",
    four="#9a4d9e",
)
DARK = Theme(
    page="#14171b",
    ink="#e9edf1",
    soft="#9aa4af",
    line="#363d46",
    base="#8d97a3",
    one="#5cb3f2",
    two="#f0975a",
    three="#45c89b",
    four="#d69bd9",
)
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.borderaxespad": 0.2,
    "legend.columnspacing": 1.0,
    "legend.handlelength": 1.4,
    "legend.handletextpad": 0.4,
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "svg.hashsalt": "pairquant",  # the same numbers give the same bytes
}
Draw = Callable[[Theme], "Figure"]


@dataclass(frozen=True)
class Picture:
    """One plot: a name for its file, what it shows in words, and how it is drawn."""

    name: str
    caption: str
    draw: Draw


def served_pictures(served: Json) -> tuple[Picture, ...]:
    """The plots of an acceptance session: ``served`` of a pair's report."""
    cells = served["cells"]
    others = [name for name in cells if name != baseline_of(served)]
    return (
        Picture(
            "acceptance",
            "Acceptance length with its interval, and the share of steps in which the draft token "
            "at each position was accepted.",
            lambda theme: draw_cells(cells, baseline_of(served), theme),
        ),
        Picture(
            "domains",
            "Acceptance length by domain, with intervals"
            + (f", against {baseline_of(served)} (grey)." if baseline_of(served) else "."),
            lambda theme: draw_domains(cells, others, baseline_of(served), theme),
        ),
    )


def baseline_of(served: Json) -> str | None:
    """The cell that the others are compared with; None when there is one cell alone."""
    retention = served["retention"]
    return retention[0]["baseline"] if retention else None


def sqnr_picture(role: str, tensors: Sequence[Json]) -> Picture:
    """Weight SQNR of one checkpoint's quantized layers, from the ``tensors`` of its report."""
    caption = (
        "Signal to quantization noise of every quantized weight by layer; of experts the least. "
        "Dashed: the scheme's floor."
    )
    return Picture(f"sqnr-{role}", caption, lambda theme: draw_sqnr(tensors, theme))


def to_svg(picture: Picture) -> str:
    """An ``<svg>`` element for an HTML page that defines ``--ink``, ``--one`` and so on."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        picture.draw(LIGHT).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = Xml.fromstring(buffer.getvalue())
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith("}metadata")]:
            parent.remove(child)
        # A page needs no namespaces, and holds several figures: only references keep their ids.
        parent.tag = parent.tag.rpartition("}")[2]
        kept = {key.rpartition("}")[2]: value for key, value in parent.attrib.items()}
        if parent.tag == "g":
            kept.pop("id", None)
        parent.attrib.clear()
        parent.attrib.update(kept)
    root.set("role", "img")
    root.set("aria-label", picture.caption)
    text = Xml.tostring(root, encoding="unicode")
    for name, colour in asdict(LIGHT).items():
        text = text.replace(colour, f"var(--{name})")
    return text


def write_pngs(folder: Path, pictures: Iterable[Picture]) -> tuple[Path, ...]:
    """``NAME.png`` and ``NAME-dark.png`` of every picture, for a card; 200 dots per inch."""
    import matplotlib as mpl

    written = []
    for picture in pictures:
        for ending, theme in (("", LIGHT), ("-dark", DARK)):
            path = folder / f"{picture.name}{ending}.png"
            with mpl.rc_context(STYLE):
                picture.draw(theme).savefig(path, dpi=200, metadata={"Software": None})
            written.append(path)
    return tuple(written)
