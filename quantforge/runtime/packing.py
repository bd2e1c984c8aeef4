"""Several small arrays in one buffer, so that a step's inputs reach a GPU in one copy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Where an array may start: kernels are compiled anew for pointers that are less aligned."""

Shape = tuple[int, ...]


class Layout:
    """Places of arrays of given dtypes and shapes, one after another, in a buffer of bytes."""

    def __init__(self, parts: Sequence[tuple[torch.dtype, Shape]]) -> None:
        self.parts = tuple(parts)
        self.starts: list[int] = []
        end = 0
        for dtype, shape in self.parts:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self.starts.append(start)
            end = start + math.prod(shape) * dtype.itemsize
        self.num_bytes = end

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The arrays in `buffer` (uint8, at least `num_bytes` long), as views of it."""
        return [
            buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(self.starts, self.parts, strict=True)
        ]


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes on the host from which `device` can copy while the host goes on.

    Torch's allocator hands pinned memory out again only when the copies from it are done.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(columns: Sequence[tuple[torch.dtype, Any]], device: torch.device) -> list[Tensor]:
    """Each (dtype, numbers) as a tensor on `device`, all through one copy that is not awaited.

    `numbers` are whatever numpy makes an array of; they must fit the dtype.
    """
    arrays = [np.asarray(numbers) for _, numbers in columns]
    layout = Layout([(columns[i][0], array.shape) for i, array in enumerate(arrays)])
    host = host_buffer(layout.num_bytes, device)
    for view, array in zip(layout.views(host), arrays, strict=True):
        view.numpy()[...] = array
    return layout.views(host.to(device, non_blocking=True))
