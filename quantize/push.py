"""Puts files into a Hub repository with huggingface_hub's own client: content first, one commit.

Nothing that a reader of the branch can see changes before the last step, and every step can be
repeated: content that is there is not sent again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha1, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantize.errors import ToolError
from quantize.job import REPORT
from quantize.manifest import MANIFEST
from quantize.publish import Item, Upload
from quantize.push_errors import explained

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

COMMIT_FILES = 100
"""Files of one commit at most (Hub documentation, "Repository limitations and recommendations")."""
MAIN = "main"
_TITLE = "quantize publish"


@dataclass(frozen=True)
class Change:
    """What one commit does to a branch whose last commit is ``head``."""

    upload: Upload
    branch: str
    head: str
    add: tuple[Item, ...]
    delete: tuple[str, ...]

    @property
    def unchanged(self) -> int:
        """Files that the branch has already."""
        return len(self.upload.items) - len(self.add)

    @property
    def title(self) -> str:
        """Names the content: equal content gives an equal title."""
        marks = sorted(f"{item.name} {item.sha256}\n" for item in self.upload.items)
        return f"{_TITLE} {sha256(''.join(marks).encode()).hexdigest()[:16]}"


def require_login(repo_ids: Iterable[str]) -> str:
    """The user's name, where the login may write to every namespace. Raises ToolError."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ToolError(
            "publishing needs a login, and no token was found",
            "hf auth login, or set HF_TOKEN; to see what would go up: add --dry-run",
        )
    with explained("this login"):
        user = HfApi().whoami()
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise ToolError(
            f"the token of {user['name']} may read and not write",
            "make a token with the right to write in the settings page, then: hf auth login",
        )
    mine = [user["name"], *(org["name"] for org in user.get("orgs", ()))]
    for repo_id in repo_ids:
        if (namespace := repo_id.partition("/")[0]) not in mine:
            raise ToolError(
                f"{repo_id}: {user['name']} may not write to {namespace}, only to "
                f"{', '.join(mine)}",
                "choose another --repo-id, or log in as somebody else: hf auth login",
            )
    return str(user["name"])


def require_base(base: str | None, *, public: bool) -> None:
    """What is made from a gated model does not go public without its gate. Raises ToolError."""
    from huggingface_hub import HfApi, errors

    if base is None or not public:
        return
    try:
        with explained(base):
            gated = HfApi().model_info(base).gated
    except ToolError as error:
        if isinstance(error.__cause__, errors.RepositoryNotFoundError):
            raise ToolError(
                f"the base model {base} is not on the Hub, or this login may not see it",
                "name the model that was quantized: --base-model ORG/NAME",
            ) from error
        raise
    if gated:
        raise ToolError(
            f"the base model {base} is gated: published with --public, its weights would be free "
            "of the terms that its readers have to accept",
            "leave out --public, set up the same gate in the repository's settings, and make it "
            "public there",
        )


def open_repository(repo_id: str, branch: str, *, public: bool) -> bool:
    """Make the repository and its branch where they are missing; whether it is private."""
    from huggingface_hub import HfApi

    api = HfApi()
    with explained(repo_id):
        api.create_repo(repo_id, private=not public, exist_ok=True)
        private = bool(api.model_info(repo_id).private)
        if not private and not public:
            raise ToolError(
                f"{repo_id} is public, and --public was not given",
                "add --public to publish there, or choose another --repo-id",
            )
        if branch != MAIN:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
    return private


def compare(upload: Upload, branch: str) -> Change:
    """What differs between the files and the branch. Raises ToolError for foreign weights.

    Files that an earlier publish wrote and that are no more are deleted; weights that we did not
    write would be loaded beside ours, and are refused.
    """
    from huggingface_hub import HfApi

    with explained(upload.repo_id):
        head = str(HfApi().model_info(upload.repo_id, revision=branch).sha)
        there = _list_files(HfApi(), upload.repo_id, head)
    add = tuple(item for item in upload.items if not _is_there(item, there))
    ours = {item.name for item in upload.items}
    stale = sorted(_written(upload, head, there) & there.keys() - ours)
    foreign = [n for n in there if n.endswith(".safetensors") and n not in {*ours, *stale}]
    if foreign:
        raise ToolError(
            f"{upload.repo_id} has weights that this tool did not write: {', '.join(foreign[:3])}",
            "choose another --repo-id, or remove them: hf repo-files delete "
            f"{upload.repo_id} {foreign[0]}",
        )
    return Change(upload, branch, head, add, tuple(stale))


def send_content(change: Change) -> list[Any]:
    """Upload the large files' content, of which nobody sees anything yet; the operations."""
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [CommitOperationAdd(item.name, item.content) for item in change.add]
    with explained(change.upload.repo_id):
        HfApi().preupload_lfs_files(
            change.upload.repo_id, operations, revision=change.branch, free_memory=False
        )
    for item, operation in zip(change.add, operations, strict=True):
        if operation.upload_info.sha256.hex() != item.sha256:
            raise ToolError(
                f"{change.upload.folder / item.name}: changed after it was verified",
                "let the folder rest and repeat the command",
            )
    return operations


