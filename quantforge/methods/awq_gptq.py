"""AWQ, then GPTQ: scales and clipped ranges fix the grid, and columns are rounded on it in turn.

The two lower the same loss ``tr(dW G dW.T)`` by different means: AWQ (arXiv 2306.00978) moves the
grid towards the channels that matter, GPTQ (arXiv 2210.17323) picks the codes on it.
"""

from dataclasses import dataclass

from torch import Tensor

from quantforge.methods.awq import AwqOptions, ScaleChoice, round_nearest, scale_groups, scale_notes
from quantforge.methods.base import BlockResult, BlockTask, Method, join_results
from quantforge.methods.gptq import GptqOptions, check_moment, round_by_columns
from quantforge.models.arch.base import InputGroup
from quantforge.qtensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AwqGptqOptions(AwqOptions):
    """The options of `awq` and those of `gptq`.

    `clip_by` diagonal is level with block: KL 0.0941 and 0.0957 on a 135M model (W4, group 64, 16 x
    512 tokens), with intervals of 0.01 either way.
    """

    act_order: bool = GptqOptions().act_order
    damping: float = GptqOptions().damping
    clip_by: str = GptqOptions().clip_by
    true_sequential: bool = GptqOptions().true_sequential
    mismatch: float = GptqOptions().mismatch
    refit: bool = GptqOptions().refit
    held_out: float = GptqOptions().held_out

    def __post_init__(self) -> None:
        AwqOptions.__post_init__(self)  # super() does not work in a class with slots
        assert self.rounding

    @property
    def rounding(self) -> GptqOptions:
        """GPTQ's share of the options; raises `RecipeError` where one is impossible."""
        return GptqOptions(
            act_order=self.act_order,
            damping=self.damping,
            clip=self.clip,
            clip_by=self.clip_by,
            true_sequential=self.true_sequential,
            mismatch=self.mismatch,
            refit=self.refit,
            held_out=self.held_out,
        )


def quantize_block(task: BlockTask, options: AwqGptqOptions) -> BlockResult:
    """Scales the groups of the block in place in `task`, then rounds them column by column.

    Raises `CalibrationError` where a group's statistics are diagonal or not finite.
    """
    choices = prepare(task, options)
    return join_results(round_group(task, group, options, choices) for group in task.groups)


def prepare(task: BlockTask, options: AwqGptqOptions) -> dict[str, ScaleChoice]:
    """Scales the groups of the block in place in `task`; gives what was chosen, by group."""
    for group in task.groups:
        check_moment(task, group)
    return scale_groups(task, options)


def round_group(
    task: BlockTask, group: InputGroup, options: AwqGptqOptions, choices: dict[str, ScaleChoice]
) -> BlockResult:
    """The linears of one input group, scaled already, rounded column by column."""
    check_moment(task, group)

    def grid(name: str, weight_NK: Tensor, measure: Tensor) -> QuantizedTensor:
        return round_nearest(weight_NK, task.quant[name], measure, task.scale_dtype, options)

    notes = scale_notes(choices.get(group.name))
    return round_by_columns(task, group, options.rounding, grid, method="awq_gptq", notes=notes)


METHOD = Method(
    name="awq_gptq",
    summary="AWQ's scales and clipping, then GPTQ's rounding on that grid",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=AwqGptqOptions,
    needs=lambda options: options.rounding.needs,
    prepare=prepare,
    round_group=round_group,
)
