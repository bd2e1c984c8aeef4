"""The Triton kernels around the linears, against the references of their ops.

The references have their own oracles (their tests). Without a GPU everything runs in Triton's
interpreter, in a process of its own: the choice is made when triton is imported. There bf16 is
wrong (float32 to bf16 truncates), so the interpreter gets float16 and float32.
"""

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from quantforge_kernels import kv_store, paged_attention, rms_norm, rope, silu_mul
from torch import Tensor

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF, WIDE = torch.float16, torch.float32
DTYPES = [HALF, WIDE] if INTERPRETED else [torch.bfloat16, HALF, WIDE]
DEVICE = "cpu" if INTERPRETED else "cuda"

on_triton = pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("default")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's own process")
def test_kernels_pass_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "2 skipped" in done.stdout  # this driver and the test of CUDA graphs


def triton_run(name: str, *args: Any) -> Any:
    """The kernel's outcome; memory that it allocates is filled with NaN first."""
    module = importlib.import_module(f"quantforge_kernels.{name}_triton")
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        out = empty(*shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        return module.run(*args)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative RMS error; NaN where anything is."""
    delta = found.double() - expected.double()
    return float(delta.norm() / expected.double().norm())


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 576), (17, 100), (5, 4096)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(rows: int, size: int, with_residual: bool, dtype: torch.dtype) -> None:
    x = random(rows, 2 * size, dtype=dtype)[:, :size]  # strided rows
    weight = random(size, dtype=dtype, seed=1)
    residual = random(rows, size, dtype=dtype, seed=2) if with_residual else None
    normed, total = triton_run("rms_norm", x, weight, 1e-5, residual)
    expected, expected_total = rms_norm.reference(x, weight, 1e-5, residual)
    assert torch.equal(total, expected_total)
    # the sum of squares is added in another order: now and then one rounding differs
    assert relative_error(normed, expected) < torch.finfo(dtype).eps


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_heads_in_a_merged_projection(dtype: torch.dtype) -> None:
    merged = random(7, 5 * 64, dtype=dtype)
    x = merged[:, 64 : 4 * 64].reshape(7, 3, 64)
    weight = random(64, dtype=dtype, seed=1)
    normed, _ = triton_run("rms_norm", x, weight, 1e-6)
    expected, _ = rms_norm.reference(x, weight, 1e-6)
    assert normed.shape == expected.shape
    assert relative_error(normed, expected) < torch.finfo(dtype).eps


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 1000), (17, 1536)])
def test_silu_mul(tokens: int, size: int, dtype: torch.dtype) -> None:
    merged = random(tokens, 2 * size, dtype=dtype) * 4
    gate, up = merged.split(size, dim=-1)
    out = triton_run("silu_mul", gate, up)
    # exp differs in its last bits from torch's: now and then one rounding differs
    assert relative_error(out, silu_mul.reference(gate, up)) < torch.finfo(dtype).eps


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (1, 1, 16), (12, 12, 96)])
def test_rope_is_bit_equal(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    tokens = 5
    merged = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q, k, _ = merged.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    q, k = q.reshape(tokens, -1, head_dim), k.reshape(tokens, -1, head_dim)
    angles = random(tokens, head_dim, dtype=torch.float32, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for found, expected in zip(
        triton_run("rope", q, k, cos, sin), rope.reference(q, k, cos, sin), strict=True
    ):
        assert torch.equal(found, expected)


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[3], [0, 19, 7], [-1, 5, -1], [-1, -1], []], ids=str)
def test_kv_store_writes_every_kept_token_and_nothing_else(
    slots: list[int], dtype: torch.dtype
) -> None:
    merged = random(len(slots), 6, 24, dtype=dtype)
    k, v = merged[:, 1:4], merged[:, 3:6]
    found = [random(5, 4, 3, 24, dtype=dtype, seed=4) for _ in range(2)]
    expected = [cache.clone() for cache in found]
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    triton_run("kv_store", k, v, *found, slot_mapping)
    kv_store.reference(k, v, *expected, slot_mapping)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


DECODES = [(1, 1), (1, 17), (1, 150)]
CHUNKS = [(3, 3), (30, 90), (2, 33)]
MIXED = [(1, 9), (1, 130), (20, 20)]


def attention_problem(
    case: list[tuple[int, int]],
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    window: int | None,
) -> tuple[Any, ...]:
    """Arguments of the op; what no sequence owns is finite garbage."""
    generator = torch.Generator().manual_seed(1)
    counts = [-(-context // page_size) for _, context in case]
    pages = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    tables = [[pages.pop() for _ in range(count)] for count in counts]
    width = max(counts)
    shape = (sum(counts) + 2, page_size, heads[1], head_dim)
    starts = [0]
    for queries, _ in case:
        starts.append(starts[-1] + queries)
    integers = {"dtype": torch.int32, "device": DEVICE}
    merged = random(starts[-1], (heads[0] + 1) * head_dim, dtype=dtype, seed=5)
    return (
        merged[:, head_dim:].reshape(starts[-1], heads[0], head_dim),
        random(*shape, dtype=dtype, seed=6),
        random(*shape, dtype=dtype, seed=7),
        torch.tensor([t + [t[0]] * (width - len(t)) for t in tables], **integers),
        torch.tensor(starts, **integers),
        torch.tensor([context for _, context in case], **integers),
        head_dim**-0.5,
        window,
    )


def attention_bound(dtype: torch.dtype) -> float:
    """Probabilities are rounded once before the second product, and the output once."""
    return 1e-5 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize("window", [None, 50])
def test_paged_attention(
    case: list[tuple[int, int]], window: int | None, dtype: torch.dtype
) -> None:
    args = attention_problem(case, dtype, (6, 2), 64, 16, window)
    out = triton_run("paged_attention", *args)
    assert relative_error(out, paged_attention.reference(*args)) < attention_bound(dtype)


@on_triton
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [((1, 1), 16, 16), ((4, 4), 80, 32), ((8, 1), 128, 1), ((4, 2), 256, 64)],
)
def test_paged_attention_of_other_shapes(
    heads: tuple[int, int], head_dim: int, page_size: int
) -> None:
    for case in (DECODES, MIXED):
        args = attention_problem(case, HALF, heads, head_dim, page_size, None)
        out = triton_run("paged_attention", *args)
        assert relative_error(out, paged_attention.reference(*args)) < attention_bound(HALF)


@on_triton
@pytest.mark.parametrize("splits", [1, 3, 64])
@pytest.mark.parametrize("window", [None, 70])
def test_any_number_of_splits_gives_the_same_attention(splits: int, window: int | None) -> None:
    from quantforge_kernels import paged_attention_triton

    args = attention_problem(DECODES, HALF, (6, 2), 64, 16, window)
    q, k, v, table, _, context, scale, _ = args
    out = paged_attention_triton.decode(q, k, v, table, context, scale, window, splits=splits)
    again = paged_attention_triton.decode(q, k, v, table, context, scale, window, splits=splits)
    assert torch.equal(out, again)
    assert relative_error(out, paged_attention.reference(*args)) < attention_bound(HALF)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="graphs are CUDA's")
def test_attention_in_a_graph_follows_the_contexts_that_it_is_given() -> None:
    args = list(attention_problem(DECODES, torch.bfloat16, (8, 2), 128, 16, None))
    context = args[5]
    from quantforge_kernels import paged_attention_triton

    paged_attention_triton.run(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_triton.run(*args)
    context.copy_(torch.tensor([1, 11, 140], dtype=torch.int32))
    graph.replay()
    assert relative_error(out, paged_attention.reference(*args)) < attention_bound(torch.bfloat16)


def test_kernels_say_why_they_refuse() -> None:
    problem = {"device": "cuda", "dtype": torch.float32, "kv_dtype": torch.float32}
    problem |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    reason = "takes bfloat16 or float16, not torch.float32"
    assert paged_attention.OP.explain(**problem)["triton"] == reason
    for op in (rms_norm.OP, silu_mul.OP, rope.OP):
        assert op.explain(device="cuda", dtype=torch.float32)["triton"] is None
        wide = op.explain(device="cuda", dtype=torch.float64)["triton"]
        assert wide == "takes bfloat16 or float16 or float32, not torch.float64"
    assert rms_norm.OP.explain(device="cpu", dtype=torch.bfloat16)["triton"] == (
        "runs on cuda, not on cpu"
    )
