"""What vLLM reads beside the weights: config.json, exclusions, shards and their index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors import safe_open
from tiny import draft_config, draft_tensors, llama_config, llama_tensors

from quantize.errors import BadPlan
from quantize.layout import index_json, lay_out
from quantize.metadata import edit_config
from quantize.plan import Options, Plan, make_plan
from schemes.base import TensorSpec

Specs = dict[str, TensorSpec]
NAMES = {"torch.bfloat16": "BF16"}


def specs_of(tensors: Mapping[str, Any]) -> Specs:
    return {n: TensorSpec(n, NAMES[str(t.dtype)], tuple(t.shape)) for n, t in tensors.items()}


def target_plan(scheme: str = "mxfp4", **options: Any) -> Plan:
    config = llama_config(num_hidden_layers=2)
    return make_plan(specs_of(llama_tensors(config)), config, Options(scheme, **options))


def draft_plan(layers: int = 1, target_layers: int = 8, **options: Any) -> Plan:
    config = draft_config(num_hidden_layers=layers)
    tensors = draft_tensors(config, "midlayer." if layers == 1 else "layers.0.")
    for n in range(1, layers):
        again = draft_tensors(config, f"layers.{n}.")
        tensors |= {name: t for name, t in again.items() if name.startswith("layers.")}
    return make_plan(
        specs_of(tensors), config, Options("fp8_rowwise", **options), target_layers=target_layers
    )


def written(plan: Plan) -> dict[str, Any]:
    assert plan.quantization_config is not None
    return plan.quantization_config


# quantization_config


@pytest.mark.parametrize("plan", [target_plan(), target_plan("fp8_rowwise"), draft_plan()])
def test_what_vllm_insists_on_is_there(plan: Plan) -> None:
    # vLLM's QuarkConfig.from_config: `export` is required and its kv_cache_group has a length;
    # `exclude` is iterated and `layer_type_quant_config` asked with .get.
    config = written(plan)
    assert config["quant_method"] == "quark"
    assert config["export"]["kv_cache_group"] == []
    assert config["export"]["pack_method"] == "reorder"
    assert isinstance(config["exclude"], list)
    assert config["layer_type_quant_config"] == {}
    assert config["layer_quant_config"] == {}
    assert config["global_quant_config"]["output_tensors"] is None
    assert json.loads(json.dumps(config)) == config


def test_the_tensor_configurations_say_the_scheme() -> None:
    # As dumped from Quark 0.13 for its schemes mxfp4 and ptpc_fp8.
    mxfp4 = written(target_plan())["global_quant_config"]
    for part, dynamic in (("weight", False), ("input_tensors", True)):
        spec = mxfp4[part]
        assert (spec["dtype"], spec["qscheme"], spec["group_size"]) == ("fp4", "per_group", 32)
        assert (spec["scale_format"], spec["scale_calculation_mode"]) == ("e8m0", "even")
        assert spec["is_dynamic"] is dynamic
    fp8 = written(target_plan("fp8_rowwise"))["global_quant_config"]
    for part, dynamic, axis in (("weight", False, 0), ("input_tensors", True, 1)):
        spec = fp8[part]
        assert (spec["dtype"], spec["qscheme"], spec["ch_axis"]) == (
            "fp8_e4m3",
            "per_channel",
            axis,
        )
        assert spec["is_dynamic"] is dynamic
        assert spec["symmetric"] is True


# Exclusions of a target: the exact names


def test_a_targets_exclusions_are_its_module_names() -> None:
    assert written(target_plan())["exclude"] == ["lm_head"]
    plan = target_plan(exclude=("*layers.1.mlp*",))
    assert written(plan)["exclude"] == [
        "lm_head",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
    ]


def test_no_embedding_is_ever_listed() -> None:
    for plan in (target_plan(), draft_plan(), target_plan(exclude=("*embed_tokens",))):
        assert not [name for name in written(plan)["exclude"] if "embed" in name]


# Exclusions of a draft: vLLM asks for other names than the checkpoint has


def runtime_names(layers: int, target_layers: int) -> set[str]:
    """As vLLM's ``llama_eagle3.py`` builds them, recorded from a run with 8 target layers."""
    leaves = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    names = {f"model.layers.{target_layers + n}.{leaf}" for n in range(layers) for leaf in leaves}
    return names | {"model.fc", "lm_head"}


