"""Writes keys and values into their slots of a paged cache.

A cache is [pages, page_size, J, A]; slot s is position ``s % page_size`` of page
``s // page_size``; a negative slot is skipped (padding of a captured graph).

Legend: T tokens, J key/value heads, A head dim.
"""

from torch import Tensor

from quantforge_kernels.op import Candidate, Op


def reference(
    k_TJA: Tensor, v_TJA: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """Stores each token's key and value at its slot, in place, rounded to the cache's dtype."""
    kept = slot_mapping_T >= 0
    slots = slot_mapping_T[kept]
    for cache, new in ((k_cache, k_TJA), (v_cache, v_TJA)):
        flat = cache.view(-1, *cache.shape[2:])
        flat[slots] = new[kept].to(cache.dtype)


OP = Op(name="kv_store", reference=Candidate(name="reference", run=reference))
