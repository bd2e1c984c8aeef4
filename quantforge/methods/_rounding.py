"""GPTQ's column loop: codes of weights under fixed scales and a factor of the second moment.

The idea is in `gptq.py`. Linears that read the same input share one factor, and are rounded as one
stacked problem where their schemes are equal: rows do not depend on each other.

Legend: N out features, K in features, G groups of K.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from quantforge_kernels import gptq_block, gptq_block_fp4, gptq_block_fp8
from torch import Tensor

from quantforge.methods._factor import Factor
from quantforge.precision import ieee_products
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import TensorQuant

BLOCK_COLUMNS = gptq_block.MAX_COLUMNS


def round_on_grids(
    weights: Mapping[str, Tensor], grids: Mapping[str, QuantizedTensor], factor: Factor
) -> dict[str, QuantizedTensor]:
    """Each weight of `grids` rounded under its grid's scales, by name.

    `grids` hold the weights rounded to nearest, which is the outcome where there is no factor.
    Linears with equal schemes are rounded together.
    """
    if factor.upper is None:
        return dict(grids)
    stacks: dict[TensorQuant, list[str]] = {}
    for name, grid in grids.items():
        stacks.setdefault(grid.quant, []).append(name)
    rounded = {}
    for quant, names in stacks.items():
        zeros = [z for n in names if (z := grids[n].zero_point) is not None]
        codes = round_columns(
            factor.without_dead(torch.cat([weights[n] for n in names])),
            torch.cat([grids[n].steps for n in names]),
            torch.cat(zeros) if zeros else None,
            quant,
            factor.upper,
            factor.order,
        )
        parts = torch.split(codes, [weights[n].shape[0] for n in names])
        for name, part in zip(names, parts, strict=True):
            rounded[name] = replace(
                grids[name], codes=part.contiguous().view(grids[name].codes.dtype)
            )
    return {name: rounded[name] for name in grids}


def round_columns(
    weight_NK: Tensor,
    scale_NG: Tensor,
    zero_point_NG: Tensor | None,
    quant: TensorQuant,
    upper_KK: Tensor,
    order_K: Tensor,
) -> Tensor:
    """Codes [N, K] of GPTQ under fixed scales (`QuantizedTensor.steps`), int8 or the bytes of float
    codes; `upper_KK` is in the order of `order_K`.

    Within a block of columns each error is spread at once; later blocks get a block's errors by one
    matrix product. Float32 throughout.
    """
    rows, columns = weight_NK.shape
    round_block = block_rounding(quant, scale_NG, zero_point_NG)
    group_K = order_K // (columns // scale_NG.shape[1])
    work_NK = weight_NK[:, order_K]
    code_dtype = torch.int8 if quant.code_type == "int" else torch.uint8
    codes_NK = torch.empty(rows, columns, dtype=code_dtype, device=weight_NK.device)
    for start in range(0, columns, BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, columns)
        codes, errors = round_block(
            work_NK[:, start:stop], upper_KK[start:stop, start:stop], group_K[start:stop]
        )
        codes_NK[:, order_K[start:stop]] = codes
        with ieee_products():
            work_NK[:, stop:].addmm_(errors, upper_KK[start:stop, stop:], alpha=-1)
    return codes_NK


def block_rounding(
    quant: TensorQuant, scale_NG: Tensor, zero_point_NG: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``f(work_NB, upper_BB, group_B) -> (codes, errors)``: the kernel that rounds to `quant`.

    `group_B` says which scale each column of a block has.
    """
    device = scale_NG.device.type
    if quant.dtype == "float":
        op = gptq_block_fp4.OP if quant.code_type == "float4" else gptq_block_fp8.OP
        on_floats = op.select(device=device, dtype=torch.float32)
        return lambda work, upper, group_B: on_floats.run(work, upper, scale_NG[:, group_B].float())
    kernel = gptq_block.OP.select(device=device, dtype=torch.float32)

    def round_block(work_NB: Tensor, upper_BB: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
        zero = None if zero_point_NG is None else zero_point_NG[:, group_B].float()
        scale = scale_NG[:, group_B].float()
        found: tuple[Tensor, Tensor] = kernel.run(work_NB, upper_BB, scale, zero, *quant.code_range)
        return found

    return round_block
