"""Nothing is lost or half-done: whatever stops a run, the same command finishes it."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
from bench.synthetic import write_llama as write_large
from conftest import QUANTIZE
from runs import pair, read_header, read_tree, run, settings, target_job
from tiny import write_draft, write_llama

from quantize import engine
from quantize.compute import Compute
from quantize.engine import Advance
from quantize.errors import BadCheckpoint, BadOutput
from quantize.job import run_one

STATE = ".pairquant"
BF16_PAIR = ("bf16", "bf16")
TENSORS = 9 + 3  # of the source below


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: syncing to a busy disk hundreds of times takes minutes."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with tokenizer files, as real ones have."""
    path = write_llama(tmp_path_factory.mktemp("source") / "model", num_hidden_layers=1)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return path


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft for a target of two layers."""
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return write_draft(tmp_path_factory.mktemp("draft") / "draft", eagle_config=taps)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft's target."""
    path = tmp_path_factory.mktemp("target") / "model"
    return write_llama(path, num_hidden_layers=2, intermediate_size=32)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    out = tmp_path_factory.mktemp("expected") / "out"
    run(source, out, "bf16", max_shard_size=60_000)
    return read_tree(out)


def run_bf16(source: Path, out: Path, **changes: Any) -> None:
    """The run that the tests below disturb."""
    run(source, out, "bf16", **{"max_shard_size": 60_000, **changes})


def stop_at(step: int) -> Callable[[str, int], Any]:
    """A stage that stops the run when it has reported ``step`` times; 0 stops before the first."""
    seen = 0

    @contextmanager
    def stage(_text: str, _size: int) -> Iterator[Advance]:
        def advance(_done: int) -> None:
            nonlocal seen
            seen += 1
            if seen > step:
                raise KeyboardInterrupt

        yield advance

    return stage


# --- interrupted


