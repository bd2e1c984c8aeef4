"""The Triton kernel of `rope`: queries and keys of a token in one program's reach.

Each product is rounded to the dtype of the activations before the two are added, as in the
reference, so the outcome is the same bit for bit.

Legend: T tokens, H query heads, J key heads, A head dim, F = A/2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_H = 8


@triton.jit
def rotated(
    x_ptr,
    out_ptr,
    first,
    num_heads,
    token,
    token_stride,
    head_stride,
    cos1,
    sin1,
    cos2,
    sin2,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Rotates the heads from `first` on of one token, `BLOCK_H` at most."""
    half: tl.constexpr = HEAD_DIM // 2
    heads = first + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_F)
    inside = (heads < num_heads)[:, None] & (lanes < half)[None, :]
    source = x_ptr + token * token_stride + heads[:, None] * head_stride + lanes[None, :]
    x1 = tl.load(source, mask=inside, other=0.0)
    x2 = tl.load(source + half, mask=inside, other=0.0)
    dtype = x1.dtype
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    a1 = (x1 * cos1[None, :]).to(dtype).to(tl.float32)
    b1 = (-x2 * sin1[None, :]).to(dtype).to(tl.float32)
    a2 = (x2 * cos2[None, :]).to(dtype).to(tl.float32)
    b2 = (x1 * sin2[None, :]).to(dtype).to(tl.float32)
    target = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM + lanes[None, :]
    tl.store(target, (a1 + b1).to(dtype), mask=inside)
    tl.store(target + half, (a2 + b2).to(dtype), mask=inside)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    num_heads,
    num_kv_heads,
    query_blocks,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    table_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Program (token, block of heads): the first `query_blocks` blocks are of q, the rest of k."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, BLOCK_F)
    table = token * table_stride + lanes
    cos1 = tl.load(cos_ptr + table, mask=lanes < half, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + table, mask=lanes < half, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + table + half, mask=lanes < half, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + table + half, mask=lanes < half, other=0.0).to(tl.float32)
    if block < query_blocks:
        rotated(
            q_ptr,
            q_out_ptr,
            block * BLOCK_H,
            num_heads,
            token,
            q_token_stride,
            q_head_stride,
            cos1,
            sin1,
            cos2,
            sin2,
            HEAD_DIM,
            BLOCK_H,
            BLOCK_F,
        )
    else:
        rotated(
            k_ptr,
            k_out_ptr,
            (block - query_blocks) * BLOCK_H,
            num_kv_heads,
            token,
            k_token_stride,
            k_head_stride,
            cos1,
            sin1,
            cos2,
            sin2,
            HEAD_DIM,
            BLOCK_H,
            BLOCK_F,
        )


def run(q_THA: Tensor, k_TJA: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference of `rope`; heads must be dense, tokens and heads may be strided."""
    q_THA, k_TJA = (t if t.stride(-1) == 1 else t.contiguous() for t in (q_THA, k_TJA))
    cos_TA, sin_TA = cos_TA.contiguous(), sin_TA.contiguous()
    tokens, num_heads, head_dim = q_THA.shape
    num_kv_heads = k_TJA.shape[1]
    q_out = torch.empty(q_THA.shape, dtype=q_THA.dtype, device=q_THA.device)
    k_out = torch.empty(k_TJA.shape, dtype=k_TJA.dtype, device=k_TJA.device)
    query_blocks = triton.cdiv(num_heads, BLOCK_H)
    if tokens:
        rope_kernel[(tokens, query_blocks + triton.cdiv(num_kv_heads, BLOCK_H))](
            q_THA,
            k_TJA,
            cos_TA,
            sin_TA,
            q_out,
            k_out,
            num_heads,
            num_kv_heads,
            query_blocks,
            q_THA.stride(0),
            q_THA.stride(1),
            k_TJA.stride(0),
            k_TJA.stride(1),
            cos_TA.stride(0),
            HEAD_DIM=head_dim,
            BLOCK_H=BLOCK_H,
            BLOCK_F=triton.next_power_of_2(head_dim // 2),
            num_warps=2,
            enable_fp_fusion=False,
        )
    return q_out, k_out
