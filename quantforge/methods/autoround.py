"""AutoRound: offsets of the rounding and ends of the ranges, learned by signed gradient descent.

SignRound (Cheng et al., arXiv 2309.05516, section 3) rounds ``w / scale + zero_point + v`` with an
offset v in [-0.5, 0.5] a weight, and keeps a share alpha of the lower and beta of the upper end of
each group's range. All three follow the sign of their gradients, which pass straight through the
rounding, in steps that fall linearly from ``1 / steps`` to 0: v can just reach its bounds. Beyond 4
bits the steps of alpha and beta are smaller by ``15 / (2^b - 1)``, so that the outermost code moves
no further at once than it does at 4 bits.

The paper's loss is the output error of a block over sampled text. Here it is that of the linear,
``tr(dW G dW.T)`` with the Gram matrix G of its inputs, whose gradient ``2 dW G`` needs no forward
pass and no samples. The rows of a weight are independent: each keeps its best iterate, of which the
first is rounding to nearest.

Legend: N out features, K in features, G groups of K, S group size.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantforge.errors import RecipeError
from quantforge.methods.awq import AwqOptions, ScaleChoice, scale_groups, scale_notes
from quantforge.methods.base import (
    BlockResult,
    BlockTask,
    LayerReport,
    Method,
    chunk_rows,
    join_results,
    relative_errors,
)
from quantforge.methods.gptq import check_moment
from quantforge.models.arch.base import InputGroup
from quantforge.precision import ieee_products, tf32_products
from quantforge.qtensor import QuantizedTensor, minmax_scale, quantize
from quantforge.schemes import TensorQuant

MAX_OFFSET = 0.5
MIN_SHARE = 0.1
"""The least share of an end of its range that a group may keep."""
FULL_RATE_STEPS = 15
"""Grid steps in a range up to which its ends move as fast as offsets: those of 4 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoroundOptions:
    """`steps` of the descent; `learn_range` also moves the ends of the ranges; `scale` starts from
    AWQ's scales of the input channels.

    Learned ranges do much of what scales do: in 30 steps (W4, group 64, blocks 1 and 14 of a 135M
    model) scales multiply held-out losses of qkv, o and gate_up by 0.98 to 1.12. They are off.
    """

    steps: int = 200
    learn_range: bool = True
    scale: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 10_000:
            raise RecipeError(f"steps {self.steps} must lie within 1 to 10000, such as 200")


@dataclass(frozen=True, kw_only=True, eq=False)
class Learned:
    """A rounded weight, and the squared output errors [N] of its rows at the start and now."""

    qtensor: QuantizedTensor
    before_N: Tensor
    after_N: Tensor


def quantize_block(task: BlockTask, options: AutoroundOptions) -> BlockResult:
    """Scales the groups of the block in place in `task` if wanted, then learns every rounding.

    Raises `CalibrationError` where a group's statistics are diagonal or not finite.
    """
    for group in task.groups:
        check_moment(task, group, needed_by="autoround")
    choices = scale_groups(task, AwqOptions(scale=options.scale, clip=False))
    return join_results(
        _round_group(task, group, options, choices.get(group.name)) for group in task.groups
    )


def _round_group(
    task: BlockTask, group: InputGroup, options: AutoroundOptions, choice: ScaleChoice | None
) -> BlockResult:
    """The linears of one input group, scaled already."""
    moment = task.statistics[group.name].second_moment
    qtensors, reports = {}, []
    for name in (m for m in group.members if m in task.quant):
        weight, quant = task.weights[name], task.quant[name]
        learned = learn_rounding(weight, quant, moment, task.scale_dtype, options)
        qtensors[name] = learned.qtensor
        restored = learned.qtensor.dequantize(weight.dtype)
        weight_error, output_error = relative_errors(weight, restored, moment)
        losses = torch.stack([learned.before_N.double().sum(), learned.after_N.double().sum()])
        before, after = losses.tolist()
        found = {"steps": options.steps, "loss_before": before, "loss_after": after}
        reports.append(
            LayerReport(
                name=name,
                scheme=str(quant),
                method="autoround",
                weight_error=weight_error,
                output_error=output_error,
                notes={**scale_notes(choice), **found},
            )
        )
    return BlockResult(qtensors=qtensors, reports=tuple(reports))


def learn_rounding(
    weight_NK: Tensor,
    quant: TensorQuant,
    moment: Tensor,
    scale_dtype: torch.dtype,
    options: AutoroundOptions,
) -> Learned:
    """The weight rounded with learned offsets under learned ranges; rows go by chunks.

    `moment` is the whole second moment [K, K]. No row ends above rounding to nearest.
    """
    parts = [
        _learn_rows(part, quant, moment, scale_dtype, options)
        for part in torch.split(weight_NK, chunk_rows(weight_NK))
    ]
    zeros = [z for part in parts if (z := part.qtensor.zero_point) is not None]
    return Learned(
        qtensor=QuantizedTensor(
            codes=torch.cat([part.qtensor.codes for part in parts]),
            scale=torch.cat([part.qtensor.scale for part in parts]),
            zero_point=torch.cat(zeros) if zeros else None,
            quant=quant,
        ),
        before_N=torch.cat([part.before_N for part in parts]),
        after_N=torch.cat([part.after_N for part in parts]),
    )


