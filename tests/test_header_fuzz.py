"""Mutated headers, indexes and configs: a clean refusal, or what safetensors itself reads.

Every example is opened under a memory limit, with the interpreter's own record of opened files,
and against a deadline; the examples are the same in every run.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from broken import FIRST, INDEX, SECOND
from hostile import DEEP, NORM, UP, WEIGHTS, opened_files
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from tiny import write_draft, write_llama

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.errors import ToolError
from quantize.plan import Options
from quantize.prepare import PairOptions, prepare_draft, prepare_target

pytestmark = pytest.mark.timeout(600)

PEAK = 40_000_000
"""Bytes that opening a checkpoint of a few kB may take, whatever lengths it claims."""

FUZZ = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=timedelta(minutes=1),
    suppress_health_check=list(HealthCheck),
)

NUMBERS = st.sampled_from(
    [
        0,
        1,
        -1,
        2,
        63,
        64,
        127,
        128,
        1 << 16,
        1 << 31,
        1 << 32,
        1 << 40,
        1 << 53,
        1 << 62,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        10**30,
    ]
)
LEAVES = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=9)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        UP,
        NORM,
        "",
        "..",
        "../secret",
        "/etc/passwd",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "__metadata__",
        "\ud800",
        "model.layers.\u0661.mlp.up_proj.weight",
        "n" * 600,
    ]
) | st.text(max_size=9)
PLACES = st.sampled_from(
    [
        FIRST,
        SECOND,
        "link.safetensors",
        "pipe.safetensors",
        "folder.safetensors",
        ".safetensors",
        "../secret.safetensors",
        "absent.safetensors",
        "config.json",
        "a\0.safetensors",
        "\ud800",
        f"./{FIRST}",
        f"sub/../{FIRST}",
    ]
)


@contextmanager
def memory_limit(room: int = 2 << 30) -> Iterator[None]:
    """No more than ``room`` bytes of further address space: a huge allocation fails at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert peak < PEAK, f"{peak:,} bytes"


def attempt(folder: Path, use: Callable[[], Any]) -> Any:
    """What ``use`` returns, or None when it refuses: politely, and without leaving the folder."""
    with memory_limit(), opened_files() as opened:
        try:
            result = use()
        except ToolError as error:
            assert error.message
            assert error.hint
            assert len(error.message + error.hint) < 2500, error.message
            result = None
    for name in opened:
        assert Path(os.path.realpath(name)).is_relative_to(folder), name
    return result


def agrees(checkpoint: Checkpoint, folder: Path) -> None:
    """Safetensors' own parser finds the same tensors with the same bytes."""
    found = {}
    for shard in checkpoint.headers:
        for name, item in deserialize((folder / shard).read_bytes()):
            found[name] = (item["dtype"], tuple(item["shape"]), bytes(item["data"]))
    ours = {
        name: (spec.dtype, spec.shape, bytes(checkpoint.read(name)))
        for name, spec in checkpoint.specs.items()
    }
    assert ours == found


def mutate(draw: st.DrawFn, pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Change an object given as pairs, at up to three places; keys may come twice."""
    pairs = list(pairs)
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, len(pairs) - 1))
        name, value = pairs[n]
        kind = draw(st.sampled_from(["name", "value", "field", "number", "twice", "drop"]))
        if kind == "name":
            pairs[n] = (draw(NAMES), value)
        elif kind == "value":
            pairs[n] = (name, draw(VALUES))
        elif kind in ("field", "number") and isinstance(value, dict) and value:
            field = draw(st.sampled_from(sorted(value)))
            pairs[n] = (
                name,
                value | {field: draw(_like(value[field]) if kind == "number" else VALUES)},
            )
        elif kind == "twice":
            pairs.append(pairs[n])
        elif len(pairs) > 1:
            del pairs[n]
    return pairs


def _like(value: Any) -> st.SearchStrategy[Any]:
    """A value of the same form: lists of numbers with one number changed."""
    if not isinstance(value, list) or not all(isinstance(n, int) for n in value) or not value:
        return st.sampled_from(["BF16", "U8", "F32", "F8_E4M3", "I64", "BF17", "F4", "bf16"])
    places = st.integers(0, len(value) - 1)
    near = st.integers(-3, 3)
    changed = st.builds(lambda n, by: [*value[:n], value[n] + by, *value[n + 1 :]], places, near)
    return changed | st.builds(lambda n, to: [*value[:n], to, *value[n + 1 :]], places, NUMBERS)


def as_json(pairs: list[tuple[str, Any]]) -> bytes:
    items = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
    return f"{{{items}}}".encode()


Header = tuple[bytes, int, int | None]
"""The bytes of a header, the length that the file claims for it, and the file's size if changed."""


def good_header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@st.composite
def shard_headers(draw: st.DrawFn, path: Path) -> Header:
    """A header like a good one, and what its file says and is."""
    header = as_json(mutate(draw, list(json.loads(good_header(path)).items())))
    length, size = len(header), None
    if draw(st.integers(0, 5)) == 1:
        length = draw(NUMBERS | st.integers(0, 2 * len(header)))
    if draw(st.integers(0, 5)) == 1:
        size = draw(st.integers(0, 2 * len(header)) | st.sampled_from([1 << 33, 1 << 42]))
    return header, length, size


def write_shard(path: Path, good: Path, case: Header) -> None:
    """A file of this header with the data of a good one."""
    header, length, size = case
    data = good.read_bytes()[8 + len(good_header(good)) :]
    path.write_bytes((length % (1 << 64)).to_bytes(8, "little") + header + data)
    if size is not None:
        os.truncate(path, size)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("good") / "m", num_hidden_layers=1)


