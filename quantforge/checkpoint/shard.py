"""`Shard`: one safetensors file, written tensor by tensor without holding them.

The file is eight bytes of header length, a JSON header, then the tensors without gaps. The header's
space is reserved first and filled in when the shard is closed, padded with blanks as the format
allows. Tensors whose size is no multiple of eight bytes wait until then and follow by falling item
size, so that every tensor is aligned to its items.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the dtypes that a checkpoint may hold."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

HEADER_BYTES = 256 * 1024
"""Space reserved for a shard's header: about 2000 tensors; a shard that needs more is closed."""

ALIGNMENT_BYTES = 8


class Shard:
    """One safetensors file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = path.open("wb")
        self.file.write(b" " * (8 + HEADER_BYTES))
        self.entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.header_bytes = len(json.dumps(self.entries))
        self.num_bytes = 0
        self.waiting: list[tuple[str, Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes `tensor`, or keeps it for the end if it would leave the next one unaligned."""
        self.header_bytes += _entry_bytes(name, tensor)
        if tensor.nbytes % ALIGNMENT_BYTES:
            self.waiting.append((name, tensor.clone()))
        else:
            self._write(name, tensor)

    def fits(self, name: str, tensor: Tensor, max_bytes: int) -> bool:
        """Whether `tensor` may join this shard; the first one always may."""
        used = self.num_bytes + sum(t.nbytes for _, t in self.waiting)
        if self.header_bytes + _entry_bytes(name, tensor) > HEADER_BYTES:
            return False
        return used == 0 or used + tensor.nbytes <= max_bytes

    def close(self) -> None:
        """Writes the tensors that waited and the header, and makes the file durable."""
        for name, tensor in sorted(self.waiting, key=lambda pair: -pair[1].itemsize):
            self._write(name, tensor)
        self.waiting.clear()
        header = json.dumps(self.entries, ensure_ascii=False).encode().ljust(HEADER_BYTES)
        assert len(header) == HEADER_BYTES, "a full shard was closed before"
        self.file.seek(0)
        self.file.write(HEADER_BYTES.to_bytes(8, "little") + header)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def _write(self, name: str, tensor: Tensor) -> None:
        end = self.num_bytes + tensor.nbytes
        self.entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.num_bytes, end],
        }
        self.file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.num_bytes = end


def _entry_bytes(name: str, tensor: Tensor) -> int:
    """More than the header's entry of a tensor can take."""
    return len(json.dumps(name, ensure_ascii=False).encode()) + 22 * tensor.dim() + 110
