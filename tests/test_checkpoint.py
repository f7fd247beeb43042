from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import (
    FIRST,
    INDEX,
    SECOND,
    SINGLE_FILE,
    TWO_SHARDS,
    Edit,
    chop,
    entry,
    pair,
    raw,
    single,
)
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import write, write_llama

from quantize.checkpoint import fingerprint, open_checkpoint
from quantize.errors import BadCheckpoint
from quantize.side_files import is_side_file
from schemes.base import ITEM_BYTES, TORCH_NAMES

# ---- what opens -----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_safetensors_reads(tmp_path: Path, shards: int) -> None:
    path = write_llama(tmp_path / "m", shards=shards, num_hidden_layers=2)
    checkpoint = open_checkpoint(str(path))
    assert list(checkpoint.headers) == sorted(p.name for p in path.glob("*.safetensors"))
    seen = 0
    for shard in checkpoint.headers:
        with safe_open(path / shard, "pt") as reference:
            for name in reference.keys():  # noqa: SIM118 - not a mapping
                expected, part = reference.get_tensor(name), reference.get_slice(name)
                spec = checkpoint.specs[name]
                assert (spec.dtype, list(spec.shape)) == (part.get_dtype(), part.get_shape())
                assert checkpoint.shard_of[name] == shard
                assert checkpoint.tensor(name).dtype == expected.dtype
                assert torch.equal(checkpoint.tensor(name), expected)
                assert torch.equal(checkpoint.tensor(name, 3, 17), part[3:17])
                raw_bytes = expected[5:].contiguous().view(torch.uint8).numpy().tobytes()
                assert checkpoint.read(name, 5) == raw_bytes
                seen += 1
    assert seen == len(checkpoint.specs)


