"""E4M3 rounding against an exact list of its values and torch's casts; the op against formulas.

Legend: M tokens, N out features, K in features.
"""

import itertools
from fractions import Fraction

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from quantforge_kernels import fp8_gemm
from quantforge_kernels.rounding import round_from_fp8, round_to_fp8
from torch import Tensor

ONE = torch.ones(())
CHANNEL, BLOCK = None, (128, 128)


def exact_values() -> dict[int, Fraction]:
    """Code -> value of every positive E4M3 number: sign, 4 exponent bits (bias 7), 3 of mantissa;
    exponent 0 is subnormal, 0x7f is NaN."""
    values = {}
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        whole = mantissa if exponent == 0 else 8 + mantissa
        values[code] = whole * Fraction(2) ** (max(exponent, 1) - 10)
    return values


def nearest(x: Fraction) -> int:
    """The code of the value nearest to `x` >= 0; between two, the one with an even code."""
    values = exact_values()
    return min(values, key=lambda code: (abs(values[code] - x), code & 1))


def code_of(x: float) -> int:
    return int(round_to_fp8(torch.tensor([x]), ONE).view(torch.uint8))


def test_every_code_is_its_exact_value() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = round_from_fp8(codes, ONE)
    assert [Fraction(float(v)) for v in values] == list(exact_values().values())
    assert torch.equal(round_to_fp8(values, ONE).view(torch.uint8), codes.view(torch.uint8))
    negative = round_to_fp8(-values, ONE).view(torch.uint8)
    assert torch.equal(negative, codes.view(torch.uint8) | 0x80)


def test_halfway_between_neighbours_goes_to_the_even_code_and_a_hair_beyond_to_the_nearer() -> None:
    values = list(exact_values().values())
    for low, high in itertools.pairwise(values):
        middle = float((low + high) / 2)
        around = torch.tensor([middle, torch.inf, -torch.inf])
        above = float(torch.nextafter(around[0], around[1]))
        below = float(torch.nextafter(around[0], around[2]))
        for x in (below, middle, above):
            assert code_of(x) == nearest(Fraction(x)), x


@pytest.mark.parametrize("x", [448.0, 460.0, 464.0, 465.0, 1e9, float("inf")])
def test_what_is_too_large_becomes_the_largest_value_and_never_nan(x: float) -> None:
    found = round_to_fp8(torch.tensor([x, -x]), ONE).float()
    assert found.tolist() == [448.0, -448.0]


def test_nan_stays_nan() -> None:
    assert bool(round_to_fp8(torch.tensor([float("nan")]), ONE).isnan().all())


