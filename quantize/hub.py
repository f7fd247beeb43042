"""A checkpoint on the Hugging Face Hub: headers by range requests, and the download for a run."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from quantize.errors import BadOutput, ToolError
from quantize.files import Files, LocalFiles

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from quantize.checkpoint import Checkpoint
    from quantize.engine import Stage

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?")


@dataclass(frozen=True)
class HubFiles:
    """A model repository at the commit that ``revision`` (None: the default branch) meant.

    Every read is one HTTP range request. ``hashes`` has the SHA-256 of the large files.
    """

    repo_id: str
    revision: str | None
    commit: str
    tree: Mapping[str, int]
    hashes: Mapping[str, str]

    @property
    def origin(self) -> str:
        """``org/name@commit``."""
        return f"{self.repo_id}@{self.commit}"

    def sizes(self) -> Mapping[str, int]:
        """Size in bytes of every file at the root, in the order of names."""
        return self.tree

    def open(self, name: str) -> io.RawIOBase:
        """The file as bytes that are fetched when read; raises `ToolError` from its reads."""
        return _RemoteFile(self, name)


class _RemoteFile(io.RawIOBase):
    def __init__(self, files: HubFiles, name: str) -> None:
        self._files, self._name, self._position = files, name, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = (0, self._position, self._files.tree[self._name])[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        size = min(len(view), self._files.tree[self._name] - self._position)
        if size <= 0:
            return 0
        data = _fetch(self._files, self._name, self._position, size)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def is_hub_id(model: str) -> bool:
    """Whether a string is spelled ``org/name[@revision]``."""
    return _HUB_ID.fullmatch(model) is not None


def find_on_hub(model: str, revision: str | None) -> Files:
    """The files of ``org/name[@revision]`` at the commit that the revision means now.

    With ``HF_HUB_OFFLINE`` set, the snapshot in the Hub cache. Raises `ToolError` when there is
    no such model or revision, when it may not be read, and when the Hub is out of reach.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    repo_id, _, tail = model.partition("@")
    if revision and tail and revision != tail:
        raise ToolError(
            f"{model}: found a second revision {revision!r}, expected one",
            f"leave out --revision, or pass {repo_id}",
        )
    revision = revision or tail or None
    with _explained(repo_id, revision):
        if constants.HF_HUB_OFFLINE:
            # Which of its files are needed, and whether they are there, shows when they are read.
            kept = ["config.json"]
            cached = snapshot_download(
                repo_id, revision=revision, local_files_only=True, allow_patterns=kept
            )
            return LocalFiles(Path(cached))
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=timeout)
    tree = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    root = {name: tree[name] for name in sorted(tree) if "/" not in name}
    hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs}
    return HubFiles(info.id, revision, str(info.sha), root, hashes)


def download(checkpoint: Checkpoint) -> Path:
    """Bring the files that a checkpoint on the Hub is made of, and no others, into the Hub cache.

    Returns the snapshot's folder. Files that are there already are not fetched again.
    """
    from huggingface_hub import HfApi, snapshot_download

    files = checkpoint.files
    if not isinstance(files, HubFiles):
        raise ValueError(f"{files.origin} is on this machine already")
    wanted = [escape(name) for name in checkpoint.source_files]
    with _explained(files.repo_id, files.commit):
        # Records in the cache what the revision's name means, for HF_HUB_OFFLINE.
        HfApi().resolve_revision(files.repo_id, revision=files.revision)
        return Path(snapshot_download(files.repo_id, revision=files.commit, allow_patterns=wanted))


def download_file(files: HubFiles, name: str, folder: Path) -> Path:
    """One file into ``folder``; what an earlier try brought of it is not fetched again."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shown = not are_progress_bars_disabled()
    disable_progress_bars()  # the run has a bar of its own
    try:
        with _explained(files.repo_id, files.commit):
            return Path(
                hf_hub_download(files.repo_id, name, revision=files.commit, local_dir=folder)
            )
    finally:
        if shown:
            enable_progress_bars()


def fetch_output(out: Path, stage: Stage) -> Path:
    """The folder of ``ORG/NAME[@REVISION]`` in the Hub cache, complete: an output to verify.

    A path whose first folder is here is a slip of the pen, and is never looked for on the Hub.
    """
    if not is_hub_id(str(out)) or out.parent.exists():
        raise BadOutput(
            f"{out}: the folder does not exist, expected an output of quantize run or pair, or "
            "the Hub id of one",
            "write it again with quantize run or quantize pair",
        )
    from huggingface_hub import snapshot_download

    repo_id, _, revision = str(out).partition("@")
    with _explained(repo_id, revision or None), stage(f"download {out}", 0):
        return Path(snapshot_download(repo_id, revision=revision or None))


def _fetch(files: HubFiles, name: str, start: int, size: int) -> bytes:
    """Up to ``size`` bytes, at least one; the rest of a connection that breaks is left out."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    url = hf_hub_url(files.repo_id, name, revision=files.commit)
    headers = build_hf_headers() | {
        "Range": f"bytes={start}-{start + size - 1}",
        "Accept-Encoding": "identity",
    }
    data = bytearray()
    with (
        _explained(files.repo_id, files.commit),
        http_stream_backoff(
            "GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT
        ) as response,
    ):
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise ToolError(
                f"{files.origin}/{name}: the server answered {response.status_code} to a range "
                "request, expected 206 (Partial Content)",
                f"download the model and pass the folder: {_by_hand(files.repo_id)}",
            )
        try:
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > size:
                    break
        except HTTPError as error:
            # Not left to the retry around this block, which cannot repeat a block.
            if not data:
                raise _explain(error, files.repo_id, files.commit) from error
    return bytes(data[:size])


def _by_hand(repo_id: str) -> str:
    return f"hf download {repo_id} --local-dir FOLDER"


@contextmanager
def _explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what the Hub's client raises into a `ToolError`."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HFValidationError,
        HTTPError,
        RevisionResolutionError,
    )

    try:
        yield
    except (OSError, HTTPError, HFValidationError, RevisionResolutionError) as error:
        raise _explain(error, repo_id, revision) from error


def _explain(error: Exception, repo_id: str, revision: str | None) -> ToolError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, errors.GatedRepoError):
        return ToolError(
            f"{repo_id}: the model is gated, and this login may not read it",
            f"ask for access at {page}, then: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ToolError(
            f"{repo_id}: not found at {constants.ENDPOINT} (or private, and this login may not "
            "read it); a local folder of that name does not exist either",
            "check the spelling; for a private model: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ToolError(
            f"{repo_id}: has no revision {revision!r}, expected a branch, a tag or a commit hash",
            f"see the branches and tags at {page}/tree/main",
        )
    if isinstance(error, errors.HFValidationError):
        return ToolError(f"{repo_id}: not a Hub id: {first_line}", "expected ORG/NAME[@REVISION]")
    if constants.HF_HUB_OFFLINE:
        return ToolError(
            f"{repo_id}: HF_HUB_OFFLINE is set, and the Hub cache does not hold "
            f"revision {revision or 'main'!r}",
            f"unset HF_HUB_OFFLINE, or where there is a network: {_by_hand(repo_id)}",
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return ToolError(f"{repo_id}: access refused: {first_line}", "hf auth login")
    return ToolError(
        f"{repo_id}: {constants.ENDPOINT} could not be read: {first_line}",
        "check the network and HF_ENDPOINT and run the same command again, or where there is a "
        f"network: {_by_hand(repo_id)}",
    )
