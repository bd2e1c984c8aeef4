"""Products with int4 weights: the packed layout and the Triton kernels against float64 products."""

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantforge_kernels import w4a16
from quantforge_kernels.w4a16_configs import DEQUANTIZE, Config, by_rule, choose, read_table
from quantforge_kernels.w4a16_layout import pack
from torch import Tensor

ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""An output is rounded once, to nearest: by at most this part of itself. So the relative RMS error
stays below it; float32 sums of some thousand products add thousands of times less."""

INTERPRETED = """
import sys
import torch
from quantforge_kernels import w4a16_triton
from quantforge_kernels.w4a16_configs import Config
from quantforge_kernels.w4a16_layout import pack

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
assert torch.isnan(torch.empty(3)).all()  # outputs and workspaces begin as NaN
found = []
for config, x, codes, scale, zero, bias in torch.load(sys.argv[1], weights_only=True):
    packed = pack(codes, scale, zero, x.dtype)
    y = w4a16_triton.multiply(x, packed, bias, Config(**config))
    assert not packed.counters.any()
    found.append((y, w4a16_triton.dequantize(packed)))
torch.save(found, sys.argv[2])
"""


def problem(
    m: int,
    n: int,
    k: int,
    group: int | None,
    symmetric: bool,
    *,
    dtype: torch.dtype = torch.float16,
    scale_dtype: torch.dtype | None = None,
    bias: bool = False,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """(x, codes, scale, zero_point, bias); rows of x lie apart."""
    generator = torch.Generator().manual_seed(m + n + k)
    groups = k // (group or k)
    codes = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
    scale = (0.001 + 0.02 * torch.rand(n, groups, generator=generator)).to(scale_dtype or dtype)
    zero = None
    if not symmetric:
        zero = torch.randint(-8, 8, (n, groups), generator=generator, dtype=torch.int8)
    x = torch.randn(m, k + 16, generator=generator).to(dtype)
    b = torch.randn(n, generator=generator).to(dtype) if bias else None
    parts = (x, codes, scale, zero, b)
    x, *rest = (None if t is None else t.to(device) for t in parts)
    assert x is not None
    return (x[:, :k], *rest)


def exact_weight(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """``(codes - zero) * scale`` [N, K] in float64, where it is exact."""
    per_group = codes.shape[1] // scale.shape[1]
    centred = codes.double()
    if zero is not None:
        centred = centred - zero.double().repeat_interleave(per_group, dim=1)
    return centred * scale.double().repeat_interleave(per_group, dim=1)


def relative_error(
    y: Tensor, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None
) -> float:
    expected = x.double() @ exact_weight(codes, scale, zero).T
    if bias is not None:
        expected = expected + bias.double()
    assert y.shape == expected.shape
    return ((y.double() - expected).norm() / expected.norm()).item()


def unpacked(words: Tensor, n: int, k: int) -> Tensor:
    """Codes read off the words, place by place, as the layout's docstring describes them."""
    codes = torch.zeros(n, k, dtype=torch.int8)
    for tile_n in range(words.shape[0]):
        for tile_k in range(words.shape[1]):
            for place, word in enumerate(words[tile_n, tile_k].tolist()):
                r3, r54, r210 = place >> 9, place >> 7 & 3, place >> 4 & 7
                row = 64 * tile_n + 16 * r54 + 8 * r3 + r210
                j = (place & 3) << 2 | (place >> 2 & 3)
                for nibble in range(8):
                    column = 128 * tile_k + 32 * (nibble % 4) + 2 * j + nibble // 4
                    if row < n and column < k:
                        codes[row, column] = (word >> 4 * nibble & 15) - 8
    return codes


@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 96), (130, 320)])
def test_words_hold_the_codes_where_the_layout_says(n: int, k: int) -> None:
    _, codes, scale, _, _ = problem(1, n, k, 32, symmetric=True)
    packed = pack(codes, scale, None, torch.float16)
    assert torch.equal(unpacked(packed.words, n, k), codes)
    assert packed.words.shape[0] % 2 == 0
    assert packed.words.shape[1] % 2 == 0


