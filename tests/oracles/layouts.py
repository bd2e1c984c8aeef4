"""AutoAWQ's and GPTQ's layouts, written from their description in plain numpy, one field a time."""

from typing import Any

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_unpack(words: Any) -> Any:
    """[R, W] words -> [R, 8 W] numbers 0 .. 15."""
    words = np.asarray(words).view(np.uint32)
    out = np.zeros((words.shape[0], words.shape[1] * 8), dtype=np.int64)
    for i, column in enumerate(AWQ_ORDER):
        out[:, column::8] = (words >> np.uint32(4 * i)) & 15
    return out


def awq_weight(tensors: dict[str, Any]) -> Any:
    """float32 [N, K] of a layer's numpy tensors."""
    q_KN, z_GN = awq_unpack(tensors["qweight"]), awq_unpack(tensors["qzeros"])
    scales = tensors["scales"].astype(np.float32)
    size = q_KN.shape[0] // scales.shape[0]
    group = np.arange(q_KN.shape[0]) // size
    return ((q_KN - z_GN[group]).astype(np.float32) * scales[group]).T


def gptq_unpack_rows(words: Any, bits: int) -> Any:
    """[R, W] words -> [R, (32 / bits) W] numbers, the first in the lowest bits."""
    words = np.asarray(words).view(np.uint32)
    count = 32 // bits
    out = np.zeros((words.shape[0], words.shape[1] * count), dtype=np.int64)
    for i in range(count):
        out[:, i::count] = (words >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
    return out


def gptq_weight(tensors: dict[str, Any], bits: int, version: int) -> Any:
    """float32 [N, K] of a layer's numpy tensors; any g_idx."""
    q_KN = gptq_unpack_rows(tensors["qweight"].T.copy(), bits).T
    zeros = tensors["qzeros"].view(np.uint32).copy()
    if version == 1:
        zeros += np.uint32(sum(1 << i for i in range(0, 32, bits)))
    z_GN = gptq_unpack_rows(zeros, bits)
    scales, group = tensors["scales"].astype(np.float32), tensors["g_idx"]
    return ((q_KN - z_GN[group]).astype(np.float32) * scales[group]).T


def gptq_tensors(q_NK: Any, z_GN: Any, scales_GN: Any, g_idx: Any, version: int) -> dict[str, Any]:
    """A 4-bit layer as GPTQ packs it, from numbers 0 .. 15."""

    def pack(numbers: Any) -> Any:
        out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
        for i in range(8):
            out |= numbers[:, i::8].astype(np.uint32) << np.uint32(4 * i)
        return out

    zeros = pack(z_GN)
    if version == 1:
        zeros -= np.uint32(0x11111111)
    return {
        "qweight": pack(q_NK).view(np.int32).T.copy(),
        "qzeros": zeros.view(np.int32),
        "scales": scales_GN.astype(np.float16),
        "g_idx": g_idx.astype(np.int32),
    }
