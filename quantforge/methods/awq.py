"""AWQ: input channels that matter are scaled up before rounding, and ranges are clipped.

AWQ (Lin et al., arXiv 2306.00978, sections 3.2 and 3.3) multiplies the input channels of a weight
by s and divides the activations by it, which the producing norm or linear absorbs. s comes from a
one-dimensional family, ``s = mean|x|^a`` or, with duo scaling, ``mean|x|^a / mean|w|^(1-a)``, whose
exponent is searched. The search here needs no forward pass: with the Gram matrix G of the inputs
the squared output error of a candidate is ``tr(dW G dW.T)``, where ``dW = Q(W s) / s - W``.
Clipping then shrinks the range of each group of weights where the diagonal block of G says that it
helps.

Legend: N out features, K in features, G groups of K, S group size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.calibration.capture import InputStatistics
from quantforge.errors import RecipeError
from quantforge.methods._clip import MIN_SHRINK, SHRINK_STEP, round_clipped
from quantforge.methods.base import (
    BlockResult,
    BlockTask,
    LayerReport,
    Method,
    chunk_rows,
    output_power,
    relative_errors,
)
from quantforge.models.arch.base import InputGroup
from quantforge.models.config import ModelConfig
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import TensorQuant

COARSE_RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
FINE_STEPS = (0.1, 0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class AwqOptions:
    """`scale` and `clip` switch the two halves off; `duo_scaling` is ``both``, ``yes`` or ``no``;
    `min_shrink` is the smallest share of its range that clipping may leave to a group, and
    `separate_ends` also moves the two ends of a range by themselves (grids with zero points).

    Without duo scaling the search costs half as much and the outcome is level: on a 135M model (W4,
    group 64, two settings of the clipping) KL 0.158 and 0.160 without, 0.159 and 0.155 with it.
    """

    scale: bool = True
    clip: bool = True
    duo_scaling: str = "no"
    min_shrink: float = MIN_SHRINK
    shrink_step: float = SHRINK_STEP
    separate_ends: bool = False

    def __post_init__(self) -> None:
        if self.duo_scaling not in ("both", "yes", "no"):
            raise RecipeError(f"duo_scaling {self.duo_scaling!r} is not one of both, yes, no")
        if not 0 < self.min_shrink <= 1 or not 0 < self.shrink_step < 1:
            raise RecipeError(
                f"min_shrink {self.min_shrink} and shrink_step {self.shrink_step} "
                "must lie between 0 and 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleChoice:
    """The winner of a search: exponent, family and relative output error."""

    ratio: float
    duo: bool
    error: float
    unscaled_error: float


def quantize_block(task: BlockTask, options: AwqOptions) -> BlockResult:
    """Scales the groups of the block in place in `task`, then rounds every linear."""
    choices = scale_groups(task, options)
    qtensors, reports = {}, []
    for group in task.groups:
        moment = task.statistics[group.name].second_moment
        choice = choices.get(group.name)
        for name in (m for m in group.members if m in task.quant):
            weight, quant = task.weights[name], task.quant[name]
            qtensors[name] = round_nearest(weight, quant, moment, task.scale_dtype, options)
            restored = qtensors[name].dequantize(weight.dtype)
            weight_error, output_error = relative_errors(weight, restored, moment)
            reports.append(
                LayerReport(
                    name=name,
                    scheme=str(quant),
                    method="awq",
                    weight_error=weight_error,
                    output_error=output_error,
                    notes=scale_notes(choice),
                )
            )
    return BlockResult(qtensors=qtensors, reports=tuple(reports))


def scale_groups(task: BlockTask, options: AwqOptions) -> dict[str, ScaleChoice]:
    """Searches the scale of each group and moves it into weights, norms and moments, in place in
    `task`; gives what was chosen, by group."""
    found = {group.name: group_scale(task, group, options) for group in task.groups}
    choices = {}
    for group in task.groups:
        scale = found[group.name]
        if scale is not None:
            choices[group.name] = scale[1]
            move_scale(task, group, scale[0])
    return choices


def group_scale(
    task: BlockTask, group: InputGroup, options: AwqOptions
) -> tuple[Tensor, ScaleChoice] | None:
    """`search_scale` where a scale is wanted and possible, else None."""
    whole = all(member in task.quant for member in group.members)
    if not options.scale or group.absorber is None or not whole:
        return None
    return search_scale(task, group, options)


def move_scale(task: BlockTask, group: InputGroup, scale_K: Tensor) -> None:
    """Moves `scale_K` [K] from the group's inputs into its members, in place in `task`."""
    scale_K = storable_scale(task, group, scale_K)
    absorb_scale(task, group, scale_K)
    name, seen = group.name, task.statistics[group.name]
    statistics = InputStatistics(
        second_moment=scaled_moment(seen.second_moment, scale_K),
        mean_abs=seen.mean_abs / scale_K,
        absmax=seen.absmax / scale_K,
        num_tokens=seen.num_tokens,
    )
    task.statistics = {**task.statistics, name: statistics}
    if name in task.cross:
        task.cross = {**task.cross, name: scaled_moment(task.cross[name], scale_K)}
    if name in task.held_out:
        task.held_out = {**task.held_out, name: task.held_out[name].scaled(scale_K)}


