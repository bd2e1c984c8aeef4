"""Writes keys and values into their slots of a paged cache, quantized where that holds codes.

A cache is [pages, page_size, J, A]; slot s is position ``s % page_size`` of page
``s // page_size``; a negative slot is skipped (padding of a captured graph).

A cache of 8 bits (``float8_e4m3fn``, ``float8_e5m2``, ``int8``) holds ``x / scale`` in float32, to
nearest, ties to even, clamped before the cast (±448, ±57344, ±127). `k_scale` and `v_scale`,
float32, say which scale:

- [1], one scale for the whole cache, calibrated before: read;
- [pages, page_size, J], one a token and head: written here, ``max(abs(x)) / largest code``, and 1
  where all of x is zero;
- None: a plain cast, scale 1. The only choice for caches of 16 and 32 bits.

Problem keys: ``device``, ``dtype`` of the keys, ``kv_dtype``, ``kv_scales`` ("none", "layer" or
"token", in the order None, [1], [pages, page_size, J]), ``num_kv_heads``, ``head_dim``,
``page_size``.

Legend: T tokens, J key/value heads, A head dim.
"""

from typing import Any

import torch
from torch import Tensor

from quantforge_kernels._triton import HALF, refuse_triton
from quantforge_kernels.op import Candidate, Op
from quantforge_kernels.rounding import E5M2_MAX, FP8_MAX, round_to_e5m2, round_to_fp8, round_to_int

INT8_MAX = 127.0

CODE_MAX = {torch.float8_e4m3fn: FP8_MAX, torch.float8_e5m2: E5M2_MAX, torch.int8: INT8_MAX}
"""The dtypes of quantized caches, with the largest magnitude of a code."""


def reference(
    k_TJA: Tensor,
    v_TJA: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Stores each token's key and value at its slot, in place, rounded to the cache's dtype.

    Never waits for a GPU: there a skipped token repeats the first one that is kept, or, if none
    is, rewrites what slot 0 holds.
    """
    if not slot_mapping_T.numel():
        return
    for cache, new, scale in ((k_cache, k_TJA, k_scale), (v_cache, v_TJA, v_scale)):
        if scale is not None and scale.dim() > 1:
            scale_TJ = token_scales(new, cache.dtype)
            _put(scale, scale_TJ, slot_mapping_T)
            scale = scale_TJ.unsqueeze(-1)
        _put(_bits(cache), _bits(to_codes(new, scale, cache.dtype)), slot_mapping_T)


def token_scales(x_TJA: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales [T, J], float32, that bring each token and head to the largest code of `dtype`.

    They are 1 where all values are zero.
    """
    scale_TJ = x_TJA.float().abs().amax(dim=-1) / CODE_MAX[dtype]
    return torch.where(scale_TJ == 0, 1.0, scale_TJ)


def to_codes(x_TJA: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x_TJA` as a cache of `dtype` holds it; `scale` broadcasts against it, None stands for 1."""
    if dtype not in CODE_MAX:
        return x_TJA.to(dtype)
    x = x_TJA.float()
    scale = x.new_ones(()) if scale is None else scale
    if dtype == torch.int8:
        return round_to_int(x, scale, None, -int(INT8_MAX), int(INT8_MAX))
    return round_to_fp8(x, scale) if dtype == torch.float8_e4m3fn else round_to_e5m2(x, scale)


def _bits(tensor: Tensor) -> Tensor:
    """FP8 as bytes, which every torch op can copy; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in CODE_MAX else tensor


def _put(cache: Tensor, new: Tensor, slot_mapping_T: Tensor) -> None:
    """Writes `new` [T, ...] to its slots of `cache` [pages, page_size, ...]."""
    flat = cache.view(-1, *cache.shape[2:])
    if slot_mapping_T.device.type == "cpu" and not (slot_mapping_T < 0).any():
        flat.index_copy_(0, slot_mapping_T, new)
        return
    kept_T = slot_mapping_T >= 0
    token_T = torch.arange(kept_T.shape[0], device=kept_T.device)
    source_T = torch.where(kept_T, token_T, kept_T.int().argmax())
    slots_T = slot_mapping_T[source_T].clamp(min=0)
    kept = kept_T[source_T].reshape(-1, *(1 for _ in new.shape[1:]))
    flat.index_copy_(0, slots_T, torch.where(kept, new[source_T], flat[slots_T]))


def _supports_triton(
    *, device: str, dtype: torch.dtype, kv_dtype: torch.dtype, **problem: Any
) -> str | None:
    if kv_dtype not in HALF:
        return f"stores bfloat16 or float16, not {kv_dtype}"
    return refuse_triton(device, dtype, HALF)


def _run_triton(*args: Any) -> None:
    from quantforge_kernels import kv_store_triton

    kv_store_triton.run(*args)


OP = Op(
    name="kv_store",
    reference=Candidate(name="reference", run=reference),
    candidates=(Candidate(name="triton", run=_run_triton, supports=_supports_triton),),
)
