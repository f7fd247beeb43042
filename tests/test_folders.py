"""Folders as users leave them: halves gone, the wrong source, places that cannot be written."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import pair, run, silent
from tiny import write_draft, write_llama

from quantize.errors import BadOutput, ToolError
from quantize.job import check_place
from quantize.prepare import prepare_target
from quantize.recheck import verify_output

COMMAND = [sys.executable, "-m", "quantize.cli"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole")
    target, draft = write_llama(folder / "target"), write_draft(folder / "draft")
    pair(target, draft, folder / "out", ("bf16", "bf16"))
    yield folder


def call(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("half", ["target", "draft"])
def test_a_half_that_is_gone_is_missed_and_never_looked_up_on_the_hub(
    whole: Path, tmp_path: Path, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole / "out", tmp_path / "px")
    shutil.rmtree(tmp_path / "px" / half)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOutput, match=f"px/{half}: the folder does not exist"):
        verify_output(Path("px"), None, None, None, silent)


def test_a_missing_output_is_missed_before_its_options_are_judged(tmp_path: Path) -> None:
    with pytest.raises(BadOutput, match="gone: the folder does not exist"):
        verify_output(tmp_path / "gone", None, None, "draft", silent)


def test_an_output_without_its_report_says_that_it_is_missing(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "out", tmp_path / "px")
    (tmp_path / "px" / "target" / "quantization_report.json").unlink()
    with pytest.raises(BadOutput, match=r"target/quantization_report\.json: the file is missing"):
        verify_output(tmp_path / "px", None, None, None, silent)


def test_the_wrong_source_fails_the_plan_and_compares_nothing(whole: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", num_hidden_layers=4)
    checks = verify_output(whole / "out", str(other), None, None, silent)["target"].checks
    found = {check.name: check.status for check in checks}
    assert found["plan"] == "fail"
    assert found["preserved"] == found["head"] == "not_measured"


def test_target_and_draft_sources_in_the_wrong_order_fail(whole: Path) -> None:
    sources = str(whole / "draft"), str(whole / "target")
    reports = verify_output(whole / "out", sources[0], None, sources[1], silent)
    for half in ("target", "draft"):
        assert "plan" in [check.name for check in reports[half].failed]


@pytest.mark.parametrize("place", ["file/x", "/proc/x"])
def test_a_place_that_cannot_hold_the_output_is_refused(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    source = write_llama(tmp_path / "model")
    with pytest.raises(BadOutput, match=r"output folder .*x cannot be made"):
        run(source, Path(place), "bf16")


def test_a_full_output_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    done = call("run", source, "-o", tmp_path / "out", "--scheme", "mxfp4")
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert "load" not in done.stderr
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_the_suggested_command_can_be_pasted(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", num_hidden_layers=1)
    out = tmp_path / "sp ace $y 'o'"
    done = call("run", source, "-o", out, "--scheme", "bf16")
    assert done.returncode == 0
    line = next(line for line in done.stderr.splitlines() if line.startswith("next: "))
    words = shlex.split(line.removeprefix("next: "))
    assert words == ["quantize", "verify", str(out), "--source", str(source)]


def test_a_result_that_cannot_be_delivered_is_an_error(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", num_hidden_layers=1)
    command = " ".join(map(shlex.quote, [*COMMAND, "plan", str(source), "--json", "--quiet"]))
    for end in (">/dev/full", ">&-"):
        done = subprocess.run(
            ["sh", "-c", f"{command} {end}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "the result cannot be written" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_refusal_names_the_checkpoint(tmp_path: Path) -> None:
    from quantize.checkpoint import open_checkpoint
    from quantize.plan import Options

    source = write_llama(tmp_path / "shallow", num_hidden_layers=3)
    text = (
        (source / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    )
    (source / "config.json").write_text(text)
    with pytest.raises(ToolError, match=r"shallow: config\.json: num_hidden_layers is 4"):
        prepare_target(open_checkpoint(str(source)), Options("mxfp4"))
    good = prepare_target(open_checkpoint(str(write_llama(tmp_path / "good"))), Options("mxfp4"))
    with pytest.raises(BadOutput, match="inside, above or equal"):
        check_place(tmp_path / "good" / "out", [good])
