"""The tensor of the paged KV cache, and how many tokens fit into memory.

It is [layers, 2, pages, page_size, J, A]: keys and values of a layer are contiguous views, and a
page can be cleared for all layers at once (J key/value heads, A head dim). Scales of a token and
head, where `KVStorage` asks for them, are a second tensor [layers, 2, pages, page_size, J].
"""

import os

import torch
from torch import Tensor

from quantforge.models.config import ModelConfig
from quantforge.runtime.kv.storage import SCALE_DTYPE, KVStorage

CPU_MEMORY_SHARE = 0.25
"""Of a machine's memory, what a KV cache on a CPU may come to use."""


class KVCache:
    """Keys and values [pages, page_size, J, A] of every layer, and the scales of their codes.

    `key_scales` and `value_scales` of a layer are [1] or [pages, page_size, J] float32; both are
    empty for a cache without scales. The memory starts as zeros; on a CPU the system backs it only
    where it is written.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        storage: KVStorage,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.storage = storage
        self.pages = torch.zeros(shape, dtype=storage.dtype, device=device)
        self.keys: tuple[Tensor, ...] = self.pages[:, 0].unbind()
        self.values: tuple[Tensor, ...] = self.pages[:, 1].unbind()
        self._cleared = [_clearable(self.pages)]
        self.key_scales: tuple[Tensor, ...] = ()
        self.value_scales: tuple[Tensor, ...] = ()
        if storage.calibrated is not None:
            self.key_scales = storage.calibrated.keys.to(device).unsqueeze(1).unbind()
            self.value_scales = storage.calibrated.values.to(device).unsqueeze(1).unbind()
        elif storage.scale_kind == "token":
            scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device)
            self.key_scales, self.value_scales = scales[:, 0].unbind(), scales[:, 1].unbind()
            self._cleared.append(scales)

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def page_size(self) -> int:
        return self.pages.shape[3]

    def scales(self, layer: int) -> tuple[Tensor, ...]:
        """(k_scale, v_scale) of `layer`, the last arguments of the ops; () where there are none."""
        return (self.key_scales[layer], self.value_scales[layer]) if self.key_scales else ()

    def clear(self, pages: Tensor) -> None:
        """Zeroes `pages` (int64) in every layer, and their own scales."""
        for tensor in self._cleared:
            tensor.index_fill_(2, pages, 0)


def _clearable(pages: Tensor) -> Tensor:
    """A view of `pages` that torch can fill: it has no such op for FP8, whose zero is a 0 byte."""
    return pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages


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
