"""GPTQ within one block of columns: round a column, spread its error over those right of it.

For column i in turn: ``codes = round(work / scale + zero)``, then ``error = (work - restored) /
U[i, i]``, and ``work[:, j] -= error * U[i, j]`` for every j > i of the block. Rows are independent.
Every operation rounds on its own in IEEE float32 (no fused multiply-add), so that kernels can equal
the reference bit for bit. Problem keys: ``device`` ("cpu", "cuda"), ``dtype`` of the work.

Legend: N rows, B columns of the block.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quantforge_kernels.op import Candidate, Op
from quantforge_kernels.rounding import round_from_int, round_to_int

MAX_COLUMNS = 128
"""The widest block that every candidate takes."""


def reference(
    work_NB: Tensor,
    upper_BB: Tensor,
    scale_NB: Tensor,
    zero_point_NB: Tensor | None,
    code_min: int,
    code_max: int,
) -> tuple[Tensor, Tensor]:
    """(codes int8 [N, B], errors float32 [N, B]) for float32 inputs, which are left as they were.

    `zero_point_NB` holds integers in float32, or is None. An error is what is multiplied by the
    rows of U: the rounding error over ``U[i, i]``.
    """

    def round_column(x_N: Tensor, i: int) -> tuple[Tensor, Tensor]:
        scale = scale_NB[:, i]
        zero = None if zero_point_NB is None else zero_point_NB[:, i]
        codes = round_to_int(x_N, scale, zero, code_min, code_max)
        return codes, round_from_int(codes, scale, zero)

    return spread_errors(work_NB, upper_BB, round_column, torch.int8)


def spread_errors(
    work_NB: Tensor,
    upper_BB: Tensor,
    round_column: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    code_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(codes, errors) [N, B] of the loop over columns, on any grid.

    ``round_column(x_N, i)`` gives the codes of column i and what they restore to.
    """
    work_NB = work_NB.clone()
    codes_NB = torch.empty(work_NB.shape, dtype=code_dtype, device=work_NB.device)
    errors_NB = torch.empty_like(work_NB)
    for i in range(work_NB.shape[1]):
        codes, restored = round_column(work_NB[:, i], i)
        errors = (work_NB[:, i] - restored) / upper_BB[i, i]
        codes_NB[:, i] = codes
        errors_NB[:, i] = errors
        work_NB[:, i + 1 :] -= errors.unsqueeze(1) * upper_BB[i, i + 1 :]
    return codes_NB, errors_NB


def _supports_triton(*, device: str, dtype: torch.dtype, **problem: Any) -> str | None:
    if device != "cuda":
        return f"runs on cuda, not on {device}"
    if dtype != torch.float32:
        return f"takes float32, not {dtype}"
    return None if find_spec("triton") else "triton is not installed"


def _run_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from quantforge_kernels import gptq_block_triton

    return gptq_block_triton.run(*args)


OP = Op(
    name="gptq_block",
    reference=Candidate(name="reference", run=reference),
    candidates=(Candidate(name="triton", run=_run_triton, supports=_supports_triton),),
)
