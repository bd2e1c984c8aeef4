"""``awq``: 4-bit weights with zero points in AutoAWQ's ``gemm`` layout.

A layer ``L`` of shape [N, K] with G groups has the tensors::

    L.qweight  int32 [K, N / 8]
    L.qzeros   int32 [G, N / 8]
    L.scales   float16 [G, N]

Nibble i of a word is output channel ``[0, 2, 4, 6, 1, 3, 5, 7][i]`` of the word's eight, so that
codes 0 .. 7 of channels 0 .. 7 make ``0x75316420``. Zero points are stored as they are.

Legend: N out features, K in features, G groups of K.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantforge.checkpoint._stored import (
    check_matrix,
    check_spec,
    half_scale,
    parse_quant,
    take,
    take_scale,
)
from quantforge.checkpoint._words import pack_words, unpack_words
from quantforge.checkpoint.base import QuantizationLayout, SchemeGroup, TensorSpec
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme

NUM_BITS = 4
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
HEAD = "lm_head"


class AutoAwq:
    """The `Format` of this file."""

    name = "awq"
    scale_suffix = "scales"
    suffixes = frozenset({"qweight", "qzeros", "scales"})

    def matches(self, scheme: QuantScheme) -> bool:
        weight = scheme.weight
        return (
            scheme.activation is None
            and weight.dtype == "int"
            and weight.num_bits == NUM_BITS
            and not weight.symmetric
            and weight.granularity in ("channel", "group")
            and not weight.dynamic
        )

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        version = quantization_config.get("version") or quantization_config.get("format")
        known = version is None or (isinstance(version, str) and version.lower() == "gemm")
        return quantization_config.get("quant_method") == self.name and known

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        if layer == HEAD:
            return f"format {self.name} keeps {HEAD} dense"
        if shape[0] % PER_WORD:
            return f"out_features {shape[0]} is not a multiple of {PER_WORD}"
        return scheme.weight.refuse_shape(shape)

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        rows, columns = shape
        groups, words = scheme.weight.num_groups(columns), -(-rows // PER_WORD)
        return {
            "qweight": TensorSpec(shape=(columns, words), dtype=torch.int32),
            "qzeros": TensorSpec(shape=(groups, words), dtype=torch.int32),
            "scales": TensorSpec(shape=(groups, rows), dtype=scale_dtype),
        }

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        qweight = take(tensors, "qweight")
        check_matrix("qweight", qweight)
        return qweight.shape[1] * PER_WORD, qweight.shape[0]

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        scheme = QuantScheme(weight=qtensor.quant)
        if not self.matches(scheme) or qtensor.permutation is not None:
            order = " in activation order" if qtensor.permutation is not None else ""
            raise UnsupportedError(f"format {self.name} cannot hold weight scheme {scheme}{order}")
        if (reason := self.refuse("", qtensor.shape, scheme)) is not None:
            raise UnsupportedError(f"format {self.name}: {reason}")
        assert qtensor.zero_point is not None, "an asymmetric weight has zero points"
        return {
            "qweight": pack_words(qtensor.codes.T, NUM_BITS, ORDER),
            "qzeros": pack_words(qtensor.zero_point.T, NUM_BITS, ORDER),
            "scales": half_scale(qtensor.scale).T.contiguous(),
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        quant = scheme.weight
        shape = self.layer_shape(tensors)
        if (reason := quant.refuse_shape(shape)) is not None:
            raise CheckpointError(f"qweight: {reason}")
        scale = take_scale(tensors, self.scale_suffix)
        for suffix, spec in self.tensors(shape, scheme, scale.dtype).items():
            check_spec(suffix, take(tensors, suffix), spec, scheme)
        codes_KN = unpack_words(tensors["qweight"], NUM_BITS, ORDER)
        zero_GN = unpack_words(tensors["qzeros"], NUM_BITS, ORDER)
        return QuantizedTensor(
            codes=codes_KN.T.contiguous(),
            scale=scale.T.contiguous(),
            zero_point=zero_GN.T.contiguous(),
            quant=quant,
        )

    def quantization_config(
        self, groups: Sequence[SchemeGroup], ignore: Sequence[str]
    ) -> dict[str, Any]:
        if len(groups) != 1 or not self.matches(groups[0].scheme):
            found = ", ".join(str(group.scheme) for group in groups)
            raise UnsupportedError(
                f"format {self.name} holds one int4 scheme with zero points a checkpoint, "
                f"not {found or 'none'}"
            )
        size = groups[0].scheme.weight.group_size
        return {
            "quant_method": self.name,
            "bits": NUM_BITS,
            "group_size": -1 if size is None else size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(dict.fromkeys((HEAD, *ignore))),
        }

    def parse_config(self, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
        where = "quantization_config"
        if quantization_config.get("zero_point", True) is not True:
            raise UnsupportedError(
                f"{where}: zero_point {quantization_config['zero_point']!r} with quant_method awq "
                "is not supported; only true is"
            )
        quant = parse_quant(where, quantization_config, symmetric=False, widths=(NUM_BITS,))
        kept = quantization_config.get("modules_to_not_convert") or []
        if not isinstance(kept, list) or not all(isinstance(k, str) and k for k in kept):
            raise CheckpointError(
                f"{where}: modules_to_not_convert is {kept!r}; expected a list of names"
            )
        return QuantizationLayout(
            format=self.name,
            groups=(SchemeGroup(targets=("Linear",), scheme=QuantScheme(weight=quant)),),
            ignore=(HEAD, *(f"re:.*{re.escape(part)}" for part in kept if part != HEAD)),
        )


FORMAT = AutoAwq()
