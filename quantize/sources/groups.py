"""The groups of a compressed-tensors config: which weights were quantized how.

Source: ``QuantizationScheme`` and ``match_name`` of compressed-tensors: a target is a module's
name, a regular expression after ``re:`` (matched from the start), or a class such as ``Linear``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from quantize.errors import BadCheckpoint

Group = tuple[tuple[str, ...], Mapping[str, Any]]
"""Targets, and the settings of the weights."""

HINT = "see the model's repository for the config that it was quantized with"


def values(found: Any) -> Iterable[Mapping[str, Any]]:
    """The objects in an object of a config; none where it is something else."""
    items = found.values() if isinstance(found, dict) else ()
    return (item for item in items if isinstance(item, dict))


def read_groups(config: Mapping[str, Any]) -> tuple[Group, ...]:
    """Every group whose weights are quantized. Raises `BadCheckpoint` for one of another form."""
    found = []
    for group in values(config.get("config_groups")):
        targets, weights = group.get("targets"), group.get("weights")
        if weights is None:
            continue
        texts = isinstance(targets, list) and all(isinstance(text, str) for text in targets)
        if not texts or not isinstance(weights, dict) or not _are_numbers(weights):
            raise BadCheckpoint(
                f"config.json: config_groups has {str(group)[:80]!r}, expected targets and the "
                "settings of weights",
                HINT,
            )
        found.append((tuple(targets or ()), weights))
    return tuple(found)


def _are_numbers(weights: Mapping[str, Any]) -> bool:
    return all(type(weights.get(key)) in (int, type(None)) for key in ("num_bits", "group_size"))


def find_group(groups: Iterable[Group], module: str) -> Mapping[str, Any]:
    """The settings of a module's weight: by its name first, then by its class; empty: none."""
    by_class: Mapping[str, Any] = {}
    for targets, weights in groups:
        for target in targets:
            if target == module:
                return weights
            if target.startswith("re:"):
                if _compile(target.removeprefix("re:")).match(module):
                    return weights
            elif "." not in target:
                by_class = by_class or weights
    return by_class


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """A pattern of the config, which could be made to take for ever: few repetitions, none nested.

    Raises `BadCheckpoint`.
    """
    repetitions = len(re.findall(r"[*+{]", pattern))
    try:
        if len(pattern) > 500 or repetitions > 4 or re.search(r"[*+}?]\)+[*+{]", pattern):
            raise re.error("more repetitions than any published config has")
        return re.compile(pattern)
    except re.error as error:
        raise BadCheckpoint(
            f"config.json: config_groups has the target {pattern[:80]!r}: {error}", HINT
        ) from error
