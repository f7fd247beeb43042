"""What must hold between a target and its draft; sources: vLLM's llama_eagle3.py and proposer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tensors, draft_config, draft_tensors, llama_config, llama_tensors, random, write

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.errors import BadPair, ToolError
from quantize.plan import Options
from quantize.prepare import Job, PairOptions, prepare_draft, prepare_target
from quantize.report import Check

KEPT = 64
"""Draft vocabulary of the pruned drafts; the target's is 128."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    config = llama_config()
    return open_checkpoint(
        str(write(tmp_path_factory.mktemp("target"), config, llama_tensors(config)))
    )


@pytest.fixture(scope="module")
def target_head() -> torch.Tensor:
    return llama_tensors(llama_config())["lm_head.weight"]


@pytest.fixture(scope="module")
def target_embedding() -> torch.Tensor:
    return llama_tensors(llama_config())["model.embed_tokens.weight"]


def write_draft(
    path: Path, extra: Tensors | None = None, layer: str = "midlayer.", **changes: Any
) -> Checkpoint:
    config = draft_config(**changes)
    return open_checkpoint(
        str(write(path / "draft", config, draft_tensors(config, layer) | (extra or {})))
    )


def prepare(draft: Checkpoint, target: Checkpoint, **more: Any) -> Job:
    compare = more.pop("compare", True)
    return prepare_draft(
        draft, target, Options("fp8_rowwise"), PairOptions(**more), compare=compare
    )


def check(job: Job, name: str) -> Check:
    return next(check for check in job.checks if check.name == name)


def dropped(job: Job) -> dict[str, str]:
    return {e.source.name: e.reason for e in job.plan.entries if not e.stored}


def refuse(draft: Checkpoint, target: Checkpoint, *words: str, **more: Any) -> None:
    """The pair is refused by `plan` and by `run`, in the same words, with a next step."""
    for compare in (False, True):
        if more.get("weights") and not compare:
            continue
        with pytest.raises(BadPair) as caught:
            prepare(draft, target, compare=compare, **more.get("wishes", {}))
        for word in words:
            assert word in caught.value.message, caught.value.message
        assert caught.value.hint


def offsets(ids: torch.Tensor) -> torch.Tensor:
    return ids - torch.arange(len(ids))


def mask(ids: torch.Tensor, size: int = 128) -> torch.Tensor:
    marks = torch.zeros(size, dtype=torch.bool)
    marks[ids] = True
    return marks


IDS = torch.cat([torch.arange(0, 20), torch.arange(50, 94)])
"""64 target ids with one gap, as a real pruned vocabulary has many."""


def pruned(path: Path, d2t: torch.Tensor | None, t2d: torch.Tensor | None = None) -> Checkpoint:
    extra = {"lm_head.weight": random(KEPT, 64, seed=5)}
    if d2t is not None:
        extra["d2t"] = d2t
    if t2d is not None:
        extra["t2d"] = t2d
    return write_draft(path, extra, draft_vocab_size=KEPT)


# Pairs that fit


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_a_draft_without_head_and_embedding_shares_the_targets(
    tmp_path: Path, target: Checkpoint, layer: str
) -> None:
    job = prepare(write_draft(tmp_path, layer=layer), target)
    assert {c.status for c in job.checks} == {"pass"}
    assert check(job, "shared head").measured == "shared"
    assert check(job, "shared embedding").measured == "shared"
    assert job.plan.target_layers == 8
    assert not dropped(job)


def test_no_draft_vocab_size_means_the_full_vocabulary(tmp_path: Path, target: Checkpoint) -> None:
    config = draft_config()
    del config["draft_vocab_size"]
    draft = open_checkpoint(str(write(tmp_path / "draft", config, draft_tensors(config))))
    assert check(prepare(draft, target), "shared head").measured == "shared"


def test_equal_copies_are_dropped(
    tmp_path: Path,
    target: Checkpoint,
    target_head: torch.Tensor,
    target_embedding: torch.Tensor,
) -> None:
    extra = {"lm_head.weight": target_head, "embed_tokens.weight": target_embedding}
    draft = write_draft(tmp_path, extra)
    job = prepare(draft, target)
    gone = dropped(job)
    assert gone.keys() == extra.keys()
    assert "lm_head.weight" in gone["lm_head.weight"]
    assert "model.embed_tokens.weight" in gone["embed_tokens.weight"]
    assert check(job, "shared head").measured == "shared"
    kept = prepare(draft, target, dedupe_head=False)
    assert not dropped(kept)
    assert kept.plan.stored["lm_head.weight"].dtype == "BF16"


