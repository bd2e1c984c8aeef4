"""`KVStorage`: the dtype of a KV cache and where the scales of its codes come from.

========== ======================== ==============================================================
choice     stored as                scales
========== ======================== ==============================================================
model      the model's dtype        none
fp8_e4m3   ``float8_e4m3fn``        the checkpoint's, one a layer; without: one a token and head
fp8_e5m2   ``float8_e5m2``          none: its range is that of float16
int8       ``int8``                 the checkpoint's, one a layer; without: one a token and head
auto       what the checkpoint has scales for, else the model's dtype
========== ======================================================================================

Scales of a token and head are float32, computed when the token is stored, and lie beside the pages.
E4M3 without a scale is not offered: keys beyond 448 would be cut off.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from quantforge.models.config import ModelConfig
from quantforge.models.kv_scales import KVScales

DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
CODE_TYPES = {"fp8_e4m3": "float", "int8": "int"}
"""Choices that need scales -> the `TensorQuant.dtype` of scales that serve them."""

SCALE_DTYPE = torch.float32

ScaleKind = Literal["none", "layer", "token"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class KVStorage:
    """How keys and values are stored. `calibrated` are the scales of a cache of kind ``layer``."""

    dtype: torch.dtype
    scale_kind: ScaleKind = "none"
    calibrated: KVScales | None = None

    def __str__(self) -> str:
        scales = {
            "none": "",
            "layer": ", one calibrated scale a layer",
            "token": ", one scale a token and head",
        }
        return f"{str(self.dtype).removeprefix('torch.')}{scales[self.scale_kind]}"

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes of a token's keys and values, and of their own scales, over all layers."""
        head_bytes = config.head_dim * self.dtype.itemsize
        if self.scale_kind == "token":
            head_bytes += SCALE_DTYPE.itemsize
        return 2 * config.num_layers * config.num_kv_heads * head_bytes


def kv_storage(choice: str, model_dtype: torch.dtype, scales: KVScales | None) -> KVStorage:
    """The storage for a word of ``--kv-cache-dtype``, given the scales of the checkpoint."""
    if choice == "auto":
        named = {code_type: name for name, code_type in CODE_TYPES.items()}
        choice = "model" if scales is None else named[scales.quant.dtype]
    if choice == "model":
        return KVStorage(dtype=model_dtype)
    dtype = DTYPES[choice]
    if choice not in CODE_TYPES:
        return KVStorage(dtype=dtype)
    if scales is not None and scales.quant.dtype == CODE_TYPES[choice]:
        return KVStorage(dtype=dtype, scale_kind="layer", calibrated=scales)
    return KVStorage(dtype=dtype, scale_kind="token")
