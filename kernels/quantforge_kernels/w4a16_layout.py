"""The layout of int4 weights for the kernels of `w4a16`, made once at load.

Legend: M tokens, N out features, K in features, G groups of K.

**Words.** A tile of 64 rows by 128 columns is 1024 int32 words, 4 KiB in one piece; tiles along K
follow each other. A word's place in its tile is made of bits of its row r and its place j in that
row, slowest first::

    r3 | r5 r4 | r2 r1 r0 | j1 j0 | j3 j2

A thread loads four words of one row (16 bytes) and so has what a tensor core wants of it: bits
r2..r0 and j1, j0 are its lane, r5 and r4 its warp. Word j of a row holds eight codes, ``u = code +
8``::

    bits     0..3   4..7   8..11  12..15  16..19  20..23  24..27  28..31
    column   2j     2j+32  2j+64  2j+96   2j+1    2j+33   2j+65   2j+97

so that one shift and one mask give two neighbours in the halves of a word.

**Meta.** Words [words along K, N] beside the weight: a symmetric weight with 16-bit scales has one
word for two groups that follow each other (the first in the low half); an asymmetric one has
``scale | offset << 16``, where `offset` is the 16-bit float ``-(128 + 8 + zero_point)``, in float16
``-(1024 + 8 + zero_point)``: what takes a code's ``128 + u`` to ``code - zero_point``. Float32
scales fill a word, and asymmetric weights then have a second one, `offset` in both halves. Groups
longer than 128 are repeated as groups of 128; one scale a channel is a group of its own.

N is padded to a multiple of 128 and K to one of 256, with codes and scales of zero.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_AT_A_TIME = 4096
"""Rows are packed in pieces, so that a large weight needs little memory beside itself."""

GROUPS = (32, 64, 128)

MAX_SPLIT_BLOCKS_M = 8
"""A product whose K is split has a counter for each block of rows and tokens: at most so many of
tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """A weight [N, K] = `shape` as the kernels read it, for inputs of `dtype`.

    `kernel_group` is 32, 64, 128, or 0 for one scale a channel. `counters` are zero between calls.
    """

    words: Tensor
    meta: Tensor
    counters: Tensor
    shape: tuple[int, int]
    kernel_group: int
    symmetric: bool
    scale_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def padded_n(self) -> int:
        return self.meta.shape[1]

    @property
    def tiles_k(self) -> int:
        return self.words.shape[1]


def refuse_group(group_size: int | None, k: int) -> str | None:
    """Why a weight of `k` columns in groups of `group_size` cannot be packed."""
    if group_size is None or group_size == k:
        return None
    if group_size not in GROUPS and group_size % 128:
        return f"takes groups of 32, 64 or a multiple of 128, not of {group_size}"
    return f"groups of {group_size} do not divide K = {k}" if k % group_size else None


def pack(
    codes_NK: Tensor, scale_NG: Tensor, zero_point_NG: Tensor | None, dtype: torch.dtype
) -> PackedWeight:
    """`PackedWeight` of int8 codes in -8..7, for inputs of `dtype` (bfloat16 or float16)."""
    n, k = codes_NK.shape
    groups = scale_NG.shape[1]
    group = 0 if groups == 1 else k // groups
    if (reason := refuse_group(group or None, k)) is not None or k % groups:
        raise ValueError(reason or f"{groups} groups do not divide K = {k}")
    scale_GN = _spread_groups(scale_NG, n, k, group)
    zero_GN = None if zero_point_NG is None else _spread_groups(zero_point_NG, n, k, group)
    words = _pack_words(codes_NK)
    return PackedWeight(
        words=words,
        meta=_pack_meta(scale_GN, zero_GN, dtype),
        counters=torch.zeros(
            words.shape[0] * MAX_SPLIT_BLOCKS_M, dtype=torch.int32, device=codes_NK.device
        ),
        shape=(n, k),
        kernel_group=min(group, 128),
        symmetric=zero_point_NG is None,
        scale_dtype=scale_NG.dtype,
        dtype=dtype,
    )


def _pack_words(codes_NK: Tensor) -> Tensor:
    """int32 words [tiles of N, tiles of K, 1024]."""
    n, k = codes_NK.shape
    tiles_n, tiles_k = -(-n // 128) * 2, -(-k // 256) * 2
    words = torch.empty(tiles_n, tiles_k, 1024, dtype=torch.int32, device=codes_NK.device)
    for start in range(0, tiles_n * 64, ROWS_AT_A_TIME):
        piece = codes_NK[start : start + ROWS_AT_A_TIME]
        stop = min(start + ROWS_AT_A_TIME, tiles_n * 64)
        piece = F.pad(piece, (0, tiles_k * 128 - k, 0, stop - start - piece.shape[0]))
        u = (piece.to(torch.int16) + 8).reshape(stop - start, tiles_k, 4, 16, 2)
        halves = u[:, :, 0] | u[:, :, 1] << 4 | u[:, :, 2] << 8 | u[:, :, 3] << 12
        rows = halves.contiguous().view(torch.int32)  # [rows, tiles_k, 16, 1]
        bits = rows.reshape(-1, 4, 2, 8, tiles_k, 4, 4)  # [tile, r54, r3, r210, tile_k, j32, j10]
        ordered = bits.permute(0, 4, 2, 1, 3, 6, 5)
        words[start // 64 : stop // 64] = ordered.reshape(-1, tiles_k, 1024)
    return words


def _spread_groups(values_NG: Tensor, n: int, k: int, group: int) -> Tensor:
    """[groups of at most 128 columns, N], both padded with zeros; two groups for a channel."""
    values_NG = values_NG.expand(n, -1)
    if group > 128:
        values_NG = values_NG.repeat_interleave(group // 128, dim=1)
    columns = -(-k // 256) * 256
    wanted = columns // min(group, 128) if group else 2
    padded = F.pad(values_NG, (0, wanted - values_NG.shape[1], 0, -n % 128))
    return padded.T.contiguous()


def _pack_meta(scale_GN: Tensor, zero_GN: Tensor | None, dtype: torch.dtype) -> Tensor:
    """int32 [words along K, N]."""
    offset = None
    if zero_GN is not None:
        bias = 128 + 8 if dtype == torch.bfloat16 else 1024 + 8
        offset = (-bias - zero_GN.to(torch.float32)).to(dtype).view(torch.int16)
    if scale_GN.dtype == torch.float32:
        words = scale_GN.view(torch.int32)
        if offset is None:
            return words
        twice = torch.stack((offset, offset), dim=-1).view(torch.int32).squeeze(-1)
        return torch.stack((words, twice), dim=1).flatten(0, 1)
    scale = scale_GN.view(torch.int16)
    if offset is None:
        low, high = scale[0::2], scale[1::2]
    else:
        low, high = scale, offset
    return torch.stack((low, high), dim=-1).view(torch.int32).squeeze(-1)
