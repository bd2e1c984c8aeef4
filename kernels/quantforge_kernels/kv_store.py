"""Writes keys and values into their slots of a paged cache.

A cache is [pages, page_size, J, A]; slot s is position ``s % page_size`` of page
``s // page_size``; a negative slot is skipped (padding of a captured graph).

Legend: T tokens, J key/value heads, A head dim.
"""

from typing import Any

import torch
from torch import Tensor

from quantforge_kernels._triton import HALF, refuse_triton
from quantforge_kernels.op import Candidate, Op


def reference(
    k_TJA: Tensor, v_TJA: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """Stores each token's key and value at its slot, in place, rounded to the cache's dtype.

    Never waits for a GPU: there a skipped token repeats the first one that is kept, or, if none
    is, rewrites what slot 0 holds.
    """
    if slot_mapping_T.device.type == "cpu" and not (slot_mapping_T < 0).any():
        for cache, new in ((k_cache, k_TJA), (v_cache, v_TJA)):
            _flat(cache).index_copy_(0, slot_mapping_T, new.to(cache.dtype))
        return
    if not slot_mapping_T.numel():
        return
    kept_T = slot_mapping_T >= 0
    token_T = torch.arange(kept_T.shape[0], device=kept_T.device)
    source_T = torch.where(kept_T, token_T, kept_T.int().argmax())
    slots_T = slot_mapping_T[source_T].clamp(min=0)
    for cache, new in ((k_cache, k_TJA), (v_cache, v_TJA)):
        flat = _flat(cache)
        values = torch.where(
            kept_T[source_T, None, None], new[source_T].to(cache.dtype), flat[slots_T]
        )
        flat.index_copy_(0, slots_T, values)


def _flat(cache: Tensor) -> Tensor:
    """The cache by slot: a view [pages * page_size, J, A]."""
    return cache.view(-1, *cache.shape[2:])


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
