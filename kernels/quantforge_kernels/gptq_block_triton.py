"""The Triton kernel of `gptq_block`: rows in parallel, a block of columns in registers.

One warp holds a few rows of the block and walks over its columns. Column i is picked out of the
registers by a masked sum (exact: all other terms are zero), rounded, and its error is subtracted
from the columns to come; then its place in the registers holds the error itself. Scales, zero
points and rows of U do not depend on that chain, and are read from memory as they are needed.

Bit for bit the reference: division is IEEE, products and sums are not fused, and rounding adds and
subtracts 1.5 * 2^23, which leaves the nearest integer, ties to even, of any float32 that has been
clamped to the code range (clamping to integers first changes nothing).

Legend: N rows, B columns of the block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 4
BLOCK_B = 128


@triton.jit
def gptq_block_kernel(
    work_ptr,
    upper_ptr,
    scale_ptr,
    zero_ptr,
    codes_ptr,
    errors_ptr,
    num_rows,
    num_columns,
    work_stride,
    upper_stride,
    CODE_MIN: tl.constexpr,
    CODE_MAX: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Rows of `work` and `upper` are strided; scale, zero, codes and errors are dense [N, B].

    The code range is given in float32.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_B)
    row_ok = rows < num_rows
    column_ok = columns < num_columns
    inside = row_ok[:, None] & column_ok[None, :]
    wide_rows = rows.to(tl.int64)
    work = tl.load(
        work_ptr + wide_rows[:, None] * work_stride + columns[None, :], mask=inside, other=0.0
    )  # [BLOCK_N, BLOCK_B]
    codes = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for i in range(num_columns):
        picked = (columns == i)[None, :]
        value = tl.sum(tl.where(picked, work, 0.0), axis=1)  # [BLOCK_N]
        scale = tl.load(scale_ptr + wide_rows * num_columns + i, mask=row_ok, other=1.0)
        scaled = tl.div_rn(value, scale)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + wide_rows * num_columns + i, mask=row_ok, other=0.0)
            scaled = scaled + zero
        clamped = tl.minimum(tl.maximum(scaled, CODE_MIN), CODE_MAX)
        code = (clamped + 12582912.0) - 12582912.0
        centred = code
        if HAS_ZERO:
            centred = code - zero
        upper = tl.load(
            upper_ptr + i * upper_stride + columns, mask=column_ok & (columns > i), other=0.0
        )  # [BLOCK_B]
        diagonal = tl.load(upper_ptr + i * upper_stride + i)
        error = tl.div_rn(value - centred * scale, tl.zeros_like(value) + diagonal)
        work = tl.where(picked, error[:, None], work - error[:, None] * upper[None, :])
        codes = tl.where(picked, code[:, None], codes)
    outputs = wide_rows[:, None] * num_columns + columns[None, :]
    tl.store(codes_ptr + outputs, codes.to(tl.int8), mask=inside)
    tl.store(errors_ptr + outputs, work, mask=inside)


def run(
    work_NB: Tensor,
    upper_BB: Tensor,
    scale_NB: Tensor,
    zero_point_NB: Tensor | None,
    code_min: int,
    code_max: int,
) -> tuple[Tensor, Tensor]:
    """As the reference of `gptq_block`, for at most `BLOCK_B` columns."""
    rows, columns = work_NB.shape
    if columns > BLOCK_B:
        raise ValueError(f"{columns} columns in a block; this kernel takes at most {BLOCK_B}")
    if work_NB.stride(1) != 1:
        work_NB = work_NB.contiguous()
    if upper_BB.stride(1) != 1:
        upper_BB = upper_BB.contiguous()
    scale_NB = scale_NB.contiguous()
    zero_NB = scale_NB if zero_point_NB is None else zero_point_NB.contiguous()
    codes_NB = torch.empty(rows, columns, dtype=torch.int8, device=work_NB.device)
    errors_NB = torch.empty(rows, columns, dtype=torch.float32, device=work_NB.device)
    gptq_block_kernel[(triton.cdiv(rows, BLOCK_N),)](
        work_NB,
        upper_BB,
        scale_NB,
        zero_NB,
        codes_NB,
        errors_NB,
        rows,
        columns,
        work_NB.stride(0),
        upper_BB.stride(0),
        CODE_MIN=float(code_min),
        CODE_MAX=float(code_max),
        HAS_ZERO=zero_point_NB is not None,
        BLOCK_N=BLOCK_N,
        BLOCK_B=BLOCK_B,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return codes_NB, errors_NB
