"""The Triton kernel of `rms_norm`: one pass over a row, residual addition included.

A program holds whole rows in registers: the sum is rounded to x's dtype and stored, the statistics
are taken of the rounded sum in float32, and the normalised value is rounded before the weight
multiplies it, all as in the reference. Only the order of the sum of squares differs.

Legend: R rows, D the size that is normalised, N heads a token where heads are normalised.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SIZE = 32768
ELEMENTS = 4096
"""Elements that a program holds at least: several short rows, or one long one."""


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    eps,
    num_rows,
    size,
    inner_rows,
    outer_stride,
    inner_stride,
    residual_stride,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Row r of x starts at ``r // inner_rows * outer_stride + r % inner_rows * inner_stride``."""
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    starts = rows // inner_rows * outer_stride + rows % inner_rows * inner_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=inside, other=0.0)
    dense = rows[:, None] * size + columns[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + rows[:, None] * residual_stride + columns[None, :],
            mask=inside,
            other=0.0,
        )
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + dense, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / size
    scale = 1.0 / tl.sqrt_rn(mean + eps)
    normed = (wide * scale[:, None]).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    out = (normed * weight[None, :]).to(x.dtype)
    tl.store(normed_ptr + dense, out, mask=inside)


def run(
    x: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference of `rms_norm`; x is [..., D] with dense rows of any strides."""
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} values; this kernel takes at most {MAX_SIZE}")
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().reshape(-1, size)
    inner_rows = x.shape[1] if x.dim() == 3 else 1
    inner_stride = x.stride(1) if x.dim() == 3 else 0
    num_rows = x.numel() // size
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x
    residual_stride = 0
    if residual is not None:
        residual = residual.reshape(-1, size)
        if residual.stride(-1) != 1:
            residual = residual.contiguous()
        residual_stride = residual.stride(0)
        total = torch.empty_like(normed)
    block_d = triton.next_power_of_2(size)
    block_r = max(1, min(triton.next_power_of_2(num_rows), ELEMENTS // block_d))
    if num_rows:
        rms_norm_kernel[(triton.cdiv(num_rows, block_r),)](
            x,
            x if residual is None else residual,
            weight_D,
            normed,
            total,
            eps,
            num_rows,
            size,
            inner_rows,
            x.stride(0) if x.dim() > 1 else 0,
            inner_stride,
            residual_stride,
            HAS_RESIDUAL=residual is not None,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=4 if block_r * block_d <= 4096 else 8,
        )
    return normed, total
