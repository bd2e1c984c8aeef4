"""`QuantizedTensor`, the waist of the project, and the one quantize/dequantize arithmetic.

Methods end in a `QuantizedTensor`, formats encode and decode it, kernels repack from it. Codes are
not packed and are signed: 4-bit codes lie in -8..7, and so do their zero points.

Legend: N out features, K in features, G groups of K.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from quantforge_kernels.rounding import (
    fp8_scale,
    mxfp4_scale,
    nvfp4_global_scale,
    nvfp4_scale,
    round_from_fp4,
    round_from_fp8,
    round_from_int,
    round_to_fp4,
    round_to_fp8,
    round_to_int,
    spread_blocks,
)
from torch import Tensor

from quantforge.errors import UnsupportedError
from quantforge.schemes import TensorQuant


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """A weight as codes with scales.

    - `codes` int8 [N, K], float8_e4m3fn [N, K] for E4M3, or uint8 [N, K] of 0 .. 15 for E2M1;
    - `scale` [N, G] (G = 1 for channel), [1, 1] for tensor, [ceil(N/bn), ceil(K/bk)] for block;
      multiplies;
    - `zero_point` int8, the shape of `scale`, or None when symmetric;
    - `quant` the scheme of the weight.

    Fields that only some schemes have: `global_scale` float32 [1], which divides (NVFP4),
    `input_scale` [1] (static inputs), `permutation` int64 [K] (imported activation-ordered
    checkpoints: column j of `codes` multiplies input ``permutation[j]``), `codebook` (NF4).
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    quant: TensorQuant
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None
    permutation: Tensor | None = None
    codebook: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K], rounded once to `dtype` (default: the scale's dtype).

        Columns are in the order of the inputs, whatever the permutation.
        """
        if self.quant.code_type == "float4":
            steps = self.steps.unsqueeze(-1)
            fp4: Tensor = round_from_fp4(_group(self.codes, self.quant), steps)
            return fp4.reshape(self.shape).to(dtype or self.scale.dtype)
        if self.quant.dtype == "float":
            spread = _spread(self.scale, self.quant, self.shape)
            values: Tensor = round_from_fp8(self.codes, spread)
            return values.to(dtype or self.scale.dtype)
        grouped: Tensor = round_from_int(
            _group(self.codes, self.quant),
            self.scale.unsqueeze(-1),
            None if self.zero_point is None else self.zero_point.unsqueeze(-1),
        )
        weight = grouped.reshape(self.shape).to(dtype or self.scale.dtype)
        return weight if self.permutation is None else weight[:, self.permutation.argsort()]

    @property
    def steps(self) -> Tensor:
        """What a code of 1 stands for, in the shape of the scale: the scale over the global one."""
        return self.scale if self.global_scale is None else self.scale / self.global_scale

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """The same tensor with every field on `device`."""

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device)

        return QuantizedTensor(
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero_point=move(self.zero_point),
            quant=self.quant,
            global_scale=move(self.global_scale),
            input_scale=move(self.input_scale),
            permutation=move(self.permutation),
            codebook=move(self.codebook),
        )


def _group(x_NK: Tensor, quant: TensorQuant) -> Tensor:
    """[N, G, K/G] view of a weight; channel and tensor granularity have one group."""
    is_fp4 = quant.code_type == "float4" and quant.scale_format is not None
    is_int = quant.dtype == "int" and quant.granularity in ("channel", "group", "tensor")
    if not (is_int or is_fp4):
        raise UnsupportedError(f"no arithmetic for weight scheme {quant}; use an int scheme")
    return x_NK.reshape(x_NK.shape[0], quant.num_groups(x_NK.shape[1]), -1)


def _refuse_unless_fp8(quant: TensorQuant) -> None:
    if quant.num_bits != 8 or quant.granularity not in ("tensor", "channel", "block"):
        raise UnsupportedError(
            f"no arithmetic for weight scheme {quant}; use an int scheme, or fp8 with one scale a "
            "tensor, channel or block"
        )


def _spread(scale: Tensor, quant: TensorQuant, shape: tuple[int, int]) -> Tensor:
    """The scale of an E4M3 weight in a shape that broadcasts against [N, K] = `shape`."""
    _refuse_unless_fp8(quant)
    if quant.block_shape is None:
        return scale
    spread: Tensor = spread_blocks(scale, quant.block_shape, shape)
    return spread


def _largest(weight_NK: Tensor, quant: TensorQuant) -> Tensor:
    """The largest magnitude under each scale of an E4M3 weight, in the shape of the scale."""
    _refuse_unless_fp8(quant)
    size = weight_NK.abs()
    if quant.granularity == "tensor":
        return size.amax().reshape(1, 1)
    if quant.block_shape is None:
        return size.amax(-1, keepdim=True)
    rows, columns = quant.block_shape
    padded = F.pad(size, (0, -size.shape[1] % columns, 0, -size.shape[0] % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return blocks.amax((1, 3))


def global_scale_of(weights: Sequence[Tensor], quant: TensorQuant) -> Tensor | None:
    """The global scale [1] that `weights` (one, or linears that are served as one) share.

    None for a scheme without one.
    """
    if quant.scale_format != "e4m3":
        return None
    largest = torch.stack([weight.abs().amax() for weight in weights]).amax()
    found: Tensor = nvfp4_global_scale(largest)
    return found


def minmax_scale(
    weight_NK: Tensor,
    quant: TensorQuant,
    shrink: Tensor | float = 1.0,
    shrink_high: Tensor | float | None = None,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale [N, G] and zero point (int8, None when symmetric) that cover the range of each group.

    Symmetric: ``max|w| / ((2^b - 1) / 2)``. Asymmetric: ``(max - min) / (2^b - 1)`` over a range
    that holds zero, zero point ``round(code_min - min / scale)`` (compressed-tensors' rules).
    E4M3: ``max|w| / 448``. E2M1: in the scheme's own scale format, under `global_scale` (default:
    the weight's) for NVFP4. `shrink` (a number, or [N, G]) multiplies the range: clipping; with
    `shrink_high` only its lower end, the upper end by that. A group of zeros gets scale 1, or the
    smallest of NVFP4.
    """
    if quant.code_type == "float4":
        largest = _group(weight_NK.float(), quant).abs().amax(-1) * shrink
        if quant.scale_format == "e8m0":
            return mxfp4_scale(largest), None
        if global_scale is None:
            global_scale = global_scale_of([weight_NK], quant)
        return nvfp4_scale(largest, global_scale), None
    if quant.dtype == "float":
        return fp8_scale(_largest(weight_NK.float(), quant) * shrink), None
    grouped = _group(weight_NK.float(), quant)
    code_min, code_max = quant.code_range
    steps = float(code_max - code_min)
    if quant.symmetric:
        scale = grouped.abs().amax(-1) * shrink / (steps / 2)
        return torch.where(scale == 0, 1.0, scale), None
    low = grouped.amin(-1).clamp(max=0) * shrink
    high = grouped.amax(-1).clamp(min=0) * (shrink if shrink_high is None else shrink_high)
    scale = (high - low) / steps
    scale = torch.where(scale == 0, 1.0, scale)
    zero_point = (code_min - low / scale).round().clamp(code_min, code_max)
    return scale, zero_point.to(torch.int8)


def quantize(
    weight_NK: Tensor,
    quant: TensorQuant,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    global_scale: Tensor | None = None,
) -> QuantizedTensor:
    """`weight_NK` rounded to the nearest codes under `scale` and `zero_point` (default: min-max).

    The scale is first rounded to `scale_dtype` (default: the weight's), in which it will be stored,
    so that the codes fit the scale that a reader sees. Scales with a format of their own (FP4) stay
    float32, and NVFP4 takes `global_scale` (default: the weight's).
    """
    if quant.code_type == "float4":
        return _quantize_fp4(weight_NK, quant, scale, global_scale)
    if scale is None:
        scale, zero_point = minmax_scale(weight_NK, quant)
    scale = scale.to(scale_dtype or weight_NK.dtype)
    if quant.dtype == "float":
        shape = (weight_NK.shape[0], weight_NK.shape[1])
        spread = _spread(scale.float(), quant, shape)
        codes = round_to_fp8(weight_NK.float(), spread)
        return QuantizedTensor(codes=codes, scale=scale, zero_point=None, quant=quant)
    codes = round_to_int(
        _group(weight_NK.float(), quant),
        scale.float().unsqueeze(-1),
        None if zero_point is None else zero_point.unsqueeze(-1),
        *quant.code_range,
    )
    return QuantizedTensor(
        codes=codes.reshape(weight_NK.shape), scale=scale, zero_point=zero_point, quant=quant
    )


def _quantize_fp4(
    weight_NK: Tensor, quant: TensorQuant, scale: Tensor | None, global_scale: Tensor | None
) -> QuantizedTensor:
    """`quantize` to E2M1; the code is ``w / (scale / global_scale)`` in that order, all float32."""
    if global_scale is None:
        global_scale = global_scale_of([weight_NK], quant)
    if scale is None:
        scale, _ = minmax_scale(weight_NK, quant, global_scale=global_scale)
    steps = scale if global_scale is None else scale / global_scale
    codes = round_to_fp4(_group(weight_NK.float(), quant), steps.unsqueeze(-1))
    return QuantizedTensor(
        codes=codes.reshape(weight_NK.shape),
        scale=scale,
        zero_point=None,
        quant=quant,
        global_scale=global_scale,
    )
