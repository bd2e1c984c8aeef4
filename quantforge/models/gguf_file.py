"""`GGUFFile`: the metadata and tensors of a GGUF file, every length checked against the file.

Layout (little-endian): ``GGUF``, version u32, number of tensors u64, number of metadata entries
u64; the entries (name, type u32, value); a header for each tensor (name, number of dimensions u32,
sizes u64 from the fastest-varying on, type u32, offset u64); padding; the tensors' data. A string
is a length u64 and UTF-8; an array is an element type u32, a length u64 and the elements.

The package `gguf` knows the block types and dequantizes them. Its reader is not used: it takes
lengths from the file unchecked, so a damaged file can make it run without end.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from quantforge.errors import CheckpointError, UnsupportedError

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
DEQUANTIZE_ELEMENTS = 1 << 24
"""Elements that are in float32 at once while a tensor is dequantized (64 MiB)."""

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""struct's letter of each scalar type; 8 is a string, 9 an array."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in torch's order; `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file, memory-mapped; a context manager.

    Raises `CheckpointError` for what is not a whole GGUF file, `UnsupportedError` for versions,
    byte orders and block types that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype`, dequantized in float32 and rounded once (nearest-even)."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=dtype)
        rows = out.view(-1, info.shape[-1])
        begin = 0
        for block in self._dequantized(info):
            rows[begin : begin + len(block)] = torch.from_numpy(block)
            begin += len(block)
        return out

    def _dequantized(self, info: GGUFTensor) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's rows in float32, some at a time."""
        columns = info.shape[-1]
        num_rows = max(1, DEQUANTIZE_ELEMENTS // columns)
        row_bytes = _num_bytes((columns,), info.type)
        for begin in range(info.offset, info.offset + info.num_bytes, num_rows * row_bytes):
            end = min(begin + num_rows * row_bytes, info.offset + info.num_bytes)
            data = np.frombuffer(self._map[begin:end], np.uint8).reshape(-1, row_bytes)
            yield _dequantize(data, info)

    def _parse(self) -> None:
        cursor = _Cursor(self._map, self.path)
        if cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file; it does not begin with 'GGUF'")
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{self.path} is GGUF version {version}"
                f"{' (big-endian?)' if version & 0xFFFF == 0 else ''}; "
                f"versions {', '.join(map(str, VERSIONS))}, little-endian, can be read"
            )
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_entries):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.scalar("I"))
        headers = [_read_header(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CheckpointError(f"{self.path}: general.alignment {alignment!r} is no alignment")
        start = -(-cursor.position // alignment) * alignment
        for name, shape, type_id, offset in headers:
            self._add(name, shape, type_id, start + offset)

    def _add(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{self.path} holds the tensor {name} twice")
        try:
            kind = gguf.GGMLQuantizationType(type_id)
        except ValueError as error:
            raise UnsupportedError(
                f"tensor {name} of {self.path} has type {type_id}, which the gguf package does not "
                "know; a newer gguf may"
            ) from error
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise CheckpointError(
                f"tensor {name} of {self.path} has shape {shape}; {kind.name} needs sizes above 0 "
                f"and rows in blocks of {block}"
            )
        num_bytes = _num_bytes(shape, kind)
        if offset + num_bytes > len(self._map):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + num_bytes}, the "
                f"file at {len(self._map)}"
            )
        self.tensors[name] = GGUFTensor(
            name=name, shape=shape, type=kind, offset=offset, num_bytes=num_bytes
        )


class _Cursor:
    """Reads the header from the start on, and never past the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated or damaged: its header asks for {num_bytes} bytes at "
                f"byte {self.position}, the file ends at {len(self._data)}"
            )
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, letter: str) -> Any:
        size = struct.calcsize(f"<{letter}")
        return struct.unpack(f"<{letter}", self.take(size))[0]

    def string(self) -> str:
        begin = self.position
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._path}: the string at byte {begin} is not UTF-8: {error}"
            ) from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value of type `kind`: int, float, bool, str or a list of one of them."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth == MAX_ARRAY_DEPTH:
            raise CheckpointError(
                f"{self._path} is damaged: metadata type {kind} (array depth {depth}) at byte "
                f"{self.position}"
            )
        element, length = self.scalar("I"), self.scalar("Q")
        if element in SCALARS:
            letter = SCALARS[element]
            size = struct.calcsize(f"<{letter}")
            return list(struct.unpack(f"<{length}{letter}", self.take(length * size)))
        return [self.value(element, depth + 1) for _ in range(length)]


def _read_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape in torch's order, type and offset into the data of the next tensor."""
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(
            f"tensor {name} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
        )
    sizes = [cursor.scalar("Q") for _ in range(num_dimensions)]
    return name, tuple(reversed(sizes)), cursor.scalar("I"), cursor.scalar("Q")


def _num_bytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    count = 1
    for size in shape:
        count *= size
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return int(count // block * block_bytes)


def _dequantize(
    data: np.ndarray[Any, Any], info: GGUFTensor
) -> np.ndarray[Any, np.dtype[np.float32]]:
    plain = {
        gguf.GGMLQuantizationType.F32: np.float32,
        gguf.GGMLQuantizationType.F16: np.float16,
        gguf.GGMLQuantizationType.F64: np.float64,
    }
    if info.type in plain:
        return np.array(data.view(plain[info.type]), dtype=np.float32)
    try:
        return np.array(gguf.dequantize(data, info.type), dtype=np.float32)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"tensor {info.name} has type {info.type.name}, which the gguf package cannot "
            "dequantize"
        ) from error