@pytest.mark.parametrize(
    ("sync_bytes", "workers"), [(0, 1), (engine.SYNC_BYTES, 1), (0, 3), (100_000, 3)]
)
def test_interrupt_at_every_tensor(
    sync_bytes: int,
    workers: int,
    source: Path,
    expected: dict[str, bytes],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While writing and while proving, with a journal line after each tensor or only at the end."""
    monkeypatch.setattr(engine, "SYNC_BYTES", sync_bytes)
    for step in range(2 * TENSORS):
        out = folder / f"out{step}"
        with pytest.raises(KeyboardInterrupt):
            run_bf16(source, out, stage=stop_at(step), compute=Compute(workers=workers))
        assert not out.exists()
        run_bf16(source, out)
        assert read_tree(out) == expected, step
        assert not out.with_name(f"{out.name}.partial").exists()


def test_interrupt_again_and_again(
    target: Path, draft: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pair, stopped at every tensor in turn and always continued; the real schemes."""
    monkeypatch.setattr(engine, "SYNC_BYTES", 0)
    schemes = ("mxfp4", "fp8_rowwise")
    pair(target, draft, folder / "whole", schemes)
    steps = 0
    while not (folder / "out").exists():
        try:
            pair(target, draft, folder / "out", schemes, stage=stop_at(steps))
        except KeyboardInterrupt:
            steps += 4
    assert steps >= 2 * (2 * 9 + 3)
    assert read_tree(folder / "out") == read_tree(folder / "whole")


def test_finished_tensors_are_not_written_again(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage done meanwhile to a tensor of the journal stays, and the proof finds it."""
    monkeypatch.setattr(engine, "SYNC_BYTES", 0)
    out, partial = folder / "out", folder / "out.partial"
    with pytest.raises(KeyboardInterrupt):
        run_bf16(source, out, stage=stop_at(10))
    name = (partial / STATE / "checkpoint.journal").read_text().splitlines()[3]
    flip_bit(partial, name)
    with pytest.raises(BadOutput, match="preserved") as caught:
        run_bf16(source, out)
    assert name in caught.value.message
    assert not out.exists()


def flip_bit(folder: Path, name: str) -> None:
    """Flip the lowest bit of the first byte of one tensor."""
    for file in folder.glob("*.safetensors"):
        header, start = read_header(file)
        if name in header:
            data = bytearray(file.read_bytes())
            data[start + header[name]["data_offsets"][0]] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError(f"{name} is not in {folder}")


# --- killed


MUTATING = {"open", "mkdir", "ftruncate", "truncate", "pwrite", "write", "flush", "fdatasync"}
MUTATING |= {"fsync", "replace", "rename", "unlink", "rmdir", "chmod"}


def changes_files(function: Any) -> bool:
    """Whether a C function that is about to be called may change what is on the disk."""
    owner = getattr(function, "__self__", None)
    ours = function.__module__ == "posix" or isinstance(owner, io.IOBase)
    return ours and function.__name__ in MUTATING


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Whether a forked child that dies before its ``step``-th file operation still was alive then.

    It dies by ``os._exit``: no clean-up runs and no buffer is flushed, as after SIGKILL.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            seen = 0

            def count(_frame: FrameType, event: str, function: Any) -> None:
                nonlocal seen
                if event == "c_call" and changes_files(function):
                    seen += 1
                    if seen > step:
                        os._exit(9)

            threading.setprofile(count)
            sys.setprofile(count)
            work()
            sys.setprofile(None)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, 9}, f"step {step}: the child failed with {code}"
    return code == 9


def check_every_kill(
    folder: Path, work: Callable[[Path], object], expected: dict[str, bytes], stride: int = 1
) -> None:
    """Kill ``work`` before its file operations; done again, it leaves what it should."""
    step = 0
    while True:
        out = folder / f"out{step}"
        if not killed_at(step, lambda out=out: work(out)):  # type: ignore[misc]
            break
        if out.exists():  # killed between the rename and the last clean-up
            found = {name: data for name, data in read_tree(out).items() if STATE not in name}
            assert found == expected
            with pytest.raises(BadOutput, match="not empty") as caught:
                work(out)
            assert "quantize verify" in caught.value.hint
        else:
            work(out)
        assert read_tree(out) == expected, step
        assert not out.with_name(f"{out.name}.partial").exists()
        shutil.rmtree(out)
        step += stride
    assert step > 50  # else nearly nothing was tried
    print(f"killed before each of {step} file operations")


@pytest.mark.parametrize(("workers", "stride"), [(1, 1), (3, 5)])
def test_kill_at_every_file_operation(
    workers: int,
    stride: int,
    source: Path,
    folder: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "SYNC_BYTES", 10_000)
    compute = Compute(workers=workers)
    check_every_kill(folder, lambda out: run_bf16(source, out, compute=compute), expected, stride)


def test_kill_a_pair_at_file_operations(
    target: Path, draft: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SYNC_BYTES", 100_000)
    pair(target, draft, folder / "whole", BF16_PAIR)
    expected = read_tree(folder / "whole")
    check_every_kill(folder, lambda out: pair(target, draft, out, BF16_PAIR), expected, stride=7)


@pytest.mark.parametrize("verify", [True, False])
def test_kill_while_starting_over(
    verify: bool, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--restart with another source, killed while it clears the old work: no byte of it is left.

    Without the proof at the end, a journal that outlived its source would do silent harm.
    """
    monkeypatch.setattr(engine, "SYNC_BYTES", 0)
    other = write_llama(folder / "other", num_hidden_layers=1, rope_theta=7.0)
    flip_bit(other, "model.layers.0.mlp.up_proj.weight")
    run(other, folder / "whole", "bf16", verify=False)
    weights = (folder / "whole" / "model.safetensors").read_bytes()
    out = folder / "out"

    def start_over() -> None:
        with suppress(KeyboardInterrupt):
            run(other, out, "bf16", restart=True, verify=verify, stage=stop_at(0))

    step = 0
    while True:
        with pytest.raises(KeyboardInterrupt):
            run(source, out, "bf16", stage=stop_at(10))
        killed = killed_at(step, start_over)
        try:
            run(other, out, "bf16", verify=verify)
        except BadOutput as error:
            assert "--restart" in error.hint
            run(other, out, "bf16", verify=verify, restart=True)
        assert (out / "model.safetensors").read_bytes() == weights, step
        shutil.rmtree(out)
        step += 1
        if not killed:
            break
    assert step > 10


@pytest.mark.parametrize("kept", [0, 1, -2, -1])
def test_cut_journal_line_does_not_count(
    kept: int, source: Path, expected: dict[str, bytes], folder: Path
) -> None:
    """The last line misses its end: its tensor is written again, so damage to it is healed."""
    out, partial = folder / "out", folder / "out.partial"
    with pytest.raises(KeyboardInterrupt):
        run_bf16(source, out, stage=stop_at(TENSORS))
    journal = partial / STATE / "checkpoint.journal"
    *lines, last = journal.read_text().splitlines()
    cut = f"{last}\n"[:kept]
    journal.write_text("".join(f"{line}\n" for line in lines) + cut)
    flip_bit(partial, last)
    run_bf16(source, out)
    assert read_tree(out) == expected


# --- killed from outside, as a user would


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 MB: large enough that a run can be met while it writes."""
    path = tmp_path_factory.mktemp("large") / "model"
    write_large(path, layers=2)
    return path


def start(large: Path, cwd: Path, *options: str) -> subprocess.Popen[str]:
    """Start the command and return when it has begun to write."""
    shared = ("--scheme", "bf16", "--max-shard-size", "100MB")
    process = subprocess.Popen(
        [sys.executable, "-m", "quantize.cli", "run", large, "-o", "out", *shared, *options],
        cwd=cwd,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not list(cwd.glob("out*/*.safetensors")):
        time.sleep(0.002)
    return process


def test_sigint_and_sigkill_at_random_times(large: Path, tmp_path: Path) -> None:
    """Workers and display may differ from call to call; the last call decides the report."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    process = start(large, whole)
    begun = time.monotonic()
    _, said = process.communicate()
    assert process.returncode == 0, said
    duration = time.monotonic() - begun

    process = start(large, killed, "--workers", "1", "--quiet")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "the same command continues where it stopped" in said
    assert "Traceback" not in said

    delays = random.Random(0)
    for _ in range(4):
        process = start(large, killed)
        time.sleep(delays.uniform(0, 0.8 * duration))
        process.kill()
        _, said = process.communicate()
        if process.returncode != -signal.SIGKILL:  # it was faster than the first
            break
    else:
        _, said = (process := start(large, killed)).communicate()
    assert process.returncode == 0, said
    assert read_tree(killed / "out") == read_tree(whole / "out")
    assert [path.name for path in killed.iterdir()] == ["out"]


# --- another run


def half_done(source: Path, out: Path) -> dict[str, bytes]:
    """Stop a run in the middle; returns what it left."""
    with pytest.raises(KeyboardInterrupt):
        run_bf16(source, out, stage=stop_at(5))
    return read_tree(out.parent)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"exclude": ("*.q_proj", "*.k_proj", "*.v_proj")}, "options.exclude"),
        ({"cast_head": True}, "options.cast_head"),
        ({"scheme": "fp8_rowwise"}, "options.scheme"),
    ],
)
def test_other_options_are_refused_by_name(
    changes: dict[str, Any], named: str, source: Path, folder: Path
) -> None:
    out = folder / "out"
    left = half_done(source, out)
    job = target_job(source, **{"scheme": "bf16", **changes})
    with pytest.raises(BadOutput) as caught:
        run_one(job, out, settings(max_shard_size=60_000))
    assert named in caught.value.message
    assert "--restart" in caught.value.hint
    assert read_tree(folder) == left


