"""GPTQ: columns are rounded one after another, each error spread over the columns still to come.

GPTQ (Frantar et al., arXiv 2210.17323) lowers ``tr(dW G dW.T)`` on a fixed grid, G the second
moment of the inputs: with U the upper Cholesky factor of the inverse of G, an error e in column i,
divided by ``U[i, i]``, changes the later columns by ``-e U[i, i + 1:]``. Columns are taken by
falling ``G[i, i]`` while groups keep their places (static act-order): no permutation is stored.

With `mismatch` the weight that is rounded is not W but the one that makes up best for what the
rounding of earlier layers did to the inputs (GPTAQ, Li et al., arXiv 2504.02692; Qronos, Zhang et
al., arXiv 2505.11695).

Legend: N out features, K in features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantforge.errors import CalibrationError, RecipeError
from quantforge.methods._candidates import CLIP_BY, choose, clip_measure, column_candidates
from quantforge.methods._clip import round_clipped
from quantforge.methods._factor import factorise
from quantforge.methods._float_scale import FLOAT_SCALES, search_float_scale
from quantforge.methods._global import global_scales
from quantforge.methods.base import (
    BlockResult,
    BlockTask,
    LayerReport,
    Method,
    Needs,
    join_results,
    relative_errors,
)
from quantforge.models.arch.base import InputGroup
from quantforge.qtensor import QuantizedTensor, quantize


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqOptions:
    """`act_order` takes the columns by falling second moment; `damping` is the share of the mean
    diagonal that is added to the second moment at first; `clip` shrinks ranges as AWQ does before
    the grid is fixed, errors weighed as `clip_by` says (`CLIP_BY`: column, diagonal or block).
    Column gives lower output errors of single linears than block (0.90 to 0.97 of them for qkv, o
    and gate_up of blocks 1 and 8 of a 135M model, 1.01 for down of block 1), but no better model
    has been measured.

    - `true_sequential` sees the inputs of each group again once the groups before it are rounded;
    - `mismatch` (0 to 1) rounds, instead of W, what makes up for the errors of earlier layers, at
      half and at full strength. It brings true-sequential order: drift that an earlier linear of
      the block makes up for must not be made up for again;
    - `refit` fits the scales again to the codes. Both are kept for a linear only where the error on
      the held-out samples, a share `held_out` of all, falls.
    """

    act_order: bool = True
    damping: float = 0.01
    clip: bool = True
    clip_by: str = "block"
    true_sequential: bool = False
    mismatch: float = 0.0
    refit: bool = False
    held_out: float = 0.125

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise RecipeError(
                f"damping {self.damping} must lie above 0 and at most at 1, such as 0.01"
            )
        if self.clip_by not in CLIP_BY:
            raise RecipeError(f"clip_by {self.clip_by!r} is not one of {', '.join(CLIP_BY)}")
        if not 0 <= self.mismatch <= 1:
            raise RecipeError(f"mismatch {self.mismatch} must lie between 0 (none) and 1")
        if not 0 < self.held_out < 1:
            raise RecipeError(f"held_out {self.held_out} must lie between 0 and 1, such as 0.125")

    @property
    def needs(self) -> Needs:
        """What these options want to see beside the plain statistics."""
        compares = self.mismatch > 0 or self.refit
        return Needs(
            true_sequential=self.true_sequential or self.mismatch > 0,
            mismatch=self.mismatch > 0,
            held_out=self.held_out if compares else 0.0,
        )


def quantize_block(task: BlockTask, options: GptqOptions) -> BlockResult:
    """Every linear rounded column by column, group by group of inputs.

    Raises `CalibrationError` where a group's statistics are diagonal or not finite.
    """
    return join_results(round_group(task, group, options, None) for group in task.groups)


def round_group(
    task: BlockTask, group: InputGroup, options: GptqOptions, prepared: None
) -> BlockResult:
    """The linears of one input group, rounded column by column."""
    check_moment(task, group)
    quants, dtype, shared = task.quant, task.scale_dtype, global_scales(task)

    def grid(name: str, weight_NK: Tensor, measure: Tensor) -> QuantizedTensor:
        over_all = shared.get(name)
        if quants[name].code_type == "float8":  # nothing to clip: larger scales cost no precision
            scale = search_float_scale(weight_NK, quants[name], dtype, FLOAT_SCALES)
            return quantize(weight_NK, quants[name], scale, scale_dtype=dtype)
        if options.clip:
            return round_clipped(weight_NK, quants[name], measure, dtype, global_scale=over_all)
        return quantize(weight_NK, quants[name], scale_dtype=dtype, global_scale=over_all)

    return round_by_columns(task, group, options, grid, method="gptq", notes={})


def round_by_columns(
    task: BlockTask,
    group: InputGroup,
    options: GptqOptions,
    grid_of: Callable[[str, Tensor, Tensor], QuantizedTensor],
    *,
    method: str,
    notes: Mapping[str, Any],
) -> BlockResult:
    """The linears of one input group on the grids of `grid_of` (a linear's name, its weight, what
    errors count in each column); `notes` go into the reports."""
    moment = task.statistics[group.name].second_moment
    factor = factorise(moment, damping=options.damping, act_order=options.act_order)
    measure = clip_measure(options.clip_by, moment, factor)
    found = column_candidates(
        task,
        group,
        factor,
        lambda name, weight_NK: grid_of(name, weight_NK, measure),
        method=method,
        mismatch=options.mismatch,
        refit=options.refit,
        damping=options.damping,
    )
    qtensors, reports = {}, []
    for name, candidates in found.items():
        chosen, why = choose(task, group, name, candidates)
        qtensors[name] = chosen.qtensor
        said = {**notes, **why}
        reports.append(report(task, name, chosen.qtensor, moment, method, said))
    return BlockResult(qtensors=qtensors, reports=tuple(reports))


def check_moment(task: BlockTask, group: InputGroup, needed_by: str = "GPTQ") -> Tensor:
    """A group's second moment [K, K]; raises `CalibrationError` for a diagonal or what is not
    finite."""
    moment = task.statistics[group.name].second_moment
    where = f"input group {group.name} of layer {task.layer}"
    if moment.dim() == 1:
        raise CalibrationError(
            f"{needed_by} needs the whole second moment [{len(moment)}, {len(moment)}] of {where}, "
            "but the statistics hold only its diagonal; calibrate with --statistics gram, or use "
            "awq"
        )
    if not bool(torch.isfinite(moment).all()):
        raise CalibrationError(
            f"the second moment of {where} holds NaN or infinity: the activations overflow in "
            "the calibration text, or the statistics file is damaged"
        )
    return moment


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


METHOD = Method(
    name="gptq",
    summary="column-by-column rounding that spreads each error over the columns to come",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=GptqOptions,
    code_types=("int", "float4", "float8-channel"),
    needs=lambda options: options.needs,
    round_group=round_group,
)
