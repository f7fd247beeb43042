"""Publishing with the real client of the Hub against a Hub on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_client import Client, environment, start_client
from hub_server import Hub, Repo, serve
from hub_state import Blob
from huggingface_hub import ModelCard
from runs import pair as write_pair
from runs import run as write_one
from tiny import write_draft, write_llama

TARGET, DRAFT = "org/tiny-MXFP4", "org/tiny-eagle3-FP8"
IDS = ("--repo-id", TARGET, "--draft-repo-id", DRAFT)
REPORT = "quantization_report.json"
LARGE = "model.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub) -> Hub:
    """The Hub with nothing in it."""
    for state in (server.repos, server.objects, server.collections, server.faults):
        state.clear()
    server.steps.clear()
    server.multipart = 0
    return server


@pytest.fixture(scope="module")
def client(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with start_client(server.url, tmp_path_factory.mktemp("home")) as client:
        yield client


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose target has side files, in several shards."""
    folder = tmp_path_factory.mktemp("written")
    target = write_llama(folder / "t")
    (target / "tokenizer.json").write_text('{"version": "1.0"}')
    (target / "LICENSE").write_text("as you like")
    (target / "README.md").write_text(
        "---\nlicense: apache-2.0\npipeline_tag: text-generation\n---\n"
    )
    draft = write_draft(folder / "d")
    schemes = ("bf16", "bf16")  # no other scheme is needed here, and none is as quick
    write_pair(target, draft, folder / "pair", schemes, max_shard_size=400_000)
    return folder / "pair"


@pytest.fixture
def pair(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "pair"))


def files(repo: Repo, revision: str = "main") -> dict[str, bytes]:
    """What a branch holds, without the file that every repository is born with."""
    tree = repo.tree(str(repo.find(revision)))
    return {name: blob.data for name, blob in tree.items() if name != ".gitattributes"}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def states(repo: Repo) -> list[frozenset[str]]:
    """Every set of files that main ever showed."""
    return [names for ref, names, _ in repo.history if ref == "main"]


def test_a_pair_becomes_two_private_repositories_that_name_each_other(
    hub: Hub, client: Client, pair: Path
) -> None:
    done = client.run(
        "publish", pair, *IDS, "--yes", "--json", "--tag", "v1", "--collection", "Tiny"
    )
    assert done.code == 0, done.err
    assert not done.heavy
    for repo_id, half in ((TARGET, "target"), (DRAFT, "draft")):
        repo = hub.repos[repo_id]
        assert repo.private
        assert files(repo) == on_disk(pair / half)
        assert len(states(repo)) == 2
        assert repo.tags == {"v1": repo.refs["main"]}
        assert all(
            repo.tree(repo.refs["main"])[n].large == n.endswith(".safetensors") for n in files(repo)
        )
    listed = {r["repo_id"]: r for r in done.json["repositories"]}
    assert listed[TARGET]["commit"] == hub.repos[TARGET].refs["main"]
    assert {f["name"]: f["size"] for f in listed[DRAFT]["files"]} == {
        name: len(data) for name, data in files(hub.repos[DRAFT]).items()
    }
    assert DRAFT in files(hub.repos[TARGET])["README.md"].decode()
    assert TARGET in files(hub.repos[DRAFT])["README.md"].decode()
    card = ModelCard(files(hub.repos[TARGET])["README.md"].decode())
    assert card.data.license == "apache-2.0"
    (collection,) = hub.collections.values()
    assert [item["id"] for item in collection["items"]] == [TARGET, DRAFT]
    assert collection["private"]

    # The content is sent before either branch moves; and again unchanged, nothing is sent.
    assert max(i for i, s in enumerate(hub.steps) if s == "put") < hub.steps.index("commit")
    before = [dict(repo.refs) for repo in hub.repos.values()]
    hub.steps.clear()
    again = client.run("publish", pair, *IDS, "--yes", "--tag", "v1", "--collection", "Tiny")
    assert again.code == 0, again.err
    assert "unchanged, nothing was uploaded" in again.err
    assert not {"preupload", "batch", "put", "commit"} & set(hub.steps)
    assert [dict(repo.refs) for repo in hub.repos.values()] == before