def test_a_tied_targets_head_is_its_embedding(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = llama_tensors(config)
    target = open_checkpoint(str(write(tmp_path / "target", config, tensors)))
    draft = write_draft(tmp_path, {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    job = prepare(draft, target)
    assert "model.embed_tokens.weight" in dropped(job)["lm_head.weight"]
    assert check(job, "shared head").measured == "shared"


def test_one_flipped_bit_keeps_the_drafts_own_head(
    tmp_path: Path, target: Checkpoint, target_head: torch.Tensor
) -> None:
    head = target_head.clone()
    head.view(torch.int16)[-1, -1] ^= 1
    draft = write_draft(tmp_path, {"lm_head.weight": head})
    job = prepare(draft, target)
    assert not dropped(job)
    found = check(job, "shared head")
    assert (found.status, found.measured) == ("pass", "not shared")
    refuse(
        draft,
        target,
        "shared head",
        "not shared",
        wishes={"require_shared_head": True},
        weights=True,
    )


def test_equal_values_in_another_dtype_are_not_shared(
    tmp_path: Path, target: Checkpoint, target_embedding: torch.Tensor
) -> None:
    draft = write_draft(tmp_path, {"embed_tokens.weight": target_embedding.float()})
    job = prepare(draft, target)
    assert check(job, "shared embedding").measured == "not shared"
    assert job.plan.stored["embed_tokens.weight"].dtype == "F32"


def test_a_plan_does_not_compare_weights_and_says_so(
    tmp_path: Path, target: Checkpoint, target_head: torch.Tensor
) -> None:
    draft = write_draft(tmp_path, {"lm_head.weight": target_head})
    job = prepare(draft, target, compare=False)
    assert check(job, "shared head").status == "not_measured"
    assert not dropped(job)


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_pruned_vocabulary(tmp_path: Path, target: Checkpoint, with_mask: bool) -> None:
    job = prepare(pruned(tmp_path, offsets(IDS), mask(IDS) if with_mask else None), target)
    assert {c.status for c in job.checks} == {"pass"}
    assert check(job, "shared head").measured == "not shared"
    assert job.plan.stored["d2t"].dtype == "I64"
    assert job.plan.stored["lm_head.weight"].shape == (KEPT, 64)


def test_a_pruned_vocabulary_of_the_first_ids_has_zero_offsets(
    tmp_path: Path, target: Checkpoint
) -> None:
    first = torch.arange(KEPT)
    job = prepare(pruned(tmp_path, offsets(first), mask(first)), target)
    assert check(job, "d2t").status == "pass"


def test_an_identity_d2t_beside_a_full_vocabulary_is_dropped(
    tmp_path: Path, target: Checkpoint
) -> None:
    every = torch.arange(128)
    draft = write_draft(tmp_path, {"d2t": offsets(every), "t2d": mask(every)})
    for compare in (True, False):
        job = prepare(draft, target, compare=compare)
        assert dropped(job).keys() == {"d2t", "t2d"}
        assert "vLLM refuses" in dropped(job)["d2t"]


def test_a_draft_narrower_than_its_target(tmp_path: Path, target: Checkpoint) -> None:
    narrow = {"hidden_size": 32, "target_hidden_size": 64}
    own = {"lm_head.weight": random(128, 32, seed=3), "embed_tokens.weight": random(128, 32)}
    job = prepare(write_draft(tmp_path, own, **narrow), target)
    assert {c.status for c in job.checks} == {"pass"}
    assert not dropped(job)


# What does not fit


@pytest.mark.parametrize(
    ("lost", "words"), [("lm_head.weight", "lm_head"), ("embed_tokens.weight", "embed_tokens")]
)
def test_a_narrower_draft_cannot_share(
    tmp_path: Path, target: Checkpoint, lost: str, words: str
) -> None:
    own = {"lm_head.weight": random(128, 32, seed=3), "embed_tokens.weight": random(128, 32)}
    del own[lost]
    draft = write_draft(tmp_path, own, hidden_size=32, target_hidden_size=64)
    refuse(draft, target, words, "[128, 64]", "[128, 32]")


def test_a_pruned_draft_without_head_is_refused(tmp_path: Path, target: Checkpoint) -> None:
    draft = write_draft(tmp_path, {"d2t": offsets(IDS)}, draft_vocab_size=KEPT)
    refuse(draft, target, "no lm_head", "draft_vocab_size 64", "128")


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        (None, None, ("no d2t", "64 of 128")),
        (None, mask(IDS), ("no d2t",)),
        (IDS, mask(IDS), ("d2t", "absolute")),
        (IDS, None, ("d2t", "absolute")),
        (offsets(IDS) + 40, None, ("d2t", "133", "127")),
        (offsets(IDS) - 1, None, ("d2t", "-1")),
        (offsets(IDS.clone().index_fill_(0, torch.tensor(9), 8)), None, ("d2t", "two draft ids")),
        (offsets(IDS), mask(IDS + 1), ("t2d", "d2t")),
        (offsets(IDS), ~mask(IDS), ("t2d", "d2t")),
        (offsets(IDS), mask(IDS).to(torch.int64), ("t2d", "I64", "BOOL")),
        (offsets(IDS), mask(IDS, 129), ("t2d", "129", "128")),
        (offsets(IDS).to(torch.int32), mask(IDS), ("d2t", "I32", "I64")),
        (offsets(IDS).float(), mask(IDS), ("d2t", "F32", "I64")),
        (offsets(IDS)[:-1], None, ("d2t", "[63]", "[64]")),
        (offsets(IDS)[None], None, ("d2t", "[1, 64]", "[64]")),
    ],
)
def test_a_wrong_map_is_refused(
    tmp_path: Path,
    target: Checkpoint,
    d2t: torch.Tensor | None,
    t2d: torch.Tensor | None,
    words: tuple[str, ...],
) -> None:
    refuse(pruned(tmp_path, d2t, t2d), target, *words)


def test_a_full_vocabulary_with_another_d2t_is_refused(tmp_path: Path, target: Checkpoint) -> None:
    swapped = torch.arange(128)
    swapped[[3, 4]] = swapped[[4, 3]]
    refuse(write_draft(tmp_path, {"d2t": offsets(swapped)}), target, "d2t", "identity")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 100, "draft_vocab_size": 100}, ("vocab_size 100", "vocab_size 128")),
        ({"vocab_size": 128, "draft_vocab_size": 256}, ("draft_vocab_size 256", "128")),
        ({"target_hidden_size": 96}, ("target_hidden_size 96", "target_hidden_size 64")),
        ({"hidden_size": 32}, ("target_hidden_size 32", "target_hidden_size 64")),
        ({"num_aux_hidden_states": 2}, ("fc [64, 192]", "2 x 64")),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, ("[2, 4]", "3 different layers")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}}, ("[2, 2, 4]",)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}}, ("[2, 4, 9]", "8")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 4, 5]}}, ("[-1, 4, 5]",)),
        ({"fc_norm": True}, ("norms before fc", "fc_norm.0.weight", "fc_norm.2.weight")),
        ({"norm_before_fc": True}, ("norms before fc", "input_norm.weight")),
        ({"eagle_config": {"norm_before_fc": True}}, ("norms before fc", "input_norm.weight")),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, target: Checkpoint, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    refuse(write_draft(tmp_path, **changes), target, *words)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size"])
