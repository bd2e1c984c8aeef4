"""Runs the decoder over a step's tokens; owns the KV cache.

Legend: T tokens of the step, R rows that need scores, D hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from quantforge_kernels import rms_norm, silu_mul
from torch import Tensor

from quantforge.models.decoder import Decoder
from quantforge.models.linear import Linear, QuantizedInner
from quantforge.runtime.batch import PagedAttention, StepBatch
from quantforge.runtime.kv.cache import KVCache
from quantforge.runtime.kv.storage import KVStorage
from quantforge.runtime.scheduler import Chunk

MAX_LOGITS_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Scores that are held at a time when a whole prompt is scored, by device: a CPU is quickest with
blocks that malloc hands out again, a GPU with ones that pay for reading the lm_head."""


class Runner:
    """A decoder on its device with a KV cache of `num_pages` pages.

    `storage` is how that holds keys and values, in the decoder's dtype by default.
    """

    def __init__(
        self, decoder: Decoder, num_pages: int, page_size: int, storage: KVStorage | None = None
    ) -> None:
        self.decoder = decoder
        self.device = decoder.embed_tokens.device
        self.dtype = decoder.embed_tokens.dtype
        storage = storage or KVStorage(dtype=self.dtype)
        self.cache = KVCache(decoder.config, num_pages, page_size, storage, self.device)
        self.attention = PagedAttention(decoder.config, self.cache, self.dtype, self.device)

    @torch.inference_mode()
    def hidden(self, batch: StepBatch) -> Tensor:
        """Hidden states [T, D] of the step's tokens, whose keys and values are cached."""
        if batch.fresh_pages is not None:
            self.cache.clear(batch.fresh_pages)
        self.attention.bind(batch)
        hidden: Tensor = self.decoder(batch.token_ids_T, batch.positions_T, self.attention)
        return hidden

    @torch.inference_mode()
    def sample_logits(self, hidden_TD: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Scores [R, V] in float32 after the last token of each chunk that samples."""
        rows, end = [], 0
        for chunk in chunks:
            end += chunk.num_tokens
            if chunk.samples:
                rows.append(end - 1)
        if len(rows) < hidden_TD.shape[0]:
            index = torch.tensor(rows).to(self.device, non_blocking=True)
            hidden_TD = hidden_TD.index_select(0, index)
        return self.decoder.logits(hidden_TD)

    @torch.no_grad()  # not inference mode: the caller may change the scores in place
    def all_logits(self, hidden_TD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row, scores [rows, V] in float32) over all rows, in blocks of bounded memory."""
        vocab_size = self.decoder.config.vocab_size
        block = max(1, MAX_LOGITS_BYTES[self.device.type] // (4 * vocab_size))
        for start in range(0, hidden_TD.shape[0], block):
            yield start, self.decoder.logits(hidden_TD[start : start + block])

    def kernels(self) -> dict[str, str]:
        """Op, or scheme of a linear, -> name of the kernel that serves it."""
        problem = {"device": self.device.type, "dtype": self.dtype}
        found = {
            **self.attention.kernels(),
            "rms_norm": rms_norm.OP.select(**problem).name,
            "silu_mul": silu_mul.OP.select(**problem).name,
        }
        for module in self.decoder.modules():
            if isinstance(module, Linear) and module.inner is not None:
                inner = module.inner
                scheme = inner.scheme if isinstance(inner, QuantizedInner) else str(self.dtype)
                found[scheme.removeprefix("torch.")] = inner.kernel
        return found
