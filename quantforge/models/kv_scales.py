"""`KVScales`: what a checkpoint says of the ranges of its keys and values."""

from dataclasses import dataclass

from torch import Tensor

from quantforge.schemes import TensorQuant


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class KVScales:
    """One scale a layer for keys (rotated) and one for values: float32 [layers], both multiply.

    `quant` is what they were calibrated for: E4M3 or int8.
    """

    quant: TensorQuant
    keys: Tensor
    values: Tensor
