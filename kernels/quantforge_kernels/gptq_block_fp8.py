"""GPTQ within one block of columns, on the grid of E4M3 codes; see `quantforge_kernels.gptq_block`.

Problem keys: ``device`` ("cpu", "cuda"), ``dtype`` of the work.

Legend: N rows, B columns of the block.
"""

import torch
from torch import Tensor

from quantforge_kernels.gptq_block import spread_errors
from quantforge_kernels.op import Candidate, Op
from quantforge_kernels.rounding import round_from_fp8, round_to_fp8


def reference(work_NB: Tensor, upper_BB: Tensor, scale_NB: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [N, B], errors float32 [N, B]) for float32 inputs, which are left as they were.

    Codes are the bytes of E4M3 numbers in uint8, which every device can index.
    """

    def round_column(x_N: Tensor, i: int) -> tuple[Tensor, Tensor]:
        codes = round_to_fp8(x_N, scale_NB[:, i])
        return codes.view(torch.uint8), round_from_fp8(codes, scale_NB[:, i])

    return spread_errors(work_NB, upper_BB, round_column, torch.uint8)


OP = Op(name="gptq_block_fp8", reference=Candidate(name="reference", run=reference))