def test_other_shard_size_is_refused_by_name(source: Path, folder: Path) -> None:
    left = half_done(source, folder / "out")
    with pytest.raises(BadOutput, match="max shard size"):
        run_bf16(source, folder / "out", max_shard_size=70_000)
    assert read_tree(folder) == left


def test_another_engine_is_refused_by_name(source: Path, folder: Path) -> None:
    """The bytes would be the same; the report, which names one engine, would not be true."""
    left = half_done(source, folder / "out")
    with pytest.raises(BadOutput, match="engine"):
        run_bf16(source, folder / "out", compute=Compute("quark"))
    assert read_tree(folder) == left
    run_bf16(source, folder / "out", compute=Compute(workers=3))  # workers may change


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_changed_source_is_refused_by_name(name: str, source: Path, folder: Path) -> None:
    copy = folder / "copy"
    shutil.copytree(source, copy)
    out = folder / "work" / "out"
    out.parent.mkdir()
    left = half_done(copy, out)
    stat = (copy / name).stat()
    os.utime(copy / name, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(BadOutput) as caught:
        run_bf16(copy, out)
    assert name in caught.value.message
    assert "mtime" in caught.value.message
    assert "--restart" in caught.value.hint
    assert read_tree(out.parent) == left
    run_bf16(copy, out, restart=True)
    assert out.exists()


def test_restart_writes_everything_anew(
    source: Path, expected: dict[str, bytes], folder: Path
) -> None:
    """Also what the earlier run wrote and this one does not: other shards, an index."""
    out = folder / "out"
    with pytest.raises(KeyboardInterrupt):
        run_bf16(source, out, max_shard_size=30_000, stage=stop_at(2 * TENSORS - 1))
    assert len(list((folder / "out.partial").glob("*.safetensors"))) > 2
    run_bf16(source, out, restart=True)
    assert read_tree(out) == expected


def test_place_of_the_source_may_be_spelled_otherwise(
    source: Path, expected: dict[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    half_done(Path(source.name), folder / "out")
    monkeypatch.chdir(folder)
    run_bf16(source, Path("out"))
    assert read_tree(folder / "out") == expected


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_partial_that_is_not_ours_is_left_alone(kind: str, source: Path, folder: Path) -> None:
    partial, mine = folder / "out.partial", folder / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_text("mine")
    if kind == "folder":
        mine.rename(partial)
    elif kind == "file":
        partial.write_text("mine")
    else:
        partial.symlink_to(mine)
    before = read_tree(folder)
    for restart in (False, True):
        with pytest.raises(BadOutput, match=r"out\.partial"):
            run_bf16(source, folder / "out", restart=restart)
    assert read_tree(folder) == before


def test_second_run_is_refused_while_the_first_works(
    source: Path, expected: dict[str, bytes], folder: Path
) -> None:
    """The second starts in the middle of the first, with and without --restart."""
    out = folder / "out"
    refused = []

    @contextmanager
    def stage(_text: str, _size: int) -> Iterator[Advance]:
        def advance(_done: int) -> None:
            for restart in (False, True):
                with pytest.raises(BadOutput, match="another run is writing") as caught:
                    run_bf16(source, out, restart=restart)
                refused.append(caught.value)

        yield advance

    run_bf16(source, out, stage=stage)
    hashed = expected.keys() - {"README.md", "quantization_report.json"}  # each of one chunk
    assert len(refused) == 2 * (2 * TENSORS + len(hashed))
    assert read_tree(out) == expected


# --- the disk


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_file_size_limit_is_said_plainly(
    source: Path, expected: dict[str, bytes], folder: Path
) -> None:
    """The kernel refuses to write on, as it does when the disk is full."""
    command = [str(QUANTIZE), "run", str(source), "-o", "out", "--scheme", "bf16"]
    done = subprocess.run(
        command, cwd=folder, preexec_fn=limit_file_size, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "error: the disk is full" in done.stderr
    assert "repeat the command" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()
    run(source, folder / "out", "bf16")
    assert weights(read_tree(folder / "out")) == weights(expected)


def weights(tree: dict[str, bytes]) -> dict[str, bytes]:
    """The bytes of every tensor, whatever the shards."""
    found = {}
    for name, data in tree.items():
        if name.endswith(".safetensors"):
            start = 8 + int.from_bytes(data[:8], "little")
            for tensor, entry in json.loads(data[8:start]).items():
                if tensor != "__metadata__":
                    begin, end = entry["data_offsets"]
                    found[tensor] = data[start + begin : start + end]
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB; only root may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("cannot mount a file system; the file size limit above stands for it")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def fill(folder: Path) -> None:
    """Write until the disk has no byte left."""
    with (folder / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.mark.parametrize("step", [0, 4, 11, 12, 20, 23])
@pytest.mark.parametrize("sync_bytes", [0, engine.SYNC_BYTES])
def test_full_disk_is_said_plainly(
    step: int,
    sync_bytes: int,
    source: Path,
    expected: dict[str, bytes],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fills up while tensors are written, before the metadata, and before the report."""
    monkeypatch.setattr(engine, "SYNC_BYTES", sync_bytes)
    out = small_disk / "out"
    seen = 0

    @contextmanager
    def stage(_text: str, _size: int) -> Iterator[Advance]:
        def advance(_done: int) -> None:
            nonlocal seen
            if seen == step:
                fill(small_disk)
            seen += 1

        yield advance

    with pytest.raises(BadOutput, match="disk is full") as caught:
        run_bf16(source, out, stage=stage)
    assert "repeat the command" in caught.value.hint
    assert not out.exists()
    (small_disk / "filler").unlink()
    run_bf16(source, out)
    assert read_tree(out) == expected


def test_pair_that_cannot_fit_is_refused_before_anything_is_written(
    source: Path, target: Path, draft: Path, small_disk: Path
) -> None:
    """The target alone would fit."""
    pair(target, draft, small_disk / "fits", BF16_PAIR)
    shutil.rmtree(small_disk / "fits")
    (small_disk / "filler").write_bytes(bytes(120_000))
    with pytest.raises(BadOutput, match=r"needs \d+ bytes more .* \d+ free"):
        pair(target, draft, small_disk / "out", BF16_PAIR)
    assert not list(small_disk.rglob("*.safetensors"))
    run(target, small_disk / "out alone", "bf16")


def test_plan_that_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A sparse source with a rotary buffer of 2 TB."""
    source = write_llama(tmp_path / "model", num_hidden_layers=1)
    file = source / "model.safetensors"
    header, start = read_header(file)
    data = file.read_bytes()[start:]
    end = len(data) + 2**41
    large = {"dtype": "BF16", "shape": [2**34, 64], "data_offsets": [len(data), end]}
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    text = json.dumps(header | {name: large}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    os.truncate(file, 8 + len(text) + end)
    with pytest.raises(BadOutput, match=r"needs \d+ bytes more .* \d+ free"):
        # Stopped at once where the check fails us: nobody's disk shall be filled.
        run(source, tmp_path / "out", "bf16", max_shard_size=10**14, stage=stop_at(0))
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").rglob("*.safetensors"))


# --- the source


def test_source_that_shrinks_while_it_is_read(
    source: Path, expected: dict[str, bytes], folder: Path
) -> None:
    """Its shard becomes unreadable; with the good file back, the same command continues."""
    copy = folder / "copy"
    shutil.copytree(source, copy)
    file = copy / "model.safetensors"
    good, stat = file.read_bytes(), file.stat()

    @contextmanager
    def stage(_text: str, _size: int) -> Iterator[Advance]:
        yield lambda _done: os.truncate(file, 20_000)

    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        run_bf16(copy, folder / "out", stage=stage)
    assert not (folder / "out").exists()
    file.write_bytes(good)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    run_bf16(copy, folder / "out")
    ours = read_tree(folder / "out")
    assert weights(ours) == weights(expected)


@pytest.mark.parametrize("verify", [True, False])
def test_source_that_changes_while_it_is_read(verify: bool, source: Path, folder: Path) -> None:
    copy = folder / "copy"
    shutil.copytree(source, copy)

    @contextmanager
    def stage(_text: str, _size: int) -> Iterator[Advance]:
        yield lambda _done: (copy / "config.json").touch()

    with pytest.raises(BadCheckpoint, match=r"config\.json changed while it was read"):
        run_bf16(copy, folder / "out", verify=verify, stage=stage)
    assert not (folder / "out").exists()
