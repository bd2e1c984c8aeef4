"""Hidden states of the calibration samples, moved through the model one block at a time."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantforge.calibration.capture import Watcher
from quantforge.calibration.hidden import Place, allocate, choose_place
from quantforge.errors import CalibrationError
from quantforge.models.attention import CausalAttention
from quantforge.models.config import ModelConfig
from quantforge.models.decoder import DecoderBlock
from quantforge.models.rope import Rope, RotaryEmbedding
from quantforge.precision import tf32_products

BATCH_TOKENS = 8192
"""Enough to keep a GPU busy; an 8B model's widest tensors take 0.23 GB each."""


class Activations:
    """Hidden states [tokens, hidden size] of `token_ids_ST` [samples, length], updated in place.

    They lie in `place`: on the device while they fit there, else in host memory, else on disk,
    mapped from a file in `folder` (`quantforge.calibration.hidden`). A batch holds at most
    `batch_tokens` tokens, at least one sample. Float32 products may use TF32 on a GPU.
    """

    def __init__(
        self,
        token_ids_ST: Tensor,
        embedding: Tensor,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_tokens: int = BATCH_TOKENS,
        place: Place | None = None,
        folder: Path | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.num_samples, self.length = token_ids_ST.shape
        if self.length > config.max_position_embeddings:
            raise CalibrationError(
                f"sequence_length {self.length} exceeds the model's "
                f"max_position_embeddings {config.max_position_embeddings}"
            )
        _refuse_unknown_tokens(token_ids_ST, config.vocab_size)
        self.batch_samples = max(1, batch_tokens // self.length)
        self.rotary = RotaryEmbedding(config)
        shape = (token_ids_ST.numel(), config.hidden_size)
        self.place = place or choose_place(shape[0] * shape[1] * dtype.itemsize, device)
        self.hidden = allocate(shape, dtype, device, self.place, folder)
        flat = token_ids_ST.reshape(-1).to(embedding.device)
        for start in range(0, flat.numel(), batch_tokens):
            rows = flat[start : start + batch_tokens]
            self.hidden[start : start + len(rows)] = embedding[rows].to(dtype)

    @property
    def num_batches(self) -> int:
        return -(-self.num_samples // self.batch_samples)

    def _batches(self) -> Iterator[tuple[slice, Tensor, int]]:
        """(rows of `hidden`, positions, samples) of each batch."""
        for first in range(0, self.num_samples, self.batch_samples):
            samples = min(self.batch_samples, self.num_samples - first)
            rows = slice(first * self.length, (first + samples) * self.length)
            positions = torch.arange(self.length, device=self.device).repeat(samples)
            yield rows, positions, samples

    def batches(self) -> Iterator[tuple[Tensor, Rope]]:
        """Hidden states [T, D] of each batch on the device, and the rotation of its positions."""
        for rows, positions, _ in self._batches():
            yield self.hidden[rows].to(self.device), self.rotary(positions, self.dtype)

    @torch.inference_mode()
    def _run(self, block: DecoderBlock, rows: slice, positions: Tensor, samples: int) -> Tensor:
        hidden = self.hidden[rows].to(self.device, non_blocking=True)
        rope = self.rotary(positions, self.dtype)
        out, residual = block(hidden, None, rope, CausalAttention(self.config, samples))
        total: Tensor = out + residual
        return total

    def observe(self, block: DecoderBlock, watcher: Watcher) -> None:
        """Runs every sample through `block` for `watcher`; the hidden states stay as they are."""
        with watcher.watching(block), tf32_products():
            for rows, positions, samples in self._batches():
                self._run(block, rows, positions, samples)

    def forward(self, block: DecoderBlock, first: int, samples: int) -> Tensor:
        """`block`'s output for `samples` samples from `first` on; the hidden states stay."""
        rows = slice(first * self.length, (first + samples) * self.length)
        positions = torch.arange(self.length, device=self.device).repeat(samples)
        return self._run(block, rows, positions, samples)

    def advance(self, block: DecoderBlock) -> None:
        """Replaces the hidden states by `block`'s output."""
        with tf32_products():
            for rows, positions, samples in self._batches():
                out = self._run(block, rows, positions, samples)
                self.hidden[rows].copy_(out, non_blocking=True)
        if self.hidden.device != self.device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the copies to the host are done


def _refuse_unknown_tokens(token_ids_ST: Tensor, vocab_size: int) -> None:
    largest = int(token_ids_ST.max())
    if largest >= vocab_size:
        raise CalibrationError(
            f"calibration token id {largest} is outside the model's vocab_size {vocab_size}; "
            "the tokenizer belongs to another model"
        )
