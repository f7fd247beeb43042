"""The LM head: which tensor it is, and whether the tie flags tell the truth about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.base import Family
from quantize.checkpoint import Checkpoint
from quantize.errors import BadPlan
from quantize.report import Check

TIE_FLAG = "tie_word_embeddings"


def same_bytes(left: Checkpoint, left_name: str, right: Checkpoint, right_name: str) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes; streams both."""
    a, b = left.specs[left_name], right.specs[right_name]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(
        left.read(left_name, start, stop) == right.read(right_name, start, stop)
        for start, stop in left.chunks(left_name)
    )


def head_tensor(family: Family, checkpoint: Checkpoint) -> str:
    """The tensor that serves as head: its own, or the embedding of a tied model."""
    return family.head if family.head in checkpoint.specs else family.embedding


def tie_flags(config: Mapping[str, Any]) -> dict[str, bool]:
    """Every ``tie_word_embeddings`` of a config, by its dotted path, nested levels included.

    Encoders of images and sound have no word embeddings, whatever their part of a config says.
    Raises `BadPlan` for a flag that is neither true nor false.
    """
    flags = {}
    for key, value in config.items():
        if key == TIE_FLAG:
            if not isinstance(value, bool | None):
                raise BadPlan(
                    f"config.json: {TIE_FLAG} is {str(value)[:40]!r}, expected true or false",
                    f'set "{TIE_FLAG}": false in config.json if a head of its own is stored',
                )
            flags[key] = bool(value)
        elif isinstance(value, dict) and not key.startswith(("vision", "audio")):
            flags |= {f"{key}.{path}": flag for path, flag in tie_flags(value).items()}
    return flags


def check_tie(family: Family, target: Checkpoint, *, compare: bool) -> Check:
    """The target's tie flags agree with its head. Raises `BadPlan` naming flag and tensor.

    ``compare`` reads the weights where a flag says *tied* and a head is stored; without it that
    case is not_measured.
    """
    flags = tie_flags(target.config)
    tied = [path for path, flag in flags.items() if flag]
    required = "the tie flags agree with the stored head"
    if family.embedding not in target.specs:
        raise BadPlan(
            f"{target.files.origin}: there is no {family.embedding}",
            "the checkpoint is incomplete: download it again",
        )
    if family.head not in target.specs:
        _check_tied(family, target, flags)
        return Check("tie flag", "pass", f"tied to {family.embedding}", required)
    if not tied:
        return Check("tie flag", "pass", f"{family.head} of its own", required)
    _refuse_contradiction(family, flags)
    _check_equal(tied[0], family, target, compare=compare)
    if not compare:
        return Check("tie flag", "not_measured", "needs the weights", required)
    return Check("tie flag", "pass", f"{family.head} equals {family.embedding}", required)


def _check_tied(family: Family, target: Checkpoint, flags: Mapping[str, bool]) -> None:
    if all(flags.values()) if flags else family.tied:
        return
    said = ", ".join(f"{path}: {str(flag).lower()}" for path, flag in flags.items())
    raise BadPlan(
        f"there is no {family.head}, and config.json does not say plainly that it is tied to "
        f"{family.embedding} ({said or f'no {TIE_FLAG} flag'})",
        f'if it is tied, set "{TIE_FLAG}": true at every level; otherwise a shard is missing',
    )


def _refuse_contradiction(family: Family, flags: Mapping[str, bool]) -> None:
    """Levels that disagree beside a stored head: engines differ in which of them they read."""
    tied = [path for path, flag in flags.items() if flag]
    untied = [path for path, flag in flags.items() if not flag]
    if untied:
        raise BadPlan(
            f"config.json: {tied[0]} is true and {untied[0]} is false, and a {family.head} is "
            f"stored beside {family.embedding}: some engines would drop the real head",
            f'set "{TIE_FLAG}": false in config.json ({", ".join(tied)}): the head is stored',
        )


def _check_equal(flag: str, family: Family, checkpoint: Checkpoint, *, compare: bool) -> None:
    head, embedding = (checkpoint.specs[name] for name in (family.head, family.embedding))
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if same and compare:
        same = same_bytes(checkpoint, head.name, checkpoint, embedding.name)
    if not same:
        raise BadPlan(
            f"config.json: {flag} is true, but a {head.name} that differs from {embedding.name} "
            "is stored: some engines would drop the real head",
            f'set "{flag.rpartition(".")[2]}": false in config.json ({flag}) if the stored head '
            "is the real one",
        )
