"""What the formats of E2M1 weights share: two codes a byte, and the config of compressed-tensors.

Code 2 i of a row lies in the low half of byte i, code 2 i + 1 in its high half::

    0, .5, 1, 1.5, 2, 3, 4, 6  =  codes 0 1 2 3 4 5 6 7  ->  0x10 0x32 0x54 0x76

Legend: N out features, K in features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantforge.checkpoint._compressed import (
    config_section,
    is_config_of,
    parse_layout,
    refuse_unfit,
)
from quantforge.checkpoint._stored import take
from quantforge.checkpoint.base import QuantizationLayout, SchemeGroup
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, ScaleFormat


def pack_fp4(codes_NK: Tensor) -> Tensor:
    """uint8 [N, K / 2] from E2M1 codes uint8 [N, K], K even."""
    return codes_NK[:, ::2] | (codes_NK[:, 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """E2M1 codes uint8 [N, K]: the inverse of `pack_fp4`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


class Fp4Packed:
    """What a `Format` of E2M1 weights is but for its scales; `scale_format` is its scheme's."""

    name: str
    scale_format: ScaleFormat
    scale_suffix = "weight_scale"

    def matches(self, scheme: QuantScheme) -> bool:
        weight = scheme.weight
        return (
            scheme.activation is None
            and weight.scale_format == self.scale_format
            and not weight.dynamic
        )

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        return is_config_of(self.name, quantization_config)

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return scheme.weight.refuse_shape(shape)

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        packed = take(tensors, "weight_packed")
        if packed.dim() != 2 or packed.dtype != torch.uint8 or 0 in packed.shape:
            raise CheckpointError(
                f"weight_packed is {packed.dtype} {list(packed.shape)}; "
                "expected uint8 with two sizes above 0"
            )
        return packed.shape[0], 2 * packed.shape[1]

    def refuse_qtensor(self, qtensor: QuantizedTensor) -> None:
        """Raises `UnsupportedError` for a weight that this format cannot hold."""
        if not self.matches(QuantScheme(weight=qtensor.quant)) or qtensor.input_scale is not None:
            raise UnsupportedError(f"format {self.name} cannot hold weight scheme {qtensor.quant}")

    def quantization_config(
        self, groups: Sequence[SchemeGroup], ignore: Sequence[str]
    ) -> dict[str, Any]:
        refuse_unfit(self.name, self.matches, groups)
        return config_section(self.name, groups, ignore)

    def parse_config(self, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
        layout = parse_layout(self.name, quantization_config)
        refuse_unfit(self.name, self.matches, layout.groups)
        return layout
