"""Prompts to measure with: one JSON object a line, ``prompt`` or ``messages``, and ``domain``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from quantize.errors import ToolError

FORM = '{"prompt": "…", "domain": "…"} or {"messages": [{"role": "user", "content": "…"}], …}'
ROLES = ("system", "user", "assistant")
NO_DOMAIN = "other"

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
"""A word, or one letter of a script that is written without spaces."""
FEWEST_WORDS = 200
COMMON = 10
LEAST_COMMON = 0.10
"""In any language the ten commonest words are a good part of a text: 0.26 of our own held-out
prompts, 0.14 of Chinese by letters; of random tokens (SmolLM2's vocabulary) at most 0.02 at 900
words. Below this share a text looks like random tokens."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """A conversation to be continued; ``index`` is its place in the file, from 0."""

    index: int
    domain: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class PromptSet:
    """All prompts of one file; ``digest`` is the SHA-256 of its bytes."""

    name: str
    digest: str
    prompts: tuple[Prompt, ...]
    warnings: tuple[str, ...]


def default_prompts() -> Path:
    """The held-out prompts that come with this package: 8 of each of the 11 SPEED-Bench domains."""
    return Path(str(files("quantize.serving"))) / "prompts-heldout.jsonl"


def read_prompts(path: Path) -> PromptSet:
    """Every prompt of a file. Raises ToolError naming the first line that is not one."""
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(f"{path}: cannot be read ({error})", f"give lines of {FORM}") from error
    prompts = [
        _read_prompt(f"{path}, line {number}", line, index)
        for index, (number, line) in enumerate((n, x) for n, x in enumerate(lines, 1) if x.strip())
    ]
    if not prompts:
        raise ToolError(f"{path}: found no prompt", f"give lines of {FORM}")
    return PromptSet(
        path.name, sha256(data).hexdigest(), tuple(prompts), tuple(_warn_of_random(prompts))
    )


def _read_prompt(where: str, line: str, index: int) -> Prompt:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ToolError(f"{where}: not JSON ({error})", f"expected {FORM}") from error
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise ToolError(f"{where}: expected one of prompt and messages", f"expected {FORM}")
    given = data.get("messages", [{"role": "user", "content": data.get("prompt")}])
    if not isinstance(given, list) or not all(_is_message(message) for message in given):
        raise ToolError(
            f"{where}: each message needs a role ({', '.join(ROLES)}) and a text that is not empty",
            f"expected {FORM}",
        )
    if not given or given[-1]["role"] != "user":
        raise ToolError(f"{where}: the last message is not the user's", f"expected {FORM}")
    messages = tuple(Message(message["role"], message["content"]) for message in given)
    return Prompt(index, str(data.get("domain") or NO_DOMAIN), messages)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ROLES
        and isinstance(value.get("content"), str)
        and bool(value["content"].strip())
    )


def _warn_of_random(prompts: Iterable[Prompt]) -> Iterable[str]:
    words: dict[str, Counter[str]] = {}
    for prompt in prompts:
        found = words.setdefault(prompt.domain, Counter())
        for message in prompt.messages:
            found.update(WORD.findall(message.content.lower()))
    for domain, counter in words.items():
        share = sum(count for _, count in counter.most_common(COMMON)) / max(counter.total(), 1)
        if counter.total() >= FEWEST_WORDS and share < LEAST_COMMON:
            yield (
                f"the prompts of domain {domain} look like random tokens (their {COMMON} commonest "
                f"words are {share:.1%} of {counter.total()}): these overstate acceptance"
            )
