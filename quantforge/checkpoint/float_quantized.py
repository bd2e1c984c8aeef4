"""``float-quantized``: E4M3 weights in the layout of compressed-tensors, vLLM and transformers.

A layer ``L`` of shape [N, K] has the tensors::

    L.weight        float8_e4m3fn [N, K]
    L.weight_scale  in the model's dtype: [1] a tensor, [N, 1] a channel, [ceil(N/128), ceil(K/128)]
                    a block of 128 x 128; multiplies

Scales of activations are computed at run time and leave no tensor, only ``input_activations`` in
the config: one a token, or one a token and 128 inputs.

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
from quantforge.checkpoint._stored import check_spec, take, take_scale
from quantforge.checkpoint.base import QuantizationLayout, SchemeGroup, TensorSpec
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, TensorQuant

NAN_CODE = 0x7F
"""E4M3's NaN without its sign bit; every other code is a finite number."""


class FloatQuantized:
    """The `Format` of this file: E4M3 weights, activations as they are or dynamic E4M3."""

    name = "float-quantized"
    scale_suffix = "weight_scale"
    suffixes = frozenset({"weight_scale"})

    def matches(self, scheme: QuantScheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        fits = activation is None or (
            _is_fp8(activation) and activation.granularity in ("token", "group")
        )
        holds = _is_fp8(weight) and weight.granularity in ("tensor", "channel", "block")
        return holds and not weight.dynamic and fits and (activation is None or activation.dynamic)

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        return is_config_of(self.name, quantization_config)

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return scheme.weight.refuse_shape(shape)

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec(shape=shape, dtype=torch.float8_e4m3fn),
            "weight_scale": TensorSpec(shape=_scale_shape(shape, scheme.weight), dtype=scale_dtype),
        }

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        weight = take(tensors, "weight")
        if weight.dim() != 2:
            raise CheckpointError(f"weight is {list(weight.shape)}; expected two dimensions")
        return weight.shape[0], weight.shape[1]

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        quant = qtensor.quant
        if not self.matches(QuantScheme(weight=quant)) or qtensor.input_scale is not None:
            raise UnsupportedError(f"format {self.name} cannot hold weight scheme {quant}")
        return {
            "weight": qtensor.codes.contiguous(),
            "weight_scale": qtensor.scale.reshape(_scale_shape(qtensor.shape, quant)),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        if "input_scale" in tensors:
            raise UnsupportedError("input_scale: static scales of activations are not supported")
        shape = self.layer_shape(tensors)
        scale = take_scale(tensors, self.scale_suffix)
        for suffix, spec in self.tensors(shape, scheme, scale.dtype).items():
            check_spec(suffix, take(tensors, suffix), spec, scheme)
        codes = tensors["weight"]
        if bad := int(((codes.view(torch.uint8) & NAN_CODE) == NAN_CODE).sum()):
            raise CheckpointError(f"weight holds {bad} values that are NaN")
        if scheme.weight.granularity == "tensor":
            scale = scale.reshape(1, 1)
        return QuantizedTensor(codes=codes, scale=scale, zero_point=None, quant=scheme.weight)

    def quantization_config(
        self, groups: Sequence[SchemeGroup], ignore: Sequence[str]
    ) -> dict[str, Any]:
        refuse_unfit(self.name, self.matches, groups)
        return config_section(self.name, groups, ignore)

    def parse_config(self, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
        layout = parse_layout(self.name, quantization_config)
        refuse_unfit(self.name, self.matches, layout.groups)
        return layout


def _is_fp8(quant: TensorQuant) -> bool:
    return quant.dtype == "float" and quant.num_bits == 8


def _scale_shape(shape: tuple[int, int], quant: TensorQuant) -> tuple[int, ...]:
    """The shape of ``weight_scale`` on disk."""
    if quant.granularity == "tensor":
        return (1,)
    if quant.block_shape is None:
        return shape[0], 1
    rows, columns = quant.block_shape
    return -(-shape[0] // rows), -(-shape[1] // columns)


FORMAT = FloatQuantized()
