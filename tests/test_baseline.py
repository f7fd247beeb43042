"""`verify` as a guard in CI: baselines, floors, the page of a job, and the Action's own step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from runs import pair as write_pair
from tiny import write_draft, write_llama

from quantize.baseline import Limits, judge, read_baseline

ROOT = Path(__file__).parents[1]
UP, DOWN, NORM = "layers.0.up.weight", "layers.0.down.weight", "norm.weight"
RULE = {"prompts": "ab", "num_speculative_tokens": 3, "max_tokens": 160, "temperature": 0.0}


def figures(**changes: Any) -> dict[str, Any]:
    """A target with two quantized weights and a preserved one, as read from its report."""
    target = {
        UP: {"bytes": 1000, "sqnr_db": "19.5"},
        DOWN: {"bytes": 1000, "sqnr_db": "inf"},
        NORM: {"bytes": 128, "sqnr_db": None},
    }
    return {
        "target": target | changes.get("target", {}),
        "acceptance": {
            "length": changes.get("length", 2.0),
            "rule": RULE | changes.get("rule", {}),
        },
    }


@pytest.mark.parametrize(
    ("now", "failed", "said"),
    [
        ({}, None, ""),
        ({"target": {UP: {"bytes": 1000, "sqnr_db": "19.41"}}}, None, ""),
        (
            {"target": {UP: {"bytes": 1000, "sqnr_db": "19.39"}}},
            "baseline SQNR, target",
            f"{UP}: 19.39 dB, baseline 19.50 dB",
        ),
        (
            {"target": {DOWN: {"bytes": 1000, "sqnr_db": "40.0"}}},
            "baseline SQNR, target",
            f"{DOWN}: 40.00 dB, baseline inf dB",
        ),
        (
            {"target": {NORM: {"bytes": 64, "sqnr_db": "60"}}},
            "baseline SQNR, target",
            f"{NORM}: 60.00 dB, baseline preserved",
        ),
        (
            {"target": {UP: {"bytes": 1000, "sqnr_db": "nan"}}},
            "baseline SQNR, target",
            f"{UP}: nan dB",
        ),
        ({"target": {UP: {"bytes": 1002, "sqnr_db": "20"}}}, None, ""),
        (
            {"target": {UP: {"bytes": 1005, "sqnr_db": None}}},
            "baseline bytes, target",
            f"{UP}: 5 bytes more",
        ),
        ({"length": 1.981}, None, ""),
        ({"length": 1.979}, "baseline acceptance length", ""),
    ],
)
def test_a_regression_beyond_its_tolerance_fails_and_names_the_tensor(
    now: dict[str, Any], failed: str | None, said: str
) -> None:
    checks = judge(figures(**now), figures(), Limits(0.1, 0.01, 0.001))
    assert len(checks) == 3
    assert [check.name for check in checks if check.status != "pass"] == (
        [failed] if failed else []
    )
    assert said in "".join(check.detail for check in checks)


def test_what_cannot_be_compared_is_not_passed() -> None:
    limits = Limits(0.1, 0.01, 0.001, min_sqnr=10, min_al=1.5)
    unproven = figures(
        target={UP: {"bytes": 1000, "sqnr_db": "not_measured"}}, rule={"prompts": "c"}
    )
    found = {check.name: check for check in judge(unproven, figures(), limits)}
    for name in ("baseline SQNR, target", "baseline acceptance length"):
        assert found[name].status == "not_measured"
    assert UP in found["baseline SQNR, target"].detail
    del unproven["acceptance"]
    found = {check.name: check.status for check in judge(unproven, figures(), limits)}
    assert found["baseline acceptance length"] == "not_measured"
    (only,) = judge({"draft": figures()["target"]}, {"target": {}}, Limits(0.1, 0.01, 0.001))
    assert (only.name, only.status) == ("baseline", "not_measured")


def test_floors() -> None:
    limits = Limits(0, 0, 0, min_sqnr=19.6, min_al=2.1)
    sqnr, length = judge(figures(), None, limits)
    assert (sqnr.status, sqnr.detail) == ("fail", f"{UP}: 19.50 dB")
    assert (length.status, length.measured) == ("fail", "2.000")
    sqnr, length = judge(figures(), None, Limits(0, 0, 0, min_sqnr=19.4, min_al=1.9))
    assert (sqnr.status, length.status) == ("pass", "pass")


def test_a_floor_without_a_figure_fails_and_says_how_to_measure_it() -> None:
    now = {"target": {UP: {"bytes": 1000, "sqnr_db": "not_measured"}}}
    sqnr, length = judge(now, None, Limits(0, 0, 0, min_sqnr=15, min_al=1.5))
    assert (sqnr.status, sqnr.measured) == ("fail", "not measured: 1 weights")
    assert UP in sqnr.detail
    assert "hint: measure it: give --source" in sqnr.detail
    assert (length.status, length.measured) == ("fail", "not measured: not served")
    assert "quantize accept" in length.detail


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    target, draft = write_llama(folder / "t"), write_draft(folder / "d")
    write_pair(target, draft, folder / "pair", ("bf16", "bf16"))
    return folder


def run(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quantize.cli", "verify", *args],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_output_is_its_own_baseline_as_folder_as_report_and_as_result(written: Path) -> None:
    sources = ("--source", "t", "--draft-source", "d")
    done = run(
        "pair", *sources, "--json", "--summary", "page.md", "--baseline", "pair", cwd=written
    )
    assert done.returncode == 0, done.stderr
    (written / "result.json").write_text(done.stdout)
    judged = json.loads(done.stdout)["checks"]["baseline"]
    assert [c["name"] for c in judged if c["status"] == "pass"] == [
        f"baseline {what}, {kind}" for kind in ("target", "draft") for what in ("SQNR", "bytes")
    ]
    page = (written / "page.md").read_text()
    assert page.startswith("### quantize verify pair: no check failed\n\n| | part |")
    assert "| ✅ pass | target | headers |" in page

    result = json.loads(done.stdout)["figures"]
    assert read_baseline(written / "pair") == read_baseline(written / "result.json") == result
    report = written / "pair" / "draft" / "quantization_report.json"
    assert read_baseline(report) == {"draft": result["draft"]}
    before = json.loads(done.stdout)
    before["figures"]["draft"]["fc.weight"]["bytes"] -= 2
    (written / "less.json").write_text(json.dumps(before))
    options = ("--baseline", "less.json", "--bytes-tolerance", "0", "--summary", "page.md")
    done = run("pair", *sources, *options, cwd=written)
    assert done.returncode == 1
    assert "fc.weight: 2 bytes more" in done.stderr
    assert "### quantize verify pair: 1 checks failed" in (written / "page.md").read_text()


def test_a_floor_on_an_unproven_output_is_not_excused(written: Path) -> None:
    new = ("-o", written / "unproven", "--scheme", "mxfp4", "--no-verify")
    made = subprocess.run(
        [sys.executable, "-m", "quantize.cli", "run", written / "t", *new],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert made.returncode == 0
    assert run("unproven", "--allow-unmeasured", cwd=written).returncode == 0
    for floor, said in (("--min-sqnr", "floor of SQNR"), ("--min-al", "floor of acceptance")):
        done = run("unproven", "--allow-unmeasured", floor, "1", cwd=written)
        assert done.returncode == 1
        assert said in done.stderr
        assert "1 checks failed" in done.stderr
        done = run("unproven", floor, "nan", cwd=written)
        assert done.returncode == 2
        assert "'nan' is not a number" in done.stderr


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": {"kind": "target"}}', '{"figures": 1}'])
def test_a_baseline_without_figures_is_refused(written: Path, text: str) -> None:
    from quantize.errors import BadOutput

    path = written / "bad.json"
    path.write_text(text)
    with pytest.raises(BadOutput, match=r"--baseline .*bad\.json") as refused:
        read_baseline(path)
    assert "--json" in refused.value.hint


# --- the Action


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def _exclude_as_quark_writes_it(path: Path) -> None:
    config = json.loads(path.read_text())
    config["quantization_config"]["exclude"] = ["fc"]
    path.write_text(json.dumps(config))


def step(path: Path, cwd: Path, **inputs: str) -> tuple[int, str, str]:
    """The Action's second step, as the runner would run it: code, the job's page, stderr."""
    page = cwd / "page.md"
    page.unlink(missing_ok=True)
    names = {f"VERIFY_{name.upper()}": value for name, value in inputs.items()}
    env = os.environ | names | {
        "VERIFY_PATH": str(path),
        "GITHUB_STEP_SUMMARY": str(page),
        "QUANTIZE": f"{sys.executable} -m quantize.cli",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [ROOT / ".ci" / "verify"], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, page.read_text() if page.exists() else "", done.stderr


def test_every_input_of_the_action_reaches_the_command() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    script = (ROOT / ".ci" / "verify").read_text()
    env = action["runs"]["steps"][1]["env"]
    for name in action["inputs"].keys() - {"package"}:
        assert env[f"VERIFY_{name.upper().replace('-', '_')}"] == f"${{{{ inputs.{name} }}}}"
        assert name in script.lower().replace("verify_", "").replace("_", "-")
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"].split()[:2] == ["quantize", "verify"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (uses,) = [s for s in workflow["jobs"]["demo"]["steps"] if s.get("uses") == "./"]
    assert uses["with"].keys() <= action["inputs"].keys()


def test_the_action_on_the_demo_and_on_three_broken_outputs(demo_dir: Path, tmp_path: Path) -> None:
    pair = demo_dir / "pair"
    inputs = {"allow_unmeasured": "true", "baseline": str(pair), "min_sqnr": "15"}
    code, page, err = step(pair, tmp_path, **inputs, junit="verify.xml")
    assert code == 0, err
    assert "no check failed" in page
    assert "| ✅ pass | baseline | floor of SQNR, target | least 1" in page
    assert not list(ElementTree.parse(tmp_path / "verify.xml").iter("failure"))
    code, page, _ = step(pair, tmp_path, allow_unmeasured="true", min_sqnr="19")
    assert code == 1
    assert ".weight: 1" in page

    damages = {
        "flipped": (lambda d: _flip(d / "model.safetensors"), "model.safetensors: other bytes"),
        "names": (lambda d: _exclude_as_quark_writes_it(d / "config.json"), "quantization_config"),
        "lost": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors missing"),
    }
    for name, (damage, said) in damages.items():
        broken = Path(shutil.copytree(pair / "draft", tmp_path / name))
        damage(broken)  # type: ignore[no-untyped-call]
        code, page, err = step(broken, tmp_path, allow_unmeasured="true", junit="verify.xml")
        assert code == 1
        assert said in page + err, name