def test_dry_run_shows_names_and_sizes_and_needs_no_login_nor_hub(
    hub: Hub, client: Client, pair: Path
) -> None:
    (pair / "target" / ".env").write_text("HF_TOKEN=hf_secret")
    (pair / "target" / "tokenizer_notes.json").write_text("{}")
    before = on_disk(pair / "target")
    done = client.run("publish", pair, *IDS, "--dry-run", "--json", token=None)
    assert done.code == 0, done.err
    assert not hub.steps
    assert not hub.repos
    assert on_disk(pair / "target") == before
    (listed, _) = done.json["repositories"]
    names = {file["name"] for file in listed["files"]}
    assert names == before.keys() - {".env", "tokenizer_notes.json"}
    assert "not uploaded: .env, tokenizer_notes.json" in done.err
    assert f"{(pair / 'target' / 'config.json').stat().st_size:,}" in done.err
    assert f"{listed['bytes']:,}" in done.err


def test_stray_files_and_secrets_stay_here(hub: Hub, client: Client, pair: Path) -> None:
    """Also those whose names look like a model's own side files."""
    for name in (".env", "tokenizer_notes.json", "vocab.private", "extra.safetensors"):
        (pair / "draft" / name).write_text("hf_secret")
    done = client.run("publish", pair / "draft", "--repo-id", DRAFT, "--yes")
    if done.code == 0:
        assert not any(b"hf_secret" in data for data in files(hub.repos[DRAFT]).values())
    else:  # a stray weight is refused by verify: nothing goes up at all
        assert not hub.repos
    (pair / "draft" / "extra.safetensors").unlink()
    done = client.run("publish", pair / "draft", "--repo-id", DRAFT, "--yes")
    assert done.code == 0, done.err
    assert not any(b"hf_secret" in data for data in files(hub.repos[DRAFT]).values())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _forge(path: Path, key: str, value: object) -> None:
    report = json.loads(path.read_text())
    report[key] = value
    path.write_text(json.dumps(report))


def _append(path: Path) -> None:
    path.write_text(path.read_text() + " ")


OUTSIDE = {"../../t/LICENSE": {"size": 11, "sha256": ""}}
UNPROVEN = {"name": "verify", "status": "not_measured", "measured": "--no-verify"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: _flip(d / LARGE), f"files: 1 differ.*{LARGE}: other bytes"),
        (lambda d: _append(d / "config.json"), "config.json: [0-9]+ bytes, expected"),
        (lambda d: (d / LARGE).unlink(), "model.safetensors missing, listed by"),
        (lambda d: _forge(d / REPORT, "files", None), "lists no files"),
        (lambda d: _forge(d / REPORT, "files", OUTSIDE), "../t/LICENSE missing, listed by"),
        (lambda d: _forge(d / REPORT, "checks", [UNPROVEN]), "--no-verify.*--source"),
    ],
)  # fmt: skip
def test_what_is_not_proven_is_not_published(
    hub: Hub, client: Client, pair: Path, damage: object, said: str
) -> None:
    damage(pair / "draft")  # type: ignore[operator]
    done = client.run("publish", pair / "draft", "--repo-id", DRAFT, "--yes")
    assert done.code == 1
    assert re.search(said, " ".join(done.err.split())), done.err
    assert not hub.repos


@pytest.mark.parametrize(
    ("args", "token", "said"),
    [
        ((*IDS,), None, "no token was found; hf auth login, or set HF_TOKEN"),
        ((*IDS,), "hf_read", "may read and not write"),
        ((*IDS,), "hf_old", "the token is not valid any more"),
        (("--repo-id", "no/t", "--draft-repo-id", "org/d"), "hf_write", "jane may not write to no"),
        (("--repo-id", "org/t"), "hf_write", "add --draft-repo-id ORG/NAME"),
        (("--repo-id", "org/t", "--draft-repo-id", "org/t"), "hf_write", "both org/t"),
        (("--repo-id", "t", "--draft-repo-id", "org/d"), "hf_write", "'t' is not a Hub id"),
    ],
)  # fmt: skip
def test_refused_before_anything_slow(
    hub: Hub, client: Client, pair: Path, args: tuple[str, ...], token: str | None, said: str
) -> None:
    done = client.run("publish", pair, *args, "--yes", token=token)
    assert done.code == 1
    assert said in " ".join(done.err.split()).replace(" hint:", ";"), done.err
    assert not hub.repos


