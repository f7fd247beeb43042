"""Each architecture, small, through the whole line and into the real vLLM's class for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import runs
import tiny
from vllm_server import ENVIRONMENT

from models.base import Family
from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.errors import BadPlan
from quantize.job import run_one
from quantize.plan import Options, Plan, make_plan
from quantize.roles import find_family
from quantize.share import quantized_share
from quantize.source import split_experts
from quantize.vllm_names import get_matching_fused, name_runtime_modules
from schemes.base import TensorSpec

LOADER = Path(__file__).with_name("load_families.py")
BUILDERS = (*families.TARGETS, *families.DRAFTS)
NAMES = [build.__name__ for build in BUILDERS]


def specs_of(shapes: families.Shapes) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, "F32" if families.FLOAT32.fullmatch(name) else "BF16", shape)
        for name, shape in shapes.items()
    }


def plan_of(
    config: dict[str, Any], shapes: families.Shapes, scheme: str = "mxfp4", **options: Any
) -> Plan:
    """The plan of a checkpoint of these shapes, fused experts split as a source does."""
    specs = specs_of(shapes)
    weights = split_experts(find_family(specs, config), specs, {})
    parts = {part for weight in weights.values() for part in weight.parts}
    logical = {name: spec for name, spec in specs.items() if name not in parts}
    logical |= {name: weight.spec for name, weight in weights.items()}
    return make_plan(logical, config, Options(scheme, **options), target_layers=2, weights=weights)


# What is quantized by default, as AMD publishes these models or as its Quark templates say


POLICY = {
    "llama": {"attention", "mlp"},
    "mistral": {"attention", "mlp"},
    "qwen2": {"attention", "mlp"},
    "qwen3": {"attention", "mlp"},
    "gemma": {"attention", "mlp"},
    "gemma2": {"attention", "mlp"},
    "gemma3": {"attention", "mlp"},
    "gemma3_vl": {"attention", "mlp"},
    "phi3": {"attention", "mlp"},
    "qwen3_moe": {"attention", "mlp", "expert"},
    "glm4_moe": {"expert"},
    "deepseek_v3": {"mlp", "shared expert", "expert"},
    "kimi_k2": {"mlp", "shared expert", "expert"},
    "kimi_k25": {"mlp", "shared expert", "expert"},
    "minimax_m2": {"expert"},
    "minimax_m3": {"shared expert", "expert"},
    "gpt_oss": {"attention", "expert"},
    "llama4": {"attention", "mlp", "shared expert", "expert"},
    "eagle3_llama": {"attention", "mlp"},
    "eagle3_llama_long": {"attention", "mlp"},
    "eagle3_qwen3": {"attention", "mlp"},
    "eagle3_mla": {"attention", "mlp"},
}


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_what_is_quantized_by_default(build: Any) -> None:
    plan = plan_of(*build())
    quantized = [entry for entry in plan.entries if entry.scheme]
    assert {entry.role for entry in quantized} == POLICY[build.__name__]
    kept = ("embed", "norm", "gate.weight", "router", "vision", "projector", "bias", "lm_head")
    assert not [e.source.name for e in quantized if any(word in e.source.name for word in kept)]
    assert not [e.source.name for e in quantized if "kv_b_proj" in e.source.name]
    for entry in plan.entries:
        if entry.source.dtype == "F32":
            assert entry.stored == (entry.source,)


@pytest.mark.parametrize("build", [families.deepseek_v3, families.glm4_moe])
def test_an_mtp_layer_is_quantized_when_it_is_asked_for(build: Any) -> None:
    asked = plan_of(*build(), layer_schemes=(("model.layers.2.mlp.experts.*", "mxfp4"),))
    made = {e.source.module for e in asked.entries if e.scheme and "layers.2." in e.source.name}
    assert made == {
        f"model.layers.2.mlp.experts.{n}.{leaf}_proj"
        for n in range(families.EXPERTS)
        for leaf in ("gate", "up", "down")
    }


def test_attention_in_fp8_beside_experts_in_mxfp4() -> None:
    plan = plan_of(*families.kimi_k25(), layer_schemes=(("*self_attn*", "fp8_rowwise"),))
    schemes = {e.source.module.rpartition(".")[2]: e.scheme for e in plan.entries if e.scheme}
    latent = {name for name in families.LATENT if name.endswith(("proj", "mqa"))}
    assert {leaf for leaf, scheme in schemes.items() if scheme == "fp8_rowwise"} == latent
    assert {leaf for leaf, scheme in schemes.items() if scheme == "mxfp4"} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert plan.quantization_config is not None
    assert list(plan.quantization_config["layer_quant_config"]) == ["*self_attn*"]


def test_one_key_for_the_experts_of_a_layer() -> None:
    globs = (("*experts.*", "mxfp4"),)
    plan = plan_of(*families.qwen3_moe(), "fp8_rowwise", layer_schemes=globs)
    assert plan.quantization_config is not None
    assert list(plan.quantization_config["layer_quant_config"]) == ["model.layers.1.mlp.experts"]


def test_experts_that_vllm_would_not_load_in_bf16() -> None:
    with pytest.raises(BadPlan, match=r"experts\.0\.gate_up_proj\.weight and 15 more") as caught:
        plan_of(*families.gpt_oss(), exclude=("*experts*",))
    assert "bf16" in caught.value.hint


# Layers that are incomplete


def refuse(config: dict[str, Any], shapes: families.Shapes) -> str:
    with pytest.raises(BadPlan) as caught:
        plan_of(config, shapes)
    return caught.value.message


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
MISSING = [
    EXPERT,
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_a_layernorm.weight",
    "model.layers.1.self_attn.kv_b_proj.weight",
    "model.layers.2.mlp.experts.0.down_proj.weight",
    "model.layers.2.eh_proj.weight",
    "model.layers.2.hnorm.weight",
]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_is_named(name: str) -> None:
    config, shapes = families.deepseek_v3()
    del shapes[name]
    _, _, number, inner = name.split(".", 3)
    assert f"layer {number} lacks {inner}" in refuse(config, shapes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_routed_experts": 5}, "layer 1 lacks mlp.experts.4.down_proj.weight"),
        ({"n_routed_experts": 3}, "by config.json it has 3 experts"),
        ({"n_routed_experts": None}, "n_routed_experts is None"),
        ({"n_routed_experts": 10**9}, "n_routed_experts is 1000000000"),
        ({"first_k_dense_replace": 2}, "layer 1 lacks mlp.down_proj.weight"),
        ({"first_k_dense_replace": "1"}, "does not tell whether layer 0 has experts"),
        ({"num_nextn_predict_layers": 0}, "found tensors of 3 layers"),
        ({"num_hidden_layers": 3}, "layer 1 lacks eh_proj.weight"),
        ({"q_lora_rank": None}, "layer 0 lacks self_attn.q_proj.weight"),
    ],
)
def test_a_config_that_contradicts_the_layers(changes: dict[str, Any], words: str) -> None:
    config, shapes = families.deepseek_v3()
    assert words in refuse(config | changes, shapes)


def test_layers_for_prediction_may_be_left_out() -> None:
    config, shapes = families.deepseek_v3()
    short = {name: shape for name, shape in shapes.items() if "layers.2." not in name}
    assert plan_of(config, short).family == "deepseek_v3"


def test_queries_without_a_low_rank_are_not_fused() -> None:
    """As in DeepSeek-V2-Lite: ``kv_a_proj_with_mqa`` is a module of its own there."""
    config, shapes = families.deepseek_v3()
    lite: families.Shapes = {}
    for name, shape in shapes.items():
        if "q_a_proj" in name:
            lite[name.replace("q_a_proj", "q_proj")] = (128, families.H)
        elif "q_b_proj" not in name and "q_a_layernorm" not in name:
            lite[name] = shape
    plan = plan_of(config | {"q_lora_rank": None}, lite)
    family = find_family(specs_of(lite), config)
    modules = [
        entry.source.module for entry in plan.entries if "layers.0.self_attn" in entry.source.name
    ]
    runtime = name_runtime_modules(family, modules, None)
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in runtime


# The share of bytes


def test_the_share_of_bytes_and_its_warning() -> None:
    config, shapes = families.minimax_m2()
    plan = plan_of(config, shapes)
    size = {name: (4 if families.FLOAT32.fullmatch(name) else 2) for name in shapes}
    weigh = {name: size[name] for name in shapes}
    for name, shape in shapes.items():
        for length in shape:
            weigh[name] *= length
    experts = sum(weight for name, weight in weigh.items() if ".experts." in name)
    assert quantized_share(plan.entries) == pytest.approx(experts / sum(weigh.values()))
    assert not [note for note in plan.notes if "mixture of experts" in note]
    kept = plan_of(*families.qwen3_moe(), exclude=("*experts*",))
    (note,) = (note for note in kept.notes if "mixture of experts" in note)
    assert "kept as expert" in note
    assert not plan_of(*families.llama(), exclude=("*mlp*", "*layers.0*")).notes


# Built and loaded by vLLM itself


FIRST = ("*layers.0.*",)
RUNS: dict[str, tuple[Callable[[], families.Checkpoint], tuple[str, ...]]] = {
    **{build.__name__: (build, ()) for build in BUILDERS},
    # Exclusions that vLLM does not find by the checkpoint's own names.
    "qwen3_moe, a dense layer kept": (families.qwen3_moe, FIRST),
    "minimax_m2, experts kept": (families.minimax_m2, FIRST),
    "gpt_oss, attention kept": (families.gpt_oss, ("*self_attn*",)),
    "eagle3_qwen3, attention kept": (families.eagle3_qwen3, ("*self_attn*",)),
    "eagle3_mla, attention kept": (families.eagle3_mla, ("*self_attn*",)),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Every family through the line to FP8, then vLLM's answer about the output."""
    root = tmp_path_factory.mktemp("families")
    pairs: dict[str, list[str]] = {}
    for name, (build, exclude) in RUNS.items():
        source = root / "sources" / build.__name__
        if not source.exists():
            config, shapes = build()
            tiny.write(source, config, families.materialize(shapes))
        if build in families.DRAFTS:
            target = root / "sources" / families.DRAFTS[build].__name__
            job = runs.draft_job(source, target, "fp8_rowwise", exclude=exclude)
            pairs[name] = [str(target), str(root / name)]
        else:
            job = runs.target_job(source, "fp8_rowwise", exclude=exclude)
            pairs[name] = [str(root / name)]
        run_one(job, root / name, runs.settings())
    done = subprocess.run(
        [sys.executable, str(LOADER), json.dumps([*pairs.values()]), str(root)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return {name: (root / name, answer) for name, answer in zip(pairs, answers, strict=True)}


def quantized_modules(out: Checkpoint) -> set[str]:
    return {spec.module for spec in out.specs.values() if spec.dtype == "F8_E4M3"}


@pytest.mark.parametrize("name", RUNS)
def test_vllm_loads_the_output_and_reads_every_name_as_its_bytes_are(
    name: str, served: dict[str, tuple[Path, Any]]
) -> None:
    path, answer = served[name]
    assert isinstance(answer, list), answer[-3000:]
    out = open_checkpoint(str(path))
    family = find_family(out.specs, out.config)
    found = answer[-1]
    assert found["loaded"] is None, found["loaded"]
    check_renames(family, found)
    modules = families.linear_modules({n: spec.shape for n, spec in out.specs.items()})
    predicted = name_runtime_modules(family, modules, 2)
    made = quantized_modules(out)
    asked = {module: dtype for module, (_, dtype, _) in found["asked"].items()}
    if family.name == "eagle3_qwen3":  # built first by the parent class, and replaced
        replaced = asked.pop("model.layers.2.self_attn.qkv_proj")
        assert replaced == asked["model.layers.2.qkv_proj"]
    assert asked.keys() <= predicted.keys()
    for module, members in predicted.items():
        expected = {"fp8_e4m3" if member in made else None for member in members}
        # What vLLM builds without asking is never quantized.
        assert expected == {asked.get(module)}, module
    assert made


def check_renames(family: Family, found: dict[str, Any]) -> None:
    for module, (_, _, fused) in found["asked"].items():
        if ".layers." in module and "vision" not in module:
            known = {group: [*names] for group, names in get_matching_fused(family).items()}
            assert known == {group: fused.get(group) for group in known}, module
            # vLLM adds these to the class, so that only the next model of it has them.
            assert fused.keys() - known.keys() <= {*family.joined.values()}
    if not family.draft:
        assert found["renamed"]
        for name, renamed in found["renamed"].items():
            assert family.renames.apply(name) == renamed
