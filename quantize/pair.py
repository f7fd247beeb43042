"""What must hold between a target and its EAGLE-3 draft for vLLM to serve them together.

Source: vLLM ``model_executor/models/llama_eagle3.py`` and ``v1/spec_decode/llm_base_proposer.py``
(0.32), where most of these mistakes load without a message and only acceptance suffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from models.base import Family
from quantize.checkpoint import Checkpoint
from quantize.errors import BadPair
from quantize.head import head_tensor, same_bytes, tie_flags
from quantize.report import Check
from quantize.roles import find_family, text_config
from quantize.vocabulary import check_d2t

SHARED = "shared"
NOT_SHARED = "not shared"
TAPS = "eagle_aux_hidden_state_layer_ids"
MOST_STATES = 64
"""Auxiliary states of a draft; published ones read three."""


def target_layers(target: Checkpoint) -> int:
    """Decoder layers of the target: vLLM numbers the draft's layers after them."""
    return _size(text_config(target.config), "num_hidden_layers", target)


def check_pair(
    target: Checkpoint, draft: Checkpoint, *, compare: bool = True, require_shared: bool = False
) -> tuple[Check, ...]:
    """Every check of the pair; ``compare`` reads the heads and embeddings, else not_measured."""
    target_family = find_family(target.specs, target.config)
    _require_target(target_family, target)
    return (
        _check_vocabulary(target, draft),
        check_d2t(draft, _draft_vocab(draft), _vocab(target)),
        *_check_states(target, draft),
        _check_norms(draft),
        _check_draft_tie(target_family, target, draft, compare=compare),
        _check_shared("embedding", target_family.embedding, target, draft, compare=compare),
        _check_head(target_family, target, draft, compare=compare, require=require_shared),
    )


def _require_target(family: Family, target: Checkpoint) -> None:
    if family.draft:
        raise BadPair(
            f"{target.files.origin} is an EAGLE-3 draft, expected its target",
            "give the target first and the draft second, or the target as --target",
        )
    if family.embedding not in target.specs:
        raise BadPair(
            f"{target.files.origin}: there is no {family.embedding}, which drafts may share",
            "the target is incomplete: download it again",
        )


def require_pair(checks: Iterable[Check]) -> None:
    """Raise `BadPair` for the first check that failed."""
    for check in checks:
        if check.status == "fail":
            raise BadPair(
                f"draft and target do not fit ({check.name}): found {check.measured}, "
                f"expected {check.required}",
                check.detail,
            )


def redundant_tensors(target: Checkpoint, draft: Checkpoint, *, dedupe: bool) -> dict[str, str]:
    """Draft tensors that the output does not need, with the reason.

    An identity ``d2t`` of a full-vocabulary draft is always among them, with its ``t2d``, because
    vLLM refuses it; an equal head and embedding only when ``dedupe`` is on. Reads the weights.
    """
    dropped = {}
    if "d2t" in draft.specs and _draft_vocab(draft) == _vocab(target):
        reason = "vLLM refuses a d2t beside a full vocabulary, and this one is the identity"
        dropped = {name: reason for name in ("d2t", "t2d") if name in draft.specs}
    family = find_family(target.specs, target.config)
    pairs = (
        ("lm_head.weight", head_tensor(family, target)),
        ("embed_tokens.weight", family.embedding),
    )
    for ours, theirs in pairs:
        if dedupe and ours in draft.specs and same_bytes(draft, ours, target, theirs):
            dropped[ours] = f"equal to the target's {theirs}, which vLLM shares"
    return dropped


def _check_vocabulary(target: Checkpoint, draft: Checkpoint) -> Check:
    ours, theirs, kept = (
        _size(draft.config, "vocab_size", draft),
        _vocab(target),
        _draft_vocab(draft),
    )
    head = draft.specs.get("lm_head.weight")
    measured = f"vocab_size {ours}, draft_vocab_size {kept}"
    if head:
        measured += f", lm_head {list(head.shape)}"
    hidden = _size(draft.config, "hidden_size", draft)
    good = ours == theirs and kept <= theirs and (head is None or head.shape == (kept, hidden))
    return _check(
        "vocabulary",
        good,
        measured,
        f"vocab_size {theirs}, draft_vocab_size at most that and the head's rows",
        "the draft was trained for another target, or its config.json is wrong",
    )


