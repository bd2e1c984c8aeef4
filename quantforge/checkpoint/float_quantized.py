"""``float-quantized``: E4M3 weights in the layout of compressed-tensors, vLLM and transformers.

A layer ``L`` of shape [N, K] has the tensors::

    L.weight        float8_e4m3fn [N, K]
    L.weight_scale  in the model's dtype: [1] a tensor, [N, 1] a channel, [ceil(N/128), ceil(K/128)]
                    a block of 128 x 128; multiplies
    L.input_scale   [1], only where inputs have one static scale

Other scales of activations are computed at run time and leave no tensor, only ``input_activations``
in the config: one a token, or one a token and 128 inputs.

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
from quantforge.checkpoint._stored import check_spec, take, take_input_scale, take_scale
from quantforge.checkpoint.base import QuantizationLayout, SchemeGroup, TensorSpec
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, TensorQuant

NAN_CODE = 0x7F
"""E4M3's NaN without its sign bit; every other code is a finite number."""


class FloatQuantized:
    """The `Format` of this file: E4M3 weights, activations as they are or E4M3."""

    name = "float-quantized"
    scale_suffix = "weight_scale"
    suffixes = frozenset({"weight_scale", "input_scale"})

    def matches(self, scheme: QuantScheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        holds = _is_fp8(weight) and weight.granularity in ("tensor", "channel", "block")
        if not holds or weight.dynamic or activation is None:
            return holds and not weight.dynamic
        fits = ("token", "group") if activation.dynamic else ("tensor",)
        return _is_fp8(activation) and activation.granularity in fits

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        return is_config_of(self.name, quantization_config)

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return scheme.weight.refuse_shape(shape)

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        specs = {
            "weight": TensorSpec(shape=shape, dtype=torch.float8_e4m3fn),
            "weight_scale": TensorSpec(shape=_scale_shape(shape, scheme.weight), dtype=scale_dtype),
        }
        if scheme.has_static_inputs:
            specs["input_scale"] = TensorSpec(shape=(1,), dtype=scale_dtype)
        return specs

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        weight = take(tensors, "weight")
        if weight.dim() != 2:
            raise CheckpointError(f"weight is {list(weight.shape)}; expected two dimensions")
        return weight.shape[0], weight.shape[1]

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        quant = qtensor.quant
        if not self.matches(QuantScheme(weight=quant)):
            raise UnsupportedError(f"format {self.name} cannot hold weight scheme {quant}")
        tensors = {
            "weight": qtensor.codes.contiguous(),
            "weight_scale": qtensor.scale.reshape(_scale_shape(qtensor.shape, quant)),
        }
        if qtensor.input_scale is not None:
            tensors["input_scale"] = qtensor.input_scale.reshape(1)
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        shape = self.layer_shape(tensors)
        scale = take_scale(tensors, self.scale_suffix)
        for suffix, spec in self.tensors(shape, scheme, scale.dtype).items():
            if suffix != "input_scale":
                check_spec(suffix, take(tensors, suffix), spec, scheme)
        codes = tensors["weight"]
        if bad := int(((codes.view(torch.uint8) & NAN_CODE) == NAN_CODE).sum()):
            raise CheckpointError(f"weight holds {bad} values that are NaN")
        if scheme.weight.granularity == "tensor":
            scale = scale.reshape(1, 1)
        return QuantizedTensor(
            codes=codes,
            scale=scale,
            zero_point=None,
            quant=scheme.weight,
            input_scale=take_input_scale(tensors, scheme),
        )

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
