"""The tensor of the paged KV cache, and how many tokens fit into memory.

It is [layers, 2, pages, page_size, J, A]: keys and values of a layer are contiguous views, and a
page can be cleared for all layers at once (J key/value heads, A head dim).
"""

import os

import torch
from torch import Tensor

from quantforge.models.config import ModelConfig

CPU_MEMORY_SHARE = 0.25
"""Of a machine's memory, what a KV cache on a CPU may come to use."""


class KVCache:
    """Keys and values [pages, page_size, J, A] of every layer.

    The memory starts as zeros; on a CPU the system backs it only where it is written.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.pages = torch.zeros(shape, dtype=dtype, device=device)
        self.keys: tuple[Tensor, ...] = self.pages[:, 0].unbind()
        self.values: tuple[Tensor, ...] = self.pages[:, 1].unbind()

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def page_size(self) -> int:
        return self.pages.shape[3]

    def clear(self, pages: Tensor) -> None:
        """Zeroes `pages` (int64) in every layer."""
        self.pages.index_fill_(2, pages, 0)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def free_bytes(device: torch.device, share: float, peak_bytes: int) -> int:
    """Bytes that a KV cache may take on `device`.

    On a GPU: `share` of it, less what other programs hold and less `peak_bytes`, the most that
    this process has had allocated in a step. On a CPU: a quarter of the machine's memory.
    """
    if device.type == "cpu":
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(physical * CPU_MEMORY_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * share) - others - peak_bytes
