"""One file for a whole release, tried up to a Hub on this machine; completion and examples."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from hub_client import environment
from hub_server import serve
from tiny import write_draft, write_llama

from quantize.cli import cli
from quantize.errors import ToolError
from quantize.release import option_words, read_release, step_words

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def parse(words: list[str]) -> dict[str, Any]:
    """What click makes of a command line; a usage error for what it does not know."""
    command = cli.commands[words[0]]
    with command.make_context(words[0], list(words[1:])) as context:
        return context.params


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_example_recipes_are_commands_that_exist(path: Path) -> None:
    """Every command parses, and says what the published cards exclude."""
    recipe = read_release(path)
    words = {step: step_words(recipe, step, yes=True) for step in yaml_steps(path)}
    given = {step: parse(list(said or ())) for step, said in words.items()}
    pair = yaml.safe_load(path.read_text())["pair"]
    for step in ("plan", "pair"):
        assert list(given[step]["exclude"]) == pair["exclude_layers"]
        assert list(given[step]["draft_exclude"]) == ["fc", "lm_head"]
        assert (given[step]["scheme"], given[step]["draft_scheme"]) == ("mxfp4", "fp8_rowwise")
    assert given["verify"]["source"] == recipe.target
    assert given["accept"]["min_retention"] == 0.97
    assert given["publish"]["yes"]
    assert len(RECIPES) == 3


def yaml_steps(path: Path) -> list[str]:
    return ["plan", "verify", *(k for k in yaml.safe_load(path.read_text()) if k in STEPS)]


STEPS = ("pair", "accept", "publish")


def test_options_become_words() -> None:
    options = {"scheme": "mxfp4", "exclude_layers": ["a", "*b"], "layer_scheme": [["x", "bf16"]]}
    flags = {"public": True, "yes": False, "min_retention": 0.97}
    assert shlex.join(option_words(options | flags)) == (
        "--scheme mxfp4 --exclude-layers a --exclude-layers '*b' --layer-scheme x bf16 --public "
        "--min-retention 0.97"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected a mapping"),
        ("target: a\ndraft: b\n", "no out"),
        ("target: a\ndraft: b\nout: c\nverfy: {}\n", "unknown key 'verfy'"),
        ("target: a\ndraft: b\nout: c\npair: [x]\n", "pair: expected a mapping"),
        ("target: [", "not a recipe"),
        ("target: a\ndraft: b\nout: c\nout: d\n", "line 4: the key 'out' is there twice"),
        ("pair:\n  scheme: bf16\n  scheme: mxfp4\n", "line 3: the key 'scheme' is there twice"),
    ],
)
def test_a_recipe_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ToolError) as refused:
        read_release(path)
    assert said in refused.value.message
    assert str(path) in refused.value.message


@pytest.mark.parametrize(
    ("step", "key", "nearest"),
    [
        ("pair", "shceme", "scheme"),
        ("verify", "min-sqrn", "min_sqnr"),
        ("accept", "min_retentoin", "min_retention"),
        ("publish", "repo", "repo_id"),
    ],
)
def test_an_unknown_option_is_refused_before_the_first_step(
    tmp_path: Path, step: str, key: str, nearest: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"target: a\ndraft: b\nout: {tmp_path / 'c'}\n{step}:\n  {key}: x\n")
    with pytest.raises(ToolError) as refused:
        cli.main(["release", str(path), "--until", "plan"], standalone_mode=False)
    assert f"{step}: unknown key {key!r}" in refused.value.message
    assert refused.value.message.endswith(f"the nearest known one is {nearest!r}")
    assert refused.value.hint == f"quantize {step} --help tells the options"


@pytest.mark.parametrize(
    ("pair", "said", "hint"),
    [
        ("dedupe-head: false", "pair: dedupe-head: false would be no option", "no_dedupe_head"),
        ("exclude-layers: a\n  exclude_layers: b", "pair: one option has two spellings", "one"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path: Path, pair: str, said: str, hint: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"target: a\ndraft: b\nout: {tmp_path / 'c'}\npair:\n  {pair}\n")
    with pytest.raises(ToolError) as refused:
        cli.main(["release", str(path), "--print"], standalone_mode=False)
    assert said in refused.value.message
    assert hint in refused.value.hint


def test_dashed_options_of_the_pair_reach_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"target: a\ndraft: b\nout: {tmp_path / 'c'}\npair:\n  exclude-layers: ['*x']\n"
    )
    cli.main(["release", str(path), "--print"], standalone_mode=False)
    assert "quantize plan a --draft b --exclude-layers '*x'" in capsys.readouterr().out


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_example_recipes_name_known_options(path: Path) -> None:
    cli.main(["release", str(path), "--print"], standalone_mode=False)


def test_a_release_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Planned, written, proven and published from one file; then nothing is done again."""
    write_llama(tmp_path / "t")
    write_draft(tmp_path / "d")
    recipe: dict[str, Any] = {
        "target": "t",
        "draft": "d",
        "out": "out",
        "pair": {"scheme": "bf16", "draft_scheme": "bf16"},
        "publish": {"repo_id": "org/t", "draft_repo_id": "no/d"},
    }
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with serve() as hub:
        env = environment(hub.url, tmp_path / "home")

        def run(*options: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "quantize.cli", "release", "r.yaml", *options]
            return subprocess.run(
                command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
            )

        printed = run("--print")
        assert [line.split()[:2] for line in printed.stdout.splitlines()] == [
            ["quantize", verb] for verb in ("plan", "pair", "verify", "publish")
        ]
        assert not (tmp_path / "out").exists()
        stopped = run("--yes")
        assert stopped.returncode == 1
        assert "jane may not write to no" in stopped.stderr
        assert "release stopped at publish (exit code 1)" in stopped.stderr
        assert not hub.repos
        before = (tmp_path / "out" / "target" / "model.safetensors").stat().st_mtime_ns

        recipe["publish"]["draft_repo_id"] = "org/d"
        path.write_text(yaml.safe_dump(recipe))
        done = run("--yes", "--json", "--quiet")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] == {
            **dict.fromkeys(("plan", "pair", "verify"), "had passed"),
            "accept": "not asked for",
            "publish": "passed",
        }
        assert hub.repos.keys() == {"org/t", "org/d"}
        assert (tmp_path / "out" / "target" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_for_this_command(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quantize.cli", "completion", shell],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_QUANTIZE_COMPLETE" in done.stdout
    assert "quantize" in done.stdout


def test_bash_completes_verbs_and_options() -> None:
    def complete(line: str) -> list[str]:
        words = line.split(" ")
        env = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run(
            [sys.executable, "-c", "from quantize.cli import main; main()"],
            env=os.environ | env | {"_QUANTIZE_COMPLETE": "bash_complete", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        return [item.partition(",")[2] for item in done.stdout.splitlines()]

    assert complete("quantize pu") == ["publish"]
    assert "--draft-repo-id" in complete("quantize publish --dr")
    assert complete("quantize release r.yaml --until ve") == ["verify"]


def test_every_verb_shows_an_example_that_parses() -> None:
    for name, command in cli.commands.items():
        text = command.help or ""
        assert "\n\n    Example: " in text or "Example: " in text, name
        example = text.partition("Example: ")[2].strip().splitlines()[0]
        words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'))
        assert words[:2] == ["quantize", name]
        if name != "release":  # its file is relative to the repository
            parse(words[1:])


def test_a_command_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError):
        parse(["publish", "out"])