@pytest.mark.parametrize("value", [None, "64", 0, -1])
def test_a_config_without_sizes_is_refused(
    tmp_path: Path, target: Checkpoint, key: str, value: Any
) -> None:
    tensors = draft_tensors(draft_config())
    draft = open_checkpoint(str(write(tmp_path / "draft", draft_config(**{key: value}), tensors)))
    refuse(draft, target, "config.json", key, repr(value), str(tmp_path / "draft"))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lm_head.weight": random(64, 64)}, ("lm_head [64, 64]", "128")),
        ({"lm_head.weight": random(128, 32)}, ("lm_head [128, 32]",)),
        ({"embed_tokens.weight": random(64, 64)}, ("embed_tokens.weight [64, 64]", "[128, 64]")),
        ({"fc.weight": random(64, 128)}, ("fc [64, 128]", "3 x 64")),
        ({"fc_norm.0.weight": random(64)}, ("norms before fc", "fc_norm.0.weight", "none")),
        ({"input_norm.weight": random(192)}, ("norms before fc", "input_norm.weight", "none")),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, target: Checkpoint, extra: Tensors, words: tuple[str, ...]
) -> None:
    refuse(write_draft(tmp_path, extra), target, *words)


def test_a_size_that_the_stored_fc_contradicts_is_refused(
    tmp_path: Path, target: Checkpoint
) -> None:
    draft = write_draft(tmp_path, {"fc.weight": random(64, 192)}, target_hidden_size=96)
    refuse(draft, target, "target_hidden_size 96", "target_hidden_size 64")


def norms(names: tuple[str, ...], size: int) -> Tensors:
    return {name: torch.ones(size, dtype=torch.bfloat16) for name in names}


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"fc_norm": True}, norms(tuple(f"fc_norm.{n}.weight" for n in range(3)), 64)),
        ({"norm_before_fc": True}, norms(("input_norm.weight",), 192)),
        ({"eagle_config": {"norm_before_fc": True}}, norms(("input_norm.weight",), 192)),
    ],
)
def test_norms_before_fc_are_kept(
    tmp_path: Path, target: Checkpoint, changes: dict[str, Any], extra: Tensors
) -> None:
    job = prepare(write_draft(tmp_path, extra, **changes), target)
    assert {c.status for c in job.checks} == {"pass"}
    assert all(job.plan.stored[name].dtype == "BF16" for name in extra)


# vLLM taps the target at layers 2, L // 2 and L - 3 unless told otherwise


