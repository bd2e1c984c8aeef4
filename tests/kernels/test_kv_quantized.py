"""Quantized caches: codes against torch's and numpy's own rounding, attention against SDPA on
explicitly dequantized keys and values, and laws that hold exactly."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quantforge_kernels import kv_store, paged_attention

PAGES, PAGE_SIZE, HEADS, DIM = 6, 4, 2, 16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}
DTYPES = list(LARGEST)
KINDS = ["none", "layer", "token"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def oracle_codes(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes as float32: numpy's rint for int8, torch's cast of what is in range for FP8."""
    scaled = (x.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == INT8:
        return torch.from_numpy(np.rint(scaled.numpy()))
    return scaled.to(dtype).float()


def scales_of(kind: str, dtype: torch.dtype, device: str) -> tuple[torch.Tensor | None, ...]:
    """(k_scale, v_scale) of a fresh cache."""
    if kind == "none":
        return None, None
    if kind == "layer":
        return tuple(torch.tensor([s / LARGEST[dtype]], device=device) for s in (4.0, 3.0))
    shape = (2, PAGES, PAGE_SIZE, HEADS)
    return torch.full(shape, float("nan"), device=device).unbind()


def empty(dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, PAGES, PAGE_SIZE, HEADS, DIM, dtype=dtype, device=device).unbind()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[0, 7, 3], [-1, 5, -1], [9], [-1, -1]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_tokens_are_rounded_as_torch_and_numpy_round(
    dtype: torch.dtype, kind: str, slots: list[int], source: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(2, len(slots), HEADS, DIM) * 3).to(source)
    caches, scales = empty(dtype, device), scales_of(kind, dtype, device)
    slot_mapping = torch.tensor(slots, device=device)
    kv_store.OP.reference.run(k.to(device), v.to(device), *caches, slot_mapping, *scales)
    for new, cache, scale in zip((k, v), caches, scales, strict=True):
        stored = cache.cpu().float().flatten(0, 1)
        kept = [slot for slot in slots if slot >= 0]
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            if kind == "token":
                assert scale is not None
                used = scale.cpu().flatten(0, 1)[slot].unsqueeze(-1)
                expected = new[token].float().abs().amax(-1, keepdim=True) / LARGEST[dtype]
                torch.testing.assert_close(used, expected, rtol=1e-6, atol=0)
            else:
                used = torch.ones(1) if scale is None else scale.cpu()
            assert torch.equal(stored[slot], oracle_codes(new[token], used, dtype))
        others = [slot for slot in range(PAGES * PAGE_SIZE) if slot not in kept]
        assert not stored[others].any()
        if kind == "token":
            assert scale is not None
            assert scale.cpu().flatten(0, 1)[others].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "given", "stored"),
    [
        (INT8, [0.5, 1.5, 2.5, -0.5, -1.5, 200.0], [0, 2, 2, 0, -2, 127]),
        (E4M3, [17, 19, 21, -17, 460, 1e6], [16, 20, 20, -16, 448, 448]),
        (E5M2, [9, 11, 13, -9, 60000, 1e9], [8, 12, 12, -8, 57344, 57344]),
    ],
    ids=str,
)
def test_ties_go_to_even_and_what_is_too_large_is_clamped(
    dtype: torch.dtype, given: list[float], stored: list[float]
) -> None:
    x = torch.tensor(given).expand(1, 1, -1)
    for scale in (torch.ones(1), torch.tensor([0.125])):
        codes = kv_store.to_codes(x * scale, scale, dtype)
        assert codes.float().flatten().tolist() == stored


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_whose_values_are_all_zero_is_stored_as_zero_with_scale_one(
    dtype: torch.dtype,
) -> None:
    zero = torch.zeros(1, HEADS, DIM)
    caches, scales = empty(dtype), scales_of("token", dtype, "cpu")
    kv_store.OP.reference.run(zero, zero, *caches, torch.tensor([2]), *scales)
    for cache, scale in zip(caches, scales, strict=True):
        assert scale is not None
        assert scale[0, 2].tolist() == [1.0] * HEADS
        assert not cache.float().any()


def attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor | None, ...],
    context: int,
    window: int | None,
) -> torch.Tensor:
    device = q.device
    pages = torch.arange(PAGES, dtype=torch.int32, device=device).flip(0)
    out: torch.Tensor = paged_attention.OP.reference.run(
        q,
        *caches,
        pages[None],
        torch.tensor([0, len(q)], dtype=torch.int32, device=device),
        torch.tensor([context], dtype=torch.int32, device=device),
        DIM**-0.5,
        window,
        *scales,
    )
    return out


def slots(context: int) -> torch.Tensor:
    """Slots of positions 0 .. context - 1 where the block table counts pages down."""
    position = torch.arange(context)
    return (PAGES - 1 - position // PAGE_SIZE) * PAGE_SIZE + position % PAGE_SIZE


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """The oracle, in float64: q [T, H, A] stands at the end of k and v [C, J, A]."""
    queries, context = len(q), len(k)
    position = torch.arange(context - queries, context)[:, None]
    seen = torch.arange(context)[None]
    mask = seen <= position
    if window is not None:
        mask &= seen > position - window
    group = q.shape[1] // k.shape[1]
    out = F.scaled_dot_product_attention(
        q.double().transpose(0, 1),
        k.double().transpose(0, 1).repeat_interleave(group, dim=0),
        v.double().transpose(0, 1).repeat_interleave(group, dim=0),
        attn_mask=mask,
        scale=1 / math.sqrt(q.shape[-1]),
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("queries", [1, 6, 18])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_sdpa_on_dequantized_keys_and_values(
    dtype: torch.dtype, kind: str, queries: int, window: int | None, device: str
) -> None:
    torch.manual_seed(1)
    context = 18
    q = torch.randn(queries, 2 * HEADS, DIM)
    new = torch.randn(2, context, HEADS, DIM)
    caches, scales = empty(dtype, device), scales_of(kind, dtype, device)
    kv_store.OP.reference.run(*new.to(device), *caches, slots(context).to(device), *scales)
    for scale in scales if kind == "token" else ():
        assert scale is not None
        scale.nan_to_num_(0.0)  # as an engine clears a page before it begins to fill it
    dequantized = []
    for x, scale in zip(new, scales, strict=True):
        if kind == "token":
            used = x.abs().amax(-1, keepdim=True) / LARGEST[dtype]
        else:
            used = torch.ones(1) if scale is None else scale.cpu()
        dequantized.append(oracle_codes(x, used, dtype) * used)
    found = attend(q.to(device), caches, scales, context, window).cpu()
    expected = sdpa(q, dequantized[0], dequantized[1], window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 18])
@pytest.mark.parametrize("kind", ["layer", "token"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_the_codes_hold_exactly_give_bit_equal_attention(
    dtype: torch.dtype, kind: str, queries: int
) -> None:
    """Small integers times a power of two are codes of every dtype under such a scale."""
    generator = torch.Generator().manual_seed(2)
    context, step = 18, 2.0**-3
    new = torch.randint(-4, 5, (2, context, HEADS, DIM), generator=generator) * step
    if kind == "token":  # the largest magnitude makes the scale: 448, 57344 or 127 steps
        new[..., 0] = LARGEST[dtype] * step
        scales: tuple[torch.Tensor | None, ...] = scales_of("token", dtype, "cpu")
    else:
        scales = (torch.tensor([step]), torch.tensor([step]))
    q = torch.randn(queries, 2 * HEADS, DIM, generator=generator)
    caches, plain = empty(dtype), empty(torch.float32)
    kv_store.OP.reference.run(*new, *caches, slots(context), *scales)
    kv_store.OP.reference.run(*new, *plain, slots(context))
    for scale in scales if kind == "token" else ():
        assert scale is not None
        scale.nan_to_num_(0.0)
    found = attend(q, caches, scales, context, None)
    assert torch.equal(found, attend(q, plain, (None, None), context, None))
