"""The paged store against a loop over tokens."""

import pytest
import torch
from quantforge_kernels import kv_store

PAGES, PAGE_SIZE, HEADS, DIM = 5, 4, 2, 8


def stored_by_loop(new: torch.Tensor, cache: torch.Tensor, slots: list[int]) -> torch.Tensor:
    expected = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = new[token].to(cache.dtype)
    return expected


@pytest.mark.parametrize(
    "slots", [[3], [0, 19, 7], [-1, 5, -1], [5, -1, 6], [-1, -1], [-1, 0], []], ids=str
)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_kept_token_is_stored_and_nothing_else_changes(
    slots: list[int], cache_dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, len(slots), HEADS, DIM)
    caches = torch.randn(2, PAGES, PAGE_SIZE, HEADS, DIM).to(cache_dtype)
    expected = [stored_by_loop(new, c, slots) for new, c in zip((k, v), caches, strict=True)]
    k_cache, v_cache = caches.to(device)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    kv_store.OP.reference.run(k.to(device), v.to(device), k_cache, v_cache, slot_mapping)
    assert torch.equal(k_cache.cpu(), expected[0])
    assert torch.equal(v_cache.cpu(), expected[1])


def test_padded_slots_are_skipped_on_the_path_that_does_not_wait_for_a_device() -> None:
    k = torch.randn(3, HEADS, DIM)
    cache = torch.randn(PAGES, PAGE_SIZE, HEADS, DIM)
    for slots in ([-1, 0, 9], [-1, -1, -1]):
        k_cache, v_cache = cache.clone(), cache.clone()
        kv_store.reference(k, k, k_cache, v_cache, torch.tensor(slots))
        assert torch.equal(k_cache, stored_by_loop(k, cache, slots))
        assert torch.equal(v_cache, k_cache)


def test_strided_keys_are_stored_as_they_are() -> None:
    merged = torch.randn(6, 3 * HEADS, DIM)
    k, v = merged[:, HEADS : 2 * HEADS], merged[:, 2 * HEADS :]
    k_cache, v_cache = torch.full((2, PAGES, PAGE_SIZE, HEADS, DIM), float("nan"))
    kv_store.OP.reference.run(k, v, k_cache, v_cache, torch.arange(6))
    assert torch.equal(k_cache.flatten(0, 1)[:6], k)
    assert torch.equal(v_cache.flatten(0, 1)[:6], v)
    assert k_cache.flatten(0, 1)[6:].isnan().all()
