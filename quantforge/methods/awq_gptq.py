"""AWQ, then GPTQ: scales and clipped ranges fix the grid, and columns are rounded on it in turn.

The two lower the same loss ``tr(dW G dW.T)`` by different means: AWQ (arXiv 2306.00978) moves the
grid towards the channels that matter, GPTQ (arXiv 2210.17323) picks the codes on it.
"""

from dataclasses import dataclass

from quantforge.methods._factor import factorise
from quantforge.methods.awq import AwqOptions, round_nearest, scale_groups, scale_notes
from quantforge.methods.base import BlockResult, BlockTask, LayerReport, Method
from quantforge.methods.gptq import GptqOptions, check_moment, report, round_on_grids
from quantforge.qtensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AwqGptqOptions(AwqOptions):
    """The options of `awq`, with `act_order` and `damping` of `gptq`."""

    act_order: bool = GptqOptions().act_order
    damping: float = GptqOptions().damping

    def __post_init__(self) -> None:
        AwqOptions.__post_init__(self)  # super() does not work in a class with slots
        assert self.rounding

    @property
    def rounding(self) -> GptqOptions:
        """GPTQ's share of the options; raises `RecipeError` where one is impossible."""
        return GptqOptions(act_order=self.act_order, damping=self.damping, clip=self.clip)


def quantize_block(task: BlockTask, options: AwqGptqOptions) -> BlockResult:
    """Scales the groups of the block in place in `task`, then rounds them column by column.

    Raises `CalibrationError` where a group's statistics are diagonal or not finite.
    """
    for group in task.groups:
        check_moment(task, group)
    scaled = scale_groups(task, options)
    qtensors: dict[str, QuantizedTensor] = {}
    reports: list[LayerReport] = []
    for group in task.groups:
        moment = scaled.moments[group.name]
        factor = factorise(moment, damping=options.damping, act_order=options.act_order)
        grids = {
            name: round_nearest(
                factor.without_dead(task.weights[name]),
                task.quant[name],
                moment,
                task.scale_dtype,
                options,
            )
            for name in group.members
            if name in task.quant
        }
        rounded = round_on_grids(task.weights, grids, factor)
        notes = factor.notes | scale_notes(scaled.choices.get(group.name))
        qtensors |= rounded
        reports += [report(task, name, q, moment, "awq_gptq", notes) for name, q in rounded.items()]
    return BlockResult(qtensors=qtensors, reports=tuple(reports))


METHOD = Method(
    name="awq_gptq",
    summary="AWQ's scales and clipping, then GPTQ's rounding on that grid",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=AwqGptqOptions,
)
