"""``mxfp4-pack-quantized``: E2M1 weights in groups of 32 with powers of two, as compressed-tensors.

A layer ``L`` of shape [N, K] has the tensors::

    L.weight_packed  uint8 [N, K / 2], two codes a byte (`quantforge.checkpoint._fp4`)
    L.weight_scale   uint8 [N, K / 32], E8M0: e stands for 2^(e - 127), and 255 for NaN

The format is that of the OCP Microscaling specification, 1.0.

Legend: N out features, K in features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.checkpoint._fp4 import Fp4Packed, pack_fp4, unpack_fp4
from quantforge.checkpoint._stored import check_spec, take
from quantforge.checkpoint.base import TensorSpec
from quantforge.errors import CheckpointError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, ScaleFormat

E8M0_BIAS = 127
E8M0_NAN = 255


class Mxfp4Packed(Fp4Packed):
    """The `Format` of this file: MXFP4 weights, activations as they are."""

    name = "mxfp4-pack-quantized"
    scale_format: ScaleFormat = "e8m0"
    suffixes = frozenset({"weight_packed", "weight_scale"})

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        rows, columns = shape
        scales = (rows, scheme.weight.num_groups(columns))
        return {
            "weight_packed": TensorSpec(shape=(rows, columns // 2), dtype=torch.uint8),
            "weight_scale": TensorSpec(shape=scales, dtype=torch.uint8),
        }

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        self.refuse_qtensor(qtensor)
        exponent = torch.frexp(qtensor.scale).exponent - 1  # frexp's mantissa is 0.5
        return {
            "weight_packed": pack_fp4(qtensor.codes),
            "weight_scale": (exponent + E8M0_BIAS).to(torch.uint8),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        shape = self.layer_shape(tensors)
        for suffix, spec in self.tensors(shape, scheme, torch.float32).items():
            check_spec(suffix, take(tensors, suffix), spec, scheme)
        stored = tensors["weight_scale"]
        if bad := int((stored == E8M0_NAN).sum()):
            raise CheckpointError(f"weight_scale holds {bad} values that are NaN")
        exponent = stored.to(torch.int32) - E8M0_BIAS
        return QuantizedTensor(
            codes=unpack_fp4(tensors["weight_packed"]),
            scale=torch.ldexp(torch.ones(exponent.shape), exponent),
            zero_point=None,
            quant=scheme.weight,
        )


FORMAT = Mxfp4Packed()
