"""Where a checkpoint's files are: they are read by offset, and never outside their folder."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Protocol

from quantize.errors import BadCheckpoint

LFS_POINTER = b"version https://git-lfs"
"""How a git-LFS pointer file starts (git-lfs `docs/spec.md`)."""

COPY_BYTES = 8 << 20
"""Bytes of a file that are copied at a time."""


class Files(Protocol):
    """The root level of a checkpoint; nested folders such as ``original/`` are not part of it."""

    @property
    def origin(self) -> str:
        """Shown to the user: a folder's path, or ``org/name@commit``."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Every file's name and size in bytes, in the order of names."""
        ...

    def open(self, name: str) -> io.RawIOBase:
        """A seekable, unbuffered binary file; `BadCheckpoint` when it may not or cannot be read."""
        ...


@dataclass(frozen=True)
class LocalFiles:
    """A folder on disk, possibly a snapshot of the Hub cache."""

    path: Path

    @property
    def origin(self) -> str:
        """The folder's path as the user gave it."""
        return str(self.path)

    def sizes(self) -> Mapping[str, int]:
        """Every file's name and size in bytes; 0 for a link that leads nowhere."""
        try:
            paths = [path for path in sorted(self.path.iterdir()) if not path.is_dir()]
        except OSError as error:
            raise BadCheckpoint(
                f"{self.path}: the folder cannot be listed ({error.strerror})",
                f"check its permissions (it needs r and x): ls -ld {quote(str(self.path))}",
            ) from error
        return {path.name: _size(path) for path in paths}

    def open(self, name: str) -> io.RawIOBase:
        """Open a regular file of the folder; see `Files.open`."""
        path = self.path / name
        target = self._target(name)
        try:
            # Without NONBLOCK a pipe would wait for a writer. The links are resolved: one that
            # is new here is not followed.
            descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            file = io.FileIO(descriptor)
        except OSError as error:
            raise BadCheckpoint(
                f"{path}: cannot be read ({error.strerror})",
                f"check the file, its permissions and where it links to: ls -lL {quote(str(path))}",
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise BadCheckpoint(
                f"{path}: found a pipe, device or folder, expected a regular file",
                f"look at it: ls -l {quote(str(path))}",
            )
        return file

    def _target(self, name: str) -> Path:
        """The file behind a name; the Hub cache links from ``snapshots/COMMIT`` to ``blobs``."""
        folder = Path(os.path.realpath(self.path))
        target = Path(os.path.realpath(folder / name))
        blobs = folder.parent.parent / "blobs"
        in_cache = folder.parent.name == "snapshots" and target.parent == blobs
        if not (in_cache or target.is_relative_to(folder)):
            path = quote(str(self.path / name))
            raise BadCheckpoint(
                f"{self.path / name}: the link leaves the checkpoint folder (to {target}); "
                "only files of the folder itself and of its Hub cache are read",
                f"put the file itself in its place: cp --remove-destination {quote(str(target))} "
                f"{path}  (or pass the folder that holds the real files)",
            )
        return target


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_at(files: Files, name: str, offset: int, size: int) -> bytearray:
    """``size`` bytes of a file from ``offset``; fewer are a `BadCheckpoint`."""
    data = bytearray(size)
    done = 0
    with files.open(name) as file, memoryview(data) as view:
        try:
            file.seek(offset)
            while done < size and (count := file.readinto(view[done:])):
                done += count
        except OSError as error:
            raise BadCheckpoint(
                f"{files.origin}/{name}: reading failed at byte {offset + done:,} "
                f"({error.strerror or error})",
                fetch_again(files, name),
            ) from error
    if done < size:
        raise BadCheckpoint(
            f"{files.origin}/{name}: the file ends at byte {offset + done:,}, expected "
            f"{offset + size:,}",
            fetch_again(files, name),
        )
    return data


def copy_file(files: Files, name: str, size: int, path: Path) -> None:
    """Copy a file of ``size`` bytes to ``path``, a part at a time; raises as `read_at` does."""
    with path.open("wb") as copy:
        for start in range(0, size, COPY_BYTES):
            copy.write(read_at(files, name, start, min(COPY_BYTES, size - start)))


def refuse_pointer(files: Files, name: str, data: bytes | bytearray) -> None:
    """Refuse a git-LFS pointer: ``data`` is the start of the file."""
    if data.startswith(LFS_POINTER):
        raise BadCheckpoint(
            f"{files.origin}/{name}: found a git-LFS pointer, expected the file itself",
            f"git -C {quote(files.origin)} lfs pull",
        )


def fetch_again(files: Files, *names: str) -> str:
    """The hint for files that are missing or damaged."""
    if not isinstance(files, LocalFiles):
        return "the repository itself is at fault: try another revision, ORG/NAME@REVISION"
    folder = Path(os.path.realpath(files.path))
    wanted = " ".join(map(quote, names)) if len(names) < 20 else "--include '*.safetensors'"
    if folder.parent.name == "snapshots":
        repo = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return f"hf download {repo} {wanted} --revision {folder.name} --force-download"
    return f"get it again: hf download ORG/NAME {wanted} --local-dir {quote(files.origin)}"
