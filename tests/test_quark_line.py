"""The line's bytes equal those of AMD Quark's public file-to-file export, on real input."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from pruned import write_pruned
from runs import draft_job, read_header, settings, target_job

from quantize.compute import Compute
from quantize.demo import draft_path
from quantize.job import run_one
from schemes import SCHEMES
from schemes.base import Scheme

Tensors = dict[str, tuple[str, list[int], str]]
BOTH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.NAME)


@pytest.fixture(scope="module")
def target(demo_dir: Path) -> Path:
    """SmolLM2-135M-Instruct in BF16."""
    return demo_dir / "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def pruned(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pruned(tmp_path_factory.mktemp("drafts") / "pruned", target)


def read_tensors(folder: Path) -> Tensors:
    """Dtype, shape and the bytes' hash of every tensor in a folder."""
    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        header, start = read_header(file)
        header.pop("__metadata__", None)
        data = memoryview(file.read_bytes())[start:]
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], sha256(data[begin:end]).hexdigest())
    return found


def export(source: Path, out: Path, scheme: Scheme, exclude: list[str] | None = None) -> Tensors:
    """Quark's own export, with the exclusions of its Llama template or with these."""
    from quark.torch import LLMTemplate, ModelQuantizer

    options = {"exclude_layers": exclude} if exclude else {}
    config = LLMTemplate.get("llama").get_config(scheme=scheme.QUARK_SCHEME, **options)
    assert not out.exists()  # Quark would delete it
    ModelQuantizer(config).direct_quantize_checkpoint(str(source), str(out), device="cpu")
    return read_tensors(out)


def quantized(tensors: Tensors) -> set[str]:
    """The modules that have a scale."""
    suffix = ".weight_scale"
    return {name.removesuffix(suffix) for name in tensors if name.endswith(suffix)}


@BOTH
def test_target(scheme: Scheme, target: Path, demo_dir: Path, tmp_path: Path) -> None:
    theirs = export(target, tmp_path / "quark", scheme)
    run_one(target_job(target, scheme.NAME), tmp_path / "ours", settings(verify=False))
    assert len(quantized(theirs)) == 30 * 7
    assert read_tensors(tmp_path / "ours") == theirs
    if scheme.NAME == "mxfp4":  # what the command itself wrote
        assert read_tensors(demo_dir / "pair" / "target") == theirs


@BOTH
@pytest.mark.parametrize("layout", ["shared head", "pruned head"])
def test_draft(
    scheme: Scheme, layout: str, target: Path, pruned: Path, demo_dir: Path, tmp_path: Path
) -> None:
    draft = draft_path() if layout == "shared head" else pruned
    theirs = export(draft, tmp_path / "theirs", scheme, ["fc", "lm_head"])
    assert len(quantized(theirs)) == 7
    assert {"d2t", "t2d", "lm_head.weight"} <= theirs.keys() or layout == "shared head"
    for compute in (Compute(workers=3), Compute("quark")):
        out = tmp_path / compute.engine
        job = draft_job(draft, target, scheme.NAME)
        run_one(job, out, settings(verify=False, compute=compute))
        assert read_tensors(out) == theirs
    if (scheme.NAME, layout) == ("fp8_rowwise", "shared head"):
        assert read_tensors(demo_dir / "pair" / "draft") == theirs
