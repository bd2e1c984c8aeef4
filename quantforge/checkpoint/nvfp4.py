"""``nvfp4-pack-quantized``: E2M1 weights in groups of 16 with E4M3 scales, as compressed-tensors.

A layer ``L`` of shape [N, K] has the tensors::

    L.weight_packed        uint8 [N, K / 2], two codes a byte (`quantforge.checkpoint._fp4`)
    L.weight_scale         float8_e4m3fn [N, K / 16]
    L.weight_global_scale  float32 [1], which divides: w = E2M1(code) * scale / global

Linears that a runtime joins (q, k, v; gate, up) are quantized under one global scale.

Legend: N out features, K in features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.checkpoint._fp4 import Fp4Packed, pack_fp4, unpack_fp4
from quantforge.checkpoint._stored import check_spec, take
from quantforge.checkpoint.base import TensorSpec
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, ScaleFormat


class Nvfp4Packed(Fp4Packed):
    """The `Format` of this file: NVFP4 weights, activations as they are."""

    name = "nvfp4-pack-quantized"
    scale_format: ScaleFormat = "e4m3"
    suffixes = frozenset({"weight_packed", "weight_scale", "weight_global_scale"})

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        rows, columns = shape
        scales = (rows, scheme.weight.num_groups(columns))
        return {
            "weight_packed": TensorSpec(shape=(rows, columns // 2), dtype=torch.uint8),
            "weight_scale": TensorSpec(shape=scales, dtype=torch.float8_e4m3fn),
            "weight_global_scale": TensorSpec(shape=(1,), dtype=torch.float32),
        }

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        self.refuse_qtensor(qtensor)
        assert qtensor.global_scale is not None, "an NVFP4 weight has a global scale"
        return {
            "weight_packed": pack_fp4(qtensor.codes),
            "weight_scale": qtensor.scale.to(torch.float8_e4m3fn),
            "weight_global_scale": qtensor.global_scale,
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        if "input_global_scale" in tensors:
            raise UnsupportedError("input_global_scale: activations in FP4 are not supported")
        shape = self.layer_shape(tensors)
        for suffix, spec in self.tensors(shape, scheme, torch.float32).items():
            check_spec(suffix, take(tensors, suffix), spec, scheme)
        global_scale = tensors["weight_global_scale"]
        if not bool(global_scale.isfinite()) or not bool(global_scale > 0):
            raise CheckpointError(
                f"weight_global_scale is {float(global_scale)}; expected a finite number above 0"
            )
        return QuantizedTensor(
            codes=unpack_fp4(tensors["weight_packed"]),
            scale=tensors["weight_scale"].to(torch.float32),
            zero_point=None,
            quant=scheme.weight,
            global_scale=global_scale,
        )


FORMAT = Nvfp4Packed()
