"""The fate of every tensor, decided from headers: no file, no weight, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from quantize.errors import BadPlan
from quantize.plan import Options, Plan, make_plan, plan_from_json
from schemes.base import TensorSpec

Specs = dict[str, TensorSpec]

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def add(specs: Specs, name: str, *shape: int, dtype: str = "BF16") -> None:
    specs[name] = TensorSpec(name, dtype, shape)


def add_linears(specs: Specs, prefix: str, h: int, i: int, reads: int, dtype: str = "BF16") -> None:
    shapes = ((h, reads), (h // 2, reads), (h // 2, reads), (h, h), (i, h), (i, h), (h, i))
    for linear, shape in zip(LINEARS, shapes, strict=True):
        add(specs, f"{prefix}{linear}.weight", *shape, dtype=dtype)


def target_specs(
    h: int = 64, i: int = 128, layers: int = 2, *, head: bool = True, dtype: str = "BF16"
) -> Specs:
    specs: Specs = {}
    add(specs, "model.embed_tokens.weight", 128, h, dtype=dtype)
    for n in range(layers):
        add_linears(specs, f"model.layers.{n}.", h, i, h, dtype)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(specs, f"model.layers.{n}.{norm}.weight", h, dtype=dtype)
    add(specs, "model.norm.weight", h, dtype=dtype)
    if head:
        add(specs, "lm_head.weight", 128, h, dtype=dtype)
    return specs


def draft_specs(layer: str = "midlayer.", h: int = 64) -> Specs:
    specs: Specs = {}
    add(specs, "fc.weight", h, 3 * h)
    add_linears(specs, layer, h, 128, 2 * h)
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        add(specs, f"{layer}{norm}.weight", h)
    add(specs, "norm.weight", h)
    return specs


def config(architecture: str = "LlamaForCausalLM", layers: int = 2, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "num_hidden_layers": layers, "vocab_size": 128} | more


DRAFT = config("LlamaForCausalLMEagle3", layers=1)


def plan_target(specs: Specs, scheme: str = "mxfp4", **options: Any) -> Plan:
    return make_plan(specs, config(), Options(scheme, **options))


def plan_draft(specs: Specs, scheme: str = "fp8_rowwise", **options: Any) -> Plan:
    return make_plan(specs, DRAFT, Options(scheme, **options), target_layers=8)


def fates(plan: Plan) -> dict[str, str | None]:
    return {entry.source.name: entry.scheme for entry in plan.entries}


def quantized(plan: Plan) -> set[str]:
    return {name for name, scheme in fates(plan).items() if scheme}


def reason(plan: Plan, name: str) -> str:
    return next(entry.reason for entry in plan.entries if entry.source.name == name)


def refuse(
    specs: Specs, settings: Mapping[str, Any], options: Options, **more: Any
) -> tuple[str, str]:
    with pytest.raises(BadPlan) as caught:
        make_plan(specs, settings, options, **more)
    assert caught.value.hint, "a refusal names the next step"
    return caught.value.message, caught.value.hint


def layer_linears(layers: int, prefix: str = "model.layers.") -> set[str]:
    return {f"{prefix}{n}.{linear}.weight" for n in range(layers) for linear in LINEARS}


# Defaults per family


def test_llama_quantizes_all_decoder_linears_and_nothing_else() -> None:
    plan = plan_target(target_specs())
    assert plan.family == "llama"
    assert plan.kind == "target"
    assert quantized(plan) == layer_linears(2)
    assert set(fates(plan)) == set(target_specs()), "every source tensor has an entry"
    kept = {e.source.name: e for e in plan.entries if e.scheme is None}
    for name, entry in kept.items():
        assert entry.stored == (entry.source,), f"{name} is preserved bit for bit"


def test_stored_tensors_of_both_schemes_have_the_published_shapes() -> None:
    # Quark's file-to-file export: U8 [N, K/2] with U8 [N, K/32]; F8_E4M3 [N, K] with F32 [N].
    name = "model.layers.0.mlp.down_proj.weight"
    scale = "model.layers.0.mlp.down_proj.weight_scale"
    mxfp4 = plan_target(target_specs()).stored
    assert mxfp4[name] == TensorSpec(name, "U8", (64, 64))
    assert mxfp4[scale] == TensorSpec(scale, "U8", (64, 4))
    fp8 = plan_target(target_specs(), "fp8_rowwise").stored
    assert fp8[name] == TensorSpec(name, "F8_E4M3", (64, 128))
    assert fp8[scale] == TensorSpec(scale, "F32", (64,))


def test_qwen2_keeps_its_biases() -> None:
    specs = target_specs()
    biases = [f"model.layers.{n}.self_attn.{p}_proj.bias" for n in range(2) for p in "qkv"]
    for name in biases:
        add(specs, name, 64)
    plan = make_plan(specs, config("Qwen2ForCausalLM"), Options("mxfp4"))
    assert plan.family == "qwen2"
    assert quantized(plan) == layer_linears(2)
    assert {e.role for e in plan.entries if e.source.name in biases} == {"bias"}


def test_qwen3_keeps_its_query_and_key_norms() -> None:
    specs = target_specs()
    norms = [f"model.layers.{n}.self_attn.{p}_norm.weight" for n in range(2) for p in "qk"]
    for name in norms:
        add(specs, name, 16)
    plan = make_plan(specs, config("Qwen3ForCausalLM"), Options("mxfp4"))
    assert plan.family == "qwen3"
    assert quantized(plan) == layer_linears(2)
    assert {e.role for e in plan.entries if e.source.name in norms} == {"norm"}


def test_llama_has_no_role_for_the_norms_of_qwen3() -> None:
    specs = target_specs()
    add(specs, "model.layers.0.self_attn.q_norm.weight", 16)
    message, _ = refuse(specs, config(), Options("mxfp4"))
    assert "model.layers.0.self_attn.q_norm.weight" in message


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_draft_keeps_fc_head_embedding_and_maps(layer: str, architecture: str) -> None:
    specs = draft_specs(layer)
    add(specs, "lm_head.weight", 64, 64)
    add(specs, "embed_tokens.weight", 128, 64)
    add(specs, "d2t", 64, dtype="I64")
    add(specs, "t2d", 128, dtype="BOOL")
    for n in range(3):
        add(specs, f"fc_norm.{n}.weight", 64)
    add(specs, "input_norm.weight", 192)
    settings = DRAFT | {"architectures": [architecture]}
    plan = make_plan(specs, settings, Options("fp8_rowwise"), target_layers=8)
    assert plan.kind == "draft"
    assert quantized(plan) == {f"{layer}{linear}.weight" for linear in LINEARS}


def test_a_draft_saved_as_llama_is_recognised_by_its_fc() -> None:
    plan = make_plan(draft_specs(), config(layers=1), Options("fp8_rowwise"), target_layers=8)
    assert plan.kind == "draft"
    assert fates(plan)["fc.weight"] is None


def test_a_draft_of_another_architecture_is_refused() -> None:
    message, hint = refuse(
        draft_specs(), config("Qwen2ForCausalLM", layers=1), Options("mxfp4"), target_layers=8
    )
    assert "Qwen2ForCausalLM" in message
    assert "fc.weight" in message
    assert "EAGLE-3" in hint


# The generic decoder


def generic_specs(layers: int = 2) -> Specs:
    specs = target_specs(layers=layers)
    for n in range(layers):
        add(specs, f"model.layers.{n}.mlp.gate.weight", 8, 64)
        for expert in range(2):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                add(specs, f"model.layers.{n}.mlp.experts.{expert}.{leaf}.weight", 64, 64)
    return specs


def test_an_unknown_decoder_is_served_by_its_names_and_says_so() -> None:
    specs = generic_specs()
    plan = make_plan(specs, config("NovelForCausalLM"), Options("mxfp4"))
    assert plan.family == "generic"
    experts = {name for name in specs if ".experts." in name}
    assert quantized(plan) == layer_linears(2) | experts
    routers = {e.source.name for e in plan.entries if e.role == "router"}
    assert routers == {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mixer.in_kernel.weight", (64, 64)),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 64)),
        ("model.layers.0.mlp.experts.0.extra_proj.weight", (4, 64, 64)),
        ("model.layers.0.self_attn.conv_proj.weight", (64, 1, 4)),
        ("visual.patch_embed.weight", (64, 64)),
    ],
)
def test_a_tensor_of_unclear_role_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    specs = generic_specs()
    add(specs, name, *shape)
    message, hint = refuse(specs, config("NovelForCausalLM"), Options("mxfp4"))
    assert name in message
    assert str(list(shape)) in message
    assert "models/" in hint


def test_a_missing_layer_is_refused() -> None:
    specs = {n: s for n, s in generic_specs(3).items() if not n.startswith("model.layers.1.")}
    message, hint = refuse(specs, config("NovelForCausalLM", layers=3), Options("mxfp4"))
    assert "num_hidden_layers" in message
    assert "0, 2" in message
    assert "incomplete" in hint


@pytest.mark.parametrize("layers", [None, 3, "2"])
def test_a_layer_count_that_the_tensors_contradict_is_refused(layers: Any) -> None:
    message, _ = refuse(target_specs(), config(layers=layers), Options("mxfp4"))
    assert "config.json" in message
    assert repr(layers) in message


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "NovelForCausalLM"])
@pytest.mark.parametrize(
    "lost", ["self_attn.v_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.gate_proj"]
)
def test_a_missing_member_of_a_fused_module_is_refused(architecture: str, lost: str) -> None:
    specs = target_specs()
    del specs[f"model.layers.1.{lost}.weight"]
    message, hint = refuse(specs, config(architecture), Options("mxfp4"))
    assert "layer 1" in message
    assert f"{lost}.weight" in message
    assert "incomplete" in hint


@pytest.mark.parametrize("lost", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_missing_linear_of_a_known_family_is_refused(lost: str) -> None:
    specs = target_specs(layers=1)
    del specs[f"model.layers.0.{lost}.weight"]
    message, _ = refuse(specs, config(layers=1), Options("mxfp4"))
    assert f"{lost}.weight" in message


@pytest.mark.parametrize("lost", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_target_without_embedding_or_norm_is_refused(lost: str) -> None:
    specs = target_specs()
    del specs[lost]
    message, hint = refuse(specs, config(), Options("mxfp4"))
    assert lost in message
    assert "incomplete" in hint


def test_a_fused_member_that_all_layers_lack_is_refused() -> None:
    specs = {n: s for n, s in target_specs().items() if "v_proj" not in n}
    message, _ = refuse(specs, config("NovelForCausalLM"), Options("mxfp4"))
    assert "self_attn.v_proj.weight" in message


def test_a_lone_member_of_a_fused_module_may_be_all_there_is() -> None:
    specs = {n: s for n, s in target_specs().items() if "gate_proj" not in n}
    plan = make_plan(specs, config("NovelForCausalLM"), Options("mxfp4"))
    assert fates(plan)["model.layers.0.mlp.up_proj.weight"] == "mxfp4"


def test_a_bias_that_one_layer_lacks_is_refused() -> None:
    specs = target_specs()
    add(specs, "model.layers.0.self_attn.q_proj.bias", 64)
    message, _ = refuse(specs, config("Qwen2ForCausalLM"), Options("mxfp4"))
    assert "layer 1" in message
    assert "self_attn.q_proj.bias" in message


def test_a_missing_norm_of_one_layer_is_refused() -> None:
    specs = target_specs()
    del specs["model.layers.1.input_layernorm.weight"]
    message, _ = refuse(specs, config(), Options("mxfp4"))
    assert "layer 1" in message
    assert "input_layernorm.weight" in message


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "LlamaForCausalLM"])
def test_unclear_architectures_are_refused(architectures: Any) -> None:
    settings = config() | {"architectures": architectures}
    message, _ = refuse(target_specs(), settings, Options("mxfp4"))
    assert "config.json" in message
    assert "architectures" in message


# Precedence: head, exclusions, layer schemes, defaults

QKV = ("*q_proj", "*k_proj", "*v_proj")


def test_no_option_quantizes_the_head() -> None:
    plan = plan_target(target_specs(), layer_schemes=(("*", "fp8_rowwise"),))
    assert fates(plan)["lm_head.weight"] is None
    assert {fates(plan)[name] for name in layer_linears(2)} == {"fp8_rowwise"}


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "model.norm"])
def test_a_layer_scheme_for_what_is_never_quantized_is_refused(module: str) -> None:
    message, hint = refuse(
        target_specs(), config(), Options("mxfp4", layer_schemes=((module, "fp8_rowwise"),))
    )
    assert module in message
    assert "never quantized" in hint


def test_an_exclusion_wins_over_a_layer_scheme() -> None:
    plan = plan_target(
        target_specs(), exclude=("*mlp*",), layer_schemes=(("*mlp*", "fp8_rowwise"),)
    )
    assert {fates(plan)[f"model.layers.0.{linear}.weight"] for linear in LINEARS[4:]} == {None}
    assert "*mlp*" in reason(plan, "model.layers.0.mlp.up_proj.weight")


def test_a_layer_scheme_wins_over_the_default_and_the_first_match_counts() -> None:
    plan = plan_target(
        target_specs(),
        layer_schemes=(("*layers.0.self_attn*", "bf16"), ("*self_attn*", "fp8_rowwise")),
    )
    assert fates(plan)["model.layers.0.self_attn.q_proj.weight"] is None
    assert fates(plan)["model.layers.1.self_attn.q_proj.weight"] == "fp8_rowwise"
    assert fates(plan)["model.layers.1.mlp.up_proj.weight"] == "mxfp4"


def test_exclusions_add_to_the_familys() -> None:
    plan = plan_draft(draft_specs(), exclude=("*mlp*",))
    assert quantized(plan) == {f"midlayer.{linear}.weight" for linear in LINEARS[:4]}
    assert fates(plan)["fc.weight"] is None


def test_fc_is_quantized_when_asked() -> None:
    plan = plan_draft(draft_specs(), layer_schemes=(("fc", "fp8_rowwise"),))
    assert fates(plan)["fc.weight"] == "fp8_rowwise"
    assert plan.stored["fc.weight"].dtype == "F8_E4M3"
    assert plan.quantization_config is not None
    assert not [n for n in plan.quantization_config["exclude"] if "fc" in n]


def test_an_exclusion_of_fc_wins_over_its_layer_scheme() -> None:
    plan = plan_draft(draft_specs(), exclude=("fc",), layer_schemes=(("fc", "fp8_rowwise"),))
    assert fates(plan)["fc.weight"] is None


def test_every_reason_explains_itself() -> None:
    plan = plan_target(
        target_specs(), exclude=("*0.mlp*",), layer_schemes=(("*self_attn*", "fp8_rowwise"),)
    )
    assert "head" in reason(plan, "lm_head.weight")
    assert "--exclude-layers" in reason(plan, "model.layers.0.mlp.up_proj.weight")
    assert "--layer-scheme" in reason(plan, "model.layers.0.self_attn.q_proj.weight")
    assert all(entry.reason for entry in plan.entries)


# Patterns


@pytest.mark.parametrize("field", ["exclude", "layer_schemes"])
def test_a_pattern_that_matches_nothing_is_refused(field: str) -> None:
    value: Any = ("*atention*",) if field == "exclude" else (("*atention*", "fp8_rowwise"),)
    options = {"exclude": "--exclude-layers", "layer_schemes": "--layer-scheme"}
    message, hint = refuse(target_specs(), config(), Options("mxfp4", **{field: value}))
    assert options[field] in message
    assert "*atention*" in message
    assert "--allow-unmatched" in hint
    plan = plan_target(target_specs(), allow_unmatched=True, **{field: value})
    assert quantized(plan) == layer_linears(2)


@pytest.mark.parametrize(
    "pattern", ["model.layers.0.mlp.up_proj.weight", "*up_proj.weight", "lm_head.weight"]
)
def test_a_pattern_with_the_weight_suffix_is_told_the_right_spelling(pattern: str) -> None:
    message, hint = refuse(target_specs(), config(), Options("mxfp4", exclude=(pattern,)))
    assert pattern in message
    assert repr(pattern.removesuffix(".weight")) in hint


def test_matching_is_case_sensitive_and_whole_as_fnmatch_is() -> None:
    refuse(target_specs(), config(), Options("mxfp4", exclude=("*MLP*",)))
    refuse(target_specs(), config(), Options("mxfp4", exclude=("mlp",)))
    specs = target_specs(layers=12)
    settings = config(layers=12)
    plan = make_plan(specs, settings, Options("mxfp4", exclude=("model.layers.1.*",)))
    assert fates(plan)["model.layers.1.mlp.up_proj.weight"] is None
    assert fates(plan)["model.layers.11.mlp.up_proj.weight"] == "mxfp4"
    plan = make_plan(specs, settings, Options("mxfp4", exclude=("model.layers.[01].*",)))
    assert fates(plan)["model.layers.0.mlp.up_proj.weight"] is None


def test_the_head_may_be_excluded_on_a_tied_model_too() -> None:
    for pattern in ("lm_head", "*lm_head"):
        plan = plan_target(target_specs(head=False), exclude=(pattern,))
        assert quantized(plan) == layer_linears(2)
        assert "lm_head.weight" not in plan.stored, "no head tensor is invented"


# Fused modules


@pytest.mark.parametrize(
    ("pattern", "group"),
    [("*layers.1.self_attn.q_proj", "qkv_proj"), ("*layers.1.mlp.gate_proj", "gate_up_proj")],
)
@pytest.mark.parametrize("field", ["exclude", "layer_schemes"])
def test_a_part_of_a_fused_module_is_refused(pattern: str, group: str, field: str) -> None:
    value: Any = (pattern,) if field == "exclude" else ((pattern, "fp8_rowwise"),)
    message, hint = refuse(target_specs(), config(), Options("mxfp4", **{field: value}))
    assert group in message
    assert "model.layers.1." in message
    assert pattern.rpartition(".")[2] in message
    assert "*" in hint


def test_a_part_of_a_drafts_fused_module_is_refused() -> None:
    message, _ = refuse(
        draft_specs(), DRAFT, Options("fp8_rowwise", exclude=("*k_proj",)), target_layers=8
    )
    assert "midlayer.self_attn" in message
    assert "qkv_proj" in message
    assert "k_proj BF16" in message


def test_whole_fused_modules_may_differ_from_their_layer() -> None:
    plan = plan_target(target_specs(), exclude=QKV)
    assert fates(plan)["model.layers.0.self_attn.o_proj.weight"] == "mxfp4"
    assert fates(plan)["model.layers.0.self_attn.v_proj.weight"] is None


def test_mixed_layer_schemes() -> None:
    plan = plan_target(
        target_specs(), layer_schemes=(("*self_attn*", "fp8_rowwise"),), exclude=("*down_proj",)
    )
    found = {
        name.split("layers.0.")[1]: s for name, s in fates(plan).items() if "layers.0." in name
    }
    assert found["self_attn.q_proj.weight"] == found["self_attn.o_proj.weight"] == "fp8_rowwise"
    assert found["mlp.up_proj.weight"] == "mxfp4"
    assert found["mlp.down_proj.weight"] is None
    written = plan.quantization_config
    assert written is not None
    assert written["global_quant_config"]["weight"]["dtype"] == "fp4"
    layer = written["layer_quant_config"]["*self_attn*"]
    assert layer["weight"]["dtype"] == "fp8_e4m3"
    assert written["exclude"] == [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_nothing_left_to_quantize_is_refused() -> None:
    message, hint = refuse(target_specs(), config(), Options("mxfp4", exclude=("*",)))
    assert "nothing is left to quantize" in message
    assert "bf16" in hint


def test_bf16_leaves_a_model_as_it_is() -> None:
    plan = plan_target(target_specs(), "bf16")
    assert plan.stored == target_specs()
    assert plan.quantization_config is None


# MXFP4 and K


def test_a_k_that_is_no_multiple_of_32_stays_bf16_is_excluded_and_noted() -> None:
    specs = target_specs(i=48)  # down_proj reads 48
    plan = plan_target(specs)
    names = [f"model.layers.{n}.mlp.down_proj.weight" for n in range(2)]
    for name in names:
        assert fates(plan)[name] is None
        assert plan.stored[name] == specs[name]
        assert "32" in reason(plan, name)
        assert "48" in reason(plan, name)
    assert any("BF16" in note and names[0] in note for note in plan.notes)
    assert plan.quantization_config is not None
    assert plan.quantization_config["exclude"] == [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert not plan_target(specs, "fp8_rowwise").notes


def test_a_whole_fused_group_may_stay_bf16() -> None:
    plan = plan_target(target_specs(h=48, i=64))
    assert quantized(plan) == {f"model.layers.{n}.mlp.down_proj.weight" for n in range(2)}


# Tensor-parallel sizes: input dim per rank divisible by 32, for o_proj (K = h), down_proj (K = i)


@pytest.mark.parametrize(
    ("h", "i", "sizes"),
    [
        (64, 128, (1, 2)),  # 64/2 = 32; 64/4 = 16
        (576, 1536, (1, 2)),  # SmolLM2-135M: 576/2 = 9 x 32; 576/4 = 144
        (4096, 11008, (1, 2, 4, 8)),  # Llama-2-7B: 11008/8 = 43 x 32; 11008/16 = 688
        (8192, 28672, (1, 2, 4, 8, 16, 32)),  # Llama-3-70B: 28672/32 = 28 x 32
        (3584, 18944, (1, 2, 4, 8, 16)),  # Qwen2.5-7B: 3584/16 = 7 x 32; 18944/16 = 37 x 32
        (96, 96, (1,)),  # 3 x 32
    ],
)
def test_tensor_parallel_sizes_of_mxfp4(h: int, i: int, sizes: tuple[int, ...]) -> None:
    assert plan_target(target_specs(h, i, layers=2)).tensor_parallel == sizes


def test_tensor_parallel_counts_only_what_is_quantized_and_split_along_k() -> None:
    specs = target_specs(64, 128)
    assert plan_target(specs, exclude=("*o_proj",)).tensor_parallel == (1, 2, 4)
    both = ("*o_proj", "*down_proj")
    assert plan_target(specs, exclude=both).tensor_parallel == (1, 2, 4, 8, 16, 32)
    assert plan_target(specs, "fp8_rowwise").tensor_parallel == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("heads", "shared", "sizes"), [(9, 3, (1,)), (8, 2, (1, 2, 4, 8)), (8, 8, (1, 2, 4, 8))]
)
def test_tensor_parallel_sizes_split_the_heads(
    heads: int, shared: int, sizes: tuple[int, ...]
) -> None:
    """vLLM refuses 9 heads on 2 ranks, and repeats 2 key-value heads on 4 or 8."""
    settings = config(num_attention_heads=heads, num_key_value_heads=shared)
    plan = make_plan(target_specs(64, 128), settings, Options("fp8_rowwise"))
    assert plan.tensor_parallel == sizes


# Widths


@pytest.mark.parametrize(
    ("key", "size", "named"),
    [
        ("hidden_size", 128, r"model.embed_tokens.weight \[128, 64\], expected 128 columns"),
        ("vocab_size", 256, r"model.embed_tokens.weight \[128, 64\], expected 256 rows"),
    ],
)
def test_a_config_of_other_widths_is_refused(key: str, size: int, named: str) -> None:
    message, _ = refuse(target_specs(64, 128), config(**{key: size}), Options("mxfp4"))
    assert re.search(named, message)


def test_a_transposed_weight_is_refused() -> None:
    specs = target_specs(64, 128)
    name = "model.layers.1.mlp.down_proj.weight"
    specs[name] = TensorSpec(name, "BF16", specs[name].shape[::-1])
    message, hint = refuse(specs, config(hidden_size=64), Options("mxfp4"))
    assert f"{name} [128, 64], expected 64 rows" in message
    assert "transposed" in hint


# Source dtypes


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_weights_that_are_not_bf16_need_consent(dtype: str) -> None:
    specs = target_specs()
    name = "model.layers.1.mlp.up_proj.weight"
    add(specs, name, 128, 64, dtype=dtype)
    message, hint = refuse(specs, config(), Options("mxfp4"))
    assert name in message
    assert dtype in message
    assert "--cast-weights" in hint
    plan = plan_target(specs, cast_weights=True)
    assert fates(plan)[name] == "mxfp4"
    entry = next(e for e in plan.entries if e.source.name == name)
    assert "cast" in entry.reason
    assert dtype in entry.reason, "the report records the cast"


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_preserved_tensors_keep_their_dtype(dtype: str) -> None:
    specs = target_specs()
    add(specs, "model.norm.weight", 64, dtype=dtype)
    add(specs, "model.layers.0.mlp.up_proj.weight", 128, 64, dtype=dtype)
    add(specs, "model.layers.0.mlp.gate_proj.weight", 128, 64, dtype=dtype)
    plan = plan_target(specs, cast_weights=True, cast_head=True, exclude=("*layers.0.mlp*",))
    assert plan.stored["model.norm.weight"].dtype == dtype
    assert plan.stored["model.layers.0.mlp.up_proj.weight"].dtype == dtype


@pytest.mark.parametrize("dtype", ["F16", "F32"])
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_a_head_that_is_not_bf16_needs_consent_of_its_own(dtype: str, kind: str) -> None:
    specs, settings = (target_specs(), config()) if kind == "target" else (draft_specs(), DRAFT)
    add(specs, "lm_head.weight", 128, 64, dtype=dtype)
    message, hint = refuse(
        specs, settings, Options("fp8_rowwise", cast_weights=True), target_layers=8
    )
    assert "lm_head.weight" in message
    assert dtype in message
    assert "--cast-head" in hint
    plan = make_plan(specs, settings, Options("fp8_rowwise", cast_head=True), target_layers=8)
    assert plan.stored["lm_head.weight"] == TensorSpec("lm_head.weight", "BF16", (128, 64))
    assert dtype in reason(plan, "lm_head.weight"), "the report records the cast"


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_the_embedding_that_is_a_tied_models_head_is_under_the_heads_rule(dtype: str) -> None:
    specs = target_specs(head=False)
    name = "model.embed_tokens.weight"
    add(specs, name, 128, 64, dtype=dtype)
    message, hint = refuse(specs, config(), Options("mxfp4"))
    assert name in message
    assert dtype in message
    assert "--cast-head" in hint
    plan = plan_target(specs, cast_head=True)
    assert plan.stored[name] == TensorSpec(name, "BF16", (128, 64))
    assert dtype in reason(plan, name)
    untied = specs | {"lm_head.weight": TensorSpec("lm_head.weight", "BF16", (128, 64))}
    assert plan_target(untied).stored[name].dtype == dtype


# Schemes by name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("mxfp4", "mxfp4"),
        ("w_mxfp4_a_mxfp4", "mxfp4"),
        ("fp8_rowwise", "fp8_rowwise"),
        ("ptpc_fp8", "fp8_rowwise"),
        ("fp8_per_channel", "fp8_rowwise"),
        ("FP8_DYNAMIC", "fp8_rowwise"),
        ("bf16", "bf16"),
    ],
)
def test_scheme_names_people_paste(spelling: str, name: str) -> None:
    assert plan_target(target_specs(), spelling).scheme == name


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    message, hint = refuse(target_specs(), config(), Options("int4"))
    assert "int4" in message
    assert "mxfp4" in message
    assert "fp8_rowwise" in message
    assert "bf16" in hint


# Bytes and JSON


def test_bytes_before_and_after() -> None:
    data = plan_target(target_specs()).to_json()
    # A layer: q 64x64, k and v 32x64, o 64x64, gate and up 128x64, down 64x128.
    weights = 2 * (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64 + 3 * 128 * 64)
    rest = 2 * 128 * 64 + 2 * 2 * 64 + 64  # embedding, head, norms
    assert data["bytes_before"] == 2 * (weights + rest)
    assert data["bytes_after"] == weights // 2 + weights // 32 + 2 * rest


def test_the_plan_survives_json() -> None:
    import json

    plan = plan_draft(draft_specs(), layer_schemes=(("fc", "mxfp4"),))
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_dropped_tensors_have_no_bytes_and_a_reason() -> None:
    specs = draft_specs()
    add(specs, "lm_head.weight", 128, 64)
    plan = make_plan(
        specs,
        DRAFT,
        Options("fp8_rowwise"),
        target_layers=8,
        dropped={"lm_head.weight": "equal to the target's"},
    )
    assert "lm_head.weight" not in plan.stored
    assert reason(plan, "lm_head.weight") == "dropped: equal to the target's"
    assert plan.quantization_config is not None
    assert "lm_head" in plan.quantization_config["exclude"]
