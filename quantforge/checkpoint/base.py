"""What a format is: how the tensors of one quantized layer lie on disk.

A format lives in one file of this folder (found by `quantforge.registry`), which defines
``FORMAT: Format``. Tensor names, packing orders and config keys of a format stand there only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype that a tensor has on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemeGroup:
    """Layers that share a scheme. `targets` are layer names (``model.layers.0.mlp.down_proj``),
    class names (``Linear``) or ``re:`` patterns, as compressed-tensors writes them."""

    targets: tuple[str, ...]
    scheme: QuantScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationLayout:
    """Which layers of a checkpoint are quantized how, independent of a format's config keys."""

    format: str
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...]


class Format(Protocol):
    """One on-disk layout of quantized linears. Implementations hold no state."""

    name: str

    def matches(self, scheme: QuantScheme) -> bool:
        """Whether this format can hold `scheme`."""

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        """Whether a ``quantization_config`` of a config.json was written in this format."""

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Suffix -> shape and dtype of a layer's tensors: ``weight_packed``, ``weight_scale``."""

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        """Suffix -> tensor, exactly as `tensors` announces them."""

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        """The inverse of `encode`. Raises `CheckpointError` naming what does not fit."""

    def quantization_config(
        self, groups: Sequence[SchemeGroup], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """The ``quantization_config`` that config.json gets."""

    def parse_config(self, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
        """The inverse of `quantization_config`; raises `CheckpointError` or `UnsupportedError`."""