def _learn_rows(
    weight_NK: Tensor,
    quant: TensorQuant,
    moment: Tensor,
    scale_dtype: torch.dtype,
    options: AutoroundOptions,
) -> Learned:
    """`learn_rounding` of a few rows.

    The descent may multiply in TF32, so the best iterate is held against the start once more in
    float32.
    """
    start = best = quantize(weight_NK, quant, scale_dtype=scale_dtype)
    offset_NK = torch.zeros_like(weight_NK)
    low_NG = torch.ones_like(start.scale, dtype=torch.float32)
    high_NG, now = low_NG, start
    least_N = torch.full_like(weight_NK[:, 0], torch.inf)
    pace = min(1.0, FULL_RATE_STEPS / (2**quant.num_bits - 1))
    for step in range(options.steps + 1):  # the last turn only looks at what the last step gave
        delta_NK = now.dequantize(torch.float32).sub_(weight_NK)
        with tf32_products():
            slope_NK = delta_NK @ moment  # half the gradient of the loss: only its sign counts
        loss_N = delta_NK.mul_(slope_NK).sum(1)
        best = _better_rows(now, best, loss_N < least_N)
        least_N = torch.minimum(least_N, loss_N)
        if step == options.steps:
            break
        rate = (1 - step / options.steps) / options.steps
        inside_NK, low_slope, high_slope = _slopes(weight_NK, now, offset_NK, slope_NK)
        offset_NK.sub_(slope_NK.sign_().mul_(inside_NK), alpha=rate)
        offset_NK.clamp_(-MAX_OFFSET, MAX_OFFSET)
        if options.learn_range:
            low_NG = (low_NG - rate * pace * low_slope.sign()).clamp(MIN_SHARE, 1)
            high_NG = (high_NG - rate * pace * high_slope.sign()).clamp(MIN_SHARE, 1)
        now = _round(weight_NK, quant, offset_NK, low_NG, high_NG, scale_dtype)
    before_N, after_N = (_loss(weight_NK, q, moment) for q in (start, best))
    return Learned(
        qtensor=_better_rows(best, start, after_N < before_N),
        before_N=before_N,
        after_N=torch.minimum(before_N, after_N),
    )


def _round(
    weight_NK: Tensor,
    quant: TensorQuant,
    offset_NK: Tensor,
    low_NG: Tensor,
    high_NG: Tensor,
    scale_dtype: torch.dtype,
) -> QuantizedTensor:
    """Codes ``round(w / scale + zero_point + v)`` under the shares of the ranges."""
    scale, zero_point = minmax_scale(weight_NK, quant, low_NG, high_NG)
    spread_NGS = scale.to(scale_dtype).float().unsqueeze(-1)
    moved = offset_NK.reshape(*scale.shape, -1) * spread_NGS
    shifted_NK = moved.reshape(weight_NK.shape).add_(weight_NK)
    return quantize(shifted_NK, quant, scale, zero_point, scale_dtype)


def _slopes(
    weight_NK: Tensor, now: QuantizedTensor, offset_NK: Tensor, slope_NK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where codes are not clamped [N, K], and multiples of the losses' gradients by the lower and
    the upper share of the range, [N, G] both (symmetric: equal).

    With c a code, z the zero point and d its gradient, the restored weight ``s (c - z)`` changes by
    ``c - z - w / s`` with the scale s where the code is not clamped and by ``c - z`` where it is;
    with z by 0 and ``-s``. z itself is ``code_min - low / s``.
    """
    quant, grouped = now.quant, (*now.scale.shape, -1)
    scale_NG = now.scale.float()
    code_min, code_max = quant.code_range
    ratio_NGS = weight_NK.reshape(grouped) / scale_NG.unsqueeze(-1)
    place_NGS = ratio_NGS + offset_NK.reshape(grouped)
    held_NGS = now.codes.reshape(grouped).float()
    if now.zero_point is not None:
        zero_NG1 = now.zero_point.float().unsqueeze(-1)
        place_NGS += zero_NG1
        held_NGS -= zero_NG1
    place_NGS.round_()
    inside_NGS = (place_NGS >= code_min) & (place_NGS <= code_max)
    inside_NK = inside_NGS.reshape(weight_NK.shape)
    slope_NGS = slope_NK.reshape(grouped)
    by_scale = held_NGS.sub_(ratio_NGS.mul_(inside_NGS)).mul_(slope_NGS).sum(-1)
    if now.zero_point is None:
        return inside_NK, by_scale, by_scale
    by_zero = -scale_NG * (slope_NGS * ~inside_NGS).sum(-1)
    by_scale += by_zero * (code_min - now.zero_point.float()) / scale_NG  # low / s**2
    steps = code_max - code_min
    by_low, by_high = -by_zero / scale_NG - by_scale / steps, by_scale / steps
    return inside_NK, -by_low, by_high  # low is not above 0: its share moves it the other way


def _better_rows(new: QuantizedTensor, old: QuantizedTensor, better_N: Tensor) -> QuantizedTensor:
    """The rows of `new` where they are better, else those of `old`."""
    better_N1 = better_N.unsqueeze(1)
    zero_point = None
    if new.zero_point is not None and old.zero_point is not None:
        zero_point = torch.where(better_N1, new.zero_point, old.zero_point)
    return replace(
        old,
        codes=torch.where(better_N1, new.codes, old.codes),
        scale=torch.where(better_N1, new.scale, old.scale),
        zero_point=zero_point,
    )


def _loss(weight_NK: Tensor, qtensor: QuantizedTensor, moment: Tensor) -> Tensor:
    """``e G e.T`` of each row's error e, [N], in IEEE float32."""
    delta_NK = qtensor.dequantize(torch.float32).sub_(weight_NK)
    with ieee_products():
        return (delta_NK @ moment).mul_(delta_NK).sum(1)


METHOD = Method(
    name="autoround",
    summary="rounding offsets and ranges learned by signed gradient descent",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=AutoroundOptions,
)