def round_nearest(
    weight_NK: Tensor,
    quant: TensorQuant,
    second_moment: Tensor,
    scale_dtype: torch.dtype,
    options: AwqOptions,
) -> QuantizedTensor:
    """The weight rounded to nearest, under clipped ranges where the options say so."""
    if not options.clip:
        return quantize(weight_NK, quant, scale_dtype=scale_dtype)
    return round_clipped(
        weight_NK,
        quant,
        second_moment,
        scale_dtype,
        min_shrink=options.min_shrink,
        shrink_step=options.shrink_step,
        separate_ends=options.separate_ends,
    )


def scale_notes(choice: ScaleChoice | None) -> dict[str, float | bool]:
    """What a report says of a group's scale; nothing where it was left alone."""
    return {} if choice is None else {"ratio": choice.ratio, "duo_scaling": choice.duo}


def search_scale(
    task: BlockTask, group: InputGroup, options: AwqOptions
) -> tuple[Tensor, ScaleChoice] | None:
    """The best scale [K] of the group's inputs, or None where leaving them alone is best.

    A coarse grid of exponents for each family, then two refinements around the best.
    """
    statistics = task.statistics[group.name]
    weights = [task.weights[m] for m in group.members]
    quants = [task.quant[m] for m in group.members]
    x_mean = statistics.mean_abs
    w_sum = sum(_relative_sum(w, q) for w, q in zip(weights, quants, strict=True))
    w_mean = torch.as_tensor(w_sum) / sum(len(w) for w in weights)
    if group.absorber_is_value:
        x_mean, w_mean = (tie_query_heads(v, task.config) for v in (x_mean, w_mean))

    stacks = _stacked(weights, quants)

    def errors_of(scales: Sequence[Tensor | None]) -> list[float]:
        """The group's error under each scale; one wait for the device."""
        errors = [
            sum(scaled_power(w, q, scale, statistics, task.scale_dtype) for w, q in stacks)
            for scale in scales
        ]
        found: list[float] = torch.stack([torch.as_tensor(e) for e in errors]).tolist()
        return found

    best = (errors_of([None])[0], 0.0, False)
    unscaled = best[0]
    families = {"both": (False, True), "yes": (True,), "no": (False,)}[options.duo_scaling]

    def consider(ratios: Sequence[float], duo: bool) -> None:
        nonlocal best
        scales = [scale_family(x_mean, w_mean, ratio, duo) for ratio in ratios]
        for ratio, error in zip(ratios, errors_of(scales), strict=True):
            if error < best[0]:
                best = (error, ratio, duo)

    for duo in families:
        consider(COARSE_RATIOS if duo else COARSE_RATIOS[1:], duo)
    if best[0] >= unscaled:
        return None
    for step in FINE_STEPS:
        around = (best[1] - step, best[1] + step)
        consider([r for r in around if 0 <= r <= 1], best[2])
    error, ratio, duo = best
    choice = ScaleChoice(ratio=ratio, duo=duo, error=error, unscaled_error=unscaled)
    return scale_family(x_mean, w_mean, ratio, duo), choice


def _stacked(
    weights: Sequence[Tensor], quants: Sequence[TensorQuant]
) -> list[tuple[Tensor, TensorQuant]]:
    """Weights with equal schemes as one, where each row has scales of its own."""
    same = len(set(quants)) == 1 and quants[0].granularity in ("channel", "group")
    if not same or len(weights) == 1:
        return list(zip(weights, quants, strict=True))
    return [(torch.cat(list(weights)), quants[0])]


