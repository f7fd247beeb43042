"""The port of vLLM's naming rules, held equal to the installed vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatch
from itertools import combinations, product
from typing import Any

import families
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import FAMILIES, deepseek_v3, eagle3, generic, llama, phi3
from models.base import Family, Renames
from quantize import vllm_names
from quantize.errors import BadCheckpoint, BadPlan
from quantize.roles import find_family
from quantize.vllm_names import FusedMismatch
from schemes import SCHEMES

TARGET_LAYERS = 30
ONE, TWO = (scheme.layer_config() for scheme in SCHEMES[:2])
OTHER = ONE | {"unknown key": None}
FUSED = llama.FUSED
LAYER = [f"self_attn.{leaf}" for leaf in llama.LINEARS["self_attn"]]
LAYER += [f"mlp.{leaf}" for leaf in llama.LINEARS["mlp"]]
MOE = [f"mlp.experts.{n}.{leaf}" for n in (0, 1) for leaf in llama.LINEARS["mlp"]]


BUILT = {
    find_family(dict.fromkeys(shapes), config).name: families.linear_modules(shapes)  # type: ignore[arg-type]
    for config, shapes in (build() for build in (*families.TARGETS, *families.DRAFTS))
}


def linear_modules(family: Family) -> list[str]:
    """Checkpoint modules of a family; layers 1 and 11 share a prefix on purpose."""
    head = family.head.removesuffix(".weight")
    if family not in (llama.FAMILY, eagle3.FAMILY, generic.FAMILY):
        return sorted({head, *BUILT.get(family.name, ())})
    if family.draft:
        return ["fc", "lm_head", *(f"layers.{n}.{name}" for n in (0, 1) for name in LAYER)]
    names = [f"model.layers.{n}.{name}" for n in (0, 1, 11) for name in LAYER]
    if family is generic.FAMILY:
        names += [f"model.layers.2.{name}" for name in [*LAYER[:4], *MOE, "mlp.gate"]]
    return ["lm_head", *names]


def asked_names(family: Family) -> list[str]:
    """What vLLM may ask for, and the checkpoint's own names beside it."""
    modules = linear_modules(family)
    runtime = vllm_names.name_runtime_modules(family, modules, TARGET_LAYERS)
    return list(dict.fromkeys([*runtime, *modules, "fc_xyz", "model.layers.1.self_attn.attn"]))


def quark_config(
    exclude: Iterable[str] = (), layers: Mapping[str, Any] | None = None, default: Any = ONE
) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": default,
        "exclude": list(exclude),
        "layer_quant_config": dict(layers or {}),
        "layer_type_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    }


