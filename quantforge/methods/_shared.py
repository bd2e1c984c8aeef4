"""One scale for projections that share an input, where a weight has one scale a tensor.

The runtime merges q/k/v and gate/up along N. With one scale in common they stay one weight with one
scale, which is what a kernel with per-tensor scales needs.
"""

import torch
from torch import Tensor

from quantforge.methods.base import BlockTask
from quantforge.qtensor import minmax_scale


def shared_scales(task: BlockTask) -> dict[str, Tensor]:
    """The scale [1, 1] of each linear under tensor granularity: the largest of its input group."""
    scales: dict[str, Tensor] = {}
    for group in task.groups:
        alike: dict[object, list[str]] = {}
        for name in group.members:
            quant = task.quant.get(name)
            if quant is not None and quant.granularity == "tensor":
                alike.setdefault(quant, []).append(name)
        for names in alike.values():
            largest = torch.stack([task.weights[n].abs().amax() for n in names])
            scale, _ = minmax_scale(largest.unsqueeze(0), task.quant[names[0]])
            scales |= dict.fromkeys(names, scale)
    return scales
