"""The files that travel beside the weights into the output: tokenizer, templates, licence."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from quantize.errors import BadCheckpoint
from quantize.files import Files, read_at, refuse_pointer
from quantize.header import read_json, shown

SIDE_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "generation_config.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "image_processor*.json",
    "license*",
    "notice*",
)
"""Patterns, in lower case, of the files that travel with a model's weights."""

NEVER = (".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack", ".onnx")
"""Endings of weights and training state: never side files, whatever their names say."""

LARGEST_SIDE_FILE = 1_000_000_000
"""Bytes of the largest file that travels beside the weights; published tokenizers have 40 MB."""


def find_side_files(files: Files, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The files that travel with the weights. Raises `BadCheckpoint` for one that cannot."""
    remote_code = _has_remote_code(files, sizes)
    names = tuple(name for name in sizes if is_side_file(name, remote_code))
    for name in names:
        _check_side_file(files, name, sizes[name])
        # A pointer file is shorter than 1024 bytes (git-lfs docs/spec.md).
        if sizes[name] < 1024:
            refuse_pointer(files, name, read_at(files, name, 0, sizes[name]))
        else:
            files.open(name).close()
    return names


def _check_side_file(files: Files, name: str, size: int) -> None:
    """It travels into the output, so its name must be writable everywhere and its size modest."""
    if not name.isprintable():
        raise BadCheckpoint(
            f"{files.origin}: found the file name {shown(name)}, expected printable characters",
            "rename the file, or move it out of the folder",
        )
    if size > LARGEST_SIDE_FILE:
        raise BadCheckpoint(
            f"{files.origin}/{name}: found {size:,} bytes, expected at most "
            f"{LARGEST_SIDE_FILE:,} in a file beside the weights",
            "move it out of the folder, if it is not part of the model",
        )


def _has_remote_code(files: Files, sizes: Mapping[str, int]) -> bool:
    """Whether one of the configs names classes in the folder's own ``.py`` files."""
    configs = [name for name in sizes if name.endswith("config.json")]
    return any(name.endswith(".py") for name in sizes) and any(
        "auto_map" in read_json(files, name, sizes[name]) for name in configs
    )


def is_side_file(name: str, remote_code: bool) -> bool:
    """Whether a file travels with the weights; ``remote_code``: the model needs its ``.py``."""
    name = name.lower()
    if name.endswith(NEVER):
        return False
    return (remote_code and name.endswith(".py")) or any(
        fnmatchcase(name, pattern) for pattern in SIDE_FILES
    )