def scale_family(x_mean_K: Tensor, w_mean_K: Tensor, ratio: float, duo: bool) -> Tensor:
    """``x^a`` or ``x^a / w^(1-a)``, centred so that the largest times the smallest is 1."""
    scale = x_mean_K.clamp(min=1e-4).pow(ratio)
    if duo:
        scale = scale / w_mean_K.clamp(min=1e-4).pow(1 - ratio)
    scale = scale.clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


def _relative_sum(weight_NK: Tensor, quant: TensorQuant) -> Tensor:
    """Sum over rows of |w| over the largest of its group, [K]: how much of the grid is used."""
    groups = quant.num_groups(weight_NK.shape[1])
    total = torch.zeros(weight_NK.shape[1], device=weight_NK.device)
    for part in torch.split(weight_NK, chunk_rows(weight_NK)):
        grouped = part.abs().reshape(len(part), groups, -1)
        total += grouped.div_(grouped.amax(-1, keepdim=True).clamp(min=1e-12)).sum(0).reshape(-1)
    return total


def scaled_power(
    weight_NK: Tensor,
    quant: TensorQuant,
    scale_K: Tensor | None,
    statistics: InputStatistics,
    scale_dtype: torch.dtype,
) -> Tensor:
    """Mean squared output error of rounding ``W * s`` and dividing by s again, on the device.

    Rows go by chunks where their scales are their own, which keeps the temporary tensors small.
    """
    by_rows = quant.granularity in ("channel", "group")
    total = torch.zeros((), device=weight_NK.device)
    for part in torch.split(weight_NK, chunk_rows(weight_NK) if by_rows else len(weight_NK)):
        scaled = part if scale_K is None else part * scale_K
        rounded = quantize(scaled, quant, scale_dtype=scale_dtype).dequantize(torch.float32)
        delta = rounded.sub_(scaled)
        if scale_K is not None:
            delta.div_(scale_K)
        total += output_power(delta, statistics.second_moment)
    return total


def tie_query_heads(values_K: Tensor, config: ModelConfig) -> Tensor:
    """Means over the query heads that share a value head, [K]: one scale a value channel."""
    repeat = config.num_heads // config.num_kv_heads
    heads = values_K.reshape(config.num_kv_heads, repeat, config.head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)


def storable_scale(task: BlockTask, group: InputGroup, scale_K: Tensor) -> Tensor:
    """`scale_K` adjusted so that a norm which absorbs it is exact in the dtype it is stored in.

    A norm weight divided by s is rounded to bf16 on disk; s is chosen again as the quotient, so
    that the product of the two layers stays what it was. Channels that the norm silences keep
    scale 1.
    """
    norm = task.norms.get(group.absorber or "")
    if norm is None:
        return scale_K
    stored = (norm / scale_K).to(task.scale_dtype).float()
    return torch.where(stored == 0, torch.ones_like(norm), norm / stored)


def absorb_scale(task: BlockTask, group: InputGroup, scale_K: Tensor) -> None:
    """Multiplies the members' inputs by `scale_K` and divides the absorber's outputs by it."""
    for member in group.members:
        task.weights[member] = task.weights[member] * scale_K
    absorber = group.absorber
    assert absorber is not None
    if absorber in task.norms:
        task.norms[absorber] = task.norms[absorber] / scale_K
        return
    outputs = scale_K
    if group.absorber_is_value:
        config = task.config
        heads = scale_K.reshape(config.num_kv_heads, -1, config.head_dim)
        outputs = heads[:, 0].reshape(-1)
    task.weights[absorber] = task.weights[absorber] / outputs.unsqueeze(1)
    if absorber in task.biases:
        task.biases[absorber] = task.biases[absorber] / outputs


def scaled_moment(second_moment: Tensor, scale_K: Tensor) -> Tensor:
    """Second moment of ``x / s``."""
    if second_moment.dim() == 1:
        return second_moment / scale_K.square()
    return (second_moment / scale_K.unsqueeze(0)).div_(scale_K.unsqueeze(1))


METHOD = Method(
    name="awq",
    summary="activation-aware scales and clipping, searched through Gram matrices",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=AwqOptions,
)
