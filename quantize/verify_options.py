"""The options by which ``quantize verify`` guards an output in CI."""

from __future__ import annotations

from pathlib import Path

import click

from quantize.options import apply, spellings
from quantize.quantities import Floor

_SHARE = click.FloatRange(min=0, max=1)

BASELINE = apply(
    click.option(
        "--baseline",
        type=click.Path(exists=True, path_type=Path),
        help="Fail when OUT is worse than this earlier output, report or --json result.",
    ),
    click.option(
        *spellings("--sqnr-tolerance"),
        "sqnr_loss",
        type=click.FloatRange(min=0),
        default=0.1,
        show_default=True,
        help="dB that each weight may lose against the baseline.",
    ),
    click.option(
        *spellings("--al-tolerance"),
        "al_loss",
        type=_SHARE,
        default=0.01,
        show_default=True,
        help="Share of acceptance length that may be lost.",
    ),
    click.option(
        *spellings("--bytes-tolerance"),
        "growth",
        type=_SHARE,
        default=0.001,
        show_default=True,
        help="Share by which the bytes may grow.",
    ),
    click.option(*spellings("--min-sqnr"), type=Floor(), help="Least SQNR of any weight, in dB."),
    click.option(*spellings("--min-al"), type=Floor(), help="Least acceptance length, pooled."),
    click.option(
        "--summary", type=click.Path(path_type=Path), help="Append the checks as Markdown."
    ),
)