def _check_states(target: Checkpoint, draft: Checkpoint) -> Iterator[Check]:
    theirs = _size(text_config(target.config), "hidden_size", target)
    ours = _size(draft.config, "hidden_size", draft)
    reads = draft.config.get("target_hidden_size", ours)
    count, taps = _aux_states(target, draft)
    fc = draft.specs.get("fc.weight")
    shape = list(fc.shape) if fc else "missing"
    yield _check(
        "hidden states",
        reads == theirs and fc is not None and fc.shape == (ours, count * theirs),
        f"target_hidden_size {reads}, fc {shape}",
        f"target_hidden_size {theirs}, fc [{ours}, {count} x {theirs}]",
        "the draft was trained for another target, or target_hidden_size is missing in its config",
    )
    layers = target_layers(target)
    yield _check(
        "auxiliary layers",
        len(set(taps)) == count and all(0 <= tap <= layers for tap in taps),
        f"{list(taps)}",
        f"{count} different layers between 0 and {layers}",
        "set eagle_config.eagle_aux_hidden_state_layer_ids in the draft's config.json",
    )


def _aux_states(target: Checkpoint, draft: Checkpoint) -> tuple[int, tuple[int, ...]]:
    """How many auxiliary states ``fc`` reads, and at which layers vLLM taps the target."""
    layers = target_layers(target)
    listed = _listed(_eagle_config(draft), draft) or _listed(draft.config, draft)
    return _aux_count(draft), listed or (2, layers // 2, layers - 3)


def _aux_count(draft: Checkpoint) -> int:
    """As ``LlamaModel.__init__``: it does not look at a list at the config's top level."""
    key = "num_aux_hidden_states"
    if not draft.config.get(key):
        return len(_listed(_eagle_config(draft), draft)) or 3
    count = _size(draft.config, key, draft)
    if count > MOST_STATES:
        _refuse(draft, key, count, f"at most {MOST_STATES}")
    return count


def _listed(config: Mapping[str, Any], draft: Checkpoint) -> tuple[int, ...]:
    """The auxiliary layers that a config lists; empty where it lists none."""
    taps = config.get(TAPS) or []
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps[:MOST_STATES]):
        _refuse(draft, TAPS, taps, "a list of layer numbers")
    if len(taps) > MOST_STATES:
        _refuse(draft, TAPS, taps, f"at most {MOST_STATES} layers")
    return tuple(taps)


def _eagle_config(draft: Checkpoint) -> dict[str, Any]:
    found = draft.config.get("eagle_config") or {}
    if not isinstance(found, dict):
        _refuse(draft, "eagle_config", found, "an object")
    return dict(found)


def _check_norms(draft: Checkpoint) -> Check:
    expected = set()
    if draft.config.get("fc_norm"):
        expected |= {f"fc_norm.{n}.weight" for n in range(_aux_count(draft))}
    if _eagle_config(draft).get("norm_before_fc", draft.config.get("norm_before_fc")):
        expected.add("input_norm.weight")
    found = {name for name in draft.specs if name.startswith(("fc_norm.", "input_norm."))}
    return _check(
        "norms before fc",
        found == expected,
        ", ".join(sorted(found)) or "none",
        ", ".join(sorted(expected)) or "none",
        "fc_norm and norm_before_fc in the draft's config.json must tell what is stored",
    )


