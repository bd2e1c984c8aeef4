"""Hidden states of the calibration samples, moved through the model one block at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantforge.calibration.capture import Capture
from quantforge.errors import CalibrationError
from quantforge.models.attention import CausalAttention
from quantforge.models.config import ModelConfig
from quantforge.models.decoder import DecoderBlock
from quantforge.models.rope import RotaryEmbedding

BATCH_TOKENS = 4096
DEVICE_SHARE = 0.25
"""Part of a GPU's free memory that the hidden states may take before they stay in host memory."""


class Activations:
    """Hidden states [tokens, hidden size] of `token_ids_ST` [samples, length], updated in place.

    They lie on the device while they fit there (`DEVICE_SHARE`), else in host memory; a batch holds
    at most `batch_tokens` tokens, at least one sample.
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
        home = self._home(token_ids_ST.numel() * config.hidden_size * dtype.itemsize)
        self.hidden = torch.empty(
            (token_ids_ST.numel(), config.hidden_size), dtype=dtype, device=home
        )
        flat = token_ids_ST.reshape(-1).to(embedding.device)
        for start in range(0, flat.numel(), BATCH_TOKENS):
            rows = flat[start : start + BATCH_TOKENS]
            self.hidden[start : start + len(rows)] = embedding[rows].to(home, dtype)

    def _home(self, num_bytes: int) -> torch.device:
        if self.device.type == "cpu":
            return self.device
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.device if num_bytes <= free * DEVICE_SHARE else torch.device("cpu")

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

    @torch.inference_mode()
    def _run(self, block: DecoderBlock, rows: slice, positions: Tensor, samples: int) -> Tensor:
        hidden = self.hidden[rows].to(self.device)
        rope = self.rotary(positions, self.dtype)
        out, residual = block(hidden, None, rope, CausalAttention(self.config, samples))
        total: Tensor = out + residual
        return total

    def observe(self, block: DecoderBlock, capture: Capture) -> None:
        """Runs every sample through `block` for `capture`; the hidden states stay as they are."""
        with capture.watching(block):
            for rows, positions, samples in self._batches():
                self._run(block, rows, positions, samples)

    def advance(self, block: DecoderBlock) -> None:
        """Replaces the hidden states by `block`'s output."""
        for rows, positions, samples in self._batches():
            self.hidden[rows] = self._run(block, rows, positions, samples).to(self.hidden.device)


def _refuse_unknown_tokens(token_ids_ST: Tensor, vocab_size: int) -> None:
    largest = int(token_ids_ST.max())
    if largest >= vocab_size:
        raise CalibrationError(
            f"calibration token id {largest} is outside the model's vocab_size {vocab_size}; "
            "the tokenizer belongs to another model"
        )
