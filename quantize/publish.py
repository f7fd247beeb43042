"""What `publish` puts on the Hub: the files of a proven output, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantize.card import CARD, base_model, render_card
from quantize.errors import BadOutput
from quantize.hub import is_hub_id
from quantize.job import HALVES, PAIR_REPORT, REPORT
from quantize.manifest import MANIFEST, make_manifest, require_files
from quantize.report import Report
from quantize.workdir import PARTIAL, STATE, json_text, write_text


@dataclass(frozen=True)
class Names:
    """What the user calls the repositories, and the models that were quantized."""

    repo_id: str
    draft_repo_id: str | None = None
    base_model: str | None = None
    draft_base_model: str | None = None


@dataclass(frozen=True)
class Item:
    """One file to have in a repository: bytes, or the file that holds them."""

    name: str
    size: int
    sha256: str
    content: Path | bytes


@dataclass(frozen=True)
class Upload:
    """One repository's files; ``left`` are names in the folder that stay where they are."""

    repo_id: str
    folder: Path
    items: tuple[Item, ...]
    left: tuple[str, ...]
    base_model: str | None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(item.size for item in self.items)


def require_complete(out: Path, names: Names) -> None:
    """OUT is a finished output, and has as many repositories as checkpoints. Raises BadOutput."""
    partial = out.with_name(out.name + PARTIAL)
    if (
        out.name.endswith(PARTIAL)
        or (out / STATE).is_dir()
        or (partial.is_dir() and not out.exists())
    ):
        raise BadOutput(
            f"{out} is not complete: its run has not finished",
            "repeat the command that writes it: it continues where it stopped",
        )
    for repo_id in filter(None, (names.repo_id, names.draft_repo_id)):
        if "@" in repo_id or not is_hub_id(repo_id):
            raise BadOutput(f"{repo_id!r} is not a Hub id", "expected ORG/NAME")
    pair = (out / PAIR_REPORT).is_file()
    if pair and not names.draft_repo_id:
        raise BadOutput(
            f"{out} holds a target and its draft, and there is one repository",
            "add --draft-repo-id ORG/NAME, or publish one half: quantize publish OUT/target",
        )
    if names.draft_repo_id and not pair:
        raise BadOutput(
            f"--draft-repo-id was given, and {out} is no pair (it has no {PAIR_REPORT})",
            "leave out --draft-repo-id, or give the folder that quantize pair wrote",
        )
    if names.draft_repo_id == names.repo_id:
        raise BadOutput(
            f"--repo-id and --draft-repo-id are both {names.repo_id}",
            "a draft has a repository of its own",
        )


def require_proven(out: Path, reports: Mapping[str, Report]) -> None:
    """Nothing failed now or before, and what was proven is what is there. Raises BadOutput.

    What could not be measured now (without sources) is as the folders' own reports say, which
    holds for the same bytes.
    """
    whole = not any(report.unmeasured for report in reports.values())
    for name, report in reports.items():
        for check in report.checks:
            if check.status == "fail" or (check.name == MANIFEST and check.status != "pass"):
                raise BadOutput(
                    f"{out}: {name}: {check.name}: {check.measured}, expected {check.required}"
                    f"{f' ({check.detail})' if check.detail else ''}",
                    f"write it again with this version, and look at it: quantize verify {out}",
                )
    for folder in _folders(out):
        for check in _read(folder / REPORT)["checks"]:
            if check["status"] == "fail" or (check["status"] != "pass" and not whole):
                raise BadOutput(
                    f"{folder}/{REPORT}: {check['name']} is {check['status']} "
                    f"({check['measured']}), expected pass",
                    "prove it while publishing: --source SOURCE (and --draft-source for a pair)",
                )
    _require_served(out)


def _require_served(out: Path) -> None:
    """Acceptance that was measured and failed is no reason to publish."""
    if not (out / PAIR_REPORT).is_file():
        return
    served = _read(out / PAIR_REPORT)["served"]
    failed = [c for c in served["checks"] if c["status"] == "fail"] if type(served) is dict else []
    if failed:
        raise BadOutput(
            f"{out}/{PAIR_REPORT}: served acceptance failed: {failed[0]['name']}: "
            f"{failed[0]['measured']}, expected {failed[0]['required']}",
            "measure it again: quantize accept OUT/target OUT/draft --record",
        )


def prepare_uploads(out: Path, names: Names) -> tuple[Upload, ...]:
    """The repositories with their files; reports and cards as they will be. Writes nothing."""
    folders = _folders(out)
    if len(folders) == 1:
        return (_prepare(folders[0], names.repo_id, names.base_model, {}),)
    target, draft = names.repo_id, str(names.draft_repo_id)
    return (
        _prepare(folders[0], target, names.base_model, {"draft": draft}),
        _prepare(folders[1], draft, names.draft_base_model, {"target": target}),
    )


def save_cards(uploads: Iterable[Upload]) -> None:
    """Write the reports and cards that go up, so that the folders hold what the Hub will."""
    for upload in uploads:
        for item in upload.items:
            if isinstance(item.content, bytes):
                write_text(upload.folder / item.name, item.content.decode())


def _prepare(folder: Path, repo_id: str, base: str | None, other: Mapping[str, str]) -> Upload:
    report = _read(folder / REPORT)
    before = report.get("published", {})
    named = base or before.get("base_model")
    published = {"repo_id": repo_id, **({"base_model": named} if named else {}), **other}
    report["published"] = published
    card = folder / CARD
    text = render_card(report, card.read_text(encoding="utf-8") if card.exists() else "")
    written = (_text_item(REPORT, json_text(report)), _text_item(CARD, text))
    listed = report[MANIFEST]
    items = tuple(
        Item(name, mark["size"], mark["sha256"], folder / name)
        for name, mark in (listed | _pictures(folder, report)).items()
    )
    ours = {REPORT, CARD, *(item.name for item in items)}
    left = tuple(sorted(path.name for path in folder.iterdir() if path.name not in ours))
    return Upload(repo_id, folder, (*items, *written), left, base_model(report))


def _pictures(folder: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """The plots that the card shows, as they are now."""
    names = report.get("pair", {}).get("pictures", {})
    require_files(folder, names)
    return make_manifest(folder, names, lambda _: None)


def _text_item(name: str, text: str) -> Item:
    data = text.encode()
    return Item(name, len(data), sha256(data).hexdigest(), data)


def _folders(out: Path) -> tuple[Path, ...]:
    return tuple(out / half for half in HALVES) if (out / PAIR_REPORT).is_file() else (out,)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
