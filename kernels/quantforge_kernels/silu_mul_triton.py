"""The Triton kernel of `silu_mul`: one read of gate and up, one write.

The activation is computed in float32 and rounded to the inputs' dtype before `up` multiplies it,
as in the reference. Legend: T tokens, I features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, out_ptr, size, gate_stride, up_stride, BLOCK: tl.constexpr):
    """Rows of gate and up are dense; program (token, block of features)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_ptr + token * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(up_ptr + token * up_stride + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype)
    out = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + token * size + columns, out, mask=inside)


def run(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """As the reference of `silu_mul`, for [..., I] whose rows may be strided."""
    shape = gate_TI.shape
    gate, up = (t.reshape(-1, shape[-1]) for t in (gate_TI, up_TI))
    gate, up = (t if t.stride(-1) == 1 else t.contiguous() for t in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        silu_mul_kernel[(gate.shape[0], triton.cdiv(shape[-1], BLOCK))](
            gate, up, out, shape[-1], gate.stride(0), up.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return out.reshape(shape)
