"""``.bin`` checkpoints are read as torch reads them, and run nothing."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import draft_job, run_one, settings
from safetensors.torch import load_file
from tiny import Tensors, draft_config, draft_tensors, write, write_draft, write_llama

from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.errors import BadCheckpoint

NAME = "pytorch_model.bin"


def folder(path: Path, saved: Any, name: str = NAME, **how: Any) -> Path:
    """A checkpoint folder with one file of `torch.save`."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    torch.save(saved, path / name, **how)
    return path


def awkward() -> Tensors:
    """Views of one storage, transposed, expanded, scalar, empty, and every kind of number."""
    base = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    cube = torch.arange(3 * 4 * 5, dtype=torch.float32).reshape(3, 4, 5)
    return {
        "whole": base,
        "same": base,
        "rows": base[3:7],
        "columns": base[:, 2:5],
        "transposed": base.t(),
        "expanded": base[:, :1].expand(12, 6),
        "cube": cube.permute(0, 2, 1),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "d2t": torch.arange(5),
        "t2d": torch.tensor([True, False, True]),
        "fp8": base.to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(base[1:2]),
    }


def check_equal(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Every tensor, and any rows of it, are those that were saved."""
    assert checkpoint.specs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = checkpoint.tensor(name)
        assert found.dtype == tensor.dtype
        expected = tensor.detach().contiguous()
        assert found.shape == expected.shape
        assert torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))
        if tensor.ndim and len(tensor) > 2:
            assert checkpoint.read(name, 1, 3) == bytes(
                expected[1:3].contiguous().flatten().view(torch.uint8).tolist()
            )


def test_every_view_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(folder(tmp_path / "m", awkward())))
    check_equal(checkpoint, awkward())
    assert torch.equal(checkpoint.expert("cube", 2, 1, 4), awkward()["cube"][2, 1:4])
    assert list(checkpoint.chunks("transposed")) == [(0, 8)]


@pytest.mark.parametrize("index", [True, False])
def test_several_files(index: bool, tmp_path: Path) -> None:
    parts: list[Tensors] = [{}, {}, {}]
    for n, item in enumerate(awkward().items()):
        parts[n % 3] |= [item]
    names = [f"pytorch_model-0000{n + 1}-of-00003.bin" for n in range(3)]
    for name, part in zip(names, parts, strict=True):
        path = folder(tmp_path / "m", part, name)
    (path / "training_args.bin").write_bytes(b"not weights")
    if index:
        weights = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        text = json.dumps({"weight_map": weights})
        (path / "pytorch_model.bin.index.json").write_text(text)
    checkpoint = open_checkpoint(str(path))
    check_equal(checkpoint, awkward())
    assert ("pytorch_model.bin.index.json" in checkpoint.source_files) == index
    (path / names[1]).unlink()
    with pytest.raises(BadCheckpoint, match="pytorch_model-00002-of-00003"):
        open_checkpoint(str(path))


def test_safetensors_beside_it_are_preferred(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {}, {"w": torch.ones(2)})
    folder(path, {"w": torch.zeros(2)})
    assert open_checkpoint(str(path)).tensor("w").tolist() == [1, 1]


def test_a_draft_makes_the_same_output(tmp_path: Path) -> None:
    """Its projections saved as transposed views, as an older trainer left them."""
    target, plain = write_llama(tmp_path / "t"), write_draft(tmp_path / "d")
    config = draft_config()
    tensors = draft_tensors(config)
    views = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in tensors.items()}
    pickled = folder(tmp_path / "p", views)
    (pickled / "config.json").write_text(json.dumps(config))
    for source in (plain, pickled):
        job = draft_job(source, target, "fp8_rowwise")
        run_one(job, tmp_path / f"{source.name}-out", settings())
    left, right = (load_file(tmp_path / f"{n}-out/model.safetensors") for n in "dp")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in left)


class Evil:
    """What a hostile pickle holds: a call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_no_code_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    path = folder(tmp_path / "m", {"w": torch.zeros(2), "x": Evil(marker)})
    with pytest.raises(BadCheckpoint, match="not a plain state dict") as caught:
        open_checkpoint(str(path))
    assert not marker.exists()
    assert caught.value.hint


def rewrite(path: Path, compression: int = zipfile.ZIP_STORED, **changed: bytes | None) -> None:
    """Write the archive anew; a record whose last part is named gets other bytes, or goes."""
    with zipfile.ZipFile(path / NAME) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path / NAME, "w", compression) as archive:
        for name, data in records.items():
            found = changed.get(name.rpartition("/")[2].replace(".", "_"), data)
            if found is not None:
                archive.writestr(name, found)


SAVED: dict[str, Any] = {
    "nested": {"state_dict": {"w": torch.ones(4)}},
    "a list": [torch.ones(4)],
    "a number": {"w": torch.ones(4), "step": 3},
    "sparse": {"w": torch.eye(4).to_sparse()},
    "complex": {"w": torch.ones(4, dtype=torch.complex64)},
    "a name": {"w\n": torch.ones(4)},
}
REWRITTEN: dict[str, dict[str, Any]] = {
    "compressed": {"compression": zipfile.ZIP_DEFLATED},
    "short storage": {"0": b"1234"},
    "no storage": {"0": None},
    "no pickle": {"data_pkl": None},
    "another pickle": {"data_pkl": b"\x80\x02}q\x00.garbage"},
    "big endian": {"byteorder": b"big"},
}


def damage(kind: str, path: Path) -> None:
    """Turn a good file into another."""
    file = path / NAME
    if kind in SAVED:
        torch.save(SAVED[kind], file)
    elif kind in REWRITTEN:
        rewrite(path, **REWRITTEN[kind])
    elif kind == "legacy":
        torch.save({"w": torch.ones(4)}, file, _use_new_zipfile_serialization=False)
    else:
        file.write_bytes(file.read_bytes()[:-40] if kind == "truncated" else b"")


@pytest.mark.parametrize("kind", [*SAVED, *REWRITTEN, "legacy", "truncated", "empty"])
def test_what_is_no_plain_state_dict_is_refused(kind: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"w": torch.ones(4)})
    damage(kind, path)
    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin|found no tensor"):
        open_checkpoint(str(path))
