"""YAML in which no key is there twice: the loader alone would quietly keep the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml import Node


def load_yaml(text: str) -> Any:
    """The values in a YAML text; raises ``yaml.YAMLError``, which names a repeated key."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _refuse_repeated(root, set())
    return yaml.safe_load(text)


def _refuse_repeated(node: Node, seen: set[int]) -> None:
    """Each node once: an alias is the node itself again, and may lie within it."""
    import yaml

    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated(item, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    keys: set[tuple[str, str]] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in keys:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: the key {key.value!r} is there twice")
            keys.add((key.tag, key.value))
        _refuse_repeated(value, seen)
