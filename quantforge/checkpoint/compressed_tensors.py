"""``pack-quantized``: integer weights in the layout of compressed-tensors, vLLM and transformers.

A layer ``L`` of shape [N, K] with b-bit codes and G groups has the tensors::

    L.weight_packed      int32 [N, ceil(K b / 32)]
    L.weight_scale       [N, G] in the model's dtype
    L.weight_shape       int64 [2] = (N, K)
    L.weight_zero_point  int32 [ceil(N b / 32), G], asymmetric only, packed along N

Codes are stored as ``u = code + 2^(b-1)``, densely and least significant bit first: code i of a row
occupies the bits ``i b .. (i + 1) b - 1`` of the row, and may cross a word (3-bit codes do)::

    -8 -7 -6 ... 7  in 4 bits  ->  0x76543210 0xfedcba98
    -4 -3 ... 3, four times, in 3 bits  ->  0x88fac688 0xc688fac6 0xfac688fa

Eight codes fill exactly b bytes, so packing works on bytes and words are a view of them
(little-endian, as safetensors is).

Legend: N out features, K in features, G groups of K, R rows, C codes of a row, W words of a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge.checkpoint._compressed import (
    config_section,
    is_config_of,
    parse_layout,
    refuse_unfit,
)
from quantforge.checkpoint._stored import check_spec, take, take_scale
from quantforge.checkpoint._words import pack_words, unpack_words
from quantforge.checkpoint.base import QuantizationLayout, SchemeGroup, TensorSpec
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme


def pack_int(codes_RC: Tensor, num_bits: int) -> Tensor:
    """int32 [R, ceil(C num_bits / 32)] from signed int8 codes [R, C]; padding codes are 0 bits."""
    rows, columns = codes_RC.shape
    half = 1 << (num_bits - 1)
    if 8 % num_bits == 0:  # whole codes in each byte: several times as fast
        return pack_words(F.pad(codes_RC, (0, -columns % (32 // num_bits)), value=-half), num_bits)
    unsigned = codes_RC.contiguous().view(torch.uint8) + half  # wraps to 0 .. 2^b - 1
    octets = F.pad(unsigned, (0, -columns % 32)).reshape(rows, -1, 8)
    joined = torch.zeros(octets.shape[:2], dtype=torch.int64, device=octets.device)
    for i in range(8):
        joined |= octets[..., i].long() << (num_bits * i)
    packed = joined.view(torch.uint8).reshape(rows, -1, 8)[..., :num_bits]
    words = packed.reshape(rows, -1).contiguous().view(torch.int32)
    return words[:, : _num_words(columns, num_bits)].contiguous()


def unpack_int(packed_RW: Tensor, num_bits: int, num_codes: int) -> Tensor:
    """Signed int8 codes [R, num_codes]: the inverse of `pack_int`."""
    rows, words = packed_RW.shape
    if 8 % num_bits == 0:
        return unpack_words(packed_RW, num_bits)[:, :num_codes].contiguous()
    padded = F.pad(packed_RW, (0, -words % num_bits)).contiguous().view(torch.uint8)
    octets = F.pad(padded.reshape(rows, -1, num_bits), (0, 8 - num_bits)).contiguous()
    joined = octets.view(torch.int64).squeeze(-1)
    mask, half = (1 << num_bits) - 1, 1 << (num_bits - 1)
    codes = torch.empty((*joined.shape, 8), dtype=torch.int8, device=joined.device)
    for i in range(8):
        codes[..., i] = ((joined >> (num_bits * i)) & mask) - half
    return codes.reshape(rows, -1)[:, :num_codes].contiguous()


def _num_words(num_codes: int, num_bits: int) -> int:
    return -(-num_codes * num_bits // 32)


class PackQuantized:
    """The `Format` of this file: weight-only integers, one scale a channel or a group."""

    name = "pack-quantized"
    scale_suffix = "weight_scale"
    suffixes = frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"})

    def matches(self, scheme: QuantScheme) -> bool:
        weight = scheme.weight
        return (
            scheme.activation is None
            and weight.dtype == "int"
            and weight.granularity in ("channel", "group")
            and not weight.dynamic
        )

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        return is_config_of(self.name, quantization_config)

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return scheme.weight.refuse_shape(shape)

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        weight = scheme.weight
        rows, columns = shape
        groups = weight.num_groups(columns)
        packed = (rows, _num_words(columns, weight.num_bits))
        specs = {
            "weight_packed": TensorSpec(shape=packed, dtype=torch.int32),
            "weight_scale": TensorSpec(shape=(rows, groups), dtype=scale_dtype),
            "weight_shape": TensorSpec(shape=(2,), dtype=torch.int64),
        }
        if not weight.symmetric:
            zero_shape = (_num_words(rows, weight.num_bits), groups)
            specs["weight_zero_point"] = TensorSpec(shape=zero_shape, dtype=torch.int32)
        return specs

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        stored = take(tensors, "weight_shape")
        if stored.shape != (2,) or stored.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(
                f"weight_shape is {stored.dtype} {list(stored.shape)}; expected int64 [2]"
            )
        rows, columns = (int(size) for size in stored)
        if rows < 1 or columns < 1:
            raise CheckpointError(f"weight_shape is [{rows}, {columns}]; expected sizes above 0")
        return rows, columns

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        quant = qtensor.quant
        if not self.matches(QuantScheme(weight=quant)) or qtensor.permutation is not None:
            order = " in activation order" if qtensor.permutation is not None else ""
            raise UnsupportedError(f"format {self.name} cannot hold weight scheme {quant}{order}")
        tensors = {
            "weight_packed": pack_int(qtensor.codes, quant.num_bits),
            "weight_scale": qtensor.scale.contiguous(),
            "weight_shape": torch.tensor(qtensor.shape, dtype=torch.int64),
        }
        if not quant.symmetric:
            assert qtensor.zero_point is not None, "an asymmetric weight has zero points"
            packed_GW = pack_int(qtensor.zero_point.T, quant.num_bits)
            tensors["weight_zero_point"] = packed_GW.T.contiguous()
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        if "weight_g_idx" in tensors:
            raise UnsupportedError("weight_g_idx: activation-ordered groups are not supported")
        quant = scheme.weight
        rows, columns = shape = self.layer_shape(tensors)
        reason = quant.refuse_shape(shape)
        if reason is not None:
            raise CheckpointError(reason)
        scale = take_scale(tensors, self.scale_suffix)
        for suffix, spec in self.tensors(shape, scheme, scale.dtype).items():
            if suffix != "weight_shape":  # `layer_shape` has read it
                check_spec(suffix, take(tensors, suffix), spec, scheme)
        zero_point = None
        if not quant.symmetric:
            packed_GW = tensors["weight_zero_point"].T.contiguous()
            zero_point = unpack_int(packed_GW, quant.num_bits, rows).T.contiguous()
        return QuantizedTensor(
            codes=unpack_int(tensors["weight_packed"], quant.num_bits, columns),
            scale=scale,
            zero_point=zero_point,
            quant=quant,
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


FORMAT = PackQuantized()
