"""The options of ``quantize publish``."""

from __future__ import annotations

import click

from quantize.options import apply, spellings

PUBLISH = apply(
    click.option(
        *spellings("--repo-id"), required=True, metavar="ORG/NAME", help="Of OUT, or of OUT/target."
    ),
    click.option(*spellings("--draft-repo-id"), metavar="ORG/NAME", help="Of OUT/draft."),
    click.option("--public", is_flag=True, help="Make a new repository public."),
    click.option("--revision", default="main", show_default=True, help="Branch to write to."),
    click.option("--tag", help="Name the commit, such as v1.0."),
    click.option("--collection", metavar="TITLE", help="Put the repositories into a collection."),
    click.option(
        *spellings("--base-model"),
        metavar="ORG/NAME",
        help="What was quantized.  [default: as read]",
    ),
    click.option(
        *spellings("--draft-base-model"), metavar="ORG/NAME", help="The same, of OUT/draft."
    ),
    click.option("--source", help="What OUT (or OUT/target) was made from, to prove it in full."),
    click.option("--draft-source", help="What the draft was made from."),
    click.option("--yes", is_flag=True, help="Do not ask."),
    click.option("--dry-run", is_flag=True, help="Show what would go up; needs no login."),
)
