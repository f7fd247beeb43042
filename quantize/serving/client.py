"""Asks a vLLM server, over its OpenAI-compatible API, and keeps what it says of each request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from quantize.errors import ToolError
from quantize.serving.prompts import Message, Prompt

TIMEOUT = 3600.0
"""Seconds for one answer: a large model on a busy server may queue it for long."""
TOP_LOGPROBS = 20
"""The most that vLLM gives by default (``--max-logprobs``)."""
LOOPBACK = {"127.0.0.1", "localhost", "::1"}

Advance = Callable[[int], object]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """One generated turn.

    ``histogram[j]`` counts the steps that accepted exactly j draft tokens; it and
    ``draft_tokens`` come from vLLM's ``metrics.speculative_decoding``, and are None and 0 where
    the server does not say. ``alternatives`` has the logprobs (nats) of the likeliest token ids
    at each position, when they were asked for.
    """

    prompt: Prompt
    turn: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    histogram: tuple[int, ...] | None
    draft_tokens: int
    alternatives: tuple[Mapping[int, float], ...] = ()


class RequestsFailed(ToolError):
    """Requests that a server did not answer; a measurement without them would mislead."""


def fetch(url: str, body: Mapping[str, Any] | None = None, timeout: float = 60) -> bytes:
    """GET, or POST as JSON. Raises ToolError with the server's own words."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    proxies: dict[str, str] | None = {} if urlsplit(url).hostname in LOOPBACK else None
    try:
        with build_opener(ProxyHandler(proxies)).open(request, timeout=timeout) as answer:
            return bytes(answer.read())
    except HTTPError as error:
        said = error.read()[:500].decode(errors="replace")
        raise ToolError(f"{url}: HTTP {error.code} {error.reason}: {said}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ToolError(f"{url}: {error or type(error).__name__}", "is the server up?") from error


def find_model(url: str) -> str:
    """The name of the (first) model that a server has. Raises ToolError."""
    try:
        return str(json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(f"{url}/v1/models: names no model", "is this a vLLM?") from error


def find_version(url: str) -> str:
    """The server's vLLM version. Raises ToolError."""
    try:
        return str(json.loads(fetch(f"{url}/version"))["version"])
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(f"{url}/version: states no version", "is this a vLLM?") from error


def ask_all(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    advance: Advance,
    *,
    logprobs: bool = False,
) -> tuple[Answer, ...]:
    """Every generated turn of every prompt, in the order of the prompts.

    Raises RequestsFailed, after all were tried, when a request failed.
    """
    model = find_model(url)
    results = _in_threads(
        lambda prompt: _converse(url, model, prompt, sampling, logprobs),
        prompts,
        concurrency,
        advance,
    )
    failed = {
        prompt.index: result
        for prompt, result in zip(prompts, results, strict=True)
        if isinstance(result, ToolError)
    }
    if failed:
        index, first = next(iter(failed.items()))
        raise RequestsFailed(
            f"{len(failed)} of {len(prompts)} prompts failed; first prompt {index}: "
            f"{first.message}",
            "an acceptance length without them would mislead: fix the cause and measure again",
        )
    return tuple(
        answer for result in results if not isinstance(result, ToolError) for answer in result
    )


def _converse(
    url: str, model: str, prompt: Prompt, sampling: Sampling, logprobs: bool
) -> tuple[Answer, ...]:
    """Generate an answer after each user's message to which the file gives none."""
    history: list[Message] = []
    answers: list[Answer] = []
    following = (*(message.role for message in prompt.messages[1:]), "")
    for message, after in zip(prompt.messages, following, strict=True):
        history.append(message)
        if message.role == "user" and after != "assistant":
            body = _body(model, history, sampling, logprobs)
            reply = fetch(f"{url}/v1/chat/completions", body, TIMEOUT)
            answers.append(read_answer(reply, prompt, len(answers)))
            history.append(Message("assistant", answers[-1].text))
    return tuple(answers)


def _body(
    model: str, history: Sequence[Message], sampling: Sampling, logprobs: bool
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": turn.role, "content": turn.content} for turn in history],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "return_token_ids": True,
    }
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS, "return_tokens_as_token_ids": True}
    return body


def read_answer(reply: bytes, prompt: Prompt, turn: int) -> Answer:
    """One response of ``/v1/chat/completions``. Raises ToolError when a part is missing."""
    try:
        data = json.loads(reply)
        choice = data["choices"][0]
        spoken = (data.get("metrics") or {}).get("speculative_decoding")
        content = (choice.get("logprobs") or {}).get("content") or ()
        return Answer(
            prompt,
            turn,
            choice["message"]["content"] or "",
            tuple(choice["token_ids"]),
            str(choice["finish_reason"]),
            tuple(spoken["acceptance_histogram"]) if spoken else None,
            int(spoken["num_draft_tokens"]) if spoken else 0,
            tuple(
                {_token_id(top["token"]): float(top["logprob"]) for top in place["top_logprobs"]}
                for place in content
            ),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(
            f"an answer lacks {error}: {reply[:300].decode(errors='replace')}"
        ) from error


def _token_id(text: str) -> int:
    return int(text.removeprefix("token_id:"))


def _in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], threads: int, advance: Advance
) -> list[Result | ToolError]:
    """``work`` on every item, in order. Daemon threads: Ctrl-C need not wait for answers."""
    todo: SimpleQueue[int] = SimpleQueue()
    done: SimpleQueue[tuple[int, Result | BaseException]] = SimpleQueue()
    for place in range(len(items)):
        todo.put(place)

    def run() -> None:
        while True:
            try:
                place = todo.get_nowait()
            except Empty:
                return
            try:
                done.put((place, work(items[place])))
            except BaseException as error:
                done.put((place, error))

    for _ in range(min(threads, len(items))):
        Thread(target=run, daemon=True).start()
    results: dict[int, Result | ToolError] = {}
    for _ in items:
        place, result = done.get()
        if isinstance(result, BaseException) and not isinstance(result, ToolError):
            raise result
        results[place] = result
        advance(1)
    return [results[place] for place in range(len(items))]
