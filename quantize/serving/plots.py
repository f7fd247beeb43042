"""How each plot is drawn with matplotlib: rows of dots with intervals, bars, lines by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from schemes import SCHEMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
Groups = Mapping[str, Mapping[str, Mapping[int, float]]]
"""SQNR in dB by group of layers, linear and layer number."""

MARKERS = ("o", "s", "^", "D")
ROW, PANEL, LABELS, MARGIN = 0.26, 2.3, 1.9, 0.95
"""Inches: height of a row, width of a panel, width for row labels, height beside the rows."""


@dataclass(frozen=True)
class Theme:
    """Colours; those of the series differ in lightness too, and each has a marker of its own."""

    page: str
    ink: str
    soft: str
    line: str
    base: str
    one: str
    two: str
    three: str
    four: str

    @property
    def series(self) -> tuple[str, ...]:
        """The colours of up to four series."""
        return self.one, self.two, self.three, self.four


def draw_cells(cells: Json, baseline: str | None, theme: Theme) -> Figure:
    """Acceptance length with its interval, then one panel of bars for every position."""
    positions = len(next(iter(cells.values()))["rates"])
    figure, (first, *others) = _panels(1, positions + 1, len(cells), theme)
    rows = range(len(cells))
    colours = [theme.base if name == baseline else theme.one for name in cells]
    _name_rows(first, list(cells), theme)
    for row, cell, colour in zip(rows, cells.values(), colours, strict=True):
        _dot(first, cell["length"], row, colour)
    if baseline is not None:
        at = cells[baseline]["length"]["value"]
        first.axvline(at, color=theme.base, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    first.set_title("acceptance length", color=theme.ink)
    first.margins(x=0.12)
    most = max(rate["value"] for cell in cells.values() for rate in cell["rates"])
    for position, axes in enumerate(others):
        values = [cell["rates"][position]["value"] for cell in cells.values()]
        bars = axes.barh(rows, values, height=0.55, color=colours)
        labels = [f"{value:.3f}" for value in values]
        axes.bar_label(bars, labels, padding=3, color=theme.ink, fontsize=8)
        axes.set_xlim(0, most * 1.25)
        axes.set_xticks([])  # every bar says its value
        axes.set_title(f"accepted at position {position + 1}", color=theme.ink)
    return figure


def draw_domains(cells: Json, others: Sequence[str], baseline: str | None, theme: Theme) -> Figure:
    """One panel for each cell, all against the baseline; domains from most accepted to least."""
    reference = cells[baseline or others[0]]["domains"]
    domains = sorted(reference, key=lambda name: -reference[name]["length"]["value"])
    columns = min(3, len(others))
    rows = ceil(len(others) / columns)
    figure, panels = _panels(rows, columns, len(domains), theme, width=3.1, share=True)
    for number, (name, axes) in enumerate(zip(others, panels, strict=False)):
        if number % columns == 0:
            _name_rows(axes, domains, theme)
        shift = 0.16 if baseline else 0
        for row, domain in enumerate(domains):
            if baseline:
                _dot(axes, reference[domain]["length"], row - shift, theme.base)
            if domain in cells[name]["domains"]:
                _dot(axes, cells[name]["domains"][domain]["length"], row + shift, theme.one, "s")
        axes.set_title(name, color=theme.ink)
    for axes in panels[len(others) :]:
        axes.set_visible(False)
    return figure


def draw_sqnr(tensors: Sequence[Json], theme: Theme) -> Figure:
    """By layer; a model of one layer, such as a draft, by name."""
    groups = _group(tensors)
    used = {tensor["scheme"] for tensor in tensors}
    floors = {scheme.NAME: scheme.SQNR_FLOOR_DB for scheme in SCHEMES if scheme.NAME in used}
    layers = {layer for series in groups.values() for points in series.values() for layer in points}
    draw = _draw_layers if len(layers) > 1 else _draw_names
    return draw(groups, floors, theme)


def _draw_names(groups: Groups, floors: Mapping[str, float], theme: Theme) -> Figure:
    values = {
        f"{group}.{linear}": value
        for group, series in groups.items()
        for linear, points in series.items()
        for value in points.values()
    }
    figure, (axes,) = _panels(1, 1, len(values), theme, width=5.0)
    _name_rows(axes, list(values), theme)
    axes.plot(list(values.values()), range(len(values)), "o", color=theme.one, markersize=5)
    for row, value in enumerate(values.values()):
        _note(axes, f"{value:.2f}", (value, row), (6, -3), theme.ink)
    for scheme, floor in floors.items():
        axes.axvline(floor, color=theme.base, linewidth=0.9, linestyle=(0, (4, 3)))
        _note(axes, f"floor of {scheme}", (floor, len(values) - 0.5), (4, 4), theme.soft)
    axes.margins(x=0.25)
    axes.set_title("weight SQNR, dB", color=theme.ink)
    return figure


def _draw_layers(groups: Groups, floors: Mapping[str, float], theme: Theme) -> Figure:
    """A panel for each group of layers (attention, MLP, experts), a series for each linear."""
    figure, panels = _panels(1, len(groups), 9, theme, width=4.0, labels=0.7)
    for (group, series), axes in zip(groups.items(), panels, strict=True):
        axes.grid(axis="x", visible=False)
        axes.grid(axis="y", color=theme.line, linewidth=0.6)
        for number, (linear, points) in enumerate(series.items()):
            axes.plot(
                list(points),
                list(points.values()),
                color=theme.series[number % 4],
                marker=MARKERS[number % 4],
                markersize=3,
                linewidth=1.2,
                linestyle=("-", ":")[number // 4 % 2],
                label=linear,
            )
        for scheme, floor in floors.items():
            axes.axhline(floor, color=theme.base, linewidth=0.9, linestyle=(0, (4, 3)))
            first = min(layer for points in series.values() for layer in points)
            _note(axes, f"floor of {scheme}, {floor} dB", (first, floor), (-4, 3), theme.soft)
        axes.margins(y=0.12)
        axes.set_title(group, color=theme.ink)
        axes.set_xlabel("layer", color=theme.soft)
        axes.legend(ncols=4, labelcolor=theme.ink, loc="lower right", bbox_to_anchor=(1, 1))
    panels[0].set_ylabel("weight SQNR, dB", color=theme.soft)
    return figure


def _group(tensors: Sequence[Json]) -> dict[str, dict[str, dict[int, float]]]:
    """SQNR by group, linear and layer number; exact weights (infinite SQNR) have no place."""
    groups: dict[str, dict[str, dict[int, float]]] = {}
    found = []
    for tensor in tensors:
        *path, linear, _ = tensor["name"].split(".")
        numbers = [int(part) for part in path if part.isdigit()] or [0]
        words = [part for part in path if not part.isdigit()] or ["weights"]
        found.append((numbers[0], words[-1], linear, float(tensor["sqnr_db"])))
    for layer, group, linear, value in sorted(found):
        if isfinite(value):
            points = groups.setdefault(group, {}).setdefault(linear, {})
            points[layer] = min(value, points.get(layer, value))
    return groups


def _panels(
    rows: int,
    columns: int,
    lines: int,
    theme: Theme,
    width: float = PANEL,
    labels: float = LABELS,
    share: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure of panels that share their rows, and with ``share`` their scale."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    size = (labels + columns * width, rows * (lines * ROW + MARGIN))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04)
    figure = Figure(figsize=size, layout=layout, facecolor=theme.page)
    grid = figure.subplots(rows, columns, sharex=share, sharey=True, squeeze=False)
    panels = [axes for row in grid for axes in row]
    for axes in panels:
        axes.set_facecolor("none")
        axes.tick_params(colors=theme.soft, labelsize=8)
        axes.spines["bottom"].set_color(theme.line)
        axes.grid(axis="x", color=theme.line, linewidth=0.6)
    return figure, panels


def _name_rows(axes: Axes, names: Sequence[str], theme: Theme) -> None:
    axes.set_yticks(range(len(names)), names, color=theme.ink)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _dot(axes: Axes, interval: Json, row: float, colour: str, marker: str = "o") -> None:
    low, high = interval["low"], interval["high"]
    if low is not None and high is not None:
        axes.plot((low, high), (row, row), color=colour, linewidth=1.6, solid_capstyle="round")
    axes.plot(interval["value"], row, color=colour, marker=marker, markersize=5, linestyle="none")


def _note(
    axes: Axes, text: str, at: tuple[float, float], shift: tuple[int, int], colour: str
) -> None:
    """Text beside a place in the plot, ``shift`` points from it."""
    axes.annotate(text, at, shift, "data", "offset points", color=colour, fontsize=8)