def test_without_a_terminal_it_never_goes_on_unasked(hub: Hub, client: Client, pair: Path) -> None:
    done = client.run("publish", pair, *IDS)
    assert done.code == 2
    assert "--yes" in done.err
    assert not hub.repos


@pytest.mark.parametrize(
    "step", ["create", "validate", "preupload", "batch", "put", "verify", "commit"]
)
def test_a_step_that_fails_leaves_main_whole_and_the_same_command_continues(
    hub: Hub, client: Client, pair: Path, step: str
) -> None:
    hub.faults[step] = [403]
    done = client.run("publish", pair, *IDS, "--yes")
    assert done.code == 1
    assert "error: " in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err
    for repo in hub.repos.values():
        assert states(repo) == [frozenset({".gitattributes"})]
    hub.faults.clear()
    sent = set(hub.objects)
    hub.steps.clear()
    assert client.run("publish", pair, *IDS, "--yes").code == 0
    assert files(hub.repos[TARGET]) == on_disk(pair / "target")
    assert files(hub.repos[DRAFT]) == on_disk(pair / "draft")
    large = {
        n
        for half in ("target", "draft")
        for n in on_disk(pair / half)
        if n.endswith(".safetensors")
    }
    assert large
    assert hub.steps.count("put") == len(hub.objects) - len(sent)


@pytest.mark.parametrize("fault", ["drop", "lose"])
def test_a_commit_whose_connection_breaks(hub: Hub, client: Client, pair: Path, fault: str) -> None:
    """Whether it was made before the answer was lost or not, the repeated command ends the same."""
    hub.faults["commit"] = [fault]
    done = client.run("publish", pair / "draft", "--repo-id", DRAFT, "--yes")
    assert done.code == 1
    assert "continue with the same command" in done.err
    assert "content that is there is not sent again" in done.err
    hub.steps.clear()
    assert client.run("publish", pair / "draft", "--repo-id", DRAFT, "--yes").code == 0
    assert files(hub.repos[DRAFT]) == on_disk(pair / "draft")
    assert len(states(hub.repos[DRAFT])) == 2
    assert "put" not in hub.steps


def test_an_upload_whose_connection_breaks_goes_on_by_itself_in_parts(
    hub: Hub, client: Client, pair: Path
) -> None:
    hub.multipart = 40_000
    hub.faults["put"] = ["drop"]
    done = client.run("publish", pair / "draft", "--repo-id", DRAFT, "--yes")
    assert done.code == 0, done.err
    assert files(hub.repos[DRAFT]) == on_disk(pair / "draft")
    assert hub.steps.count("put") > 3


