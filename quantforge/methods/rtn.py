"""Round to nearest: every group's range is divided evenly. Needs no text; the baseline of all.

E4M3 scales are searched within an octave (`_float_scale`), which needs no text either.
"""

from dataclasses import dataclass

from quantforge.errors import RecipeError
from quantforge.methods._float_scale import FLOAT_SCALES, search_float_scale
from quantforge.methods._global import global_scales
from quantforge.methods._shared import shared_scales
from quantforge.methods.base import BlockResult, BlockTask, LayerReport, Method, relative_errors
from quantforge.qtensor import quantize


@dataclass(frozen=True, kw_only=True, slots=True)
class RtnOptions:
    """`float_scales` is how many scales within an octave are tried for weights in E4M3; 1 takes
    ``max|w| / 448``.
    """

    float_scales: int = FLOAT_SCALES

    def __post_init__(self) -> None:
        if not 1 <= self.float_scales <= 256:
            raise RecipeError(f"float_scales {self.float_scales} must lie within 1 to 256")


def quantize_block(task: BlockTask, options: RtnOptions) -> BlockResult:
    """Each linear rounded under its min-max scale, or in E4M3 under the best of an octave."""
    group_of = {member: g.name for g in task.groups for member in g.members}
    shared, shared_global = shared_scales(task), global_scales(task)
    qtensors, reports = {}, []
    for name, quant in task.quant.items():
        weight = task.weights[name]
        scale = shared.get(name)
        if scale is None and quant.code_type == "float8":
            scale = search_float_scale(weight, quant, task.scale_dtype, options.float_scales)
        qtensor = quantize(
            weight,
            quant,
            scale,
            scale_dtype=task.scale_dtype,
            global_scale=shared_global.get(name),
        )
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
