"""The Triton kernel of `kv_store`: a token's keys and values go to its slot, rounded once.

Legend: T tokens, J key/value heads, A head dim.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kv_store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    size,
    head_dim,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    slot_stride,
    BLOCK: tl.constexpr,
):
    """One program a token; a slot's J * A values are dense, a negative slot is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            head = at // head_dim
            lane = at % head_dim
            k = tl.load(
                k_ptr + token * k_token_stride + head * k_head_stride + lane, mask=inside, other=0.0
            )
            v = tl.load(
                v_ptr + token * v_token_stride + head * v_head_stride + lane, mask=inside, other=0.0
            )
            target = slot * slot_stride + at
            tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
            tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=inside)


def run(
    k_TJA: Tensor, v_TJA: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """As the reference of `kv_store`; pages of the caches are dense."""
    k_TJA, v_TJA = (t if t.stride(-1) == 1 else t.contiguous() for t in (k_TJA, v_TJA))
    tokens, num_kv_heads, head_dim = k_TJA.shape
    size = num_kv_heads * head_dim
    if tokens:
        kv_store_kernel[(tokens,)](
            k_TJA,
            v_TJA,
            k_cache,
            v_cache,
            slot_mapping_T,
            size,
            head_dim,
            k_TJA.stride(0),
            k_TJA.stride(1),
            v_TJA.stride(0),
            v_TJA.stride(1),
            k_cache.stride(1),
            BLOCK=min(1024, triton.next_power_of_2(size)),
            num_warps=4,
        )