def _check_draft_tie(
    family: Family, target: Checkpoint, draft: Checkpoint, *, compare: bool
) -> Check:
    """A draft config that says *tied* (often copied from its target) with another head stored."""
    flags = [path for path, flag in tie_flags(draft.config).items() if flag]
    required = "no tie flag that contradicts the stored head"
    if not flags or "lm_head.weight" not in draft.specs:
        return _check("tie flag", True, "agrees", required, "")
    own = "embed_tokens.weight" in draft.specs
    holder, name = (draft, "embed_tokens.weight") if own else (target, family.embedding)
    same = draft.specs["lm_head.weight"].shape == holder.specs[name].shape
    if same and not compare:
        return Check("tie flag", "not_measured", "needs the weights", required)
    same = same and same_bytes(draft, "lm_head.weight", holder, name)
    measured = f"{flags[0]} is true, lm_head.weight {'equals' if same else 'differs from'} {name}"
    detail = f'set "{flags[0]}": false in the draft\'s config.json: some engines drop the real head'
    return _check("tie flag", same, measured, required, detail)


def _check_head(
    family: Family, target: Checkpoint, draft: Checkpoint, *, compare: bool, require: bool
) -> Check:
    full = _draft_vocab(draft) == _vocab(target)
    if "lm_head.weight" not in draft.specs and not full:
        return _check(
            "shared head",
            False,
            f"no lm_head and draft_vocab_size {_draft_vocab(draft)}",
            f"a head of its own, or the full vocabulary {_vocab(target)}",
            "vLLM would cut the target's head to its first rows and draft wrong ids silently",
        )
    check = _check_shared("head", head_tensor(family, target), target, draft, compare=compare)
    if require and check.measured == NOT_SHARED:
        detail = "drop --require-shared-head to keep the draft's own head"
        return _check("shared head", False, NOT_SHARED, SHARED, detail)
    return check


def _check_shared(
    role: str, theirs: str, target: Checkpoint, draft: Checkpoint, *, compare: bool
) -> Check:
    ours = {"head": "lm_head.weight", "embedding": "embed_tokens.weight"}[role]
    required = "absent, equal to the target's, or of its own"
    name = f"shared {role}"
    hidden = _size(draft.config, "hidden_size", draft)
    if ours not in draft.specs:
        shape = target.specs[theirs].shape
        good = shape[1:] == (hidden,)
        detail = f"a draft without {ours} needs the target's width"
        measured = SHARED if good else f"the target's {theirs} is {list(shape)}"
        return _check(name, good, measured, f"{[*shape[:1], hidden]}", detail)
    if role == "embedding" and draft.specs[ours].shape != (_vocab(target), hidden):
        measured = f"{ours} {list(draft.specs[ours].shape)}"
        detail = "the draft was trained for another target, or its config.json is wrong"
        return _check(name, False, measured, f"[{_vocab(target)}, {hidden}]", detail)
    if draft.specs[ours].shape != target.specs[theirs].shape:
        return Check(name, "pass", NOT_SHARED, required, "the shapes differ")
    if not compare:
        return Check(name, "not_measured", "needs the weights", required)
    same = same_bytes(draft, ours, target, theirs)
    return Check(name, "pass", SHARED if same else NOT_SHARED, required, f"compared with {theirs}")


def _check(name: str, good: bool, measured: str, required: str, detail: str) -> Check:
    return Check(name, "pass" if good else "fail", measured, required, "" if good else detail)


def _vocab(target: Checkpoint) -> int:
    return _size(text_config(target.config), "vocab_size", target)


def _draft_vocab(draft: Checkpoint) -> int:
    pruned = draft.config.get("draft_vocab_size") is not None
    return _size(draft.config, "draft_vocab_size" if pruned else "vocab_size", draft)


def _size(config: Any, key: str, checkpoint: Checkpoint) -> int:
    value = config.get(key)
    if type(value) is not int or value <= 0:
        _refuse(checkpoint, key, value, "a number")
    return value


def _refuse(checkpoint: Checkpoint, key: str, value: Any, expected: str) -> NoReturn:
    raise BadPair(
        f"{checkpoint.files.origin}: config.json has {key} {value!r:.80}, expected {expected}",
        "correct the config, or get it again",
    )