def test_every_dtype_and_odd_shapes(tmp_path: Path) -> None:
    tensors = {
        dtype: torch.arange(24).reshape(2, 3, 4).to(torch.float32).to(getattr(torch, name))
        for dtype, name in TORCH_NAMES.items()
    }
    tensors["scalar"] = torch.tensor(7, dtype=torch.int64)
    tensors["empty"] = torch.empty(0, 4)
    tensors["no columns"] = torch.empty(4, 0, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(str(write(tmp_path / "m", {}, tensors)))
    assert TORCH_NAMES.keys() == ITEM_BYTES.keys()
    for name, expected in tensors.items():
        tensor = checkpoint.tensor(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        if expected.numel():
            as_bytes = tensor.flatten().view(torch.uint8)
            assert torch.equal(as_bytes, expected.flatten().view(torch.uint8)), name
    assert checkpoint.tensor("no columns", 1, 3).shape == (2, 0)
    assert checkpoint.tensor("BF16", 2, 2).shape == (0, 3, 4)
    checkpoint.tensor("F32").zero_()
    with pytest.raises(ValueError, match="rows 1:3 of 2"):
        checkpoint.read("F32", 1, 3)


def test_order_is_of_shards_then_of_data(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text('{"z": 1, "a": {"y": 2, "b": 3}}')
    raw(
        path / FIRST,
        {"p": entry(2, 5, [3]), "q": entry(0, 2, [2]), "e": entry(5, 5, [0])},
        b"QQPPP",
    )
    raw(path / SECOND, {"a": entry(0, 1, [1])}, b"A")
    checkpoint = open_checkpoint(str(path))
    assert list(checkpoint.specs) == ["q", "p", "e", "a"]
    assert checkpoint.read("p") == b"PPP"
    assert json.dumps(checkpoint.config) == '{"z": 1, "a": {"y": 2, "b": 3}}'
    assert checkpoint.path == path


TRAVEL = """
    LICENSE.txt NOTICE added_tokens.json chat_template.jinja generation_config.json merges.txt
    preprocessor_config.json special_tokens_map.json spiece.model tokenizer.json tokenizer.model
    tokenizer_config.json video_preprocessor_config.json vocab.json
"""
STAY = """
    README.md .gitattributes hf_quant_config.json quantize_config.json quant_config.json
    optimizer.pt trainer_state.json training_args.bin tokenizer.bin vocab.pth model.gguf
    pytorch_model.bin train.py params.json
"""


def test_side_files_are_those_that_travel(tmp_path: Path) -> None:
    path = single(tmp_path / "m")
    travel, stay = TRAVEL.split(), STAY.split()
    for name in (*travel, *stay):
        (path / name).write_text("{}")
    (path / "original").mkdir()
    (path / ".cache").mkdir()
    (path / "original" / "tokenizer.model").write_text("x")
    assert open_checkpoint(str(path)).side_files == tuple(sorted(travel))
    (path / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_x.X"}}')
    assert "train.py" in open_checkpoint(str(path)).side_files
    assert not is_side_file("modeling_x.py", remote_code=False)


def test_weights_beside_the_checkpoint_are_not_read(tmp_path: Path) -> None:
    path = pair(tmp_path / "m")
    save_file({"layers.0.wq": torch.ones(2)}, path / "consolidated.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"stale")
    assert sorted(open_checkpoint(str(path)).specs) == list("abcd")
    (path / INDEX).unlink()
    assert sorted(open_checkpoint(str(path)).specs) == list("abcd")


def test_ignore_index_reads_the_good_file(tmp_path: Path) -> None:
    path = single(tmp_path / "m")
    (path / INDEX).write_text(json.dumps({"weight_map": {"old": FIRST}}))
    assert list(open_checkpoint(str(path), ignore_index=True).specs) == ["a", "b"]
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(BadCheckpoint, match="omits tensor 'b'"):
        open_checkpoint(str(path))
    assert list(open_checkpoint(str(path), ignore_index=True).specs) == ["a", "b"]


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    real = pair(tmp_path / "real")
    snapshot = tmp_path / "models--o--n" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--o--n" / "blobs"
    blobs.mkdir()
    for n, file in enumerate(real.iterdir()):
        shutil.copy(file, blobs / str(n))
        (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    assert list(open_checkpoint(str(snapshot)).specs) == list("abcd")
    (tmp_path / "link").symlink_to(snapshot)
    assert list(open_checkpoint(str(tmp_path / "link")).specs) == list("abcd")


def test_fingerprint_tells_sources_apart(tmp_path: Path) -> None:
    path = pair(tmp_path / "m")
    (path / "tokenizer.json").write_text("{}")
    before = fingerprint(open_checkpoint(str(path)))
    assert json.loads(json.dumps(before)) == before
    assert list(before) == ["config.json", INDEX, FIRST, SECOND, "tokenizer.json"]
    assert fingerprint(open_checkpoint(str(path))) == before
    os.utime(path / "tokenizer.json", ns=(0, 0))
    assert fingerprint(open_checkpoint(str(path))) != before
    data = (path / FIRST).read_bytes()
    stat = (path / FIRST).stat()
    (path / FIRST).write_bytes(data.replace(b'"format":"pt"', b'"format":"tf"'))
    os.utime(path / FIRST, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = fingerprint(open_checkpoint(str(path)))[FIRST]
    assert changed["mtime_ns"] == before[FIRST]["mtime_ns"]
    assert changed["header_sha256"] != before[FIRST]["header_sha256"]


def test_opening_imports_no_torch_and_no_hub_client(tmp_path: Path) -> None:
    code = (
        "import sys; from quantize.checkpoint import open_checkpoint as o; o(sys.argv[1]); "
        "print({'torch', 'huggingface_hub', 'safetensors', 'numpy'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(pair(tmp_path / "m"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- what is refused ------------------------------------------------------------------------


def refusal(path: Path, **options: Any) -> BadCheckpoint:
    with pytest.raises(BadCheckpoint) as caught:
        open_checkpoint(str(path), **options)
    return caught.value


@pytest.mark.parametrize(
    ("build", "case"),
    [(single, case) for case in SINGLE_FILE.values()]
    + [(pair, case) for case in TWO_SHARDS.values()],
    ids=[*SINGLE_FILE, *TWO_SHARDS],
)
def test_refused_by_name(
    tmp_path: Path,
    build: Callable[[Path], Path],
    case: tuple[Edit, list[str], list[str]],
) -> None:
    path = build(tmp_path / "m")
    open_checkpoint(str(path))
    edit, in_message, in_hint = case
    edit(path)
    error = refusal(path)
    assert str(path) in error.message
    for word in in_message:
        assert word in error.message
    assert error.hint
    for word in in_hint:
        assert word in error.hint


def test_places_that_are_no_checkpoint(tmp_path: Path) -> None:
    path = single(tmp_path / "m")
    assert "does not exist" in refusal(tmp_path / "nothing").message
    assert "expected a checkpoint folder" in refusal(path / "model.safetensors").message
    assert str(path) in refusal(path / "model.safetensors").hint
    assert "v2" in refusal(path, revision="v2").message


def test_a_link_is_only_followed_in_a_hub_cache(tmp_path: Path) -> None:
    """A folder called ``snapshots`` opens no other place than its own ``blobs``."""
    snapshot = single(tmp_path / "snapshots" / "m")
    (tmp_path / "blobs" / "deep").mkdir(parents=True)
    (snapshot / "model.safetensors").rename(tmp_path / "blobs" / "deep" / "file")
    (snapshot / "model.safetensors").symlink_to("../../blobs/deep/file")
    assert "leaves the checkpoint folder" in refusal(snapshot).message


def test_a_file_that_shrinks_after_opening_is_refused(tmp_path: Path) -> None:
    path = single(tmp_path / "m")
    checkpoint = open_checkpoint(str(path))
    chop(path)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: the file ends at byte"):
        checkpoint.read("a" if checkpoint.offsets["a"] > checkpoint.offsets["b"] else "b")


def test_a_file_that_goes_after_opening_is_refused(tmp_path: Path) -> None:
    path = single(tmp_path / "m")
    (path / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(str(path))
    (path / "tokenizer.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"m/tokenizer\.json: was there"):
        fingerprint(checkpoint)
