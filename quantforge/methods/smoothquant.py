"""SmoothQuant: outliers of the inputs are moved into the weights, then both are rounded to nearest.

Xiao et al. (arXiv 2211.10438, section 4): inputs are divided by ``s_j = max|x_j|^a /
max|w_j|^(1-a)`` for each channel j, and the weights that read them are multiplied by it. The norm
before them absorbs the division; so do v_proj and up_proj, for o_proj and down_proj, which the
paper leaves alone. The exponent a (`alpha`) says how much moves: with 0 the weights' channels
become even, with 1 the inputs'.

Legend: N out features, K in features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import RecipeError
from quantforge.methods._shared import shared_scales
from quantforge.methods.awq import absorb_scale, scaled_moment, storable_scale
from quantforge.methods.base import BlockResult, BlockTask, LayerReport, Method, relative_errors
from quantforge.models.arch.base import InputGroup
from quantforge.models.config import ModelConfig
from quantforge.qtensor import quantize

SMALLEST = 1e-5
"""The least magnitude that a channel counts with, so that scales stay finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmoothQuantOptions:
    """`alpha` from 0 to 1 is the share of the outliers that moves into the weights."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise RecipeError(f"alpha {self.alpha} is not between 0 and 1")


def quantize_block(task: BlockTask, options: SmoothQuantOptions) -> BlockResult:
    """Smooths the groups of the block in place in `task`, then rounds every linear to nearest."""
    scales = smooth_groups(task, options)
    shared = shared_scales(task)
    qtensors, reports = {}, []
    for group in task.groups:
        scale_K = scales.get(group.name)
        moment = task.statistics[group.name].second_moment
        if scale_K is not None:
            moment = scaled_moment(moment, scale_K)
        for name in (m for m in group.members if m in task.quant):
            weight, quant = task.weights[name], task.quant[name]
            qtensor = quantize(weight, quant, shared.get(name), scale_dtype=task.scale_dtype)
            restored = qtensor.dequantize(weight.dtype)
            weight_error, output_error = relative_errors(weight, restored, moment)
            qtensors[name] = qtensor
            reports.append(
                LayerReport(
                    name=name,
                    scheme=str(quant),
                    method="smoothquant",
                    weight_error=weight_error,
                    output_error=output_error,
                    notes={} if scale_K is None else {"alpha": options.alpha},
                )
            )
    return BlockResult(qtensors=qtensors, reports=tuple(reports))


def smooth_groups(task: BlockTask, options: SmoothQuantOptions) -> dict[str, Tensor]:
    """Scales [K] by input group, moved into weights and norms, in place in `task`.

    A group without an absorber, or with a linear that stays dense, is left out. Groups are taken
    from the last to the first, so that an absorber's own weights have changed before the scale of
    its inputs is chosen.
    """
    scales = {}
    for group in reversed(task.groups):
        if group.absorber is not None and all(m in task.quant for m in group.members):
            scale_K = storable_scale(task, group, smoothing_scale(task, group, options.alpha))
            absorb_scale(task, group, scale_K)
            scales[group.name] = scale_K
    return scales


def smoothing_scale(task: BlockTask, group: InputGroup, alpha: float) -> Tensor:
    """``max|x_j|^alpha / max|w_j|^(1 - alpha)`` [K]; one a value channel where v_proj absorbs it.

    Channels that the text never excites, or that no weight reads, keep scale 1.
    """
    x_max = task.statistics[group.name].absmax
    w_max = torch.stack([task.weights[m].abs().amax(0) for m in group.members]).amax(0)
    if group.absorber_is_value:
        x_max, w_max = (largest_of_heads(values, task.config) for values in (x_max, w_max))
    scale = x_max.clamp(min=SMALLEST).pow(alpha) / w_max.clamp(min=SMALLEST).pow(1 - alpha)
    return torch.where((x_max == 0) | (w_max == 0), 1.0, scale)


def largest_of_heads(values_K: Tensor, config: ModelConfig) -> Tensor:
    """The largest over the query heads that share a value head, [K]: one scale a value channel."""
    repeat = config.num_heads // config.num_kv_heads
    heads = values_K.reshape(config.num_kv_heads, repeat, config.head_dim)
    return heads.amax(1, keepdim=True).expand_as(heads).reshape(-1)


METHOD = Method(
    name="smoothquant",
    summary="moves outliers of the inputs into the weights, then rounds to nearest",
    needs_statistics=True,
    quantize_block=quantize_block,
    options_type=SmoothQuantOptions,
    code_types=("int", "float"),
)
