"""Any damage to a shard ends in a refusal or does no harm."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.torch import save

from quantize.checkpoint import open_checkpoint
from quantize.errors import BadCheckpoint

VALID = save(
    {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(()), "c": torch.empty(0, 2)},
    metadata={"format": "pt"},
)
HEADER = VALID[8 : 8 + int.from_bytes(VALID[:8], "little")]
TOKENS = [
    *(bytes([c]) for c in b'"{}[],:-019 \xff'),
    *(b"null", b"1e3", b'"a"', b'"F4"', b'"U8"', b"\\ud800", b'"x":1,', b"18446744073709551616"),
]
DAMAGE = st.tuples(st.integers(0, len(HEADER)), st.integers(0, 12), st.sampled_from(TOKENS))


@given(
    damages=st.lists(DAMAGE, max_size=3),
    keep_length=st.booleans(),
    cut=st.integers(-3, 3),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    damages: list[tuple[int, int, bytes]],
    keep_length: bool,
    cut: int,
) -> None:
    """safetensors itself is the judge: what opens here opens there, with the same tensors."""
    text, data = HEADER, VALID[8 + len(HEADER) :]
    for position, deleted, inserted in damages:
        text = text[:position] + inserted + text[position + deleted :]
    data = data[:cut] if cut < 0 else data + bytes(cut)
    length = len(HEADER) if keep_length else len(text)
    content = struct.pack("<Q", length) + text + data
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(content)
    try:
        checkpoint = open_checkpoint(str(path))
    except BadCheckpoint as error:
        assert "model.safetensors" in error.message
        return
    reference = {name: (t["dtype"], tuple(t["shape"])) for name, t in deserialize(content)}
    assert reference == {s.name: (s.dtype, s.shape) for s in checkpoint.specs.values()}
    for name, tensor in deserialize(content):
        assert checkpoint.read(name) == bytes(tensor["data"])


def test_the_undamaged_file_opens(tmp_path: Path) -> None:
    """The file that the damage starts from: else every refusal above would prove nothing."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(VALID)
    assert sorted(open_checkpoint(str(tmp_path)).specs) == ["a", "b", "c"]