def test_packing_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, codes, scale, _, _ = problem(1, 400, 256, 64, symmetric=True)
    whole = pack(codes, scale, None, torch.float16)
    monkeypatch.setattr("quantforge_kernels.w4a16_layout.ROWS_AT_A_TIME", 128)
    assert torch.equal(pack(codes, scale, None, torch.float16).words, whole.words)


SMALL = Config(block_m=16)
INTERPRETED_CASES: list[tuple[Config, tuple[Any, ...], dict[str, Any]]] = [
    (SMALL, (1, 64, 256, 128, True), {}),
    (SMALL, (3, 40, 64, 32, False), {"bias": True}),
    (
        Config(block_m=16, tiles=2, split=2),
        (3, 72, 576, 64, False),
        {"bias": True},
    ),
    (
        Config(block_m=32, split=3),
        (17, 130, 512, 32, True),
        {"scale_dtype": torch.float32},
    ),
    (
        Config(block_m=16, block_n=128, num_warps=8, tiles=2),
        (33, 200, 384, 128, False),
        {"scale_dtype": torch.bfloat16},
    ),
    (
        Config(block_m=16, block_n=128, split=2),
        (5, 128, 512, 256, False),
        {"scale_dtype": torch.float32},
    ),
    (Config(block_m=16, split=8), (5, 100, 300, None, True), {"bias": True}),
    (Config(block_m=16, tiles=2), (2, 65, 300, None, False), {}),
]


