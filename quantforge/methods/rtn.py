"""Round to nearest: every group's range is divided evenly. Needs no text; the baseline of all."""

from dataclasses import dataclass

from quantforge.methods._shared import shared_scales
from quantforge.methods.base import BlockResult, BlockTask, LayerReport, Method, relative_errors
from quantforge.qtensor import quantize


@dataclass(frozen=True, kw_only=True, slots=True)
class RtnOptions:
    """Rounding to nearest has no options."""


def quantize_block(task: BlockTask, options: RtnOptions) -> BlockResult:
    """Each linear rounded under its min-max scale."""
    group_of = {member: g.name for g in task.groups for member in g.members}
    shared = shared_scales(task)
    qtensors, reports = {}, []
    for name, quant in task.quant.items():
        weight = task.weights[name]
        qtensor = quantize(weight, quant, shared.get(name), scale_dtype=task.scale_dtype)
        seen = task.statistics.get(group_of[name])
        weight_error, output_error = relative_errors(
            weight, qtensor.dequantize(weight.dtype), None if seen is None else seen.second_moment
        )
        qtensors[name] = qtensor
        reports.append(
            LayerReport(
                name=name,
                scheme=str(quant),
                method="rtn",
                weight_error=weight_error,
                output_error=output_error,
            )
        )
    return BlockResult(qtensors=qtensors, reports=tuple(reports))


METHOD = Method(
    name="rtn",
    summary="round to nearest; no calibration",
    needs_statistics=False,
    quantize_block=quantize_block,
    options_type=RtnOptions,
    code_types=("int", "float"),
)
