"""Scales over whole weights, which linears that a runtime joins have to share."""

from torch import Tensor

from quantforge.methods.base import BlockTask
from quantforge.qtensor import global_scale_of


def global_scales(task: BlockTask) -> dict[str, Tensor]:
    """The global scale [1] of every linear whose scheme has one, by name within the block.

    Members of an input group with one scheme share theirs: q, k and v; gate and up.
    """
    found: dict[str, Tensor] = {}
    for group in task.groups:
        members = [m for m in group.members if m in task.quant]
        for name in members:
            quant = task.quant[name]
            peers = [task.weights[m] for m in members if task.quant[m] == quant]
            scale = global_scale_of(peers, quant)
            if scale is not None:
                found[name] = scale
    return found
