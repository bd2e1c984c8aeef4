"""``silu(gate) * up``, the gated activation of Llama-like MLPs."""

import torch.nn.functional as F
from torch import Tensor

from quantforge_kernels.op import Candidate, Op


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in the inputs' dtype; the inputs may be strided views."""
    return F.silu(gate) * up


OP = Op(name="silu_mul", reference=Candidate(name="reference", run=reference))