def vllm_leaves_alone(name: str, exclude: list[str]) -> bool:
    """``should_ignore_layer`` with the empty mapping that a draft gets: equal, or ``re.match``."""
    return any(re.match(e[3:], name) if e.startswith("re:") else e == name for e in exclude)


def left_alone(plan: Plan, layers: int = 1, target_layers: int = 8) -> set[str]:
    exclude = written(plan)["exclude"]
    return {n for n in runtime_names(layers, target_layers) if vllm_leaves_alone(n, exclude)}


def test_a_drafts_fc_and_head_are_left_alone_in_vllm() -> None:
    assert left_alone(draft_plan()) == {"model.fc", "lm_head"}


def test_quarks_own_list_would_not_leave_a_drafts_fc_alone() -> None:
    # The mistake that kills a draft silently: what file-to-file export writes.
    assert not vllm_leaves_alone("model.fc", ["fc", "lm_head"])


def test_a_drafts_exclusions_keep_the_checkpoints_names_too() -> None:
    exclude = written(draft_plan(exclude=("*mlp*",)))["exclude"]
    assert {"fc", "midlayer.mlp.down_proj", "midlayer.mlp.gate_proj"} <= set(exclude)


@pytest.mark.parametrize(
    ("pattern", "leaves"),
    [
        ("*mlp*", {"mlp.gate_up_proj", "mlp.down_proj"}),
        ("*self_attn*", {"self_attn.qkv_proj", "self_attn.o_proj"}),
        ("*o_proj", {"self_attn.o_proj"}),
        ("*[qkv]_proj", {"self_attn.qkv_proj"}),
    ],
)
def test_a_drafts_layers_have_fused_names_after_the_targets(pattern: str, leaves: set[str]) -> None:
    found = left_alone(draft_plan(exclude=(pattern,)))
    assert found == {"model.fc", "lm_head"} | {f"model.layers.8.{leaf}" for leaf in leaves}


def test_fc_quantized_on_request_is_not_left_alone() -> None:
    assert left_alone(draft_plan(layer_schemes=(("fc", "fp8_rowwise"),))) == {"lm_head"}


def test_one_of_two_draft_layers_is_left_alone() -> None:
    plan = draft_plan(2, 1, exclude=("layers.0.mlp*",))
    found = left_alone(plan, 2, 1)
    assert found == {
        "model.fc",
        "lm_head",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.1.mlp.down_proj",
    }


def test_expressions_are_anchored_and_escaped() -> None:
    exclude = written(draft_plan(2, 1, exclude=("layers.0.mlp*",)))["exclude"]
    expressions = [entry for entry in exclude if entry.startswith("re:")]
    assert expressions
    for near in (
        "model.fc2",
        "model.fc.weight",
        "modelxfc",
        "xmodel.fc",
        "model.layers.11.mlp.down_proj",
        "model.layers.1xmlp.down_proj",
        "model.layers.1.mlp.down_proj2",
        "lm_head2",
    ):
        assert not vllm_leaves_alone(near, exclude), near


def test_a_drafts_layer_scheme_reaches_the_fused_name() -> None:
    config = written(draft_plan(layer_schemes=(("*self_attn*", "mxfp4"),)))
    keys = config["layer_quant_config"]
    assert config["global_quant_config"]["weight"]["dtype"] == "fp8_e4m3"
    from fnmatch import fnmatch

    # vLLM: a key with a star is a glob, and one without is looked up the other way round.
    hit = [key for key in keys if fnmatch("model.layers.8.self_attn.qkv_proj", key)]
    assert hit and "*" in hit[0]
    assert keys[hit[0]]["weight"]["dtype"] == "fp4"
    assert not [key for key in keys if fnmatch("model.layers.8.mlp.gate_up_proj", key)]


# config.json


