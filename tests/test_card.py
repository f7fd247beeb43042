"""The model card: what the Hub's own classes read in it, and what a person wrote into it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from runs import pair as write_pair
from runs import run as write_one
from tiny import write_draft, write_llama

from quantize.card import hub_id, render_card
from quantize.job import link_halves

ORDER = (
    "# ",
    "## Quantization",
    "## Quantized and preserved layers",
    "## Tensor dtypes and bytes",
    "## Loading in vLLM",
    "## Evaluation",
    "## Reproduction",
    "## Limits",
    "## License",
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


SERVED: dict[str, Any] = {
    "conventions": ["AL, pooled: 1 + accepted / steps"],
    "settings": {
        "num_speculative_tokens": 3,
        "max_tokens": 160,
        "temperature": 0.0,
        "seed": 0,
        "vllm_options": ["--max-num-seqs", "16"],
    },
    "prompts": {"name": "heldout.jsonl", "sha256": "ab" * 32, "count": 88},
    "vllm": {"version": "0.32.0", "platform": "cpu"},
    "cells": {"target+draft": {"length": interval(1.6543), "mean_of_requests": interval(1.5987)}},
    "retention": [
        {"cell": "target+draft", "baseline": "baseline-target+draft", "ratio": interval(0.9876)}
    ],
    "verdict": "pass",
    "min_retention": 0.97,
    "checks": [],
}
"""The keys of ``acceptance.json`` that a card shows, with figures of no other place."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    target = write_llama(folder / "t")
    (target / "LICENSE.md").write_text("free")
    (target / "README.md").write_text(
        "---\nlicense: other\nlicense_name: free\nlicense_link: LICENSE.md\ndatasets: [x]\n---\nhi"
    )
    write_pair(target, write_draft(folder / "d"), folder / "pair", ("bf16", "bf16"))
    return folder / "pair"


def load(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "quantization_report.json").read_text())
    return report


def test_sections_and_metadata_of_the_demo_pair(demo_dir: Path) -> None:
    """The front matter as the Hub reads it, and every figure of the evaluation in the report."""
    expected = {
        "target": ["amd-quark", "quantized", "mxfp4"],
        "draft": ["amd-quark", "quantized", "fp8", "eagle3", "speculative-decoding", "draft-model"],
    }
    for half, tags in expected.items():
        folder = demo_dir / "pair" / half
        card = ModelCard.load(folder / "README.md")
        assert card.data.tags == tags
        assert (card.data.library_name, card.data.pipeline_tag) == (
            "transformers",
            "text-generation",
        )
        lines = card.text.splitlines()
        found = [line for line in lines if line.startswith(("# ", "## "))]
        assert len(found) == len(ORDER)
        assert all(line.startswith(start) for line, start in zip(found, ORDER, strict=True))
        evaluation = card.text.split("## Evaluation")[1].split("## Reproduction")[0]
        said = json.dumps(load(folder), ensure_ascii=False)
        figures = re.findall(r"\d+\.\d+|\d{3,}", evaluation)
        assert len(figures) >= 6
        assert [figure for figure in figures if figure not in said] == []
        assert evaluation.count("Not measured.") == 2  # acceptance and language quality


def test_bytes_by_dtype_are_those_of_the_files(demo_dir: Path) -> None:
    from safetensors import safe_open

    folder = demo_dir / "pair" / "target"
    sizes: dict[str, int] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in list(weights.keys()):
            tensor = weights.get_tensor(name)
            key = {"torch.bfloat16": "BF16", "torch.uint8": "U8"}[str(tensor.dtype)]
            sizes[key] = sizes.get(key, 0) + tensor.nbytes
    card = (folder / "README.md").read_text()
    for dtype, size in sizes.items():
        assert re.search(rf"\| {dtype} \| [\d,]+ \| {size:,} \|", card)
    assert re.search(rf"\| total \| [\d,]+ \| {sum(sizes.values()):,} \|", card)


