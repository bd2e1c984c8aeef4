"""Triton kernels of `w4a16`: int4 weights stay packed in memory, and turn to 16 bits in registers.

Legend: M tokens, N out features, K in features. The layout is that of `w4a16_layout`.

Products are transposed, ``y.T = w @ x.T``: the weight is the left operand of the matrix unit, which
Hopper's reads from registers, so that a dequantized weight never passes through shared memory. The
order of words makes a thread's 16-byte loads exactly its part of that operand.

**To 16 bits.** ``(word >> 4i) & 0x000f000f | 0x43004300`` are two bfloat16 ``128 + u``, neighbours
along K (0x6400: float16, ``1024 + u``); one addition subtracts ``128 + 8 + zero_point``, exactly.

**Groups.** Codes are multiplied unscaled and summed in float32 within a group; each group's sum is
multiplied by its scale once. One scale a channel is applied to the sum over K.

**Rounding.** ``(code - zero_point) * scale`` is not rounded to 16 bits, as the reference does; sums
are float32; the result is rounded once. `dequantize_kernel`, which writes the weight out for large
M, rounds as the reference does.

**Split K.** Few rows cannot fill a GPU, so K may be cut in `SPLIT` parts. Each writes its float32
sums to a workspace; the last to arrive at a tile's counter adds all of them in order of K: the
result does not depend on who was last. It leaves the counter at zero for the next launch. Counters
belong to the weight: one weight must not be multiplied on two streams at a time.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quantforge_kernels.w4a16_configs import Config, choose
from quantforge_kernels.w4a16_layout import MAX_SPLIT_BLOCKS_M, PackedWeight


@triton.jit
def _half(bits, FP16: tl.constexpr):
    """The float16 or bfloat16 with these low 16 bits."""
    if FP16:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)
    else:  # noqa: RET505 (Triton compiles what follows a return, too)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _load_words(tile_ptr, tile_stride, BLOCK_N: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Words [BLOCK_N, 16] of `BLOCK_N` rows and 128 columns, from their first tile's first word."""
    REPEAT: tl.constexpr = BLOCK_N // (16 * NUM_WARPS)
    outer = tl.arange(0, 2 * REPEAT)[:, None]  # repeat of the warps, bit r3
    inner = tl.arange(0, 128 * NUM_WARPS)[None, :]  # warp, lane, word of the thread
    tile = (outer // 2) * (NUM_WARPS // 4) + inner // 512
    words = tl.load(
        tile_ptr + tile * tile_stride + (outer % 2) * 512 + inner % 512,
        eviction_policy="evict_first",
    )
    words = tl.reshape(words, (REPEAT, 2, NUM_WARPS, 8, 4, 4))
    return tl.reshape(tl.permute(words, (0, 2, 1, 3, 5, 4)), (BLOCK_N, 16))


@triton.jit
def _pairs(words, zero, SLICE: tl.constexpr, FP16: tl.constexpr, INTERPRETED: tl.constexpr):
    """Columns 32 SLICE to 32 SLICE + 31 as 16-bit floats ``code - zero_point``, two in an int32.

    `zero` is what must be added, twice: an int32 tensor that broadcasts, or a constant.
    """
    codes = words >> (4 * SLICE)
    if INTERPRETED:
        MAGIC: tl.constexpr = 0x64006400 if FP16 else 0x43004300
        biased = (codes & 0x000F000F) | MAGIC
        low = _half(biased & 0xFFFF, FP16) + _half(zero & 0xFFFF, FP16)
        high = _half((biased >> 16) & 0xFFFF, FP16) + _half((zero >> 16) & 0xFFFF, FP16)
        low_bits = low.to(tl.uint16, bitcast=True).to(tl.int32)
        pairs = low_bits | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    elif FP16:
        pairs = tl.inline_asm_elementwise(
            """{ .reg .b32 u;
            lop3.b32 u, $1, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 $0, u, $2; }""",
            "=r,r,r",
            [codes, zero],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        pairs = tl.inline_asm_elementwise(
            """{ .reg .b32 u, one;
            mov.b32 one, 0x3f803f80;
            lop3.b32 u, $1, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, u, one, $2; }""",
            "=r,r,r",
            [codes, zero],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return pairs


@triton.jit
def _unpair(pairs, FP16: tl.constexpr):
    """[N, J] int32 of two neighbours each -> [N, 2 J] 16-bit floats."""
    low = _half(pairs & 0xFFFF, FP16)
    high = _half((pairs >> 16) & 0xFFFF, FP16)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _unpair4(a, b, c, d, FP16: tl.constexpr):
    """Four slices [N, J] int32 -> [N, 8 J] 16-bit floats, slice after slice."""
    pairs = tl.join(tl.join(a, c), tl.join(b, d))  # [N, J, i1, i0]
    low = _half(pairs & 0xFFFF, FP16)
    high = _half((pairs >> 16) & 0xFFFF, FP16)
    both = tl.permute(tl.join(low, high), (0, 2, 3, 1, 4))  # [N, i1, i0, J, half]
    return tl.reshape(both, (a.shape[0], 8 * a.shape[1]))


@triton.jit
def _meta(
    meta_ptr,
    meta_stride,
    rows,
    group,
    SYMMETRIC: tl.constexpr,
    SCALE32: tl.constexpr,
    FP16_SCALE: tl.constexpr,
    FP16: tl.constexpr,
):
    """(scale float32 [N], zero pair int32 [N, 1] or constant) of one group of `rows`."""
    if SCALE32:
        WORDS: tl.constexpr = 1 if SYMMETRIC else 2
        scale = tl.load(meta_ptr + group * WORDS * meta_stride + rows).to(tl.float32, bitcast=True)
        if not SYMMETRIC:
            pair = tl.load(meta_ptr + (group * 2 + 1) * meta_stride + rows)
    elif SYMMETRIC:
        word = tl.load(meta_ptr + (group // 2) * meta_stride + rows)
        scale = _half((word >> (16 * (group % 2))) & 0xFFFF, FP16_SCALE).to(tl.float32)
    else:
        word = tl.load(meta_ptr + group * meta_stride + rows)
        scale = _half(word & 0xFFFF, FP16_SCALE).to(tl.float32)
        high = (word >> 16) & 0xFFFF
        pair = high | (high << 16)
    if SYMMETRIC:  # noqa: SIM108 (Triton takes both arms of a ternary)
        zero = _symmetric_zero(FP16)
    else:
        zero = pair[:, None]
    return scale, zero


@triton.jit
def _symmetric_zero(FP16: tl.constexpr):
    """-(128 + 8) twice, or in float16 -(1024 + 8)."""
    ZERO: tl.constexpr = -0x1BF71BF8 if FP16 else -0x3CF73CF8
    return ZERO


@triton.jit(do_not_specialize=["M", "K", "tiles_k"])
def w4a16_kernel(
    x_ptr,
    words_ptr,
    meta_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    counters_ptr,
    M,
    N,
    K,
    x_stride,
    tiles_k,
    meta_stride,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SCALE32: tl.constexpr,
    FP16_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid (token blocks times row blocks, SPLIT). `GROUP` is 32, 64, 128, or 0 for a channel.

    A step takes `TILES` tiles of 128 columns. `tiles_k`: tiles along K, a multiple of two. Token
    blocks of the same rows run beside each other, so that the weight comes from memory once.
    """
    FP16: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    blocks_m = tl.cdiv(M, BLOCK_M)
    block_n = tl.program_id(0) // blocks_m
    block_m = tl.program_id(0) % blocks_m
    part = tl.program_id(1)
    rows = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_stride = tiles_k * 1024
    words_ptr += (block_n * (BLOCK_N // 64)).to(tl.int64) * tile_stride
    steps = tiles_k // TILES
    per_part = tl.cdiv(steps, SPLIT)
    first = part * per_part
    last = tl.minimum(first + per_part, steps)

    if PDL:
        if PREFETCH > 0:
            _prefetch(words_ptr, tile_stride, first * TILES, BLOCK_N, PREFETCH, NUM_WARPS)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
    token_ok = (tokens < M)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        channel_scale, channel_zero = _meta(
            meta_ptr, meta_stride, rows, 0, SYMMETRIC, SCALE32, FP16_SCALE, FP16
        )
    for step in tl.range(first, last, num_stages=STAGES):
        for i in tl.static_range(TILES):
            tile = step * TILES + i
            words = _load_words(words_ptr + tile * 1024, tile_stride, BLOCK_N, NUM_WARPS)
            if GROUP == 0 or GROUP == 128:
                k = tile * 128 + tl.arange(0, 128)
                inside = token_ok if EVEN_K else token_ok & (k < K)[:, None]
                x = tl.load(x_rows + k[:, None], mask=inside, other=0.0)  # [128, BLOCK_M]
                if GROUP == 0:
                    zero = channel_zero
                else:
                    scale, zero = _meta(
                        meta_ptr, meta_stride, rows, tile, SYMMETRIC, SCALE32, FP16_SCALE, FP16
                    )
                weight = _unpair4(
                    _pairs(words, zero, 0, FP16, INTERPRETED),
                    _pairs(words, zero, 1, FP16, INTERPRETED),
                    _pairs(words, zero, 2, FP16, INTERPRETED),
                    _pairs(words, zero, 3, FP16, INTERPRETED),
                    FP16,
                )
                if GROUP == 0:
                    acc = tl.dot(weight, x, acc)
                else:
                    acc += tl.dot(weight, x) * scale[:, None]
            else:
                for g in tl.static_range(128 // GROUP):
                    scale, zero = _meta(
                        meta_ptr,
                        meta_stride,
                        rows,
                        tile * (128 // GROUP) + g,
                        SYMMETRIC,
                        SCALE32,
                        FP16_SCALE,
                        FP16,
                    )
                    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                    for h in tl.static_range(GROUP // 32):
                        k = tile * 128 + g * GROUP + h * 32 + tl.arange(0, 32)
                        inside = token_ok if EVEN_K else token_ok & (k < K)[:, None]
                        x = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
                        weight = _unpair(
                            _pairs(words, zero, g * (GROUP // 32) + h, FP16, INTERPRETED), FP16
                        )
                        total = tl.dot(weight, x, total)
                    acc += total * scale[:, None]
    if GROUP == 0:
        acc *= channel_scale[:, None]

    outputs = tokens.to(tl.int64)[None, :] * N + rows[:, None]
    inside = token_ok & (rows < N)[:, None]
    if SPLIT > 1:
        size = M.to(tl.int64) * N
        tl.store(parts_ptr + part * size + outputs, acc, mask=inside)
        counter = counters_ptr + tl.program_id(0)
        tl.debug_barrier()  # the sums of all threads stand before the count of one
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        tl.store(counter, 0)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(
                parts_ptr + i * size + outputs, mask=inside, other=0.0, cache_modifier=".cg"
            )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + outputs, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(
    words_ptr,
    tile_stride,
    tile,
    BLOCK_N: tl.constexpr,
    PREFETCH: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Ask for the words of `PREFETCH` tiles along K from `tile` on to be brought to the L2 cache.

    One thread a line of 128 bytes: 32 lines a tile.
    """
    line = tl.arange(0, 32 * PREFETCH)
    for n in tl.static_range(BLOCK_N // 64):
        place = words_ptr + n * tile_stride + tile * 1024 + line * 32
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [place],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["tiles_k"])
def w4a16_dequantize_kernel(
    words_ptr,
    meta_ptr,
    weight_ptr,
    N,
    K,
    tiles_k,
    meta_stride,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SCALE32: tl.constexpr,
    FP16_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write one tile of 64 rows by 128 columns of the weight [N, K]. Grid (tiles of N, of K)."""
    FP16: tl.constexpr = weight_ptr.dtype.element_ty == tl.float16
    tile_n = tl.program_id(0)
    tile = tl.program_id(1)
    rows = tile_n * 64 + tl.arange(0, 64)
    tile_stride = tiles_k * 1024
    words_ptr += tile_n.to(tl.int64) * tile_stride + tile * 1024
    words = _load_words(words_ptr, tile_stride, 64, 4)
    weight_rows = weight_ptr + rows.to(tl.int64)[:, None] * K
    PER_TILE: tl.constexpr = 128 // GROUP if GROUP > 0 else 1
    WIDTH: tl.constexpr = 128 // PER_TILE
    for g in tl.static_range(PER_TILE):
        group = 0 if GROUP == 0 else tile * PER_TILE + g
        scale, zero = _meta(
            meta_ptr, meta_stride, rows, group, SYMMETRIC, SCALE32, FP16_SCALE, FP16
        )
        for h in tl.static_range(WIDTH // 32):
            pairs = _pairs(words, zero, g * (WIDTH // 32) + h, FP16, INTERPRETED)
            weight = _unpair(pairs, FP16).to(tl.float32) * scale[:, None]
            k = tile * 128 + g * WIDTH + h * 32 + tl.arange(0, 32)
            tl.store(
                weight_rows + k[None, :],
                weight.to(weight_ptr.dtype.element_ty),
                mask=(rows < N)[:, None] & (k < K)[None, :],
            )


def _is_interpreted() -> bool:
    return not isinstance(w4a16_kernel, triton.JITFunction)


def multiply(x_MK: Tensor, packed: PackedWeight, bias_N: Tensor | None, config: Config) -> Tensor:
    """``x @ weight.T + bias`` [M, N] by the fused kernel; `x_MK` has dense rows."""
    tokens, (n, k) = x_MK.shape[0], packed.shape
    y_MN = torch.empty(tokens, n, dtype=x_MK.dtype, device=x_MK.device)
    blocks_m = triton.cdiv(tokens, config.block_m)
    blocks_n = triton.cdiv(n, config.block_n)
    parts = y_MN
    if config.split > 1:
        assert blocks_m <= MAX_SPLIT_BLOCKS_M
        parts = torch.empty(config.split, tokens, n, dtype=torch.float32, device=x_MK.device)
    w4a16_kernel[(blocks_m * blocks_n, config.split)](
        x_MK,
        packed.words,
        packed.meta,
        y_MN if bias_N is None else bias_N,
        y_MN,
        parts,
        packed.counters,
        tokens,
        n,
        k,
        x_MK.stride(0),
        packed.tiles_k,
        packed.padded_n,
        GROUP=packed.kernel_group,
        SYMMETRIC=packed.symmetric,
        SCALE32=packed.scale_dtype == torch.float32,
        FP16_SCALE=packed.scale_dtype == torch.float16,
        HAS_BIAS=bias_N is not None,
        EVEN_K=k % 256 == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILES=config.tiles,
        SPLIT=config.split,
        NUM_WARPS=config.num_warps,
        STAGES=config.num_stages,
        PREFETCH=config.prefetch,
        PDL=config.pdl,
        INTERPRETED=_is_interpreted(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if config.pdl else {}),
    )
    return y_MN


def dequantize(packed: PackedWeight) -> Tensor:
    """The weight [N, K] in the packed weight's dtype, rounded once."""
    n, k = packed.shape
    weight_NK = torch.empty(n, k, dtype=packed.dtype, device=packed.words.device)
    w4a16_dequantize_kernel[(triton.cdiv(n, 64), triton.cdiv(k, 128))](
        packed.words,
        packed.meta,
        weight_NK,
        n,
        k,
        packed.tiles_k,
        packed.padded_n,
        GROUP=packed.kernel_group,
        SYMMETRIC=packed.symmetric,
        SCALE32=packed.scale_dtype == torch.float32,
        FP16_SCALE=packed.scale_dtype == torch.float16,
        INTERPRETED=_is_interpreted(),
        num_warps=4,
    )
    return weight_NK


@lru_cache
def _device(index: int | None) -> tuple[str, int, int]:
    """(name, number of SMs, compute capability such as 90) of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    return properties.name, properties.multi_processor_count, capability


def run(x_MK: Tensor, packed: PackedWeight, bias_N: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for `x_MK` of any leading shape, by the choice for its tokens."""
    flat_MK = x_MK.reshape(-1, x_MK.shape[-1])
    tokens = flat_MK.shape[0]
    config = choose(tokens, packed.shape, packed.kernel_group, *_device(x_MK.device.index))
    if tokens == 0 or config.block_m == 0:
        y_MN = F.linear(flat_MK, dequantize(packed), bias_N)
    else:
        if flat_MK.stride(1) != 1:
            flat_MK = flat_MK.contiguous()
        y_MN = multiply(flat_MK, packed, bias_N, config)
    return y_MN.unflatten(0, x_MK.shape[:-1])