def test_kernels_equal_the_float64_product_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    cases = [(asdict(c), *problem(*size, **more)) for c, size, more in INTERPRETED_CASES]
    torch.save(cases, tmp_path / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(tmp_path / "cases.pt"), str(tmp_path / "found.pt")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    for (_, x, codes, scale, zero, bias), (y, weight) in zip(cases, found, strict=True):
        assert relative_error(y, x, codes, scale, zero, bias) < ROUNDOFF[torch.float16]
        # (code - zero) * scale is exact in float32: at most 4 + 24 bits for these values
        assert torch.equal(weight, exact_weight(codes, scale, zero).float().half())


def test_kernel_says_why_it_refuses() -> None:
    def reason(**changes: Any) -> str | None:
        problem = {
            "device": "cuda",
            "dtype": torch.bfloat16,
            "shape": (64, 512),
            "num_bits": 4,
            "symmetric": True,
            "group_size": 128,
        }
        return w4a16.OP.explain(**problem | changes)["triton"]

    assert reason(device="cpu") == "runs on cuda, not on cpu"
    assert reason(dtype=torch.float32) == "takes bfloat16 and float16, not torch.float32"
    assert reason(num_bits=8) == "takes 4 bits, not 8"
    assert reason(group_size=96) == "takes groups of 32, 64 or a multiple of 128, not of 96"
    assert reason(shape=(64, 320)) == "groups of 128 do not divide K = 320"


def test_packing_refuses_groups_that_the_kernel_cannot_read() -> None:
    codes, scale = torch.zeros(4, 96, dtype=torch.int8), torch.ones(4, 6)
    with pytest.raises(ValueError, match="not of 16"):
        pack(codes, scale, None, torch.float16)


def test_measured_configs_serve_every_smaller_m() -> None:
    def measured(m: int, split: int) -> dict[str, Any]:
        config = asdict(Config(block_m=16, split=split))
        return {"N": 64, "K": 512, "group": 128, "M": m, "us": 1.0, "config": config}

    table = read_table({"records": [measured(1, 4), measured(16, 2)]})
    assert table[64, 512, 128][1].split == 4
    assert table[64, 512, 128][16].split == 2


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 100, 500, 513, 10_000])
def test_rule_gives_every_m_a_config(m: int, capability: int) -> None:
    config = by_rule(m, (4096, 4096), 132, capability)
    assert config == choose(m, (4096, 4096), 128, "no such device", 132, capability)
    if config != DEQUANTIZE:
        assert config.split == 1 or -(-m // config.block_m) <= 8


GPU_SHAPES = [(64, 256), (4096, 4096), (1000, 576), (200, 320)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize(("n", "k"), GPU_SHAPES)
def test_kernel_equals_the_float64_product_on_the_device(
    n: int, k: int, group: int | None, symmetric: bool, dtype: torch.dtype
) -> None:
    if group is not None and k % group:
        group = 32
    for m in (1, 3, 17, 33, 64, 100, 300, 600):
        x, *weight, bias = problem(m, n, k, group, symmetric, dtype=dtype, bias=True, device="cuda")
        kernel = w4a16.OP.select(
            mode="triton",
            device="cuda",
            dtype=dtype,
            shape=(n, k),
            num_bits=4,
            symmetric=symmetric,
            group_size=group,
        )
        assert kernel.repack is not None
        operands = kernel.repack(*weight, dtype)
        y = kernel.run(x, *operands, bias)
        # beyond SMALLEST_DEQUANTIZED_M the weight is rounded, too, and its errors average out
        assert relative_error(y, x, *weight, bias) < ROUNDOFF[dtype], m
        assert torch.equal(kernel.run(x.unsqueeze(0), *operands, bias)[0], y)


CONFIGS = [
    Config(block_m=bm, block_n=bn, num_warps=w, tiles=tiles, split=split, num_stages=stages)
    for bm, bn, w in ((16, 64, 4), (16, 128, 4), (32, 128, 8), (64, 64, 4), (128, 128, 8))
    for tiles in ((1, 2) if bm < 64 else (1,))
    for split, stages in ((1, 3), (3, 2), (8, 3))
]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_way_to_cut_gives_the_product_without_unwritten_outputs(config: Config) -> None:
    from quantforge_kernels import w4a16_triton

    dependent = replace(config, pdl=True, prefetch=4)
    for way in (config, dependent):
        x, codes, scale, zero, _ = problem(
            21, 700, 2048, 128, symmetric=False, dtype=torch.bfloat16, device="cuda"
        )
        packed = pack(codes, scale, zero, torch.bfloat16)
        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        try:
            y = w4a16_triton.multiply(x, packed, None, way)
            again = [w4a16_triton.multiply(x, packed, None, way) for _ in range(10)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert relative_error(y, x, codes, scale, zero, None) < ROUNDOFF[torch.bfloat16]
        assert all(torch.equal(y, other) for other in again)
        assert not packed.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("m", [1, 17])
def test_a_captured_graph_gives_what_the_kernel_gives(m: int, pdl: bool) -> None:
    from quantforge_kernels import w4a16_triton

    config = Config(block_m=32, split=4, pdl=pdl, prefetch=4 if pdl else 0)
    x, codes, scale, _, bias = problem(
        m, 512, 2048, 128, symmetric=True, dtype=torch.bfloat16, bias=True, device="cuda"
    )
    packed = pack(codes, scale, None, torch.bfloat16)
    square = pack(codes[:, :512].contiguous(), scale[:, :4].contiguous(), None, torch.bfloat16)

    def chain(x: Tensor) -> Tensor:
        y = w4a16_triton.multiply(x, packed, bias, config)
        return w4a16_triton.multiply(y, square, None, config)

    x = x.contiguous()
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for seed in range(5):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        y.fill_(float("nan"))
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, chain(x))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantized_weight_is_the_references_bit_for_bit(
    group: int | None, symmetric: bool
) -> None:
    from quantforge_kernels import w4a16_triton

    for dtype in (torch.bfloat16, torch.float16):
        _, *weight, _ = problem(1, 300, 640, group, symmetric, dtype=dtype, device="cuda")
        found = w4a16_triton.dequantize(pack(*weight, dtype))
        assert torch.equal(found, w4a16.dequantize(*weight, dtype))
