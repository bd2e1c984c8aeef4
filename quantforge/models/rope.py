"""Rotary tables: inverse frequencies of each scaling kind, then cos and sin rows for positions.

Frequencies are computed in float32 in the order of operations that models were trained with:
another order shifts the angles of far positions. Sources: RoFormer (arXiv 2104.09864), position
interpolation (arXiv 2306.15595) for ``linear``, NTK-aware scaling for ``dynamic``, Llama 3.1 for
``llama3``, YaRN (arXiv 2309.00071) for ``yarn``.

Legend: T tokens, A head dim, F = A/2 frequencies, theta the base.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantforge.errors import UnsupportedError
from quantforge.models.config import ModelConfig


class Rope(NamedTuple):
    """cos and sin [T, A] of the tokens at hand, in the activations' dtype."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Turns positions into `Rope` rows.

    ``dynamic`` scaling depends on the longest position of a call, as in transformers: tokens that
    share a call share its frequencies, and keys cached earlier keep theirs.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.inv_freq, self.attention_scale = scaled_frequencies(config)

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin [T, A] for `positions_T` (int64), on their device."""
        self.inv_freq = self.inv_freq.to(positions_T.device)
        inv_freq = self.inv_freq
        if self.config.rope.kind == "dynamic" and positions_T.numel():
            inv_freq = dynamic_frequencies(self.config, positions_T.max() + 1)
        angles = positions_T.float().unsqueeze(-1) * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return Rope(
            (angles.cos() * self.attention_scale).to(dtype),
            (angles.sin() * self.attention_scale).to(dtype),
        )


def scaled_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [F] float32 on the CPU, and what multiplies cos and sin."""
    rope = config.rope
    plain = 1.0 / _wavelengths(rope.theta, config.head_dim)
    if rope.kind in ("default", "dynamic"):
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope.parameters), 1.0
    if rope.kind == "yarn":
        return _yarn(config)
    raise UnsupportedError(f"rope type {rope.kind!r} is not supported")


def dynamic_frequencies(config: ModelConfig, length: Tensor) -> Tensor:
    """Inverse frequencies [F] for sequences of `length` tokens (a scalar tensor, on any device).

    Up to the model's maximum they are the plain ones; beyond, the base grows with the length.
    """
    limit = config.max_position_embeddings
    factor = config.rope.parameters["factor"]
    longest = length.clamp(min=limit)
    growth = (factor * longest / limit) - (factor - 1)
    theta = config.rope.theta * growth ** (config.head_dim / (config.head_dim - 2))
    return 1.0 / _wavelengths(theta, config.head_dim, length.device)


def _wavelengths(
    theta: float | Tensor, head_dim: int, device: torch.device | str = "cpu"
) -> Tensor:
    """``theta^(2i / A)`` for i in 0..F-1: radians per position, inverted."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float, device=device)
    out: Tensor = theta ** (steps / head_dim)
    return out


def _llama3(plain: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a ramp between."""
    factor, low = parameters["factor"], parameters["low_freq_factor"]
    high, original = parameters["high_freq_factor"], parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    ramp = (original / wavelength - low) / (high - low)
    smooth = (1 - ramp) * plain / factor + ramp * plain
    slow, fast = wavelength > original / low, wavelength < original / high
    return torch.where(slow, plain / factor, torch.where(fast, plain, smooth))


def _yarn(config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolation for frequencies that turn rarely over the trained length, none for fast."""
    parameters = config.rope.parameters
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.max_position_embeddings / original
    theta, dim = config.rope.theta, config.head_dim

    def turning(rotations: float) -> float:
        """The (fractional) index whose frequency turns so often over the trained length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = turning(parameters.get("beta_fast") or 32)
    high = turning(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    wavelengths = _wavelengths(theta, dim)
    index = torch.arange(dim // 2, dtype=torch.float, device="cpu")
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    mixed = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return mixed, _yarn_attention_scale(factor, parameters)


def _yarn_attention_scale(factor: float, parameters: Mapping[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    top, bottom = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(top) / scale(bottom) if top and bottom else scale(1.0)