def test_the_license_is_the_source_s(written: Path, tmp_path: Path) -> None:
    card = ModelCard.load(written / "target" / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", "free")
    assert card.data.license_link == "LICENSE.md"
    assert card.data.get("datasets") is None
    assert "As the source: free." in card.text
    assert "[LICENSE.md](LICENSE.md)" in card.text
    card = ModelCard.load(written / "draft" / "README.md")
    assert card.data.license is None
    assert "Not stated by the source's card." in card.text
    broken = write_llama(tmp_path / "t", num_hidden_layers=1)
    (broken / "README.md").write_text("---\nlicense: [\n---\n")
    write_one(broken, tmp_path / "out", "bf16")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license is None


def test_acceptance_shows_when_it_was_measured(written: Path, tmp_path: Path) -> None:
    import shutil

    pair = Path(shutil.copytree(written, tmp_path / "pair"))
    report = json.loads((pair / "report.json").read_text())
    (pair / "report.json").write_text(json.dumps(report | {"served": SERVED}))
    link_halves(pair)
    for half in ("target", "draft"):
        text = (pair / half / "README.md").read_text()
        assert "| target+draft | 1.654 [1.644, 1.664] | 1.599 [1.589, 1.609] |" in text
        assert (
            "retention of target+draft against baseline-target+draft: 0.988 [0.978, 0.998]" in text
        )
        assert "required retention 0.97: pass" in text
        assert "Tested with vLLM 0.32.0 (platform: cpu)." in text
        assert "--max-num-seqs 16" in text
        assert load(pair / half)["pair"]["served"]["cells"] == SERVED["cells"]


def test_what_a_person_wrote_survives(written: Path) -> None:
    report = load(written / "draft")
    text = (written / "draft" / "README.md").read_text()
    text = text.replace("---\nlibrary", "---\nlicense: mit\nlanguage: [en, de]\nlibrary", 1)
    text = text.replace("tags:\n", "tags:\n- day-0\n", 1)
    text = text.replace("pipeline_tag: text-generation", "pipeline_tag: translation")
    text = text.replace(
        "<!-- pairquant:loading -->", "Trained on *my* data \\1.\n\n<!-- pairquant:loading -->"
    )
    text = re.sub(r"<!-- pairquant:limits -->.*<!-- /pairquant:limits -->\n", "", text, flags=re.S)
    text += "\n## Thanks\n\nto all.\n"
    report["checks"][0]["measured"] = "7 tensors"
    again = render_card(report, text)
    card = ModelCard(again)
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "translation")
    assert card.data.get("language") == ["en", "de"]
    assert set(card.data.tags) == {*ModelCard(text).data.tags}
    assert "Trained on *my* data \\1.\n\n<!-- pairquant:loading -->" in again
    assert again.endswith("\n## Thanks\n\nto all.\n")
    assert "## Limits" not in again
    assert "| 7 tensors |" in again
    assert render_card(report, again) == again
    assert render_card(report, render_card(report)) == render_card(report)


@pytest.mark.parametrize(
    "before", ["my own words\n", "---\nlicense: mit\n---\nmy own words\n", "---\n\nmy own words\n"]
)
def test_a_card_without_our_marks_is_kept_below_ours(written: Path, before: str) -> None:
    report = load(written / "draft")
    again = render_card(report, before)
    assert "my own words" in again
    assert again.index("## License") < again.index("my own words")
    assert ModelCard(again).data.license == ("mit" if "mit" in before else None)
    assert render_card(report, again) == again


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (f"org/name@{COMMIT}", "org/name"),
        (f"/home/x/hub/models--org--my--name/snapshots/{COMMIT}", "org/my--name"),
        ("org/name", None),
        (f"./org/name@{COMMIT[:7]}", None),
        (f"/data/org/name@{COMMIT}", None),
    ],
)
def test_where_the_base_model_is_known_from(origin: str, expected: str | None) -> None:
    assert hub_id(origin) == expected
