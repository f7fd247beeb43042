"""Reads ``pytorch_model.bin`` as safetensors are read: by offset, and executing nothing from it.

``torch.save`` writes a ZIP archive whose records are not compressed: one pickle that describes the
tensors, and one record for each storage. torch's own restricted unpickler (``weights_only``) builds
them on the *meta* device, so no weight is read and nothing is allocated. What it reports counts
only where the archive's own directory agrees.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from shlex import quote
from typing import IO, TYPE_CHECKING, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from quantize.errors import BadCheckpoint
from quantize.files import Files, read_at, refuse_pointer
from quantize.header import LARGEST_JSON, LARGEST_TENSOR, Header, name_fault, shown
from schemes.base import ITEM_BYTES, TORCH_NAMES, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

LOCAL_HEADER = 30
"""Bytes of a ZIP record's own header before its name and extra field (APPNOTE 4.3.7)."""

CONVERT = (
    "it is read only as a plain state dict that torch 1.6 or later wrote; in the environment that "
    "wrote it: python -c 'import torch; d = torch.load({name}, weights_only=True); "
    "torch.save({{k: v.contiguous() for k, v in d.items()}}, {name})'"
)


def read_pickle_header(files: Files, name: str, size: int) -> Header:
    """The tensors of a ``.bin`` file of ``size`` bytes; raises `BadCheckpoint`."""
    refuse_pointer(files, name, read_at(files, name, 0, min(size, LOCAL_HEADER)))
    try:
        with io.BufferedReader(files.open(name)) as file:
            records, pickle = _read_directory(file, size)
            tensors = _load(file)
        entries = sorted(_entry(*item, records) for item in tensors.items())
    except BadCheckpoint:
        raise
    # A hostile pickle can raise anything; whatever it is, the file is refused.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadCheckpoint(
            f"{files.origin}/{name}: not a plain state dict of torch.save: {reason}",
            CONVERT.format(name=quote(f'"{name}"')),
        ) from error
    return Header(
        hashlib.sha256(pickle).hexdigest(),
        tuple(spec for _, _, spec, _ in entries),
        tuple(offset for offset, _, _, _ in entries),
        {spec.name: strides for _, _, spec, strides in entries if strides},
    )


def _read_directory(file: IO[bytes], size: int) -> tuple[dict[int, int], bytes]:
    """The size of every storage by the offset of its data, and the pickle."""
    try:
        archive = ZipFile(file)
    except BadZipFile:
        raise ValueError("found no ZIP archive") from None
    records: dict[int, int] = {}
    pickle = b""
    for info in archive.infolist():
        if info.compress_type != ZIP_STORED or info.flag_bits & 1:
            raise ValueError(f"the record {shown(info.filename)} is compressed or encrypted")
        offset = _data_offset(file, info)
        if offset + info.file_size > size:
            raise ValueError(f"the record {shown(info.filename)} ends after the file (truncated)")
        leaf = info.filename.partition("/")[2]
        if leaf == "data.pkl":
            if info.file_size > LARGEST_JSON:
                raise ValueError(f"its pickle has {info.file_size:,} bytes")
            pickle = archive.read(info)
        elif leaf == "byteorder" and archive.read(info) != b"little":
            raise ValueError("its numbers are big-endian")
        elif leaf.startswith("data/"):
            records[offset] = info.file_size
    if not pickle:
        raise ValueError("found no data.pkl")
    return records, pickle


def _data_offset(file: IO[bytes], info: ZipInfo) -> int:
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER)
    if len(header) < LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise ValueError(f"the record {shown(info.filename)} has no header")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + LOCAL_HEADER + lengths


def _load(file: IO[bytes]) -> dict[Any, Any]:
    import torch

    file.seek(0)
    found = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(found, dict):
        raise ValueError(f"found {type(found).__name__}, expected a dict of tensors")
    return found


Entry = tuple[int, str, TensorSpec, tuple[int, ...]]
"""Offset in the file, name, spec, and strides in elements where it is not contiguous."""


def _entry(name: Any, tensor: Any, records: Mapping[int, int]) -> Entry:
    import torch

    if not isinstance(name, str) or name_fault(name):
        raise ValueError(name_fault(str(name)) or f"found the key {shown(str(name))}")
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {type(tensor).__name__}, expected a tensor")
    dtype = next((n for n, known in TORCH_NAMES.items() if str(tensor.dtype)[6:] == known), None)
    if dtype is None or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is {tensor.dtype}, {tensor.layout}: expected plain numbers")
    spec = TensorSpec(name, dtype, tuple(tensor.shape))
    steps = tensor.stride()
    room = records.get(start := getattr(tensor.untyped_storage(), "_checkpoint_offset", -1))
    last = sum((size - 1) * step for size, step in zip(spec.shape, steps, strict=True))
    end = (tensor.storage_offset() + last + 1) * ITEM_BYTES[dtype] if tensor.numel() else 0
    if room is None or end > room or tensor.numel() > LARGEST_TENSOR:
        raise ValueError(f"{name} {list(spec.shape)} lies outside its storage of {room} bytes")
    offset = start + int(tensor.storage_offset()) * ITEM_BYTES[dtype]
    return offset, name, spec, () if tensor.is_contiguous() else steps


def gather(
    files: Files, shard: str, spec: TensorSpec, offset: int, strides: tuple[int, ...], rows: range
) -> bytearray:
    """The bytes of some rows of a tensor that is not contiguous, in the order of its elements."""
    import torch

    if not rows or not spec.nbytes:
        return bytearray()
    item = ITEM_BYTES[spec.dtype]
    shape = (len(rows), *spec.shape[1:])
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    data = read_at(files, shard, offset + rows.start * strides[0] * item, (last + 1) * item)
    words: Tensor = torch.frombuffer(data, dtype=getattr(torch, TORCH_NAMES[spec.dtype]))
    picked = words.as_strided(shape, strides).contiguous()
    return bytearray(picked.view(-1).view(torch.uint8).numpy().data)