CONFIG = {
    "zeta": 1,
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "rope_scaling": {"b": 1, "a": [1, 2.5, None, True]},
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "nothing": None,
    "big": 2**63,
    "words": "naïve 语言 \u2028",
    "alpha": 0,
}


def test_every_other_key_keeps_name_value_and_order() -> None:
    edited = edit_config(CONFIG, {"quant_method": "quark"})
    assert list(edited) == [*CONFIG, "quantization_config"]
    assert edited.pop("quantization_config") == {"quant_method": "quark"}
    assert json.dumps(edited) == json.dumps(CONFIG)


def test_a_model_left_in_bf16_keeps_its_config() -> None:
    assert json.dumps(edit_config(CONFIG, None)) == json.dumps(CONFIG)


def test_the_sources_config_is_not_changed_in_place() -> None:
    before = json.dumps(CONFIG)
    edit_config(CONFIG, {"quant_method": "quark"})
    assert json.dumps(CONFIG) == before


# Shards and index


def groups(seed: int) -> list[tuple[TensorSpec, ...]]:
    """Weights with their scales, of odd sizes and mixed dtypes, and small tensors between."""
    random = Random(seed)
    made: list[tuple[TensorSpec, ...]] = []
    for n in range(30):
        rows, columns = random.randint(1, 40), random.randint(1, 9)
        name = f"model.layers.{n}.{'x' * random.randint(0, 60)}"
        made.append(
            (
                TensorSpec(f"{name}.weight", "U8", (rows, columns)),
                TensorSpec(f"{name}.weight_scale", "F32", (rows,)),
            )
        )
        made.append((TensorSpec(f"{name}.norm", random.choice(["BF16", "I64"]), (rows,)),))
    return made


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1500, 4000, 10**6])
def test_shards_are_valid_within_the_limit_and_indexed_honestly(
    tmp_path: Path, seed: int, limit: int
) -> None:
    made = groups(seed)
    shards = lay_out(made, limit)
    where = {}
    total = 0
    for shard in shards:
        path = tmp_path / shard.name
        path.write_bytes(shard.header + b"\0" * (shard.size - len(shard.header)))
        assert path.stat().st_size <= limit
        with safe_open(path, "pt") as file:  # safetensors itself validates the header
            assert file.metadata() == {"format": "pt"}
            for name in sorted(file.keys()):
                view = file.get_slice(name)
                where[name] = (shard.name, view.get_dtype(), tuple(view.get_shape()))
                total += file.get_tensor(name).nbytes
    flat = [spec for group in made for spec in group]
    assert {n: (d, s) for n, (_, d, s) in where.items()} == {
        s.name: (s.dtype, s.shape) for s in flat
    }
    index = index_json(shards, flat)
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"] == {name: shard for name, (shard, _, _) in where.items()}
    for group in made:
        assert len({where[spec.name][0] for spec in group}) == 1, "a weight lies beside its scale"


def test_shard_names() -> None:
    (single,) = lay_out(groups(0), 10**6)
    assert single.name == "model.safetensors"
    several = lay_out(groups(0), 4000)
    assert len(several) > 1
    assert [s.name for s in several] == [
        f"model-{n:05}-of-{len(several):05}.safetensors" for n in range(1, len(several) + 1)
    ]


@pytest.mark.parametrize("dtype", ["F32", "I64"])
def test_wide_items_are_aligned_behind_narrow_ones(dtype: str) -> None:
    made = [(TensorSpec("a", "U8", (3,)),), (TensorSpec("b", dtype, (5,)),)]
    (shard,) = lay_out(made, 10**6)
    assert shard.offsets["b"] % {"F32": 4, "I64": 8}[dtype] == 0


def test_a_tensor_larger_than_a_shard_is_refused() -> None:
    spec = TensorSpec("model.embed_tokens.weight", "BF16", (1000, 10))
    with pytest.raises(BadPlan) as caught:
        lay_out([(spec,)], 10_000)
    assert "model.embed_tokens.weight" in caught.value.message
    assert "10000" in caught.value.message
    assert "--max-shard-size" in caught.value.hint
