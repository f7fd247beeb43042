"""OUT.partial: where work happens until it is complete, so that a folder that exists is complete.

Our state lies in ``OUT.partial/.pairquant``: the run's identity, the journal of finished tensors
and the lock. It is removed after the rename.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from quantize.errors import BadOutput
from quantize.wording import some

STATE = ".pairquant"
PARTIAL = ".partial"


@dataclass
class Journal:
    """The names of finished tensors, appended one line each; survives a kill at any moment."""

    file: TextIO
    done: frozenset[str]

    def add(self, name: str) -> None:
        """Record a tensor whose bytes are in its shard."""
        self.file.write(f"{name}\n")
        self.file.flush()


def check_out(out: Path, sources: list[Path]) -> None:
    """OUT is new or empty, and neither inside, above nor equal to a source. Raises `BadOutput`."""
    real = out.resolve()
    for source in (path.resolve() for path in sources):
        if real == source or real in source.parents or source in real.parents:
            raise BadOutput(
                f"output folder {out} is inside, above or equal to the source {source}",
                "choose a folder elsewhere with -o",
            )
    if real.name.endswith(PARTIAL):
        raise BadOutput(
            f"output {out}: names that end in {PARTIAL} are those of unfinished runs",
            "choose another -o",
        )
    if (real / STATE).is_dir():
        # The run before this one was stopped between its rename and its last clean-up.
        shutil.rmtree(real / STATE)
    _check_free(out)


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise BadOutput(f"output {out} is a file, expected a new folder", "choose another -o")
    if out.is_dir() and any(out.iterdir()):
        raise BadOutput(
            f"output folder {out} is not empty (it holds {_some(out)})",
            f"choose another -o, or remove it; to check it: quantize verify {out}",
        )


@contextmanager
def open_partial(out: Path, identity: Mapping[str, Any], *, restart: bool) -> Iterator[Path]:
    """``OUT.partial``, new or continued, locked against a second run.

    Raises `BadOutput` when the folder is not ours, belongs to another run or is in use, and when
    the disk is full.
    """
    partial = out.resolve().with_name(out.resolve().name + PARTIAL)
    _check_ours(partial)
    state = partial / STATE
    with _disk_errors(partial):
        _make_folder(state, out)
        with (state / "lock").open("w") as lock:
            _lock(lock, partial)
            _check_free(out)  # the run that held the lock may have finished meanwhile
            if restart:
                _clear(partial)
            _check_identity(partial, identity)
            yield partial


def _make_folder(state: Path, out: Path) -> None:
    try:
        state.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError, FileExistsError) as error:
        raise BadOutput(
            f"output folder {out} cannot be made ({error.strerror}: {error.filename})",
            "choose another -o, in a folder that you may write",
        ) from error
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        raise BadOutput(f"{out} is on a read-only disk", "choose another -o") from error


def _lock(lock: TextIO, partial: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadOutput(
            f"another run is writing {partial}", "wait for it, or choose another -o"
        ) from None


@contextmanager
def open_journal(partial: Path, name: str) -> Iterator[Journal]:
    """The journal of one checkpoint of the run."""
    path = partial / STATE / f"{name}.journal"
    path.touch()
    data = path.read_bytes()
    # A kill can cut the last line; only complete lines count.
    complete = data[: data.rfind(b"\n") + 1]
    os.truncate(path, len(complete))
    with path.open("a", encoding="utf-8") as file:
        yield Journal(file, frozenset(complete.decode().split("\n")))


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is either absent or whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, data: Any) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json_text(data))


def json_text(data: Any) -> str:
    """JSON as our files hold it."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def finish(partial: Path, out: Path) -> None:
    """Make the partial folder the output, then remove our state from it."""
    real = out.resolve()
    partial.rename(real)
    descriptor = os.open(real.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    # Another run that found the complete folder may be cleaning it up, too.
    shutil.rmtree(real / STATE, ignore_errors=True)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise BadOutput(
            f"the disk is full: {error.strerror} while writing {folder}",
            "free some space and repeat the command: it continues where it stopped",
        ) from error


def _check_ours(partial: Path) -> None:
    if not partial.exists():
        return
    if not partial.is_dir() or partial.is_symlink():
        raise BadOutput(f"{partial} is not a folder of ours", "move it away, or choose another -o")
    if any(partial.iterdir()) and not (partial / STATE).is_dir():
        raise BadOutput(
            f"{partial} was not written by this tool (it holds {_some(partial)})",
            "move it away, or choose another -o",
        )


def _check_identity(partial: Path, identity: Mapping[str, Any]) -> None:
    path = partial / STATE / "run.json"
    if not path.exists():
        write_json(path, identity)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    after = json.loads(json.dumps(identity))
    if before != after:
        changed = list(_changes(before, after))
        raise BadOutput(
            f"{partial} belongs to a run with other {some(changed)}",
            "repeat the earlier command to continue it, or add --restart to begin anew",
        )


def _changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The dotted names of what differs, for example ``options.scheme``."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before | after):
            yield from _changes(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
    elif before != after:
        yield path


def _clear(partial: Path) -> None:
    """Remove what an earlier run of ours wrote there (the lock in use stays).

    Journals go first and the identity last: whatever stops us, no journal outlives the tensors
    or the options that it speaks of.
    """
    state = partial / STATE
    for journal in state.glob("*.journal"):
        journal.unlink()
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path != state:
                shutil.rmtree(path)
        else:
            path.unlink()
    (state / "run.json").unlink(missing_ok=True)


def _some(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