@pytest.fixture
def folder(tmp_path: Path, target: Path) -> Path:
    return Path(shutil.copytree(target, tmp_path / "m"))


def expect(outcomes: Counter[str]) -> None:
    """The fuzz reaches both sides."""
    assert min(outcomes["opened"], outcomes["refused"]) >= 10, outcomes


def open_and_compare(folder: Path, outcomes: Counter[str], **options: bool) -> None:
    found = attempt(folder, lambda: open_checkpoint(str(folder), **options))
    outcomes["refused" if found is None else "opened"] += 1
    if found is not None:
        agrees(found, folder)


def test_headers(folder: Path, target: Path) -> None:
    outcomes: Counter[str] = Counter()

    header = good_header(target / WEIGHTS)

    @FUZZ
    @given(shard_headers(target / WEIGHTS))
    @example((header, 1 << 31, 1 << 33))
    @example((header, 1 << 40, 1 << 42))
    @example((header, 90_000_000, 200_000))
    @example((header, len(header), None))
    def check(case: Header) -> None:
        write_shard(folder / WEIGHTS, target / WEIGHTS, case)
        open_and_compare(folder, outcomes)

    check()
    expect(outcomes)


def test_bytes(folder: Path, target: Path) -> None:
    """Single bytes of the header changed, added or removed."""
    outcomes: Counter[str] = Counter()
    good = (target / WEIGHTS).read_bytes()
    places = st.integers(0, 8 + int.from_bytes(good[:8], "little"))
    bites = st.sampled_from([b"", b"\0", b"0", b"9", b'"', b"{", b"]", b",", b"\xff", b" ", b"-"])

    @FUZZ
    @given(st.lists(st.tuples(places, st.integers(0, 2), bites), max_size=3))
    def check(changes: list[tuple[int, int, bytes]]) -> None:
        data = good
        for place, cut, bite in changes:
            data = data[:place] + bite + data[place + cut :]
        (folder / WEIGHTS).write_bytes(data)
        open_and_compare(folder, outcomes)

    check()
    expect(outcomes)


@st.composite
def indexes(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    places = [(name, draw(PLACES) if draw(st.integers(0, 40)) == 7 else place)
              for name, place in good["weight_map"].items()]  # fmt: skip
    pairs = [("metadata", good["metadata"]), ("weight_map", 0)]
    text = as_json(mutate(draw, pairs) if draw(st.integers(0, 4)) == 3 else pairs)
    weight_map = as_json(mutate(draw, places))
    return text.replace(b'"weight_map":0', b'"weight_map":' + weight_map)


def test_indexes(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    folder = write_llama(tmp_path / "m", 2, num_hidden_layers=1)
    shutil.copy(folder / FIRST, tmp_path / "secret.safetensors")
    (folder / "link.safetensors").symlink_to("../secret.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()

    @FUZZ
    @given(indexes(json.loads((folder / INDEX).read_text())))
    def check(index: bytes) -> None:
        (folder / INDEX).write_bytes(index)
        open_and_compare(folder, outcomes)

    check()
    expect(outcomes)


CONFIG_VALUES = VALUES | st.just(json.loads(DEEP)) | st.sampled_from(
    [{"tie_word_embeddings": True}, ["LlamaForCausalLM"], ["LlamaForCausalLMEagle3"], [[]], {},
    "fp8", {"quant_method": "fp8"}, [2, 4, 5], [0, 0, 0], "bfloat16"]
)  # fmt: skip
KEYS = st.sampled_from(
    [
        "text_config",
        "quantization_config",
        "compression_config",
        "eagle_config",
        "fc_norm",
        "num_aux_hidden_states",
        "eagle_aux_hidden_state_layer_ids",
        "target_hidden_size",
        "norm_before_fc",
        "vision_config",
        "draft_vocab_size",
        "auto_map",
    ]
)


@st.composite
def configs(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A config with up to two keys changed, one of them perhaps new."""
    keys = st.sampled_from(sorted(good)) | KEYS
    changes = st.dictionaries(keys, CONFIG_VALUES, max_size=2)
    return good | draw(changes)


def test_target_configs(folder: Path, target: Path) -> None:
    outcomes: Counter[str] = Counter()
    _plan(folder)  # imports open files, once

    @FUZZ
    @given(configs(json.loads((target / "config.json").read_text())))
    def check(config: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        found = attempt(folder, lambda: _plan(folder))
        outcomes["refused" if found is None else "opened"] += 1

    check()
    expect(outcomes)


def _plan(folder: Path) -> Any:
    checkpoint = open_checkpoint(str(folder))
    json.dumps(checkpoint.config, ensure_ascii=False).encode()  # as the output's will be
    return prepare_target(checkpoint, Options("mxfp4")).plan.to_json()


def test_draft_configs(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    target = open_checkpoint(str(write_llama(tmp_path / "target")))
    draft = write_draft(tmp_path / "draft")
    _plan_draft(draft, target)  # imports open files, once

    @FUZZ
    @given(configs(json.loads((draft / "config.json").read_text())))
    def check(config: dict[str, Any]) -> None:
        (draft / "config.json").write_text(json.dumps(config))
        found = attempt(tmp_path, lambda: _plan_draft(draft, target))
        outcomes["refused" if found is None else "opened"] += 1

    check()
    expect(outcomes)


def _plan_draft(draft: Path, target: Checkpoint) -> Any:
    job = prepare_draft(open_checkpoint(str(draft)), target, Options("fp8_rowwise"), PairOptions())
    return job.plan.to_json()