def ask_vllm(
    name: str, config: dict[str, Any], fused: vllm_names.Fused, renames: Renames | None = None
) -> Any:
    """The layer configuration of the real `QuarkConfig`; None: unquantized."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer
    from vllm.model_executor.models.utils import WeightsMapper

    quark = QuarkConfig.from_config(deepcopy(config))
    if renames:
        mapper = WeightsMapper(
            orig_to_new_substr=renames.substrings,
            orig_to_new_prefix=renames.prefixes,
            orig_to_new_suffix=renames.suffixes,
        )
        quark.apply_vllm_mapper(mapper.get_rename_mapper())
        config = quark.quant_config
    quark.packed_modules_mapping = {group: list(members) for group, members in fused.items()}
    experts = name.endswith(".experts")
    ignored = should_ignore_layer(
        name, config["exclude"], quark.packed_modules_mapping, check_children=experts
    )
    layer_type = RoutedExperts if experts else LinearBase
    _, _, method = quark.get_quant_method_target(name, layer_type)
    assert ignored == (method is None or "Unquantized" in method.__name__)
    assert experts or ignored == (method is UnquantizedLinearMethod)
    return None if ignored else quark._find_matched_config(name, layer_type)


def agree(name: str, config: dict[str, Any], fused: vllm_names.Fused) -> None:
    """Ask vLLM and the port the same question; both answer, or both refuse."""
    try:
        expected = ask_vllm(name, config, fused)
    except ValueError:
        with pytest.raises(FusedMismatch):
            vllm_names.find_layer_config(name, config, fused)
    else:
        assert vllm_names.find_layer_config(name, config, fused) == expected, (name, config, fused)


EXCLUDES = [
    [],
    ["fc", "lm_head"],
    ["model.fc", "re:^(model\\.)?fc$"],
    ["re:fc"],
    ["re:.*fc"],
    ["*self_attn*", "*lm_head"],
    ["re:.*self_attn.*"],
    ["re:model.layers.1.*"],
    ["re:.*mlp.gate"],
    ["re:.*v_proj"],
    ["re:.*[qkv]_proj$"],
    ["re:.*\\.[qk]_proj$"],
    ["model.layers.1.self_attn.q_proj"],
    [f"model.layers.1.self_attn.{leaf}" for leaf in FUSED["qkv_proj"]],
    [f"model.layers.30.self_attn.{leaf}" for leaf in FUSED["qkv_proj"]],
    ["model.layers.30.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj"],
    ["model.layers.11.mlp.up_proj", "re:.*11.mlp.gate_proj"],
    ["model.layers.2.mlp.experts.1.up_proj"],
    ["model.layers.2.mlp.experts"],
    ["re:.*experts.1.*"],
    ["model.layers.2.mlp.gate"],
]
LAYERS: list[dict[str, Any]] = [
    {},
    {"*self_attn*": TWO},
    {"*q_proj": TWO},
    {"*qkv_proj": TWO},
    {"*[qkv]_proj": TWO},
    {"*[qkv]_proj": TWO, "*v_proj": OTHER},
    {"*v_proj": OTHER, "*[qkv]_proj": TWO},
    {"*q_proj": TWO, "*k_proj": deepcopy(TWO), "*v_proj": deepcopy(TWO)},
    {"*q_proj": ONE, "*k_proj": OTHER},
    {"*q_proj": TWO | {"x": 1}, "*k_proj": TWO | {"x": True}, "*v_proj": TWO | {"x": 1}},
    {"self_attn": TWO},
    {"re:.*": TWO},
    {"?odel.layers.1.mlp.down_proj": TWO},
    {"prefix.model.layers.1.mlp.down_proj.suffix": TWO},
    {"model.layers.1.self_attn.qkv_proj": TWO, "model.layers.30.self_attn.qkv_proj": TWO},
    {f"model.layers.11.mlp.{leaf}": TWO for leaf in FUSED["gate_up_proj"]},
    {"model.layers.2.mlp.experts.1.up_proj": TWO},
    {"fc": TWO},
    {"model.fc": TWO, "*": OTHER},
]
UNLIKE = (llama.FAMILY, phi3.FAMILY, deepseek_v3.FAMILY, eagle3.FAMILY, generic.FAMILY)
"""Families whose fused modules or names differ in kind."""
BY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.mark.parametrize("family", UNLIKE, ids=lambda family: family.name)
def test_port_equals_vllm_on_hand_picked_lists(family: Family) -> None:
    names = asked_names(family)
    for exclude, layers in [*product(EXCLUDES, [{}]), *product([["lm_head"]], LAYERS)]:
        for fused, name in product(({}, family.fused), names):
            agree(name, quark_config(exclude, layers), fused)


PIECES = ["model.", "layers.", "1", "11", "30", ".", "self_attn.", "mlp.", "fc", "lm_head", "mid"]
PIECES += ["q_proj", "k_proj", "v_proj", "qkv_proj", "gate", "gate_proj", "up_proj", "_proj"]
SPELLED = st.lists(st.sampled_from([*PIECES, "*", "?", "[qkv]"]), min_size=1, max_size=6)
EXPRESSION = st.lists(st.sampled_from([*PIECES, ".*", "\\d+", "$", "(q|k|v)", "[qkv]"]), max_size=6)
NAME = st.sampled_from([name for family in FAMILIES for name in asked_names(family)])
ENTRY = NAME | SPELLED.map("".join) | EXPRESSION.map(lambda parts: "re:" + "".join(parts))


@settings(max_examples=500, deadline=None)
@given(
    name=NAME,
    exclude=st.lists(ENTRY, max_size=5),
    layers=st.dictionaries(ENTRY, st.sampled_from([ONE, TWO, OTHER]), max_size=5),
    fused=st.sampled_from([{}, FUSED]),
)
def test_port_equals_vllm_on_random_lists(
    name: str, exclude: list[str], layers: dict[str, Any], fused: vllm_names.Fused
) -> None:
    agree(name, quark_config(exclude, layers), fused)


def runtime_of(family: Family, *extra: str) -> dict[str, tuple[str, ...]]:
    return vllm_names.name_runtime_modules(family, [*linear_modules(family), *extra], TARGET_LAYERS)


@BY_FAMILY
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_exclusions_are_read_as_meant(family: Family, data: st.DataObject) -> None:
    """VLLM's matcher, with and without a fused mapping, and Quark's `fnmatch` agree on them."""
    runtime = runtime_of(family)
    head = family.renames.apply(family.head.removesuffix(".weight"))
    off = {*data.draw(st.sets(st.sampled_from(sorted(runtime)))), head}
    excluded = [module for name in off for module in runtime[name]]
    written = vllm_names.list_exclusions(family, excluded, linear_modules(family), TARGET_LAYERS)
    for fused in ({}, family.fused) if family.draft else (family.fused,):
        config = quark_config(written)
        read = {n for n in runtime if ask_vllm(n, config, fused, family.renames) is None}
        assert read == off
    by_quark = {
        module
        for module in linear_modules(family)
        if any(fnmatch(module, entry) for entry in written)
    }
    assert by_quark == set(excluded)
    assert not any(re.search(r"embed(_tokens|dings?)$", entry) for entry in written)


def test_exclusions_of_a_draft_are_these() -> None:
    modules = ["fc", *(f"midlayer.{name}" for name in LAYER)]
    assert vllm_names.list_exclusions(eagle3.FAMILY, ["fc", "embed_tokens"], modules, 30) == [
        "fc",
        "lm_head",
        "model.fc",
        "re:^(model\\.)?fc$",
        "re:^(model\\.)?lm_head$",
    ]
    attention = [f"midlayer.{name}" for name in LAYER[:4]]
    written = vllm_names.list_exclusions(eagle3.FAMILY, attention, modules, 30)
    assert {"midlayer.self_attn.q_proj", "model.layers.30.self_attn.qkv_proj"} < set(written)
    assert "re:^(model\\.)?layers\\.\\d+\\.self_attn\\.qkv_proj$" in written
    # Also beside a target with another number of layers.
    assert ask_vllm("model.layers.8.self_attn.qkv_proj", quark_config(written), {}) is None


def test_exclusions_as_quark_writes_them_quantize_the_fc_of_a_draft() -> None:
    config = quark_config(["fc", "lm_head"])
    assert ask_vllm("model.fc", config, {}) == ONE
    assert vllm_names.find_layer_config("model.fc", config, {}) == ONE


@BY_FAMILY
def test_a_part_of_a_fused_module_cannot_be_excluded(family: Family) -> None:
    for name, members in runtime_of(family).items():
        for size in range(1, len(members)):
            for part in list(combinations(members, size))[:3]:
                with pytest.raises(FusedMismatch, match=re.escape(name)):
                    vllm_names.list_exclusions(family, part, linear_modules(family), 30)


def test_a_layer_that_is_stored_fused_can_have_no_scheme_of_its_own() -> None:
    modules = [name for name in linear_modules(phi3.FAMILY) if name != "lm_head"]
    attention = {name: "two" if "self_attn" in name else "one" for name in modules}
    with pytest.raises(BadPlan, match="layer_quant_config"):
        vllm_names.choose_layer_keys(phi3.FAMILY, attention, "one", [("*self_attn*", "two")], None)
    name = "model.layers.0.self_attn.qkv_proj"
    config = quark_config([], {"*self_attn*": TWO})
    assert ask_vllm(name, config, phi3.FAMILY.fused) == ONE


GLOB = st.lists(st.sampled_from([*PIECES, "*", "*"]), min_size=1, max_size=4).map("".join)


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f is not phi3.FAMILY], ids=lambda family: family.name
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_layer_keys_are_read_as_meant(family: Family, data: st.DataObject) -> None:
    configs = {"one": ONE, "two": TWO}
    head = family.head.removesuffix(".weight")
    runtime = {name: members for name, members in runtime_of(family).items() if head not in members}
    chosen = {name: data.draw(st.sampled_from(["one", "two"])) for name in runtime}
    globs = data.draw(st.lists(st.tuples(GLOB, st.sampled_from(["one", "two"])), max_size=3))
    schemes = {module: chosen[name] for name, members in runtime.items() for module in members}
    keys = vllm_names.choose_layer_keys(family, schemes, "one", globs, TARGET_LAYERS)
    config = quark_config([], {key: configs[scheme] for key, scheme in keys.items()})
    for fused in ({}, family.fused) if family.draft else (family.fused,):
        for name, scheme in chosen.items():
            assert ask_vllm(name, config, fused, family.renames) == configs[scheme]


def schemes_by(family: Family, rule: Sequence[tuple[str, str]], default: str) -> dict[str, str]:
    """What the user means: Quark's rule, the first glob that matches the checkpoint's name."""
    return {
        module: next((scheme for glob, scheme in rule if fnmatch(module, glob)), default)
        for module in linear_modules(family)
        if module != "lm_head"
    }


@pytest.mark.parametrize(
    ("family", "globs", "kept"),
    [
        (llama.FAMILY, [("*self_attn*", "two")], True),
        (llama.FAMILY, [("*.1.mlp*", "one"), ("*mlp*", "two")], True),
        (llama.FAMILY, [("*mlp*", "one")], None),
        (llama.FAMILY, [("model.layers.?.self_attn.o_proj", "two")], False),
        (eagle3.FAMILY, [("*self_attn*", "two")], True),
        (eagle3.FAMILY, [("*_proj", "two")], True),
        (eagle3.FAMILY, [("layers.0.mlp*", "two")], False),
        (eagle3.FAMILY, [("*[qkv]_proj", "two")], True),
        (eagle3.FAMILY, [("*.[qkv]_proj", "two")], False),
        (eagle3.FAMILY, [("*v_proj", "two"), ("layers.*.[qk]_proj", "two")], False),
        (eagle3.FAMILY, [("fc", "two")], False),
    ],
)
def test_the_users_globs_are_kept_where_vllm_reads_them_so(
    family: Family, globs: list[tuple[str, str]], kept: bool | None
) -> None:
    schemes = schemes_by(family, globs, "one")
    keys = vllm_names.choose_layer_keys(family, schemes, "one", globs, TARGET_LAYERS)
    if kept is None:
        assert keys == {}
    else:
        assert (list(keys.items()) == globs) is kept


def test_a_fused_module_needs_one_scheme() -> None:
    globs = [("*q_proj", "two")]
    schemes = schemes_by(llama.FAMILY, globs, "one")
    with pytest.raises(FusedMismatch, match="qkv_proj"):
        vllm_names.choose_layer_keys(llama.FAMILY, schemes, "one", globs, None)


def test_a_layer_of_a_draft_needs_its_target() -> None:
    with pytest.raises(BadPlan, match=r"midlayer\.mlp\.up_proj") as caught:
        vllm_names.name_runtime_modules(eagle3.FAMILY, ["midlayer.mlp.up_proj"], None)
    assert "--target" in caught.value.hint


def test_layer_configurations_have_names() -> None:
    for scheme in SCHEMES:
        assert vllm_names.name_scheme(deepcopy(scheme.layer_config()), SCHEMES) == scheme.NAME
    assert vllm_names.name_scheme(None, SCHEMES) is None
    with pytest.raises(BadCheckpoint, match="unknown key"):
        vllm_names.name_scheme(OTHER, SCHEMES)