def test_rounding_equals_torchs_cast_within_the_range() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-12, 2, 100_000)
    found = round_to_fp8(x, ONE)
    assert torch.equal(found.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def operands(
    m: int, n: int, k: int, block: tuple[int, int] | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs with outlying columns, codes, scales (one a row, or one a block) and a bias."""
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator)
    x[:, :: max(1, k // 3)] *= 30
    codes = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448)
    blocks = (n, 1) if block is None else (-(-n // block[0]), -(-k // block[1]))
    scale = torch.rand(blocks, generator=generator) / 100 + 1e-3
    bias = torch.randn(n, generator=generator)
    return x.to(dtype), codes.to(torch.float8_e4m3fn), scale.to(dtype), bias.to(dtype)


def by_loops(
    x: Tensor, codes: Tensor, scale: Tensor, block: tuple[int, int] | None, group: int | None
) -> Tensor:
    """The product by sums over codes, the scales applied outside: in float64, run by run."""
    n, k = codes.shape
    width = k if group is None else group
    x = x.double()
    out = torch.zeros(len(x), n, dtype=torch.float64)
    for start in range(0, k, width):
        part = x[:, start : start + width]
        if group is not None:
            step = (part.abs().amax(1, keepdim=True).float() / 448).double()
            step[step == 0] = 1
            ratio = (part.float() / step.float()).clamp(-448, 448)
            part = ratio.to(torch.float8_e4m3fn).double() * step
        for row in range(n):
            for i in range(part.shape[1]):
                column = start + i
                at = (row, 0) if block is None else (row // block[0], column // block[1])
                out[:, row] += part[:, i] * codes[row, column].double() * scale[at].double()
    return out


@pytest.mark.parametrize("shape", [(1, 3, 17), (5, 4, 33), (3, 1, 16)], ids=str)
@pytest.mark.parametrize("block", [CHANNEL, (2, 8)], ids=["channel", "block"])
@pytest.mark.parametrize("group", [None, "token", 8], ids=str)
def test_the_reference_is_the_formula(
    shape: tuple[int, int, int], block: tuple[int, int] | None, group: int | str | None
) -> None:
    width = shape[2] if group == "token" else group
    assert width is None or isinstance(width, int)
    x, codes, scale, bias = operands(*shape, block)
    got = fp8_gemm.reference(x, codes, scale, block, width, None, bias)
    want = by_loops(x, codes, scale, block, width) + bias.double()
    assert float((got.double() - want).norm() / want.norm()) <= 1e-6


@pytest.mark.parametrize("group", [128, 256], ids=["group", "token"])
def test_activations_are_rounded_as_compressed_tensors_rounds_them(group: int) -> None:
    x, *_ = operands(9, 1, 256, CHANNEL)
    x[3] = 0
    strategy = {"strategy": "token"} if group == 256 else {"strategy": "group", "group_size": 128}
    arguments = QuantizationArgs(num_bits=8, type="float", dynamic=True, **strategy)
    value = x.unsqueeze(0)
    scale, zero = compute_dynamic_scales_and_zp(value, arguments, torch.nn.Identity())
    want = fake_quantize(value, scale, zero, arguments)[0]
    codes, ours = fp8_gemm.quantize_activations(x, group)
    got = round_from_fp8(codes.reshape(9, -1, group), ours.unsqueeze(-1)).reshape(9, 256)
    assert torch.equal(got, want)


@pytest.mark.parametrize("step", [0.3, 0.001], ids=["all fits", "most is clamped"])
def test_a_static_scale_rounds_inputs_as_compressed_tensors_does(step: float) -> None:
    x, codes, scale, bias = operands(9, 12, 64, CHANNEL)
    input_scale = torch.tensor([step])
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    rounded = fake_quantize(x, input_scale, torch.zeros(1), arguments)
    want = rounded.double() @ (codes.double() * scale.double()).T + bias.double()
    got = fp8_gemm.reference(x, codes, scale, None, None, input_scale, bias)
    assert float((got.double() - want).norm() / want.norm()) <= 1e-6
    assert float(rounded.abs().max()) <= 448 * step * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [CHANNEL, BLOCK], ids=["channel", "block"])
@pytest.mark.parametrize("group", [None, 300, 128, "static"], ids=str)
def test_dequantizing_once_changes_no_bit(
    dtype: torch.dtype, block: tuple[int, int] | None, group: int | str | None
) -> None:
    inputs = (None, torch.tensor([0.02], dtype=dtype)) if group == "static" else (group, None)
    x, codes, scale, bias = operands(5, 200, 300, block, dtype)
    problem = {"device": "cpu", "dtype": dtype, "shape": (200, 300)}
    once = fp8_gemm.OP.select(mode="auto", **problem)
    assert once.name == "dequantize-once"
    assert once.repack is not None
    kept = once.repack(codes, scale, block, *inputs, dtype)
    want = fp8_gemm.reference(x, codes, scale, block, *inputs, bias)
    assert want.dtype == dtype
    assert torch.equal(once.run(x, *kept, bias), want)


def test_a_token_rounds_the_same_in_any_batch() -> None:
    x, *_ = operands(7, 12, 64, CHANNEL)
    together, _ = fp8_gemm.quantize_activations(x, 64)
    alone, _ = fp8_gemm.quantize_activations(x[4:5], 64)
    assert torch.equal(together[4:5].view(torch.uint8), alone.view(torch.uint8))


def test_no_tokens_give_no_rows() -> None:
    x, codes, scale, bias = operands(1, 12, 64, CHANNEL)
    assert fp8_gemm.reference(x[:0], codes, scale, None, 64, None, bias).shape == (0, 12)


def test_dequantizing_once_is_for_cpus_only() -> None:
    problem = {"device": "cuda", "dtype": torch.bfloat16, "shape": (64, 64)}
    assert fp8_gemm.OP.select(mode="auto", **problem).name == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("block", [CHANNEL, BLOCK], ids=["channel", "block"])
def test_the_reference_on_a_gpu_equals_the_cpu(block: tuple[int, int] | None) -> None:
    x, codes, scale, bias = operands(5, 200, 256, block)
    want = fp8_gemm.reference(x, codes, scale, block, 128, None, bias)
    moved = [t.cuda() for t in (x, codes, scale)]
    got = fp8_gemm.reference(*moved, block, 128, None, bias.cuda()).cpu()
    assert float((got - want).norm() / want.norm()) <= 1e-5