def commit(change: Change, additions: list[Any], user: str) -> str:
    """Make the branch hold the files, in one step; the commit's hash."""
    from huggingface_hub import CommitOperationDelete, HfApi

    operations = [*additions, *(CommitOperationDelete(name) for name in change.delete)]
    if not operations:
        return change.head
    if len(operations) > COMMIT_FILES:
        return _commit_in_parts(change, operations, user)
    with explained(change.upload.repo_id):
        done = HfApi().create_commit(
            change.upload.repo_id,
            operations,
            commit_message=change.title,
            revision=change.branch,
            parent_commit=change.head,
        )
    return str(done.oid)


def _commit_in_parts(change: Change, operations: list[Any], user: str) -> str:
    """Several commits on a pull request, which is merged when it holds all of them."""
    from huggingface_hub import HfApi

    api, repo_id = HfApi(), change.upload.repo_id
    if change.branch != MAIN:
        raise ToolError(
            f"{repo_id}: {len(operations)} files are too many for one commit ({COMMIT_FILES}), and "
            f"only {MAIN} can be reached by a pull request",
            "leave out --revision, or write fewer shards: --max-shard-size",
        )
    with explained(repo_id):
        pull = _find_pull(api, change, user)
        there = _list_files(api, repo_id, f"refs/pr/{pull.num}")
        names = {item.name for item in change.upload.items if _is_there(item, there)}
        left = [
            operation
            for operation in operations
            if operation.path_in_repo not in names
            and (operation.path_in_repo not in change.delete or operation.path_in_repo in there)
        ]
        for start in range(0, len(left), COMMIT_FILES):
            part = left[start : start + COMMIT_FILES]
            api.create_commit(
                repo_id, part, commit_message=change.title, revision=f"refs/pr/{pull.num}"
            )
        if pull.status == "draft":
            api.change_discussion_status(repo_id, pull.num, "open")
        api.merge_pull_request(repo_id, pull.num)
        return str(api.model_info(repo_id).sha)


def _find_pull(api: HfApi, change: Change, user: str) -> Any:
    """Our own pull request for this content: one that was begun, or a new one."""
    repo_id = change.upload.repo_id
    for pull in api.get_repo_discussions(repo_id, discussion_type="pull_request"):
        if (pull.title, pull.author) == (change.title, user) and pull.status in ("draft", "open"):
            return pull
    return api.create_pull_request(repo_id, change.title)


def set_tag(repo_id: str, tag: str, oid: str) -> None:
    """Name a commit; a tag never moves."""
    from huggingface_hub import HfApi

    with explained(repo_id):
        HfApi().create_tag(repo_id, tag=tag, revision=oid, exist_ok=True)
        require_tag_free(repo_id, tag, oid)


def require_tag_free(repo_id: str, tag: str, oid: str) -> None:
    """No other commit has the tag. Raises ToolError."""
    from huggingface_hub import HfApi

    with explained(repo_id):
        tags = {ref.name: ref.target_commit for ref in HfApi().list_repo_refs(repo_id).tags}
    if tags.get(tag, oid) != oid:
        raise ToolError(
            f"{repo_id}: the tag {tag} names commit {tags[tag][:12]}, expected none or this one",
            "choose another --tag",
        )


def collect(title: str, repo_ids: Iterable[str], *, public: bool) -> str:
    """Put the repositories into the collection of that title; its address."""
    from huggingface_hub import HfApi

    api, repo_ids = HfApi(), tuple(repo_ids)
    with explained(f"collection {title!r}"):
        found = api.create_collection(
            title, namespace=repo_ids[0].partition("/")[0], private=not public, exists_ok=True
        )
        for repo_id in repo_ids:
            api.add_collection_item(found.slug, repo_id, "model", exists_ok=True)
    return str(found.url)


def _list_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(repo_id, revision=revision, recursive=True)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _is_there(item: Item, there: dict[str, RepoFile]) -> bool:
    """Whether the repository has the same bytes: by SHA-256, or by git's own hash."""
    file = there.get(item.name)
    if file is None or file.size != item.size:
        return False
    if file.lfs is not None:
        return file.lfs.sha256 == item.sha256
    data = item.content if isinstance(item.content, bytes) else item.content.read_bytes()
    return file.blob_id == sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _written(upload: Upload, head: str, there: dict[str, RepoFile]) -> set[str]:
    """The files that the report in the repository lists: what an earlier publish wrote."""
    from huggingface_hub import HfApi

    if REPORT not in there or there.keys() <= {item.name for item in upload.items}:
        return set()
    with explained(upload.repo_id):
        path = Path(HfApi().hf_hub_download(upload.repo_id, REPORT, revision=head))
    try:
        return set(json.loads(path.read_text(encoding="utf-8")).get(MANIFEST, ()))
    except (ValueError, AttributeError):  # somebody else's file of that name: not our files
        return set()
