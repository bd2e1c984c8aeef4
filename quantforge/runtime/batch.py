"""A step's tokens as tensors, and the attention backend that reads and writes the paged cache.

The tokens of all chunks lie end to end; chunks of one token (decodes) come first. An attention
kernel may read beyond a context's end (and mask it), so nothing but zeros and the sequence's own
keys and values may lie there: a page that the step begins to fill is cleared first, and the block
table is padded with the sequence's own first page. So NaN cannot leak from one request to another.

Legend: T tokens of the step, S sequences, B pages of the longest sequence, H query heads, J
key/value heads, A head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from quantforge_kernels import kv_store, paged_attention
from quantforge_kernels import rope as rope_op
from quantforge_kernels.op import Candidate, KernelUnavailableError, Op
from torch import Tensor

from quantforge.errors import UnsupportedError
from quantforge.models.config import ModelConfig
from quantforge.models.rope import Rope
from quantforge.runtime.kv.cache import KVCache
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.packing import to_device
from quantforge.runtime.scheduler import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """Input of one step, on the device: int64 tokens, positions and slots, int32 tables."""

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    block_table_SB: Tensor
    query_start_S1: Tensor
    context_len_S: Tensor
    fresh_pages: Tensor | None
    """Pages (int64) to be cleared, those that the step fills in part and is the first to."""


def build_batch(chunks: Sequence[Chunk], pool: BlockManager, device: torch.device) -> StepBatch:
    """The tensors of `chunks`, whose pages are in `pool`; one copy takes them to `device`."""
    tokens: list[int] = []
    positions, slots = [], []
    starts, contexts = [0], []
    tables, fresh = [], []
    page_size = pool.page_size
    for chunk in chunks:
        end = chunk.start + chunk.num_tokens
        pages = np.asarray(pool.pages(chunk.request.request_id))
        own = np.arange(chunk.start, end)
        tokens += chunk.request.token_ids[chunk.start : end]
        positions.append(own)
        slots.append(pages[own // page_size] * page_size + own % page_size)
        starts.append(len(tokens))
        contexts.append(end)
        tables.append(pages[: pool.pages_for(end)])
        last_page = end // page_size
        if end % page_size and chunk.start <= last_page * page_size:
            fresh.append(pages[last_page])
    block_table = np.empty((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    columns = [
        (torch.int64, tokens),
        (torch.int64, np.concatenate(positions)),
        (torch.int64, np.concatenate(slots)),
        (torch.int32, block_table),
        (torch.int32, starts),
        (torch.int32, contexts),
        (torch.int64, fresh),
    ]
    token_ids, position, slot, table_SB, start, context, fresh_pages = to_device(columns, device)
    return StepBatch(
        token_ids_T=token_ids,
        positions_T=position,
        slot_mapping_T=slot,
        block_table_SB=table_SB,
        query_start_S1=start,
        context_len_S=context,
        fresh_pages=fresh_pages if fresh else None,
    )


class PagedAttention:
    """An `AttentionBackend` over a `KVCache`; `bind` gives it the step's tables."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cache = cache
        self.scale = config.head_dim**-0.5
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        problem = {
            "device": device.type,
            "dtype": dtype,
            "kv_dtype": cache.dtype,
            "kv_scales": cache.storage.scale_kind,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": cache.page_size,
        }
        self.rope = _select(rope_op.OP, **problem)
        self.kv_store = _select(kv_store.OP, **problem)
        by_window = {
            window: _select(paged_attention.OP, sliding_window=window, **problem)
            for window in set(self.windows)
        }
        self.attention = [by_window[window] for window in self.windows]
        self.batch: StepBatch | None = None

    def bind(self, batch: StepBatch) -> None:
        """Serves the attention of `batch` from now on."""
        self.batch = batch

    def kernels(self) -> dict[str, str]:
        """Op -> kernel name; more than one kernel of an op is joined by commas."""
        return {
            "rope": self.rope.name,
            "kv_store": self.kv_store.name,
            "paged_attention": ", ".join(sorted({c.name for c in self.attention})),
        }

    def attend(self, layer: int, q_THA: Tensor, k_TJA: Tensor, v_TJA: Tensor, rope: Rope) -> Tensor:
        batch = self.batch
        assert batch is not None, "no batch is bound"
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q, k = self.rope.run(q_THA, k_TJA, rope.cos, rope.sin)
        scales = self.cache.scales(layer)
        self.kv_store.run(k, v_TJA, keys, values, batch.slot_mapping_T, *scales)
        out: Tensor = self.attention[layer].run(
            q,
            keys,
            values,
            batch.block_table_SB,
            batch.query_start_S1,
            batch.context_len_S,
            self.scale,
            self.windows[layer],
            *scales,
        )
        return out


def _select(op: Op, **problem: object) -> Candidate:
    try:
        return op.select(**problem)
    except KernelUnavailableError as error:
        raise UnsupportedError(str(error)) from error
