"""Paged attention against F.scaled_dot_product_attention on each whole sequence, unpaged."""

import math

import pytest
import torch
import torch.nn.functional as F
from quantforge_kernels import paged_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Case = list[tuple[int, int]]
"""(queries, context) of each sequence."""

DECODES: Case = [(1, 1), (1, 4), (1, 17), (1, 33)]
CHUNKS: Case = [(3, 3), (5, 20), (17, 17), (2, 33)]
MIXED: Case = [(1, 9), (1, 30), (7, 7), (4, 23)]
LATE_SINGLE: Case = [(1, 5), (6, 9), (1, 12), (2, 2)]


def attention_of_each_sequence(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    case: Case,
    window: int | None,
) -> torch.Tensor:
    """The oracle: float64, every position of the sequence known, a mask of explicit positions."""
    outputs, start = [], 0
    for (queries, context), k, v in zip(case, keys, values, strict=True):
        position = torch.arange(context - queries, context)[:, None]
        seen = torch.arange(context)[None]
        mask = seen <= position
        if window is not None:
            mask &= seen > position - window
        group = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q[start : start + queries].double().transpose(0, 1),
            k.double().transpose(0, 1).repeat_interleave(group, dim=0),
            v.double().transpose(0, 1).repeat_interleave(group, dim=0),
            attn_mask=mask,
            scale=1 / math.sqrt(q.shape[-1]),
        )
        outputs.append(out.transpose(0, 1))
        start += queries
    return torch.cat(outputs)


def paged(
    rows: list[torch.Tensor], page_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[list[int]]]:
    """A cache that holds `rows`, scattered over shuffled pages, garbage everywhere else."""
    counts = [-(-len(row) // page_size) for row in rows]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    cache = torch.full((sum(counts) + 2, page_size, *rows[0].shape[1:]), 1e4, dtype=rows[0].dtype)
    tables = []
    for row, count in zip(rows, counts, strict=True):
        table = [order.pop() for _ in range(count)]
        for at, part in zip(table, row.split(page_size), strict=True):
            cache[at, : len(part)] = part
        tables.append(table)
    return cache, tables


def run(
    case: Case,
    *,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(our output, the oracle's)"""
    generator = torch.Generator().manual_seed(len(case) * 100 + page_size)
    num_heads, num_kv_heads = heads

    def random(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, head_dim, generator=generator).to(dtype)

    q = random(sum(queries for queries, _ in case), num_heads)
    keys = [random(context, num_kv_heads) for _, context in case]
    values = [random(context, num_kv_heads) for _, context in case]
    state = generator.get_state()
    k_cache, tables = paged(keys, page_size, generator)
    generator.set_state(state)
    v_cache, _ = paged(values, page_size, generator)
    width = max(map(len, tables))
    starts = [0]
    for queries, _ in case:
        starts.append(starts[-1] + queries)
    out = paged_attention.OP.reference.run(
        q.to(device),
        k_cache.to(device),
        v_cache.to(device),
        torch.tensor(
            [t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device
        ),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([context for _, context in case], dtype=torch.int32, device=device),
        head_dim**-0.5,
        window,
    )
    assert out.dtype == dtype
    return out.cpu().double(), attention_of_each_sequence(q, keys, values, case, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("case", [DECODES, CHUNKS, MIXED, LATE_SINGLE], ids=str)
def test_paged_attention_equals_attention_of_each_sequence(
    case: Case, window: int | None, device: str
) -> None:
    out, expected = run(case, window=window, device=device)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 6), (9, 3)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_any_grouping_of_heads_and_any_page_size(heads: tuple[int, int], page_size: int) -> None:
    for case in (DECODES, MIXED):
        out, expected = run(case, heads=heads, page_size=page_size, head_dim=8)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [DECODES, MIXED], ids=str)
def test_half_precision_rounds_the_output_only(case: Case, dtype: torch.dtype) -> None:
    """Softmax and both products are in float32, so the error is one rounding of the output."""
    out, expected = run(case, dtype=dtype)
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out, expected, rtol=1.1 * rounding, atol=1e-5)


def test_a_large_decode_batch_is_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = run(DECODES)
    monkeypatch.setattr(paged_attention, "MAX_GATHERED_ELEMENTS", 1)
    parts, _ = run(DECODES)
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
