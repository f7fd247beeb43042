"""The main job on the embedded default, and the model it is made from."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from conftest import run_quantize
from gguf.quants import dequantize
from transformers import AutoTokenizer

from quantize.demo import build_target, draft_path, find_gguf, find_problem
from quantize.errors import BadOutput

TARGET = "smollm2-135m-instruct"
HEADS = {"attn_q": 9, "attn_k": 3}
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk.": "layers.",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_": "self_attn.",
    "ffn_": "mlp.",
    ".q.": ".q_proj.",
    ".k.": ".k_proj.",
    ".v.": ".v_proj.",
    "gate.": "gate_proj.",
    "up.": "up_proj.",
    "down.": "down_proj.",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor of llama.cpp."""
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return f"model.{name}"


def undo_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def read_bf16(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a BF16 safetensors file, by the header alone."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            begin, end = entry["data_offsets"]
            data = np.frombuffer(raw[start + begin : start + end], ml_dtypes.bfloat16)
            yield name, data.reshape(entry["shape"])


def test_weights_are_those_of_the_gguf_rounded_once(demo_dir: Path) -> None:
    ours = dict(read_bf16(demo_dir / TARGET / "model.safetensors"))
    tensors = gguf.GGUFReader(find_gguf()).tensors
    assert {hf_name(tensor.name) for tensor in tensors} == set(ours)
    assert "lm_head.weight" not in ours
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        heads = HEADS.get(tensor.name.split(".")[-2])
        expected = undo_permutation(weight, heads) if heads else weight
        found = ours[hf_name(tensor.name)]
        assert np.array_equal(found, expected.astype(ml_dtypes.bfloat16)), tensor.name
        if heads:
            assert not np.array_equal(found, weight.astype(ml_dtypes.bfloat16))


def test_config_reads_the_same_in_old_and_new_spelling(demo_dir: Path) -> None:
    config = json.loads((demo_dir / TARGET / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert config["vocab_size"] == 49152
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    draft = json.loads((draft_path() / "config.json").read_text())
    same = ("hidden_size", "vocab_size", "rope_theta", "head_dim", "max_position_embeddings")
    assert {key: config[key] for key in same} == {key: draft[key] for key in same}


def test_tokenizer_speaks_the_chat_format(demo_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_dir / TARGET)
    message = {"role": "user", "content": "Émile has 12345 ² apples"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert text.endswith(f"user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def find_checks(value: Any) -> Iterator[dict[str, str]]:
    """Every check in a JSON result, however deep."""
    if isinstance(value, dict) and {"name", "status", "required"} <= set(value):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from find_checks(item)


def test_every_check_passes_and_quality_is_not_claimed(
    demo_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = demo_run
    result = json.loads(done.stdout)
    assert result["ok"] is True
    assert result["command"] == "demo"
    assert result["language_quality"] == "not_measured"
    checks = list(find_checks(result["checks"]))
    assert len(checks) > 10
    assert {check["status"] for check in checks} == {"pass"}
    for part in ("target/config.json", "draft/config.json", "report.json", "serve.sh"):
        assert (folder / "pair" / part).is_file()


def test_second_run_verifies_what_is_there(demo_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in demo_dir.rglob("*.safetensors")}
    again = run_quantize("demo", "-o", demo_dir, cwd=demo_dir.parent)
    assert again.returncode == 0, again.stderr
    text = again.stdout + again.stderr
    assert "quality" in text
    assert "not measured" in text.replace("_", " ")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_second_run_finds_a_flipped_bit(demo_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo_dir, tmp_path / "demo")
    path = next((copy / "pair" / "target").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = run_quantize("demo", "-o", copy, "--json", cwd=tmp_path)
    assert done.returncode == 1
    checks = list(find_checks(json.loads(done.stdout)["checks"]))
    failed = [check["name"] for check in checks if check["status"] == "fail"]
    # The last byte belongs to one tensor; in a moved folder nothing else may fail.
    assert failed in (["files", "preserved"], ["files", "quantized bytes"]), failed


def test_target_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(BadOutput, match="is not the demo's target"):
        build_target(other)
    assert [path.name for path in other.iterdir()] == ["config.json"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_target_is_found(demo_dir: Path, tmp_path: Path, file: str) -> None:
    copy = shutil.copytree(demo_dir / TARGET, tmp_path / "copy")
    assert find_problem(copy) == ""
    data = (copy / file).read_bytes()
    (copy / file).unlink()
    assert find_problem(copy)
    if file != "tokenizer.json":
        (copy / file).write_bytes(data[: len(data) // 2])
        assert find_problem(copy)
