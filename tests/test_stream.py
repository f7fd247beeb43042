"""Sources on the Hub, shard by shard: the real client, a Hub on this machine, a small disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import pytest
from hub_server import Hub, Repo, serve
from runs import pair, run, settings
from tiny import write_draft, write_llama

from quantize.checkpoint import open_checkpoint
from quantize.errors import BadCheckpoint, BadOutput
from quantize.hub import HubFiles
from quantize.job import run_one, run_pair
from quantize.plan import Options
from quantize.prepare import PairOptions, prepare_draft, prepare_target
from quantize.stream import HELD

SHARDS = 6


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with a target in six shards and a draft, and this process's client pointed at it."""
    target = write_llama(tmp_path / "t", shards=SHARDS)
    (target / "tokenizer.json").write_text("{}")
    draft = write_draft(tmp_path / "d")
    with serve() as hub:
        before = hub_constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(hub_constants.ENDPOINT)
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + before)
        monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name, folder in (("org/t", target), ("org/d", draft)):
            hub.repos[name] = Repo(name, private=False)
            hub.repos[name].put_folder(folder)
        yield hub


def streamed(out: Path, scheme: str = "bf16", **changes: Any) -> Any:
    job = prepare_target(open_checkpoint("org/t"), Options(scheme))
    assert isinstance(job.source.files, HubFiles)
    return run_one(job, out, settings(**changes))


def watch(out: Path, counts: list[int], stop: int = 0) -> Callable[[str, int], Any]:
    """A stage that counts the source's shards on disk at every tensor, and may be interrupted."""
    scratch = out.with_name(f"{out.name}.partial") / ".pairquant"

    @contextmanager
    def stage(_text: str, _size: int) -> Iterator[Callable[[int], None]]:
        def advance(_done: int) -> None:
            counts.append(len(list(scratch.glob("*.source/*.safetensors"))))
            if len(counts) == stop:
                raise KeyboardInterrupt

        yield advance

    return stage


def fetched(hub: Hub) -> list[str]:
    """The shards that were downloaded, a name for each time: the client asks for a HEAD first."""
    sent = (name for method, name, _ in hub.sent if method == "HEAD")
    return sorted(name for name in sent if name.endswith(".safetensors"))


def _head(hub: Hub) -> str:
    return hub.repos["org/t"].refs["main"]


def same(left: Path, right: Path) -> None:
    """Both hold the same files, but for what tells where they came from."""
    told = {"README.md", "quantization_report.json"}
    assert {p.name for p in left.iterdir()} == {p.name for p in right.iterdir()}
    for path in left.iterdir():
        assert path.name in told or path.read_bytes() == (right / path.name).read_bytes(), path


def test_a_streamed_run_writes_what_a_local_one_writes_with_two_shards_on_disk(
    hub: Hub, tmp_path: Path
) -> None:
    counts: list[int] = []
    out = tmp_path / "out"
    report = streamed(out, "fp8_rowwise", stage=watch(out, counts))
    local = run(tmp_path / "t", tmp_path / "local", "fp8_rowwise")
    same(out, tmp_path / "local")
    assert report == local
    assert {check.status for check in report.checks} == {"pass"}
    assert max(counts) <= HELD < SHARDS
    names = [name for name in fetched(hub) if name.startswith("model-")]
    assert names == sorted(set(names))
    assert len(names) == SHARDS
    written = json.loads((out / "quantization_report.json").read_text())
    assert written["source"]["origin"] == f"org/t@{_head(hub)}"
    assert {mark["commit"] for mark in written["source"]["files"].values()} == {_head(hub)}
    assert not list(tmp_path.glob("**/.pairquant"))
    assert not (tmp_path / "cache" / "models--org--t" / "snapshots").exists()


def test_connections_that_break_are_continued(hub: Hub, tmp_path: Path) -> None:
    hub.cut_once = {f"model-0000{n}-of-0000{SHARDS}.safetensors" for n in (1, 3, 6)}
    streamed(tmp_path / "out")
    assert not hub.cut_once
    run(tmp_path / "t", tmp_path / "local", "bf16")
    same(tmp_path / "out", tmp_path / "local")


@pytest.mark.parametrize("stop", [3, 20, 41])
def test_an_interrupted_run_continues_without_the_shards_it_is_done_with(
    hub: Hub, tmp_path: Path, stop: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        streamed(out, stage=watch(out, [], stop))
    assert not out.exists()
    before = fetched(hub)
    report = streamed(out)
    after = fetched(hub)
    local = run(tmp_path / "t", tmp_path / "local", "bf16")
    same(out, tmp_path / "local")
    assert report == local
    assert len(before) < SHARDS
    assert after == sorted(set(after))


def test_a_download_with_other_bytes_is_refused_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    name = f"model-00002-of-0000{SHARDS}.safetensors"
    source = open_checkpoint("org/t")
    job = prepare_target(source, Options("bf16"))
    hub.damaged_once = {name}
    with pytest.raises(BadCheckpoint, match=f"{name}: the download has SHA-256") as refused:
        run_one(job, tmp_path / "out", settings())
    assert "repeat the command" in refused.value.hint
    run_one(job, tmp_path / "out", settings())
    run(tmp_path / "t", tmp_path / "local", "bf16")
    same(tmp_path / "out", tmp_path / "local")


def test_a_branch_that_moved_is_another_source(hub: Hub, tmp_path: Path) -> None:
    out, first = tmp_path / "out", _head(hub)
    with pytest.raises(KeyboardInterrupt):
        streamed(out, stage=watch(out, [], 20))
    (tmp_path / "t" / "tokenizer.json").write_text('{"new": 1}')
    hub.repos["org/t"].put_folder(tmp_path / "t")
    with pytest.raises(BadOutput, match=r"source.*commit"):
        streamed(out)
    job = prepare_target(open_checkpoint(f"org/t@{first}"), Options("bf16"))
    run_one(job, out, settings())
    assert (out / "tokenizer.json").read_text() == "{}"


def test_a_pair_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    target = prepare_target(open_checkpoint("org/t"), Options("bf16"))
    draft = open_checkpoint("org/d")
    second = prepare_draft(draft, target.source, Options("bf16"), PairOptions())
    run_pair(target, second, tmp_path / "out", settings())
    pair(tmp_path / "t", tmp_path / "d", tmp_path / "local", ("bf16", "bf16"))
    for half in ("target", "draft"):
        same(tmp_path / "out" / half, tmp_path / "local" / half)
    card = (tmp_path / "out" / "draft" / "README.md").read_text()
    assert "base_model: org/d\n" in card


def test_without_a_proof_nothing_counts_as_proven(hub: Hub, tmp_path: Path) -> None:
    report = streamed(tmp_path / "out", verify=False)
    assert [c.status for c in report.checks if c.name == "verify"] == ["not_measured"]