def six_layers(path: Path) -> Checkpoint:
    config = llama_config(num_hidden_layers=6)
    return open_checkpoint(str(write(path / "six", config, llama_tensors(config))))


def test_a_target_of_six_layers_has_two_default_taps(tmp_path: Path) -> None:
    target = six_layers(tmp_path)
    refuse(write_draft(tmp_path), target, "auxiliary layers", "[2, 3, 3]", "3 different")
    with pytest.raises(BadPair) as caught:
        prepare(open_checkpoint(str(tmp_path / "draft")), target)
    assert "eagle_config.eagle_aux_hidden_state_layer_ids" in caught.value.hint


def test_named_taps_fit_a_target_of_six_layers(tmp_path: Path) -> None:
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    for n, where in enumerate(({"eagle_config": taps}, taps)):
        (tmp_path / str(n)).mkdir()
        job = prepare(write_draft(tmp_path / str(n), **where), six_layers(tmp_path))
        assert check(job, "auxiliary layers").measured == "[1, 2, 3]"
        assert job.plan.target_layers == 6


def test_two_taps_with_an_fc_for_two_states(tmp_path: Path, target: Checkpoint) -> None:
    job = prepare(
        write_draft(
            tmp_path,
            {"fc.weight": random(64, 128)},
            eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 5]},
        ),
        target,
    )
    assert {c.status for c in job.checks} == {"pass"}


# The draft's tie flag, often copied from its target


def test_a_draft_that_says_tied_beside_another_head_is_refused(
    tmp_path: Path, target: Checkpoint
) -> None:
    draft = write_draft(
        tmp_path, {"lm_head.weight": random(128, 64, seed=3)}, tie_word_embeddings=True
    )
    refuse(
        draft,
        target,
        "tie_word_embeddings is true",
        "lm_head.weight",
        "model.embed_tokens.weight",
        weights=True,
    )
    assert check(prepare(draft, target, compare=False), "tie flag").status == "not_measured"


def test_a_pruned_draft_that_says_tied_is_refused_from_headers(
    tmp_path: Path, target: Checkpoint
) -> None:
    extra = {"lm_head.weight": random(KEPT, 64), "d2t": offsets(IDS)}
    draft = write_draft(tmp_path, extra, draft_vocab_size=KEPT, tie_word_embeddings=True)
    refuse(draft, target, "tie_word_embeddings is true", "lm_head.weight")


def test_a_nested_tie_flag_is_found(tmp_path: Path, target: Checkpoint) -> None:
    draft = write_draft(
        tmp_path,
        {"lm_head.weight": random(128, 64, seed=3)},
        eagle_config={"tie_word_embeddings": True},
    )
    refuse(draft, target, "eagle_config.tie_word_embeddings", "lm_head.weight", weights=True)


def test_a_draft_that_says_tied_and_is_fits(
    tmp_path: Path, target: Checkpoint, target_embedding: torch.Tensor
) -> None:
    own = random(128, 64, seed=8)
    for n, extra in enumerate(
        (
            {},
            {"lm_head.weight": target_embedding},
            {"lm_head.weight": own, "embed_tokens.weight": own.clone()},
        )
    ):
        (tmp_path / str(n)).mkdir()
        job = prepare(write_draft(tmp_path / str(n), extra, tie_word_embeddings=True), target)
        assert check(job, "tie flag").status == "pass"


@pytest.mark.parametrize("value", ["64", 0, 64.0])
def test_a_draft_vocab_size_that_is_no_number_is_refused(
    tmp_path: Path, target: Checkpoint, value: Any
) -> None:
    draft = write_draft(tmp_path, draft_vocab_size=value)
    refuse(draft, target, "draft_vocab_size", repr(value))


# Roles


@pytest.mark.parametrize(
    ("call", "word", "step"),
    [
        (lambda t, d: prepare_target(d, Options("mxfp4")), "EAGLE-3 draft", "--target"),
        (lambda t, d: prepare(t, t), "not a draft", "target first"),
        (lambda t, d: prepare(d, d), "EAGLE-3 draft", "target"),
    ],
)
def test_exchanged_roles_are_refused(
    tmp_path: Path,
    target: Checkpoint,
    call: Callable[[Checkpoint, Checkpoint], Job],
    word: str,
    step: str,
) -> None:
    draft = write_draft(tmp_path)
    with pytest.raises(ToolError) as caught:
        call(target, draft)
    assert word in caught.value.message
    assert step in caught.value.hint


def test_a_target_without_embedding_is_refused(tmp_path: Path) -> None:
    config = llama_config()
    tensors = llama_tensors(config)
    del tensors["model.embed_tokens.weight"]
    target = open_checkpoint(str(write(tmp_path / "target", config, tensors)))
    refuse(write_draft(tmp_path), target, str(tmp_path / "target"), "model.embed_tokens.weight")
