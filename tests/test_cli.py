"""The command line as the user meets it: options, exit codes, stdout and stderr, folders."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import (
    draft_config,
    draft_tensors,
    llama_config,
    llama_tensors,
    random,
    write,
    write_draft,
    write_llama,
)

from quantize.cli import main

COMMAND = [sys.executable, "-m", "quantize.cli"]
RESULT = {"tool", "version", "command", "ok", "source", "output", "plan", "checks", "provenance"}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        data = json.loads(self.out)
        assert isinstance(data, dict)
        assert self.out.count("\n") == 1
        return data


def run_main(arguments: tuple[str | Path, ...]) -> Done:
    """`main` with these arguments, in this process."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["quantize", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
    return Done(int(caught.value.code or 0), out.getvalue(), err.getvalue())


Quantize = Callable[..., Done]


@pytest.fixture(scope="module")
def quantize() -> Quantize:
    return lambda *arguments: run_main(arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``target`` (untied, two shards, side files) and its ``draft`` with an equal head."""
    root = tmp_path_factory.mktemp("models")
    config = llama_config()
    write(root / "target", config, llama_tensors(config), shards=2)
    draft = draft_config()
    head = {"lm_head.weight": llama_tensors(config)["lm_head.weight"]}
    write(root / "draft", draft, draft_tensors(draft) | head)
    for name in SIDE_FILES + STALE_FILES:
        text = "{}" if name.endswith(".json") else "x"
        (root / "target" / name).write_text(text.ljust(2000))
    (root / "target" / "original").mkdir()
    (root / "target" / "original" / "consolidated.pth").write_text("x")
    return root


SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "merges.txt",
    "LICENSE",
)
STALE_FILES = (
    "pytorch_model.bin",
    "optimizer.pt",
    "model.gguf",
    "hf_quant_config.json",
    "quantize_config.json",
    "quantization_report.json",
    "README.md",
    "training_args.bin",
    "setup.py",
    ".gitattributes",
)


def digests(path: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file.relative_to(path)): (
            sha256(file.read_bytes()).hexdigest(),
            file.stat().st_mtime_ns,
        )
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def schemes(plan: dict[str, Any]) -> dict[str, str | None]:
    return {item["name"]: item["scheme"] for item in plan["tensors"]}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in sorted(opened.keys())}
    return found


# Nothing heavy before it is needed


HEAVY = ("torch", "quark", "vllm", "transformers", "huggingface_hub", "safetensors.torch")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "TARGET", "--draft", "DRAFT"]])
def test_help_and_plan_import_nothing_heavy(folder: Path, arguments: list[str]) -> None:
    places = {"TARGET": str(folder / "target"), "DRAFT": str(folder / "draft")}
    script = (
        "import sys\nfrom quantize.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    code = done.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *(places.get(a, a) for a in arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] in ("[] 0", "[] None"), done.stderr


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8_rowwise"])
def test_quantizing_imports_neither_torch_nor_quark(folder: Path, scheme: str) -> None:
    """Their import takes longer than quantizing a small model; the card needs huggingface_hub."""
    out = str(folder / f"out-{scheme}")
    script = (
        f"import sys\nsys.argv = ['quantize', 'run', {str(folder / 'target')!r}, '-o', {out!r}, "
        f"'--scheme', {scheme!r}, '--no-verify', '--device', 'cpu']\n"
        "from quantize.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    code = done.code\n"
        f"print([name for name in {HEAVY[:4]} if name in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[] 0", done.stderr


@pytest.mark.parametrize("verb", ["plan", "run", "pair", "verify", "demo"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_has_help_with_an_example(quantize: Quantize, verb: str, flag: str) -> None:
    done = quantize(verb, flag)
    assert done.code == 0
    assert f"Example: quantize {verb}" in done.out


def test_version(quantize: Quantize) -> None:
    done = quantize("--version")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"\d+\.\d+", done.out)


# plan


def test_a_plan_in_json_is_one_object_and_a_table_on_stderr(
    quantize: Quantize, folder: Path
) -> None:
    done = quantize("plan", folder / "target", "--draft", folder / "draft", "--json")
    assert done.code == 0, done.err
    data = done.json
    assert data.keys() >= RESULT
    assert (data["tool"], data["command"], data["ok"]) == ("pairquant", "plan", True)
    assert data["provenance"]["command"][:2] == ["quantize", "plan"]
    assert data["plan"]["scheme"] == "mxfp4"
    assert data["draft_plan"]["scheme"] == "fp8_rowwise"
    assert data["plan"]["tensor_parallel"] == [1, 2]
    item = data["plan"]["tensors"][0]
    assert {"name", "role", "scheme", "reason", "stored", "dtype", "shape"} <= item.keys()
    assert data["plan"]["bytes_after"] < data["plan"]["bytes_before"]
    head = next(check for check in data["checks"] if check["name"] == "shared head")
    assert head["status"] == "not_measured"
    assert "preserved" in done.err
    assert "tensor-parallel" in done.err
    assert "total" in done.err


def test_a_plan_writes_nothing_on_stdout_without_json(quantize: Quantize, folder: Path) -> None:
    done = quantize("plan", folder / "target")
    assert (done.code, done.out) == (0, "")
    assert "model.layers.*.mlp.up_proj.weight" in done.err


def test_quiet(quantize: Quantize, folder: Path) -> None:
    done = quantize("plan", folder / "target", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = quantize("plan", folder / "target", "--quiet", "--json")
    assert done.json["ok"]
    assert done.err == ""


def test_a_misfit_is_noted_for_the_user(quantize: Quantize, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", intermediate_size=80, num_hidden_layers=1)
    done = quantize("plan", source)
    assert done.code == 0
    assert "note: 1 weights stay BF16 (" in done.err


def test_planning_a_draft_alone(quantize: Quantize, folder: Path) -> None:
    done = quantize("plan", folder / "draft", "--json")
    assert done.code == 1
    assert "--target" in done.json["hint"]
    done = quantize("plan", folder / "draft", "--target", folder / "target", "--json")
    assert done.code == 0
    assert done.json["plan"]["kind"] == "draft"
    assert done.json["plan"]["target_layers"] == 8


@pytest.mark.parametrize("verb", [["plan"], ["run", "-o", "OUT", "--scheme", "bf16"]])
def test_a_target_of_a_target_is_refused(
    quantize: Quantize, folder: Path, tmp_path: Path, verb: list[str]
) -> None:
    name, *rest = (str(tmp_path / "out") if word == "OUT" else word for word in verb)
    done = quantize(name, folder / "target", *rest, "--target", folder / "target")
    assert done.code == 1
    assert "--target" in done.err
    assert str(folder / "target") in done.err
    assert "hint: " in done.err


# Exit codes and errors


def test_a_refusal_is_exit_code_1_with_error_and_hint(quantize: Quantize, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    done = quantize("plan", missing)
    assert (done.code, done.out) == (1, "")
    first, second = done.err.splitlines()
    assert first.startswith("error: ")
    assert str(missing) in first
    assert second.startswith("hint: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["plan"], "MODEL"),
        (["plan", "TARGET", "--model-dir", "TARGET"], "MODEL"),
        (["plan", "TARGET", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["run", "TARGET", "--scheme", "bf16"], "--output-dir"),
        (["run", "TARGET", "-o", "OUT"], "--scheme"),
        (["run", "TARGET", "-o", "OUT", "--scheme", "bf16", "--max-shard-size", "5 apples"], "5GB"),
        (["run", "TARGET", "-o", "OUT", "--scheme", "bf16", "--workers", "0"], "--workers"),
        (["pair", "TARGET", "-o", "OUT"], "DRAFT"),
        (["plan", "TARGET", "--layer-scheme", "*mlp*"], "--layer-scheme"),
        (["plan", "TARGET", "--exclude-layers"], "--exclude-layers"),
        (["plan", "TARGET", "--exclude-layers", "--quiet"], "--exclude-layers"),
        (["plan", "--exclude-layers", "*mlp*", "TARGET"], "before"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_usage_is_exit_code_2(
    quantize: Quantize,
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    word: str,
    as_json: bool,
) -> None:
    places = {"TARGET": str(folder / "target"), "OUT": str(tmp_path / "out")}
    given = [places.get(word, word) for word in arguments]
    done = quantize(*given[:1], *(["--json"] if as_json else []), *given[1:])
    assert done.code == 2
    assert word in done.err
    assert "Traceback" not in done.err
    if as_json:
        assert done.json["ok"] is False
        assert word in done.json["error"]
        assert done.json["hint"]
    else:
        assert done.out == ""
    assert not (tmp_path / "out").exists()


def test_an_error_in_json_is_one_object(quantize: Quantize, folder: Path) -> None:
    done = quantize("plan", folder / "target", "--exclude-layers", "*q_proj", "--json")
    assert done.code == 1
    data = done.json
    assert (data["tool"], data["command"], data["ok"]) == ("pairquant", "plan", False)
    assert "qkv_proj" in data["error"]
    assert data["hint"]
    assert data["error"] in done.err


def test_an_unknown_scheme_is_refused_with_the_known_ones(quantize: Quantize, folder: Path) -> None:
    done = quantize("plan", folder / "target", "--scheme", "int4")
    assert done.code == 1
    assert "int4" in done.err
    assert "fp8_rowwise" in done.err


def test_a_misfitting_pair_is_exit_code_1(quantize: Quantize, folder: Path, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", vocab_size=100, draft_vocab_size=100)
    for verb in (["plan", folder / "target", "--draft"], ["pair", folder / "target"]):
        more = ["-o", tmp_path / "out"] if verb[0] == "pair" else []
        done = quantize(*verb, draft, *more, "--json")
        assert done.code == 1
        assert "vocab_size 100" in done.json["error"]
        assert done.json["hint"]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_an_interrupt_is_exit_code_130_and_the_same_command_continues(
    quantize: Quantize, tmp_path: Path
) -> None:
    weights = llama_tensors(llama_config())
    large = torch.zeros(3 * 10**5, 64, dtype=torch.bfloat16)
    weights |= {"lm_head.weight": large, "model.embed_tokens.weight": large.clone()}
    write(tmp_path / "model", llama_config(vocab_size=3 * 10**5), weights)
    command = ["run", str(tmp_path / "model"), "-o", str(tmp_path / "out")]
    command += ["--scheme", "bf16", "--json"]
    process = subprocess.Popen(
        [*COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    limit = time.monotonic() + 60
    while not (tmp_path / "out.partial").exists() and time.monotonic() < limit:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert json.loads(out)["ok"] is False
    assert not (tmp_path / "out").exists()
    done = quantize(*command)
    assert done.code == 0, done.err
    assert tensors(tmp_path / "out").keys() == tensors(tmp_path / "model").keys()


# Colour


def on_a_terminal(arguments: list[str], **environment: str) -> tuple[int, str]:
    """Run with stderr on a terminal; its output."""
    ours, theirs = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=kept | {"TERM": "xterm-256color", "COLUMNS": "160"} | environment,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    return process.wait(), text.decode()


def test_colour_only_on_a_terminal_and_never_with_no_color(folder: Path) -> None:
    arguments = ["plan", str(folder / "target"), "--draft", str(folder / "draft")]
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    code, coloured = on_a_terminal(arguments)
    assert code == 0
    assert colour.search(coloured)
    code, plain = on_a_terminal(arguments, NO_COLOR="1")
    assert code == 0
    assert not colour.search(plain)
    assert "not_measured" in plain, "the status is a word, not a colour"


def test_no_escape_codes_without_a_terminal(quantize: Quantize, folder: Path) -> None:
    assert "\x1b" not in quantize("plan", folder / "target").err


# Spellings


@pytest.mark.parametrize("spelling", ["--scheme", "--quant-scheme", "--quant_scheme"])
@pytest.mark.parametrize(
    ("scheme", "name"),
    [("w_mxfp4_a_mxfp4", "mxfp4"), ("ptpc_fp8", "fp8_rowwise"), ("FP8_DYNAMIC", "fp8_rowwise")],
)
def test_scheme_spellings(
    quantize: Quantize, folder: Path, spelling: str, scheme: str, name: str
) -> None:
    done = quantize("plan", folder / "target", spelling, scheme, "--json")
    assert done.json["plan"]["scheme"] == name
    assert done.json["plan"]["tensors"][1]["scheme"] in (name, None)
    assert name in schemes(done.json["plan"]).values()


@pytest.mark.parametrize("name", ["--exclude-layers", "--exclude_layers"])
def test_exclusions_take_several_values_and_repeat(
    quantize: Quantize, folder: Path, name: str
) -> None:
    target = str(folder / "target")
    one = quantize(
        "plan", target, name, "*self_attn*", "*layers.0.mlp*", "lm_head", "--quiet", "--json"
    )
    assert one.code == 0, one.err
    found = schemes(one.json["plan"])
    assert found["model.layers.1.self_attn.q_proj.weight"] is None
    assert found["model.layers.0.mlp.up_proj.weight"] is None
    assert found["model.layers.1.mlp.up_proj.weight"] == "mxfp4"
    two = quantize("plan", target, name, "*self_attn*", name, "*layers.0.mlp*", "--json", "--quiet")
    assert two.json["plan"]["tensors"] == one.json["plan"]["tensors"]
    three = quantize("plan", f"{name}=*self_attn*", "--json", name, "*layers.0.mlp*", "--", target)
    assert three.json["plan"]["tensors"] == one.json["plan"]["tensors"]


@pytest.mark.parametrize(
    "name", ["--layer-scheme", "--layer_scheme", "--layer-quant-scheme", "--layer_quant_scheme"]
)
def test_layer_scheme_spellings(quantize: Quantize, folder: Path, name: str) -> None:
    done = quantize(
        "plan",
        folder / "target",
        *(name, "*self_attn*", "ptpc_fp8"),
        *(name, "*layers.3.mlp*", "bf16"),
        "--json",
    )
    found = schemes(done.json["plan"])
    assert found["model.layers.3.self_attn.q_proj.weight"] == "fp8_rowwise"
    assert found["model.layers.3.mlp.up_proj.weight"] is None
    assert found["model.layers.2.mlp.up_proj.weight"] == "mxfp4"


@pytest.mark.parametrize("style", ["-", "_"])
def test_draft_options_apply_to_the_draft_and_others_to_the_target(
    quantize: Quantize, folder: Path, style: str
) -> None:
    def spell(name: str) -> str:
        return "--" + name.replace("-", style)

    done = quantize(
        "plan",
        folder / "target",
        *("--draft", folder / "draft"),
        *(spell("draft-quant-scheme"), "mxfp4"),
        *(spell("draft-exclude-layers"), "*mlp*"),
        *(spell("draft-layer-scheme"), "fc", "fp8_rowwise"),
        *(spell("exclude-layers"), "*self_attn*"),
        "--json",
    )
    assert done.code == 0, done.err
    target, draft = schemes(done.json["plan"]), schemes(done.json["draft_plan"])
    assert draft["fc.weight"] == "fp8_rowwise"
    assert draft["midlayer.mlp.up_proj.weight"] is None
    assert draft["midlayer.self_attn.q_proj.weight"] == "mxfp4"
    assert target["model.layers.0.self_attn.q_proj.weight"] is None
    assert target["model.layers.0.mlp.up_proj.weight"] == "mxfp4"


def test_a_command_pasted_from_a_card(quantize: Quantize, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = quantize(
        "run",
        *("--model_dir", folder / "target"),
        *("--quant_scheme", "bf16"),
        *("--exclude_layers", "*lm_head", "*self_attn*"),
        *("--layer_quant_scheme", "*mlp*", "bf16"),
        *("--output_dir", out),
        "--file2file_quantization",
        "--quiet",
    )
    assert done.code == 0, done.err
    assert (out / "config.json").is_file()


def test_pair_takes_both_models_as_options(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    done = quantize(
        "pair",
        *("--model-dir", folder / "target", "--draft-model-dir", folder / "draft"),
        *("--scheme", "bf16", "--draft_scheme", "bf16", "--output-dir", tmp_path / "out"),
        "--quiet",
    )
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "draft" / "config.json").is_file()


# Recipes


def recipe(path: Path, text: str) -> Path:
    file = path / "recipe.yaml"
    file.write_text(text)
    return file


def test_a_recipe_sets_options_and_the_command_line_wins(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    file = recipe(
        tmp_path,
        f"""
model: {folder / "target"}
scheme: fp8_rowwise
exclude_layers: ["*layers.0.mlp*", lm_head]
layer-scheme: [["*self_attn*", mxfp4]]
""",
    )
    done = quantize("plan", "--recipe", file, "--json")
    assert done.code == 0, done.err
    found = schemes(done.json["plan"])
    assert found["model.layers.0.mlp.up_proj.weight"] is None
    assert found["model.layers.1.mlp.up_proj.weight"] == "fp8_rowwise"
    assert found["model.layers.1.self_attn.q_proj.weight"] == "mxfp4"
    done = quantize("plan", "--scheme", "bf16", "--recipe", file, "--json")
    assert done.json["plan"]["scheme"] == "bf16"


def test_a_recipe_may_name_one_exclusion_as_a_word(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    file = recipe(tmp_path, 'exclude_layers: "*self_attn*"\nlayer_scheme: ["*mlp*", fp8_rowwise]\n')
    done = quantize("plan", folder / "target", "--recipe", file, "--json")
    assert done.code == 0, done.err
    found = schemes(done.json["plan"])
    assert found["model.layers.0.self_attn.q_proj.weight"] is None
    assert found["model.layers.0.mlp.up_proj.weight"] == "fp8_rowwise"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shceme: mxfp4\n", ("shceme", "scheme")),
        ("recipe: other.yaml\n", ("recipe",)),
        ("- scheme\n", ("mapping",)),
        ("scheme: [unclosed\n", ("recipe.yaml",)),
        ("scheme: mxfp4\nscheme: bf16\n", ("recipe.yaml", "line 2", "'scheme' is there twice")),
        ("scheme: [mxfp4, fp8_rowwise]\n", ("scheme",)),
        ("layer_scheme: {fc: fp8_rowwise}\n", ("layer_scheme",)),
        ("allow_unmatched: perhaps\n", ("perhaps",)),
        ("max_shard_size: large\n", ("large",)),
        ("output_dir: a\nout: b\n", ("unknown key 'out'",)),
        ("output_dir: a\noutput-dir: b\n", ("output-dir", "another key")),
        ("no_dedupe_head: true\n", ("unknown key 'no_dedupe_head'", "dedupe_head")),
        ("exclude_layers: [[a]]\n", ("exclude_layers",)),
        ("exclude_layers:\n", ("exclude_layers", "None")),
        ("1: 2\n", ("unknown key 1",)),
    ],
)
def test_a_wrong_recipe_is_refused(
    quantize: Quantize, folder: Path, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    file = recipe(tmp_path, text)
    out = ["-o", tmp_path / "o"] if "output_dir" not in text else []
    scheme = [] if text.startswith("scheme") else ["--scheme", "bf16"]
    done = quantize("run", folder / "target", "--recipe", file, *out, *scheme)
    assert done.code == 2, done.err
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err


def test_a_recipe_that_is_not_there_is_refused(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    done = quantize("plan", folder / "target", "--recipe", tmp_path / "none.yaml")
    assert done.code == 2
    assert "none.yaml" in done.err


# run


def run_bf16(quantize: Quantize, source: Path, out: Path, *more: str) -> Done:
    return quantize("run", source, "-o", out, "--scheme", "bf16", "--quiet", "--json", *more)


def test_run_writes_a_complete_folder_and_leaves_the_source_alone(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    before = digests(folder / "target")
    out = tmp_path / "out"
    done = run_bf16(quantize, folder / "target", out)
    assert done.code == 0, done.err
    assert done.err == ""
    data = done.json
    assert data.keys() >= RESULT
    assert data["ok"] is True
    assert data["output"] == str(out)
    assert {check["status"] for check in data["checks"]} == {"pass"}
    assert digests(folder / "target") == before
    found = {path.name for path in out.iterdir()}
    made = {"config.json", "model.safetensors", "quantization_report.json", "README.md"}
    assert found == made | set(SIDE_FILES)
    for name in SIDE_FILES:
        assert (out / name).read_bytes() == (folder / "target" / name).read_bytes()
    for name in ("README.md", "quantization_report.json"):
        assert (out / name).read_bytes() != (folder / "target" / name).read_bytes()
    source = tensors(folder / "target")
    written = tensors(out)
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name]) for name in source)
    config = (folder / "target" / "config.json").read_text()
    assert json.dumps(json.loads((out / "config.json").read_text())) == json.dumps(
        json.loads(config)
    )
    assert not (tmp_path / "out.partial").exists()


def test_remote_code_travels_with_the_model_that_names_it(
    quantize: Quantize, tmp_path: Path
) -> None:
    source = write_llama(
        tmp_path / "model", num_hidden_layers=1, auto_map={"AutoConfig": "configuration_x.XConfig"}
    )
    (source / "configuration_x.py").write_text("raise SystemExit('never run')\n")
    done = run_bf16(quantize, source, tmp_path / "out")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "configuration_x.py").is_file()


def test_shards_stay_within_the_limit_with_an_honest_index(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run_bf16(quantize, folder / "target", out, "--max-shard-size", "60KB")
    assert done.code == 0, done.err
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3
    assert max(path.stat().st_size for path in shards) <= 60_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    written = tensors(out)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values())
    assert index["weight_map"].keys() == written.keys()
    for name, shard in index["weight_map"].items():
        with safe_open(out / shard, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("text", "size"), [("1KB", 10**3), ("0.5MB", 5 * 10**5), ("5gb", 5 * 10**9), ("123", 123)]
)
def test_sizes_are_decimal(text: str, size: int) -> None:
    from quantize.quantities import Size

    assert Size().convert(text, None, None) == size


def test_a_tensor_larger_than_a_shard_is_refused_before_anything_is_written(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    done = run_bf16(quantize, folder / "target", tmp_path / "out", "--max-shard-size", "9KB")
    assert done.code == 1
    assert "--max-shard-size" in done.json["hint"]
    assert ".weight" in done.json["error"]
    assert not list(tmp_path.iterdir())


def test_no_verify_is_recorded(quantize: Quantize, folder: Path, tmp_path: Path) -> None:
    done = run_bf16(quantize, folder / "target", tmp_path / "out", "--no-verify")
    assert done.code == 0
    assert "not_measured" in {check["status"] for check in done.json["checks"]}
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert "not_measured" in {check["status"] for check in report["checks"]}


def test_a_draft_needs_its_target(quantize: Quantize, folder: Path, tmp_path: Path) -> None:
    done = run_bf16(quantize, folder / "draft", tmp_path / "out")
    assert done.code == 1
    assert "--target" in done.json["hint"]
    done = run_bf16(
        quantize, folder / "draft", tmp_path / "out", "--target", str(folder / "target")
    )
    assert done.code == 0, done.err
    assert "lm_head.weight" not in tensors(tmp_path / "out"), "an equal copy is dropped"
    done = run_bf16(
        quantize,
        folder / "draft",
        tmp_path / "kept",
        *("--target", str(folder / "target"), "--no-dedupe-head"),
    )
    assert done.code == 0, done.err
    kept = tensors(tmp_path / "kept")["lm_head.weight"]
    assert torch.equal(kept, tensors(folder / "target")["lm_head.weight"])


def test_a_device_that_is_not_there_is_refused(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    for device in ("tpu", "cuda:99"):
        done = run_bf16(quantize, folder / "target", tmp_path / "out", "--device", device)
        assert done.code == 1
        assert device in done.json["error"]
        assert "--device cpu" in done.json["hint"]


# Where the output may go


@pytest.mark.parametrize("where", ["model", "model/out", ".", "link/out", "model/../model"])
@pytest.mark.parametrize("verb", ["run", "pair"])
def test_out_may_not_touch_a_source(
    quantize: Quantize, tmp_path: Path, where: str, verb: str
) -> None:
    source = write_llama(tmp_path / "model")
    (tmp_path / "link").symlink_to(source, target_is_directory=True)
    drafts = [write_draft(tmp_path / "draft")] if verb == "pair" else []
    before = digests(tmp_path)
    more = ["--draft-scheme", "bf16"] if verb == "pair" else []
    done = quantize(
        verb, source, *drafts, "-o", tmp_path / where, "--scheme", "bf16", *more, "--json"
    )
    assert done.code == 1
    assert "inside, above or equal" in done.json["error"]
    assert str(source) in done.json["error"]
    assert "-o" in done.json["hint"]
    assert digests(tmp_path) == before


def test_a_run_of_a_draft_may_not_write_into_its_target(quantize: Quantize, folder: Path) -> None:
    before = digests(folder)
    target = folder / "target"
    done = run_bf16(quantize, folder / "draft", target / "out", "--target", str(target))
    assert done.code == 1
    assert str(target) in done.json["error"]
    assert digests(folder) == before


def test_an_output_that_is_there_is_refused(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    done = run_bf16(quantize, folder / "target", out)
    assert done.code == 1
    assert str(out) in done.json["error"]
    assert "mine.txt" in done.json["error"]
    assert "verify" in done.json["hint"]
    done = run_bf16(quantize, folder / "target", out, "--restart")
    assert done.code == 1
    assert (out / "mine.txt").read_text() == "mine"
    file = tmp_path / "file"
    file.write_text("mine")
    done = run_bf16(quantize, folder / "target", file)
    assert done.code == 1
    assert str(file) in done.json["error"]
    assert file.read_text() == "mine"


def test_an_empty_output_folder_is_used(quantize: Quantize, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run_bf16(quantize, folder / "target", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_a_partial_folder_of_someone_else_is_refused(
    quantize: Quantize, folder: Path, tmp_path: Path, more: list[str]
) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine.txt").write_text("mine")
    done = run_bf16(quantize, folder / "target", tmp_path / "out", *more)
    assert done.code == 1
    assert str(partial) in done.json["error"]
    assert "mine.txt" in done.json["error"]
    assert "another -o" in done.json["hint"]
    assert (partial / "mine.txt").read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_a_partial_link_is_not_followed(quantize: Quantize, folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "out.partial").symlink_to(elsewhere, target_is_directory=True)
    done = run_bf16(quantize, folder / "target", tmp_path / "out")
    assert done.code == 1
    assert "out.partial" in done.json["error"]
    assert not list(elsewhere.iterdir())


# pair and verify


@pytest.fixture(scope="module")
def made_pair(quantize: Quantize, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pair") / "out"
    done = quantize(
        *("pair", folder / "target", folder / "draft", "-o", out),
        *("--scheme", "bf16", "--draft-scheme", "bf16", "--quiet", "--json"),
    )
    assert done.code == 0, done.err
    assert done.json.keys() >= RESULT
    assert done.json["plan"].keys() == {"target", "draft"}
    assert done.err == ""
    return out


def test_a_pair_is_two_folders_a_report_and_a_script(made_pair: Path) -> None:
    assert {p.name for p in made_pair.iterdir()} == {"target", "draft", "report.json", "serve.sh"}
    assert os.access(made_pair / "serve.sh", os.X_OK)
    assert "lm_head.weight" not in tensors(made_pair / "draft")
    assert "lm_head.weight" in tensors(made_pair / "target")
    digest = sha256((made_pair / "report.json").read_bytes()).hexdigest()
    for half in ("target", "draft"):
        report = json.loads((made_pair / half / "quantization_report.json").read_text())
        assert report["pair"]["sha256"] == digest


def test_verify_and_its_exit_codes(
    quantize: Quantize, folder: Path, made_pair: Path, tmp_path: Path
) -> None:
    sources = ["--source", folder / "target", "--draft-source", folder / "draft"]
    full = quantize("verify", made_pair, *sources, "--json", "--junit", tmp_path / "junit.xml")
    assert full.code == 0, full.err
    assert full.json["checks"].keys() == {"target", "draft", "pair"}
    assert {c["status"] for part in full.json["checks"].values() for c in part} == {"pass"}
    assert "<testsuites" in (tmp_path / "junit.xml").read_text()
    lacking = quantize("verify", made_pair, "--json")
    assert lacking.code == 1
    assert lacking.json["ok"] is False
    assert "--source" in lacking.err
    excused = quantize("verify", made_pair, "--json", "--allow-unmeasured")
    assert excused.code == 0
    statuses = {c["status"] for part in excused.json["checks"].values() for c in part}
    assert statuses == {"pass", "not_measured"}


@pytest.mark.parametrize("option", ["--junit", "--html", "--summary"])
def test_a_file_that_verify_cannot_write_is_refused_before_the_proof(
    quantize: Quantize, tmp_path: Path, option: str
) -> None:
    """OUT is not there: whoever hears of the file first, hears of it before any work."""
    places = {"none/x": "there is no folder", ".": "this is a folder"}
    if os.geteuid():
        (tmp_path / "kept").touch(mode=0o400)
        places["kept"] = "may not be written"
    for place, said in places.items():
        done = quantize("verify", tmp_path / "out", option, tmp_path / place)
        assert done.code == 1
        assert done.err.startswith(f"error: {option} {tmp_path / place}: {said}")
        assert "\nhint: name a file" in done.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_file_for_which_there_is_no_space_is_no_traceback(
    quantize: Quantize, made_pair: Path
) -> None:
    done = quantize("verify", made_pair, "--junit", "/dev/full")
    assert done.code == 1
    assert "error: a file that was asked for was not written: [Errno 28]" in done.err


def test_verify_with_another_source_fails(
    quantize: Quantize, made_pair: Path, tmp_path: Path
) -> None:
    config = llama_config()
    other = llama_tensors(config)
    other["model.layers.3.mlp.up_proj.weight"] = random(128, 64, seed=1234)
    write(tmp_path / "other", config, other)
    done = quantize(
        "verify", made_pair / "target", "--source", tmp_path / "other", "--json", "--quiet"
    )
    assert done.code == 1
    failed = [c for part in done.json["checks"].values() for c in part if c["status"] == "fail"]
    assert "model.layers.3.mlp.up_proj.weight" in json.dumps(failed)


@pytest.mark.parametrize("make", ["missing", "foreign"])
def test_verify_of_what_we_did_not_write_is_refused(
    quantize: Quantize, tmp_path: Path, make: str
) -> None:
    out = tmp_path / "out"
    if make == "foreign":
        write_llama(out)
    done = quantize("verify", out, "--json")
    assert done.code == 1
    assert str(out) in done.json["error"]
    assert done.json["hint"]


def test_a_draft_source_without_a_draft_is_refused(
    quantize: Quantize, folder: Path, made_pair: Path
) -> None:
    done = quantize("verify", made_pair / "target", "--draft-source", folder / "draft", "--json")
    assert done.code == 1
    assert "--draft-source" in done.json["error"]
    assert "--draft" in done.json["hint"]


def test_required_sharing_of_different_heads_fails_before_anything_is_written(
    quantize: Quantize, folder: Path, tmp_path: Path
) -> None:
    config = draft_config()
    own = {"lm_head.weight": random(128, 64, seed=3)}
    draft = write(tmp_path / "draft", config, draft_tensors(config) | own)
    arguments = ["pair", folder / "target", draft, "-o", tmp_path / "out", "--json"]
    arguments += ["--scheme", "bf16", "--draft-scheme", "bf16", "--quiet"]
    done = quantize(*arguments, "--require-shared-head")
    assert done.code == 1
    assert "not shared" in done.json["error"]
    assert "--require-shared-head" in done.json["hint"]
    assert not (tmp_path / "out.partial").exists()
    done = quantize(*arguments)
    assert done.code == 0, done.err
    heads = [c for c in done.json["checks"]["pair"] if c["name"] == "shared head"]
    assert [(c["status"], c["measured"]) for c in heads] == [("pass", "not shared")]
