"""Causal grouped-query attention over a paged cache of keys and values.

A cache is [pages, page_size, J, A], as `kv_store` writes it. Sequence s owns the pages
``block_table_SB[s]`` in order; its first ``context_len_S[s]`` positions are filled, and its queries
``q_THA[query_start_S1[s] : query_start_S1[s + 1]]`` stand at the last of these positions (they are
stored already). The query at position p sees the positions ``p - sliding_window + 1 .. p``, or all
up to p without a window. One call serves prefill, chunks of a prefill, decode and the verification
of several tokens; every sequence has at least one query, so ``T == S`` means that all are decoding.
Entries of the block table beyond a context must be valid page numbers. A kernel may read what lies
beyond a context's end and mask it, so that must be finite.

Example: page_size 4, block table row [7, 2], context_len 6, two queries: they stand at positions 4
and 5, which lie in slots 0 and 1 of page 2.

A cache of 8 bits (``float8_e4m3fn``, ``float8_e5m2``, ``int8``) holds codes; `k_scale` and
`v_scale`, float32, multiply them: [1] for the whole cache, [pages, page_size, J] for each token and
head, None where they are 1. (One scale of a cache can be folded: that of the keys into `scale`,
that of the values into the output.)

Problem keys: ``device``, ``dtype`` of q, ``kv_dtype``, ``kv_scales`` ("none", "layer" or "token",
as `kv_store` says), ``num_heads``, ``num_kv_heads``, ``head_dim``, ``page_size``,
``sliding_window`` (None for full attention).

Legend: T query tokens, S sequences, B pages a sequence, H query heads, J key/value heads, G = H/J
heads a group, A head dim, C positions of a context.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge_kernels._triton import HALF, refuse_triton
from quantforge_kernels.op import Candidate, Op

MAX_GATHERED_ELEMENTS = 1 << 25
"""Keys (or values) that the reference copies out of the pages at a time: 128 MiB in float32."""


class _Cache(NamedTuple):
    """Pages of keys or values, and what multiplies their codes."""

    pages: Tensor
    scale: Tensor | None


def reference(
    q_THA: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    scale: float,
    sliding_window: int | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention output [T, H, A] in q's dtype; ``softmax(scale * q @ k.T) @ v`` in float32.

    A GPU's all-decode batch is computed without waiting for it; a batch with longer queries reads
    its lengths back. Rows of a context of length 0 (padding) are undefined.
    """
    keys, values = _Cache(k_cache, k_scale), _Cache(v_cache, v_scale)
    num_sequences = block_table_SB.shape[0]
    if q_THA.shape[0] == num_sequences and q_THA.device.type != "cpu":
        return _decode(q_THA, keys, values, block_table_SB, context_len_S, scale, sliding_window)
    starts, contexts = query_start_S1.tolist(), context_len_S.tolist()
    singles = _leading_singles(starts)
    parts = []
    if singles:
        decodes = slice(singles)
        parts.append(
            _decode(
                q_THA[decodes],
                keys,
                values,
                block_table_SB[decodes],
                context_len_S[decodes],
                scale,
                sliding_window,
                contexts[decodes],
            )
        )
    for s in range(singles, num_sequences):
        queries = q_THA[starts[s] : starts[s + 1]]
        parts.append(
            _extend(queries, keys, values, block_table_SB[s], contexts[s], scale, sliding_window)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _leading_singles(starts: list[int]) -> int:
    """How many sequences, from the first on, have exactly one query."""
    count = 0
    while count + 1 < len(starts) and starts[count + 1] == count + 1:
        count += 1
    return count


def _decode(
    q_SHA: Tensor,
    keys: _Cache,
    values: _Cache,
    block_table_SB: Tensor,
    context_len_S: Tensor,
    scale: float,
    sliding_window: int | None,
    contexts: list[int] | None = None,
) -> Tensor:
    """One query a sequence, batched: the heads of a group are the rows of one small product.

    `contexts`, where the host knows them, bound what is read; equal ones need no mask.
    """
    page_size, num_kv_heads, head_dim = keys.pages.shape[1:]
    end = block_table_SB.shape[1] * page_size if contexts is None else max(*contexts, 1)
    block_table_SB = block_table_SB[:, : -(-end // page_size)]
    chunk = max(1, MAX_GATHERED_ELEMENTS // (end * num_kv_heads * head_dim))
    grouped = q_SHA.float().reshape(q_SHA.shape[0], num_kv_heads, -1, head_dim)
    visible = None
    everything = sliding_window is None or sliding_window >= end
    if contexts is None or min(contexts) < end or not everything:
        visible = _visible(context_len_S, end, sliding_window)
    parts = [
        F.scaled_dot_product_attention(
            grouped[s],
            _gather(keys, block_table_SB[s])[:, :, :end],
            _gather(values, block_table_SB[s])[:, :, :end],
            attn_mask=None if visible is None else visible[s],
            scale=scale,
        )
        for s in (slice(at, at + chunk) for at in range(0, q_SHA.shape[0], chunk))
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(q_SHA.shape).to(q_SHA.dtype)


def _visible(context_len_S: Tensor, end: int, sliding_window: int | None) -> Tensor:
    """Mask [S, 1, 1, C] of the positions before `end` that the last of a context sees."""
    positions_C = torch.arange(end, device=context_len_S.device)
    context_S1 = context_len_S.unsqueeze(-1)
    seen = positions_C < context_S1
    if sliding_window is not None:
        seen &= positions_C >= context_S1 - sliding_window
    return seen[:, None, None]


def _extend(
    q_THA: Tensor,
    keys: _Cache,
    values: _Cache,
    block_table_B: Tensor,
    context_len: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """The queries of one sequence, whose keys are copied out of the pages that they can see."""
    tokens, num_heads, _ = q_THA.shape
    page_size, num_kv_heads = keys.pages.shape[1:3]
    first_query = context_len - tokens
    first_seen = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)
    first_page = first_seen // page_size
    pages = block_table_B[None, first_page : -(-context_len // page_size)]
    begin = first_page * page_size
    k, v = (_gather(c, pages)[:, :, : context_len - begin] for c in (keys, values))
    causal = tokens == context_len and (sliding_window is None or sliding_window >= context_len)
    mask = None
    if not causal:
        query_T1 = torch.arange(first_query, context_len, device=q_THA.device).unsqueeze(-1)
        key_C = torch.arange(begin, context_len, device=q_THA.device)
        mask = key_C <= query_T1
        if sliding_window is not None:
            mask &= key_C > query_T1 - sliding_window
    out = F.scaled_dot_product_attention(
        q_THA.float().transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.squeeze(0).transpose(0, 1).to(q_THA.dtype)


def _gather(cache: _Cache, block_table_SB: Tensor) -> Tensor:
    """Keys or values [S, J, C, A] in float32 of whole pages, C = B * page_size."""
    index = block_table_SB.reshape(-1)
    stored = cache.pages.dtype
    raw = cache.pages.view(torch.uint8) if stored.itemsize == 1 else cache.pages
    pages = raw.index_select(0, index).view(stored)
    shape = (block_table_SB.shape[0], -1, *cache.pages.shape[2:])
    values = pages.reshape(shape).transpose(1, 2).float()
    if cache.scale is None:
        return values
    if cache.scale.dim() == 1:
        return values * cache.scale
    scales = cache.scale.index_select(0, index).reshape(shape[:-1])
    return values * scales.transpose(1, 2).unsqueeze(-1)


def _supports_triton(
    *,
    device: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    **problem: Any,
) -> str | None:
    if kv_dtype != dtype:
        return f"reads keys and values in the queries' dtype {dtype}, not in {kv_dtype}"
    if not 16 <= head_dim <= 256:
        return f"head_dim {head_dim} is not within 16 to 256"
    if num_heads // num_kv_heads > 128:
        return f"{num_heads // num_kv_heads} query heads a key/value head; it takes at most 128"
    return refuse_triton(device, dtype, HALF)


def _run_triton(*args: Any) -> Tensor:
    from quantforge_kernels import paged_attention_triton

    return paged_attention_triton.run(*args)


OP = Op(
    name="paged_attention",
    reference=Candidate(name="reference", run=reference),
    candidates=(Candidate(name="triton", run=_run_triton, supports=_supports_triton),),
)
