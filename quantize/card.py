"""The model card of an output: its front matter, and regions that are written anew.

Everything outside the marked regions, and every key and tag of the front matter that a person
added, stays as it is. Markers are HTML comments, which no renderer shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantize.card_sections import SECTIONS, schemes_used
from quantize.files import Files, read_at
from quantize.workdir import write_text

CARD = "README.md"
NOT_SERVED = "not measured"
FROM_SOURCE = ("license", "license_name", "license_link", "pipeline_tag", "language")
"""Keys of the source's own card that hold for what is made from it."""
BASE = ("base_model", "base_model_relation")
SCHEME_TAGS = {"mxfp4": "mxfp4", "fp8_rowwise": "fp8"}
LARGEST_CARD = 1 << 20

_HUB_ORIGIN = re.compile(r"([\w.-]+/[\w.-]+)@[0-9a-f]{40}")
_CACHED = re.compile(r".*/models--(.+?)--(.+?)/snapshots/[0-9a-f]{40}/?")


def render_card(report: Mapping[str, Any], before: str = "") -> str:
    """``README.md`` from the content of ``quantization_report.json`` and the card before it.

    Only what the report says was measured is in it. The front matter is written and read by
    huggingface_hub's own card classes; raises ValueError where they refuse ``before``.
    """
    from huggingface_hub import ModelCard, ModelCardData

    # A card without front matter is warned about, and is what a person may have begun with.
    old = ModelCard(before if before.lstrip().startswith("---") else f"---\n{{}}\n---\n{before}")
    theirs, ours = _metadata(old), front_matter(report)
    # The base model is told while publishing; whatever else differs from ours, a person changed.
    both = {**ours, **theirs, **{key: ours[key] for key in BASE if key in ours}}
    both["tags"] = list(dict.fromkeys([*ours["tags"], *(theirs.get("tags") or ())]))
    data = ModelCardData(**both)
    text = f"---\n{data.to_yaml(original_order=[*ours])}\n---\n{_body(report, old.text)}"
    if _metadata(ModelCard(text)) != both:
        raise ValueError("the card's front matter is not read as it was written")
    return text


def _metadata(card: Any) -> dict[str, Any]:
    return dict(card.data.to_dict())


def refresh_card(folder: Path, report: Mapping[str, Any]) -> None:
    """Write a folder's card anew from its report; a person's own text stays."""
    path = folder / CARD
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, render_card(report, before))


def front_matter(report: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the Hub reads, in its order; what is not known is left out."""
    plan = report["plan"]
    tags = ["amd-quark", "quantized"]
    tags += [SCHEME_TAGS.get(scheme, scheme) for scheme in schemes_used(report)]
    if plan["kind"] == "draft":
        tags += ["eagle3", "speculative-decoding", "draft-model"]
    known = report["source"].get("card", {})
    base = base_model(report)
    return {
        **{key: known[key] for key in FROM_SOURCE if key in known},
        **({"base_model": base, "base_model_relation": "quantized"} if base else {}),
        "library_name": "transformers",
        "pipeline_tag": known.get("pipeline_tag", "text-generation"),
        "tags": tags,
    }


def base_model(report: Mapping[str, Any]) -> str | None:
    """The Hub id of what was quantized: as published, or where it was read from."""
    named = report.get("published", {}).get("base_model")
    return named or hub_id(report["source"]["origin"])


def hub_id(origin: str) -> str | None:
    """The id in ``org/name@commit`` or in the path of a Hub cache; None for another folder."""
    if match := _HUB_ORIGIN.fullmatch(origin):
        return match[1]
    match = _CACHED.fullmatch(origin)
    return f"{match[1]}/{match[2]}" if match else None


def read_source_card(files: Files) -> dict[str, Any]:
    """What the source's own card says of its license and use; empty where it says nothing."""
    import yaml

    size = files.sizes().get(CARD, 0)
    if not 0 < size <= LARGEST_CARD:
        return {}
    text = read_at(files, CARD, 0, size).decode("utf-8", errors="replace")
    match = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:  # somebody else's card: what it meant to say is not known
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in FROM_SOURCE if isinstance(found.get(key), (str, list))}


def _body(report: Mapping[str, Any], before: str) -> str:
    """Our regions in their places; all of them at the top of a card that has none."""
    regions = {name: _region(name, section(report)) for name, section in SECTIONS.items()}
    if not any(f"<!-- pairquant:{name} -->" in before for name in regions):
        own = before.strip()
        return "\n".join(regions.values()) + (f"\n{own}\n" if own else "")
    for name, region in regions.items():
        pattern = f"<!-- pairquant:{name} -->\n.*?<!-- /pairquant:{name} -->\n?"
        if match := re.search(pattern, before, re.DOTALL):
            before = before[: match.start()] + region + before[match.end() :]
    return before


def _region(name: str, text: str) -> str:
    return f"<!-- pairquant:{name} -->\n{text.strip()}\n<!-- /pairquant:{name} -->\n"
