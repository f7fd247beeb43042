"""The real client of the Hub, in a process of its own, against a small Hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, Hub, serve
from tiny import write_llama

from quantize.checkpoint import open_checkpoint

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SMALL = "model.norm.weight"

SCRIPT = """
import json, sys
from quantize.checkpoint import bring_local, open_checkpoint
from quantize.errors import ToolError
command, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
try:
    checkpoint = open_checkpoint(model, **options)
    if command == "local":
        checkpoint = bring_local(checkpoint, ignore_index=options.get("ignore_index", False))
    result = {
        "origin": checkpoint.files.origin,
        "path": checkpoint.path and str(checkpoint.path),
        "specs": [[s.name, s.dtype, list(s.shape)] for s in checkpoint.specs.values()],
        "files": list(checkpoint.source_files),
        "small": checkpoint.read("model.norm.weight").hex(),
        "torch": "torch" in sys.modules,
    }
except ToolError as error:
    result = {"message": error.message, "hint": error.hint}
print(json.dumps(result))
"""

Client = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model in two shards, with what repositories carry beside the weights."""
    path = write_llama(tmp_path / "tiny", shards=2, num_hidden_layers=2)
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        (path / name).write_text("{}")
    shutil.copy(path / FIRST, path / "consolidated.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    (path / "original").mkdir()
    for name in (FIRST, "config.json"):
        shutil.copy(path / name, path / "original" / name)
    (path / "original" / "tokenizer.model").write_text("{}")
    return path


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with serve(folder) as hub:
        yield hub


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    def run(command: str, model: str, endpoint: str = "", offline: bool = False,
            **options: Any) -> dict[str, Any]:  # fmt: skip
        environment = {name: text for name, text in os.environ.items() if "HF_" not in name} | {
            "HF_ENDPOINT": endpoint or hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_OFFLINE": str(int(offline)),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, command, model, json.dumps(options)],
            capture_output=True,
            check=False,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


def expected_specs(folder: Path) -> list[list[Any]]:
    specs = open_checkpoint(str(folder)).specs.values()
    return [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]


def test_opening_fetches_headers_and_small_tensors_only(
    hub: Hub, folder: Path, client: Client
) -> None:
    # A shard larger than what is read of it at first.
    write_llama(folder, shards=2, num_hidden_layers=2, vocab_size=20_000)
    found = client("open", "org/tiny@main")
    assert found["specs"] == expected_specs(folder)
    assert found["small"] == bytes(open_checkpoint(str(folder)).read(SMALL)).hex()
    assert (found["origin"], found["path"]) == (f"org/tiny@{COMMIT}", None)
    assert found["files"] == [
        "config.json", INDEX, FIRST, SECOND, "generation_config.json", "tokenizer.json",
    ]  # fmt: skip
    assert not found["torch"]
    touched = {name for _, name, _ in hub.sent}
    assert touched == set(found["files"])
    for shard in (FIRST, SECOND):
        fetched = sum(size for _, name, size in hub.sent if name == shard)
        assert 0 < fetched < (folder / shard).stat().st_size / 5


def test_run_downloads_what_it_needs_and_works_offline_after(
    hub: Hub, folder: Path, client: Client
) -> None:
    found = client("local", "org/tiny")
    assert found["specs"] == expected_specs(folder)
    snapshot = Path(found["path"])
    assert snapshot.name == COMMIT
    assert sorted(found["files"]) == sorted(path.name for path in snapshot.iterdir())
    assert (snapshot / FIRST).is_symlink()
    for path in snapshot.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()
    hub.sent.clear()
    again = client("local", "org/tiny", offline=True)
    assert again == found
    assert not hub.sent
    assert client("local", "org/tiny", offline=True, revision=COMMIT) == found
    (snapshot / SECOND).unlink()
    gone = client("local", "org/tiny", offline=True)
    assert SECOND in gone["message"]
    assert f"hf download org/tiny {SECOND} --revision {COMMIT}" in gone["hint"]


def test_a_bad_checkpoint_is_refused_before_its_weights_are_downloaded(
    hub: Hub, folder: Path, client: Client
) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = SECOND
    (folder / INDEX).write_text(json.dumps(index))
    found = client("local", "org/tiny")
    assert f"org/tiny@{COMMIT}/{INDEX}" in found["message"]
    assert "'ghost'" in found["message"]
    assert "@REVISION" in found["hint"]
    assert all(method == "GET" and size <= 1 << 18 for method, _, size in hub.sent)
    assert not any(name == "consolidated.safetensors" for _, name, _ in hub.sent)


def test_a_connection_that_breaks_is_continued(hub: Hub, folder: Path, client: Client) -> None:
    hub.cut_once = {FIRST, INDEX}
    assert client("open", "org/tiny")["specs"] == expected_specs(folder)
    assert not hub.cut_once


def test_a_server_without_ranges_is_refused(hub: Hub, client: Client) -> None:
    """Else every tensor would be read from the start of its file."""
    hub.honours_ranges = False
    found = client("open", "org/tiny")
    assert "config.json: the server answered 200 to a range request" in found["message"]
    assert "hf download org/tiny --local-dir" in found["hint"]


@pytest.mark.parametrize(
    ("model", "options", "in_message", "in_hint"),
    [
        ("org/none", {}, ["org/none: not found", "local folder"], "hf auth login"),
        ("org/gated", {}, ["org/gated", "gated"], "/org/gated"),
        ("org/tiny@v9", {}, ["org/tiny", "'v9'", "branch"], "/org/tiny/tree/main"),
        ("org/tiny", {"revision": "v9"}, ["org/tiny", "'v9'"], "/org/tiny/tree/main"),
        ("org/tiny@main", {"revision": "v9"}, ["org/tiny@main", "'v9'"], "org/tiny"),
        ("org/a--b", {}, ["org/a--b: not a Hub id"], "ORG/NAME"),
        ("org/tiny/", {}, ["org/tiny/", "does not exist"], "ls -d"),
        ("tiny-model", {}, ["tiny-model", "does not exist", "ORG/NAME"], "ls -d"),
        ("./org/tiny", {}, ["./org/tiny", "does not exist"], "ls -d"),
        ("org/tiny", {"offline": True}, ["org/tiny", "HF_HUB_OFFLINE", "main"], "unset"),
        ("org/tiny", {"endpoint": "http://127.0.0.1:9"}, ["org/tiny", "127.0.0.1:9"], "network"),
    ],
)  # fmt: skip
def test_refused_by_name(
    client: Client, model: str, options: dict[str, Any], in_message: list[str], in_hint: str
) -> None:
    found = client("local", model, **options)
    for word in in_message:
        assert word in found["message"]
    assert in_hint in found["hint"]


def test_ignore_index_holds_for_the_download_too(folder: Path, client: Client) -> None:
    for name in (FIRST, SECOND):
        (folder / name).unlink()
    write_llama(folder, num_hidden_layers=1)
    assert "model.safetensors beside it is whole" in client("local", "org/tiny")["message"]
    found = client("local", "org/tiny", ignore_index=True)
    assert "model.safetensors" in found["files"]
    assert found["path"].endswith(COMMIT)
