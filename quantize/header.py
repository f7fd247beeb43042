"""Reads JSON and safetensors headers strictly: what is doubtful is refused.

Source: the safetensors format, https://github.com/huggingface/safetensors#format, and the checks
of its `SafeTensors::deserialize`; duplicate keys and unknown fields are refused here as well.
"""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from shlex import quote
from typing import Any, NoReturn

from quantize.errors import BadCheckpoint
from quantize.files import Files, fetch_again, read_at, refuse_pointer
from schemes.base import ITEM_BYTES, TensorSpec

LARGEST_JSON = 100_000_000
"""Bytes of the largest header that safetensors reads, and of the largest JSON file read here."""
LARGEST_TENSOR = 1 << 40
"""Elements of a tensor; dimensions of 0 count as 1, so that its rows can be walked in any case."""
LONGEST_NAME = 512
"""Characters of a tensor's name; published ones have about a hundred."""
DEEPEST_JSON = 64
"""Levels of objects and lists; published configs have about six."""
FIRST_READ = 1 << 18
"""Bytes of a shard read at first: most headers whole, in one request where files are remote."""


@dataclass(frozen=True, slots=True)
class Header:
    """One shard's tensors in the order of their data; ``offsets`` count from the file's start.

    ``strides``, in elements, are those of tensors that are not contiguous.
    """

    sha256: str
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_json(files: Files, name: str, size: int) -> dict[str, Any]:
    """A JSON file that holds one object, keys in order; raises `BadCheckpoint`."""
    if size > LARGEST_JSON:
        raise BadCheckpoint(
            f"{files.origin}/{name}: found {size:,} bytes, expected JSON of at most "
            f"{LARGEST_JSON:,}",
            fetch_again(files, name),
        )
    data = read_at(files, name, 0, size)
    refuse_pointer(files, name, data)
    if data.startswith(BOM_UTF8):
        raise BadCheckpoint(
            f"{files.origin}/{name}: starts with a byte order mark, expected plain JSON",
            rf"remove it: sed -i '1s/^\xEF\xBB\xBF//' {quote(f'{files.origin}/{name}')}",
        )
    try:
        value = _parse(data)
        _check_depth(value, DEEPEST_JSON)
        if b"\\ud" in data.lower():
            _check_unicode(json.dumps(value, ensure_ascii=False))
        return value
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{files.origin}/{name}: expected a JSON object, found {error}",
            fetch_again(files, name),
        ) from error


def read_header(files: Files, name: str, size: int) -> Header:
    """The header of a safetensors file of ``size`` bytes; raises `BadCheckpoint`."""
    data = read_at(files, name, 0, min(size, FIRST_READ))
    refuse_pointer(files, name, data)
    try:
        end = _header_end(data, size)
        if data[8:end][:1] != b"{":
            raise ValueError("a header that does not start with '{'")
        data = data[:end] + read_at(files, name, len(data), max(0, end - len(data)))
        entries = _entries(_parse(data[8:]))
        _check_layout(entries, size - end)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{files.origin}/{name}: not a whole safetensors file: {error}",
            fetch_again(files, name),
        ) from error
    return Header(
        hashlib.sha256(data).hexdigest(),
        tuple(spec for _, _, spec in entries),
        tuple(end + begin for begin, _, _ in entries),
    )


def name_fault(name: str) -> str:
    """Why this may not be a tensor's name; empty when it may.

    Names are shown to the user, kept in line-based journals and matched against patterns: control
    characters, look-alikes and digits of other scripts have no place in them.
    """
    if not name.isascii() or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        return (
            f"found the tensor name {shown(name)}, expected 1 to {LONGEST_NAME} printable ASCII "
            "characters"
        )
    return ""


def shown(text: str) -> str:
    """A text from a checkpoint as it may be shown: escaped, and cut when long."""
    cut = f"… ({len(text):,} characters)" if len(text) > 80 else ""
    return f"{text[:80]!a}{cut}"


def _parse(data: bytes | bytearray) -> dict[str, Any]:
    value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_constant)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} {str(value)[:40]!r}")
    return value


def _constant(text: str) -> float:
    """JSON's unofficial constants: published configs hold Infinity, and NaN equals nothing."""
    if text == "NaN":
        raise ValueError("NaN, which is no number")
    return float(text)


def _check_depth(value: Any, levels: int) -> None:
    if isinstance(value, (dict, list)):
        if not levels:
            raise ValueError(f"more than {DEEPEST_JSON} levels of objects and lists")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, levels - 1)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text that is not valid Unicode (a lone surrogate)") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(twice)} twice in one object")
    return value


def _header_end(data: bytearray, size: int) -> int:
    if size < 8:
        raise ValueError(f"found {size} bytes, expected at least the 8 of the header's length")
    length = int.from_bytes(data[:8], "little")
    if length > LARGEST_JSON:
        raise ValueError(f"header length {length:,}, expected at most {LARGEST_JSON:,}")
    if 8 + length > size:
        raise ValueError(
            f"header length {length:,}, but only {size - 8:,} bytes follow (truncated)"
        )
    return 8 + length


def _entries(header: dict[str, Any]) -> list[tuple[int, int, TensorSpec]]:
    """Begin, end and spec of every tensor in the order of their data."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ that is not an object of strings")
    _check_unicode("".join((*header, *metadata, *metadata.values())))
    if fault := next(filter(None, map(name_fault, header)), ""):
        raise ValueError(fault)
    return sorted((_entry(*item) for item in header.items()), key=lambda entry: entry[:2])


def _entry(name: str, fields: Any) -> tuple[int, int, TensorSpec]:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        _bad(name, f"found {str(fields)[:80]}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _bad(name, f"found dtype {str(dtype)[:40]!r}, expected one of {', '.join(ITEM_BYTES)}")
    # Few dimensions, so that a product over them stays small.
    if (
        not _are_sizes(shape)
        or len(shape) > 64
        or prod(map(partial(max, 1), shape)) > LARGEST_TENSOR
    ):
        _bad(name, f"found shape {str(shape)[:80]}, expected sizes of at most 2^40 elements")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _bad(name, f"found data_offsets {str(offsets)[:80]}, expected [begin, end], begin <= end")
    spec = TensorSpec(name, dtype, tuple(shape))
    begin, end = offsets
    if end - begin != spec.nbytes:
        _bad(name, f"found {end - begin:,} bytes, expected {spec.nbytes:,} for {dtype} {shape}")
    return begin, end, spec


def _bad(name: str, problem: str) -> NoReturn:
    raise ValueError(f"tensor {name!r}: {problem}")


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_layout(entries: list[tuple[int, int, TensorSpec]], data_bytes: int) -> None:
    """The tensors must fill the file's data from its first byte to its last."""
    if entries and entries[0][0] != 0:
        _bad(entries[0][2].name, f"data begins at {entries[0][0]:,}, expected 0 (a hole)")
    for (_, end, before), (begin, _, spec) in pairwise(entries):
        if begin != end:
            kind = "overlaps" if begin < end else "leaves a hole after"
            _bad(spec.name, f"begins at {begin:,}, expected {end:,}: it {kind} {before.name!r}")
    end = entries[-1][1] if entries else 0
    if end != data_bytes:
        kind = "truncated" if data_bytes < end else "trailing bytes"
        name = entries[-1][2].name if entries else "(no tensor)"
        _bad(name, f"the data ends at {end:,}, the file's data at {data_bytes:,} ({kind})")
