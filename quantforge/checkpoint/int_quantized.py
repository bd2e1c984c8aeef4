"""``int-quantized``: int8 weights, not packed, in the layout of compressed-tensors and vLLM.

A layer ``L`` of shape [N, K] has the tensors::

    L.weight        int8 [N, K], symmetric codes -128 .. 127
    L.weight_scale  [N, 1] a channel, [N, G] a group, in the model's dtype; multiplies
    L.input_scale   [1], only where inputs have one static scale (static W8A8)

Inputs are int8 too (W8A8), under one scale a token that leaves no tensor, or under the static one.
Weight-only int8 is read, also under the name ``naive-quantized``; it is written as
``pack-quantized``, which other runtimes expect there.

Legend: N out features, K in features, G groups of K.
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

ALIAS = "naive-quantized"


class IntQuantized:
    """The `Format` of this file: int8 weights, inputs int8 or as they are."""

    name = "int-quantized"
    scale_suffix = "weight_scale"
    suffixes = frozenset({"weight_scale", "input_scale"})

    def matches(self, scheme: QuantScheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        if not _is_int8(weight) or weight.dynamic:
            return False
        if activation is None:
            return weight.granularity in ("channel", "group")
        fits = "token" if activation.dynamic else "tensor"
        whole = weight.granularity == "channel"
        return whole and _is_int8(activation) and activation.granularity == fits

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        return any(is_config_of(name, quantization_config) for name in (self.name, ALIAS))

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return scheme.weight.refuse_shape(shape)

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        groups = scheme.weight.num_groups(shape[1])
        specs = {
            "weight": TensorSpec(shape=shape, dtype=torch.int8),
            "weight_scale": TensorSpec(shape=(shape[0], groups), dtype=scale_dtype),
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
        if not self.matches(QuantScheme(weight=quant)) or qtensor.permutation is not None:
            order = " in activation order" if qtensor.permutation is not None else ""
            raise UnsupportedError(f"format {self.name} cannot hold weight scheme {quant}{order}")
        tensors = {
            "weight": qtensor.codes.contiguous(),
            "weight_scale": qtensor.scale.contiguous(),
        }
        if qtensor.input_scale is not None:
            tensors["input_scale"] = qtensor.input_scale.reshape(1)
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        shape = self.layer_shape(tensors)
        reason = scheme.weight.refuse_shape(shape)
        if reason is not None:
            raise CheckpointError(reason)
        scale = take_scale(tensors, self.scale_suffix)
        for suffix, spec in self.tensors(shape, scheme, scale.dtype).items():
            if suffix != "input_scale":
                check_spec(suffix, take(tensors, suffix), spec, scheme)
        return QuantizedTensor(
            codes=tensors["weight"],
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


def _is_int8(quant: TensorQuant) -> bool:
    return quant.dtype == "int" and quant.num_bits == 8 and quant.symmetric


FORMAT = IntQuantized()
