"""``quantize publish``: verify, show what would go up, ask, and push."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantize import push
from quantize.publish import (
    Names,
    Upload,
    prepare_uploads,
    require_complete,
    require_proven,
    save_cards,
)
from quantize.recheck import verify_output
from quantize.report import Report, check_table, figure_table

if TYPE_CHECKING:
    from quantize.view import View


def publish_verb(view: View, given: Mapping[str, Any]) -> None:
    """Exit 0 when every repository holds the output (or would, with ``--dry-run``)."""
    out: Path = given["out"]
    names = Names(*(given[key] for key in Names.__dataclass_fields__))
    require_complete(out, names)
    ids = [name for name in (names.repo_id, names.draft_repo_id) if name]
    user = "" if given["dry_run"] else push.require_login(ids)
    if not (given["dry_run"] or given["yes"] or sys.stdin.isatty()):
        raise click.UsageError("there is no terminal to ask on: add --yes, or --dry-run")
    reports = _verify(view, out, given)
    uploads = prepare_uploads(out, names)
    _show(view, uploads, given)
    done: list[dict[str, Any]] = []
    if not given["dry_run"]:
        for upload in uploads:
            push.require_base(upload.base_model, public=given["public"])
        if not given["yes"]:
            click.confirm("upload these files?", abort=True, err=True)
        save_cards(uploads)
        done = _push(view, uploads, user, given)
    view.result(
        True,
        lambda: {
            "output": str(out),
            "checks": {name: report.to_json()["checks"] for name, report in reports.items()},
            "repositories": done or [_listed(upload) for upload in uploads],
        },
    )


def _verify(view: View, out: Path, given: Mapping[str, Any]) -> dict[str, Report]:
    reports = verify_output(out, given["source"], None, given["draft_source"], view.stage)
    view.show(*(check_table(name, report) for name, report in reports.items()))
    require_proven(out, reports)
    return reports


def _show(view: View, uploads: tuple[Upload, ...], given: Mapping[str, Any]) -> None:
    """Every name and size, and what stays here."""
    for upload in uploads:
        rows = [(item.name, f"{item.size:,}") for item in upload.items]
        rows.append((f"total: {len(upload.items)} files", f"{upload.size:,}"))
        kind = "public" if given["public"] else "private"
        title = f"{upload.repo_id} ({kind}), branch {given['revision']}, from {upload.folder}"
        view.show(figure_table(title, ("file", "bytes"), rows))
        if upload.left:
            view.show(f"not uploaded: {', '.join(upload.left)}")
        if upload.base_model is None:
            view.show("note: the base model is not known: the card has none; see --base-model")


def _push(
    view: View, uploads: tuple[Upload, ...], user: str, given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All content first, then one commit a repository, then what names them."""
    branch, public, tag = given["revision"], given["public"], given["tag"]
    _quiet(view)
    changes = []
    for upload in uploads:
        if push.open_repository(upload.repo_id, branch, public=public) and public:
            view.show(f"note: {upload.repo_id} was private before and stays so; see its settings")
        changes.append(push.compare(upload, branch))
        if tag and (changes[-1].add or changes[-1].delete):
            push.require_tag_free(upload.repo_id, tag, "")
    additions = [push.send_content(change) for change in changes]
    done = []
    for change, added in zip(changes, additions, strict=True):
        oid = push.commit(change, added, user)
        if tag:
            push.set_tag(change.upload.repo_id, tag, oid)
        view.show(_said(change, oid))
        names = [item.name for item in change.add]
        sent = {"commit": oid, "uploaded": names, "deleted": list(change.delete)}
        done.append(_listed(change.upload) | sent)
    if given["collection"]:
        ids = [upload.repo_id for upload in uploads]
        view.show(f"collection: {push.collect(given['collection'], ids, public=public)}")
    return done


def _said(change: push.Change, oid: str) -> str:
    repo_id = change.upload.repo_id
    if oid == change.head:
        return f"{repo_id}@{oid}: unchanged, nothing was uploaded"
    return f"{repo_id}@{oid}: {len(change.add)} files written, {change.unchanged} were there"


def _listed(upload: Upload) -> dict[str, Any]:
    files = [{"name": item.name, "size": item.size} for item in upload.items]
    return {"repo_id": upload.repo_id, "files": files, "bytes": upload.size}


def _quiet(view: View) -> None:
    """The client shows its own bars for uploads."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if view.quiet:
        disable_progress_bars()
