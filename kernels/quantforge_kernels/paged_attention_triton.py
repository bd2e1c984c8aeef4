"""The Triton kernels of `paged_attention`: split decode, its reduction, and mixed prefill.

All are flash attention (Dao, arXiv 2307.08691) with keys and values gathered through the block
table, and the query heads of a group packed into the rows of one product, so that a key is read
once a group. Scores and sums are in float32; probabilities are rounded to the cache's dtype before
the second product.

- Decode: a context is cut into `splits` parts (flash decoding) where sequences and heads alone do
  not fill the device. Each part leaves its output, normalised by its own sum, and the log of that
  sum; the reduction weighs them. The order of all sums is fixed: runs are bit-equal.
- Mixed: a program takes `BLOCK_Q` queries of one sequence, found by bisection in the query starts,
  so the host needs no lengths. Longest contexts of a sequence start first.

Legend: T query tokens, S sequences, B pages a sequence, H query heads, J key/value heads, G = H/J
heads a group, A head dim, M rows (queries x heads of a group), N keys of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
DECODE_TILE = 64
PROGRAMS_PER_SM = 4
MIN_TILES_A_SPLIT = 2


@triton.jit
def step(
    q_MA,
    k_ptr,
    v_ptr,
    table_ptr,
    tile,
    end,
    head_offset,
    page_stride,
    token_stride,
    scale,
    first_M,
    last_M,
    top_M,
    sum_M,
    acc_MA,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of keys: row m sees the positions ``first_M[m] .. last_M[m]``.

    `scale` holds the factor log2(e). Every row that matters has seen a key after its first tile.
    """
    position_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lane_A = tl.arange(0, BLOCK_A)
    filled_N = position_N < end
    page_N = tl.load(table_ptr + position_N // PAGE_SIZE, mask=filled_N, other=0).to(tl.int64)
    start_N = page_N * page_stride + (position_N % PAGE_SIZE) * token_stride + head_offset
    inside = filled_N[:, None] & (lane_A < HEAD_DIM)[None, :]
    k_NA = tl.load(k_ptr + start_N[:, None] + lane_A[None, :], mask=inside, other=0.0)
    v_NA = tl.load(v_ptr + start_N[:, None] + lane_A[None, :], mask=inside, other=0.0)
    score_MN = tl.dot(q_MA, tl.trans(k_NA), input_precision=PRECISION) * scale
    if MASKED:
        seen = (position_N[None, :] >= first_M[:, None]) & (position_N[None, :] <= last_M[:, None])
        score_MN = tl.where(seen, score_MN, -float("inf"))
    new_top_M = tl.maximum(top_M, tl.max(score_MN, axis=1))
    shift_M = new_top_M
    if MASKED:  # a row that has seen nothing yet keeps -inf, and must not become NaN
        shift_M = tl.where(new_top_M == -float("inf"), 0.0, new_top_M)
    p_MN = tl.exp2(score_MN - shift_M[:, None])
    fade_M = tl.exp2(top_M - shift_M)
    sum_M = sum_M * fade_M + tl.sum(p_MN, axis=1)
    acc_MA = acc_MA * fade_M[:, None]
    acc_MA = tl.dot(p_MN.to(v_NA.dtype), v_NA, acc_MA, input_precision=PRECISION)
    return new_top_M, sum_M, acc_MA


@triton.jit
def paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_ptr,
    out_ptr,
    log_sum_ptr,
    scale,
    splits,
    q_token_stride,
    q_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (sequence, key/value head, split). Writes [S, H, splits, A] and [S, H, splits]."""
    s = tl.program_id(0)
    j = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    row_M = tl.arange(0, BLOCK_M)
    lane_A = tl.arange(0, BLOCK_A)
    head_M = j * GROUP + row_M
    live = (row_M < GROUP)[:, None] & (lane_A < HEAD_DIM)[None, :]
    q_start = s.to(tl.int64) * q_token_stride + head_M[:, None] * q_head_stride
    q_MA = tl.load(q_ptr + q_start + lane_A[None, :], mask=live, other=0.0)

    context = tl.load(context_ptr + s)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    first_tile = first // BLOCK_N
    end_tile = tl.cdiv(context, BLOCK_N)
    share = tl.cdiv(tl.maximum(end_tile - first_tile, 0), splits)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, end_tile)

    top_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MA = tl.zeros([BLOCK_M, BLOCK_A], tl.float32)
    first_M = tl.zeros([BLOCK_M], tl.int32) + first
    last_M = tl.zeros([BLOCK_M], tl.int32) + context - 1
    row_table = table_ptr + s.to(tl.int64) * table_stride
    for tile in tl.range(begin, end, num_stages=STAGES):
        top_M, sum_M, acc_MA = step(
            q_MA,
            k_ptr,
            v_ptr,
            row_table,
            tile,
            context,
            j * head_stride,
            page_stride,
            token_stride,
            scale,
            first_M,
            last_M,
            top_M,
            sum_M,
            acc_MA,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_A,
            BLOCK_N,
            True,
            PRECISION,
        )
    safe_M = tl.where(sum_M > 0, sum_M, 1.0)
    out_MA = acc_MA / safe_M[:, None]
    log_M = tl.where(sum_M > 0, top_M + tl.log2(safe_M), -float("inf"))
    at_M = (s.to(tl.int64) * num_heads + head_M) * splits + split
    out_at = at_M[:, None] * HEAD_DIM + lane_A[None, :]
    tl.store(out_ptr + out_at, out_MA.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(log_sum_ptr + at_M, log_M, mask=row_M < GROUP)


@triton.jit
def paged_reduce_kernel(
    part_ptr,
    log_sum_ptr,
    out_ptr,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """One program a sequence and head: the parts of its context, weighed by their sums."""
    row = tl.program_id(0).to(tl.int64)
    split_P = tl.arange(0, BLOCK_S)
    lane_A = tl.arange(0, BLOCK_A)
    log_P = tl.load(
        log_sum_ptr + row * splits + split_P, mask=split_P < splits, other=-float("inf")
    )
    top = tl.max(log_P, axis=0)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight_P = tl.exp2(log_P - top)
    inside = (split_P < splits)[:, None] & (lane_A < HEAD_DIM)[None, :]
    part_at = (row * splits + split_P)[:, None] * HEAD_DIM + lane_A[None, :]
    part_PA = tl.load(part_ptr + part_at, mask=inside, other=0.0)
    total = tl.sum(weight_P, axis=0)
    out_A = tl.sum(part_PA * weight_P[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + row * HEAD_DIM + lane_A,
        out_A.to(out_ptr.dtype.element_ty),
        mask=lane_A < HEAD_DIM,
    )


@triton.jit
def paged_mixed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    query_start_ptr,
    context_ptr,
    out_ptr,
    scale,
    num_sequences,
    num_heads,
    q_token_stride,
    q_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of queries, key/value head). Sequence s owns the blocks from
    ``query_start[s] // BLOCK_Q + s`` on; those beyond its queries have nothing to do."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    j = tl.program_id(1)
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        owned = tl.load(query_start_ptr + middle) // BLOCK_Q + middle
        if owned <= block:
            low = middle + 1
        else:
            high = middle
    s = low - 1
    start = tl.load(query_start_ptr + s)
    queries = tl.load(query_start_ptr + s + 1) - start
    first_query = (block - (start // BLOCK_Q + s)) * BLOCK_Q
    if first_query < queries:
        context = tl.load(context_ptr + s)
        row_M = tl.arange(0, BLOCK_Q * BLOCK_G)
        lane_A = tl.arange(0, BLOCK_A)
        query_M = first_query + row_M // BLOCK_G
        head_M = j * GROUP + row_M % BLOCK_G
        live_M = (query_M < queries) & (row_M % BLOCK_G < GROUP)
        live = live_M[:, None] & (lane_A < HEAD_DIM)[None, :]
        token_M = (start + query_M).to(tl.int64)
        q_at = token_M[:, None] * q_token_stride + head_M[:, None] * q_head_stride
        q_MA = tl.load(q_ptr + q_at + lane_A[None, :], mask=live, other=0.0)

        last_M = context - queries + query_M
        first_M = tl.zeros([BLOCK_Q * BLOCK_G], tl.int32)
        begin = 0
        if WINDOW > 0:
            first_M = tl.maximum(last_M - WINDOW + 1, 0)
            begin = tl.maximum(context - queries + first_query - WINDOW + 1, 0) // BLOCK_N
        end = tl.minimum(context, context - queries + first_query + BLOCK_Q)
        end_tile = tl.cdiv(end, BLOCK_N)
        # tiles that every row sees whole need no mask
        plain_end = begin
        if WINDOW == 0:
            plain_end = (context - queries + first_query + 1) // BLOCK_N
        top_M = tl.full([BLOCK_Q * BLOCK_G], -float("inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_Q * BLOCK_G], tl.float32)
        acc_MA = tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_A], tl.float32)
        row_table = table_ptr + s.to(tl.int64) * table_stride
        for tile in tl.range(begin, plain_end, num_stages=STAGES):
            top_M, sum_M, acc_MA = step(
                q_MA,
                k_ptr,
                v_ptr,
                row_table,
                tile,
                context,
                j * head_stride,
                page_stride,
                token_stride,
                scale,
                first_M,
                last_M,
                top_M,
                sum_M,
                acc_MA,
                HEAD_DIM,
                PAGE_SIZE,
                BLOCK_A,
                BLOCK_N,
                False,
                PRECISION,
            )
        for tile in tl.range(plain_end, end_tile, num_stages=STAGES):
            top_M, sum_M, acc_MA = step(
                q_MA,
                k_ptr,
                v_ptr,
                row_table,
                tile,
                context,
                j * head_stride,
                page_stride,
                token_stride,
                scale,
                first_M,
                last_M,
                top_M,
                sum_M,
                acc_MA,
                HEAD_DIM,
                PAGE_SIZE,
                BLOCK_A,
                BLOCK_N,
                True,
                PRECISION,
            )
        out_MA = acc_MA / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
        out_at = (token_M * num_heads + head_M)[:, None] * HEAD_DIM + lane_A[None, :]
        tl.store(out_ptr + out_at, out_MA.to(out_ptr.dtype.element_ty), mask=live)


def run(
    q_THA: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """As the reference of `paged_attention`. Nothing is read back from the device."""
    if q_THA.stride(-1) != 1:
        q_THA = q_THA.contiguous()
    block_table_SB = block_table_SB.contiguous()
    if q_THA.shape[0] == block_table_SB.shape[0]:
        return decode(q_THA, k_cache, v_cache, block_table_SB, context_len_S, scale, sliding_window)
    return mixed(
        q_THA,
        k_cache,
        v_cache,
        block_table_SB,
        query_start_S1,
        context_len_S,
        scale,
        sliding_window,
    )


def num_splits(sequences: int, kv_heads: int, tiles: int, processors: int) -> int:
    """Parts that a context of at most `tiles` tiles is cut into: the most that still run as whole
    rounds of `PROGRAMS_PER_SM` programs a processor."""
    wanted = PROGRAMS_PER_SM * processors // (sequences * kv_heads)
    return max(1, min(wanted, tiles // MIN_TILES_A_SPLIT))


def decode(
    q_SHA: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    context_len_S: Tensor,
    scale: float,
    sliding_window: int | None,
    *,
    splits: int | None = None,
    tile: int = DECODE_TILE,
    num_warps: int = 4,
    num_stages: int | None = None,
) -> Tensor:
    """One query a sequence; `splits` None chooses by what fills the device."""
    sequences, num_heads, head_dim = q_SHA.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    if splits is None:
        longest = block_table_SB.shape[1] * page_size
        if sliding_window is not None:
            longest = min(longest, sliding_window + tile)
        splits = num_splits(
            sequences, num_kv_heads, triton.cdiv(longest, tile), _processors(q_SHA.device)
        )
    out = torch.empty(q_SHA.shape, dtype=q_SHA.dtype, device=q_SHA.device)
    parts = out
    if splits > 1:
        parts = torch.empty(
            (sequences, num_heads, splits, head_dim), dtype=torch.float32, device=q_SHA.device
        )
    logs = torch.empty((sequences, num_heads, splits), dtype=torch.float32, device=q_SHA.device)
    group = num_heads // num_kv_heads
    block_a = triton.next_power_of_2(head_dim)
    paged_decode_kernel[(sequences, num_kv_heads, splits)](
        q_SHA,
        k_cache,
        v_cache,
        block_table_SB,
        context_len_S,
        parts,
        logs,
        scale * LOG2_E,
        splits,
        q_SHA.stride(0),
        q_SHA.stride(1),
        *k_cache.stride()[:3],
        block_table_SB.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        WINDOW=sliding_window or 0,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=tile,
        BLOCK_A=block_a,
        STAGES=num_stages or _decode_stages(head_dim),
        PRECISION=_precision(q_SHA.dtype),
        num_warps=num_warps,
    )
    if splits > 1:
        paged_reduce_kernel[(sequences * num_heads,)](
            parts,
            logs,
            out,
            splits,
            HEAD_DIM=head_dim,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_A=block_a,
            num_warps=4,
        )
    return out


def mixed(
    q_THA: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    scale: float,
    sliding_window: int | None,
    *,
    rows: int | None = None,
    tile: int | None = None,
    num_stages: int | None = None,
) -> Tensor:
    """Any numbers of queries; decodes among them are right, but not split."""
    tokens, num_heads, head_dim = q_THA.shape
    sequences = block_table_SB.shape[0]
    page_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    block_g = triton.next_power_of_2(group)
    chosen = _mixed_config(head_dim, q_THA.device)
    rows, tile, stages = (g or c for g, c in zip((rows, tile, num_stages), chosen, strict=True))
    block_q = max(1, rows // block_g)
    out = torch.empty(q_THA.shape, dtype=q_THA.dtype, device=q_THA.device)
    paged_mixed_kernel[(tokens // block_q + sequences, num_kv_heads)](
        q_THA,
        k_cache,
        v_cache,
        block_table_SB,
        query_start_S1,
        context_len_S,
        out,
        scale * LOG2_E,
        sequences,
        num_heads,
        q_THA.stride(0),
        q_THA.stride(1),
        *k_cache.stride()[:3],
        block_table_SB.stride(0),
        GROUP=group,
        BLOCK_G=block_g,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        WINDOW=sliding_window or 0,
        BLOCK_Q=block_q,
        BLOCK_N=tile,
        BLOCK_A=triton.next_power_of_2(head_dim),
        STAGES=stages,
        PRECISION=_precision(q_THA.dtype),
        num_warps=8,
    )
    return out


def _mixed_config(head_dim: int, device: torch.device) -> tuple[int, int, int]:
    """(rows, keys of a tile, tiles in flight) of a mixed program, by registers and shared memory.

    On an H200 128 keys reached 352 TFLOP/s at 8,192 tokens where 64 reached 320; on sm_100 they
    spill. Devices other than sm_90 are untested.
    """
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if head_dim > 128:
        return 64, 32, 2
    if major == 9:
        return 128, 128, 2
    return (128, 64, 3) if major > 9 else (64, 64, 3)


def _decode_stages(head_dim: int) -> int:
    """Tiles in flight, as shared memory allows: 3 of 32 KiB at head_dim 128."""
    return 3 if head_dim <= 128 else 2


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
