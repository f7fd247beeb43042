"""What a Hub keeps: repositories with their commits and refs, large objects, pull requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TIME = "2026-01-01T00:00:00.000Z"
LARGE = 10 << 20
"""Bytes from which every file is a large object, whatever its name."""


@dataclass(frozen=True)
class Blob:
    """One file of a commit; a large one is known by the SHA-256 of its bytes."""

    data: bytes
    large: bool = False

    @property
    def oid(self) -> str:
        """Git's hash of the file; of a large one, of the pointer that git holds in its place."""
        return git_hash(self.pointer if self.large else self.data)

    @property
    def pointer(self) -> bytes:
        """The pointer file (git-lfs `docs/spec.md`)."""
        return (
            "version https://git-lfs.github.com/spec/v1\n"
            f"oid sha256:{self.sha256}\nsize {len(self.data)}\n"
        ).encode()

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def etag(self) -> str:
        """What the Hub names in the ETag of a download."""
        return self.sha256 if self.large else self.oid


Tree = dict[str, Blob]


@dataclass
class Repo:
    """One model repository. ``history`` has every state that a ref ever had, oldest first."""

    repo_id: str
    private: bool = True
    gated: bool = False
    commits: dict[str, Tree] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: list[dict[str, Any]] = field(default_factory=list)
    history: list[tuple[str, frozenset[str], str]] = field(default_factory=list)
    card: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n")}, "initial")

    def put_folder(self, folder: Path) -> str:
        """Make the main branch hold a folder's files; weights are large objects."""
        files = sorted(path for path in folder.iterdir() if path.is_file())
        tree = {path.name: Blob(path.read_bytes(), path.suffix == ".safetensors") for path in files}
        return self.commit("main", tree, "put")

    def commit(self, ref: str, tree: Tree, summary: str) -> str:
        """Put a ref on a new commit."""
        text = f"{self.refs.get(ref)} {summary} {sorted((n, b.sha256) for n, b in tree.items())}"
        oid = git_hash(text.encode())
        self.commits[oid] = dict(tree)
        self.refs[ref] = oid
        self.history.append((ref, frozenset(tree), summary))
        return oid

    def find(self, revision: str) -> str | None:
        """The commit of a branch, tag, pull request or hash."""
        known = self.refs | self.tags
        return known.get(revision) or (revision if revision in self.commits else None)

    def tree(self, oid: str) -> Tree:
        """The files of a commit."""
        return self.commits[oid]


class FolderRepo(Repo):
    """A public repository that shows what a folder holds now, always as one and the same commit."""

    def __init__(self, repo_id: str, folder: Path) -> None:
        super().__init__(repo_id, private=False)
        self.folder = folder

    def find(self, revision: str) -> str | None:
        """The one commit, by its branch and its hash."""
        return COMMIT if revision in ("main", COMMIT) else None

    def tree(self, oid: str) -> Tree:
        """The folder's files."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): Blob(path.read_bytes()) for path in paths}


@dataclass
class Hub:
    """A Hub with its users: token to name, organisations and role.

    ``faults`` maps a step to what happens at its next calls: a status to answer, ``"drop"`` to
    close the connection before it, ``"lose"`` to do it and close without an answer, or a function
    to call first. ``sent`` logs method, file and body bytes of every answer that resolves a file;
    ``steps`` every step that was reached.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, bytes] = field(default_factory=dict)
    collections: dict[str, dict[str, Any]] = field(default_factory=dict)
    users: dict[str, tuple[str, tuple[str, ...], str]] = field(
        default_factory=lambda: {
            "hf_write": ("jane", ("org",), "write"),
            "hf_read": ("jane", ("org",), "read"),
        }
    )
    multipart: int = 0
    honours_ranges: bool = True
    cut_once: set[str] = field(default_factory=set)
    damaged_once: set[str] = field(default_factory=set)
    faults: dict[str, list[int | str | Callable[[], None]]] = field(default_factory=dict)
    sent: list[tuple[str, str, int]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)


def git_hash(data: bytes) -> str:
    """Git's hash of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
