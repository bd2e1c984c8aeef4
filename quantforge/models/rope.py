"""Rotary tables: inverse frequencies of each scaling kind, then cos and sin rows for positions."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantforge.models.config import ModelConfig


class Rope(NamedTuple):
    """cos and sin [T, A] of the tokens at hand, in the activations' dtype."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Turns positions into `Rope` rows."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self.inv_freq = (1.0 / (config.rope.theta**half)).float()
        self.attention_scale = 1.0

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin [T, A] for `positions_T` (int64), on their device."""
        self.inv_freq = self.inv_freq.to(positions_T.device)
        angles = positions_T.float().unsqueeze(-1) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return Rope(
            (angles.cos() * self.attention_scale).to(dtype),
            (angles.sin() * self.attention_scale).to(dtype),
        )