@pytest.mark.parametrize("step", ["put", "commit", "merge"])
def test_a_killed_publish_repeated_ends_with_the_same_content(
    hub: Hub, client: Client, pair: Path, tmp_path: Path, step: str
) -> None:
    """Killed before the step of the second file, and again in the middle of a pull request."""
    small = "import quantize.push as p; p.COMMIT_FILES = 3\n" if step == "merge" else ""
    code = f"{small}from quantize.cli import main; main()"
    args = [sys.executable, "-c", code, "publish", str(pair), *IDS, "--yes"]
    env = environment(hub.url, tmp_path)
    process = subprocess.Popen(args, env=env, stderr=subprocess.PIPE)
    hub.faults[step] = [lambda: os.kill(process.pid, signal.SIGKILL)]
    if step == "put":
        hub.faults[step].insert(0, 0)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    for repo in hub.repos.values():
        whole = frozenset({".gitattributes", *on_disk(pair / "target")})
        assert set(states(repo)) <= {frozenset({".gitattributes"}), whole}
    hub.faults.clear()
    done = subprocess.run(args, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for repo_id, half in ((TARGET, "target"), (DRAFT, "draft")):
        assert files(hub.repos[repo_id]) == on_disk(pair / half)
        whole = frozenset({".gitattributes", *on_disk(pair / half)})
        assert set(states(hub.repos[repo_id])) == {frozenset({".gitattributes"}), whole}
    if step == "merge":
        assert [pull["status"] for pull in hub.repos[TARGET].pulls] == ["merged"]


def test_existing_repositories_are_respected(hub: Hub, client: Client, pair: Path) -> None:
    repo = hub.repos[DRAFT] = Repo(DRAFT, private=False)
    args = ("publish", pair / "draft", "--repo-id", DRAFT, "--yes")
    done = client.run(*args)
    assert done.code == 1
    assert f"{DRAFT} is public, and --public was not given" in done.err
    repo.commit(
        "main", {"pytorch.safetensors": Blob(b"x", True), "notes.txt": Blob(b"n")}, "theirs"
    )
    done = client.run(*args, "--public")
    assert done.code == 1
    assert "weights that this tool did not write: pytorch.safetensors" in done.err
    repo.commit("main", {"notes.txt": Blob(b"n")}, "theirs")
    assert client.run(*args, "--public").code == 0
    assert files(repo) == on_disk(pair / "draft") | {"notes.txt": b"n"}
    done = client.run(*args, "--public", "--revision", "dev", "--tag", "v1")
    assert done.code == 0, done.err
    assert files(repo, "dev") == files(repo)
    assert repo.tags == {"v1": repo.refs["dev"]}


def test_files_of_an_earlier_publish_that_are_no_more_go_away(
    hub: Hub, client: Client, pair: Path, tmp_path: Path
) -> None:
    args = ("--repo-id", TARGET, "--yes")
    assert client.run("publish", pair / "target", *args, "--tag", "v1").code == 0
    repo = hub.repos[TARGET]
    shards = {name for name in files(repo) if name.endswith(".safetensors")}
    assert len(shards) > 1
    repo.commit("main", repo.tree(repo.refs["main"]) | {"notes.txt": Blob(b"n")}, "by hand")
    write_one(write_llama(tmp_path / "t", num_hidden_layers=2), tmp_path / "one", "bf16")
    done = client.run("publish", tmp_path / "one", *args, "--tag", "v1")
    assert done.code == 1
    assert "the tag v1 names commit" in done.err
    done = client.run("publish", tmp_path / "one", *args, "--tag", "v2")
    assert done.code == 0, done.err
    assert files(repo) == on_disk(tmp_path / "one") | {"notes.txt": b"n"}


def test_a_gated_base_model_is_not_made_public(hub: Hub, client: Client, pair: Path) -> None:
    hub.repos["org/base"] = Repo("org/base", private=False, gated=True)
    args = ("publish", pair / "draft", "--repo-id", DRAFT, "--base-model", "org/base", "--yes")
    done = client.run(*args, "--public")
    assert done.code == 1
    assert "the base model org/base is gated" in done.err
    assert DRAFT not in hub.repos
    done = client.run(*args)
    assert done.code == 0, done.err
    card = ModelCard(files(hub.repos[DRAFT])["README.md"].decode())
    assert (card.data.base_model, card.data.base_model_relation) == ("org/base", "quantized")
    done = client.run(*args[:-3], "--base-model", "org/none", "--public", "--yes")
    assert "the base model org/none is not on the Hub" in done.err


def test_somebody_else_moved_the_branch_meanwhile(hub: Hub, client: Client, pair: Path) -> None:
    repo = hub.repos[DRAFT] = Repo(DRAFT)
    hub.faults["put"] = [lambda: repo.commit("main", {"a": Blob(b"a")}, "theirs") and None]
    args = ("publish", pair / "draft", "--repo-id", DRAFT, "--yes")
    done = client.run(*args)
    assert done.code == 1
    assert "somebody else changed it meanwhile" in done.err
    assert files(repo) == {"a": b"a"}
    assert client.run(*args).code == 0
    assert files(repo) == on_disk(pair / "draft") | {"a": b"a"}
