"""GPTQ: columns are rounded one after another, each error spread over the columns still to come.

GPTQ (Frantar et al., arXiv 2210.17323) lowers ``tr(dW G dW.T)`` on a fixed grid, G the second
moment of the inputs: with U the upper Cholesky factor of the inverse of G, an error e in column i,
divided by ``U[i, i]``, changes the later columns by ``-e U[i, i + 1:]``. Columns are taken by
falling ``G[i, i]`` while groups keep their places (static act-order): no permutation is stored.

Linears that read the same input share one factor, and are rounded as one stacked problem where
their schemes are equal: rows do not depend on each other.

Legend: N out features, K in features, G groups of K.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from quantforge_kernels import gptq_block, gptq_block_fp4
from torch import Tensor

from quantforge.errors import CalibrationError, RecipeError
from quantforge.methods._clip import round_clipped
from quantforge.methods._factor import Factor, factorise
from quantforge.methods._global import global_scales
from quantforge.methods.base import (
    BlockResult,
    BlockTask,
    LayerReport,
    Method,
    relative_errors,
)
from quantforge.models.arch.base import InputGroup
from quantforge.precision import ieee_products
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import TensorQuant

BLOCK_COLUMNS = gptq_block.MAX_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqOptions:
    """`act_order` takes the columns by falling second moment; `damping` is the share of the mean
    diagonal that is added to the second moment at first; `clip` shrinks ranges as AWQ does before
    the grid is fixed.
    """

    act_order: bool = True
    damping: float = 0.01
    clip: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise RecipeError(
                f"damping {self.damping} must lie above 0 and at most at 1, such as 0.01"
            )


def quantize_block(task: BlockTask, options: GptqOptions) -> BlockResult:
    """Every linear rounded column by column, group by group of inputs.

    Raises `CalibrationError` where a group's statistics are diagonal or not finite.
    """
    qtensors: dict[str, QuantizedTensor] = {}
    reports: list[LayerReport] = []
    shared = global_scales(task)
    for group in task.groups:
        check_moment(task, group)
        moment = task.statistics[group.name].second_moment
        factor = factorise(moment, damping=options.damping, act_order=options.act_order)
        grids = {}
        for name in (m for m in group.members if m in task.quant):
            weight, quant = factor.without_dead(task.weights[name]), task.quant[name]
            over_all, dtype = shared.get(name), task.scale_dtype
            if options.clip:
                grids[name] = round_clipped(weight, quant, moment, dtype, global_scale=over_all)
            else:
                grids[name] = quantize(weight, quant, scale_dtype=dtype, global_scale=over_all)
        rounded = round_on_grids(task.weights, grids, factor)
        qtensors |= rounded
        reports += [
            report(task, name, q, moment, "gptq", factor.notes) for name, q in rounded.items()
        ]
    return BlockResult(qtensors=qtensors, reports=tuple(reports))


def check_moment(task: BlockTask, group: InputGroup) -> None:
    """Raises `CalibrationError` where a group's second moment is a diagonal or not finite."""
    moment = task.statistics[group.name].second_moment
    where = f"input group {group.name} of layer {task.layer}"
    if moment.dim() == 1:
        raise CalibrationError(
            f"GPTQ needs the whole second moment [{len(moment)}, {len(moment)}] of {where}, but "
            "the statistics hold only its diagonal; calibrate with --statistics gram, or use awq"
        )
    if not bool(torch.isfinite(moment).all()):
        raise CalibrationError(
            f"the second moment of {where} holds NaN or infinity: the activations overflow in "
            "the calibration text, or the statistics file is damaged"
        )


def report(
    task: BlockTask,
    name: str,
    qtensor: QuantizedTensor,
    moment: Tensor,
    method: str,
    notes: Mapping[str, Any],
) -> LayerReport:
    """The report of one linear; its method is "rtn" where the notes tell of a fallback."""
    weight = task.weights[name]
    weight_error, output_error = relative_errors(weight, qtensor.dequantize(weight.dtype), moment)
    return LayerReport(
        name=name,
        scheme=str(qtensor.quant),
        method="rtn" if "fallback" in notes else method,
        weight_error=weight_error,
        output_error=output_error,
        notes=dict(notes),
    )


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
            rounded[name] = replace(grids[name], codes=part.contiguous())
    return {name: rounded[name] for name in grids}


def round_columns(
    weight_NK: Tensor,
    scale_NG: Tensor,
    zero_point_NG: Tensor | None,
    quant: TensorQuant,
    upper_KK: Tensor,
    order_K: Tensor,
) -> Tensor:
    """Codes [N, K] of GPTQ under fixed scales (`QuantizedTensor.steps`), in the dtype of `quant`'s
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
    if quant.code_type == "float4":
        on_floats = gptq_block_fp4.OP.select(device=device, dtype=torch.float32)
        return lambda work, upper, group_B: on_floats.run(work, upper, scale_NG[:, group_B].float())
    kernel = gptq_block.OP.select(device=device, dtype=torch.float32)

    def round_block(work_NB: Tensor, upper_BB: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
        zero = None if zero_point_NG is None else zero_point_NG[:, group_B].float()
        scale = scale_NG[:, group_B].float()
        found: tuple[Tensor, Tensor] = kernel.run(work_NB, upper_BB, scale, zero, *quant.code_range)
        return found

    return round_block


METHOD = Method(
    name="gptq",
    summary="column-by-column rounding that spreads each error over the columns to come",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=GptqOptions,
    code_types=("int", "float4"),
)
