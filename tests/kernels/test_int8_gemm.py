"""The int8 product against integer sums in int64, and its rounding against compressed-tensors.

Legend: M tokens, N out features, K in features.
"""

import itertools

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from quantforge_kernels import int8_gemm
from torch import Tensor

SHAPES = ((1, 3, 17), (5, 4, 33), (17, 8, 1024), (3, 33, 1025), (2, 5, 3000))
STATIC = [None, torch.tensor([0.05])]
STATIC_NAMES = ["token", "static"]


def operands(
    m: int, n: int, k: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs with outlying columns, codes of the whole range, scales and a bias."""
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator)
    x[:, :: max(1, k // 3)] *= 30
    codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, 1, generator=generator) / 100 + 1e-3
    bias = torch.randn(n, generator=generator)
    return x.to(dtype), codes, scale.to(dtype), bias.to(dtype)


def arguments(strategy: str) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, type="int", strategy=strategy, dynamic=strategy == "token")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("input_scale", STATIC, ids=STATIC_NAMES)
def test_the_reference_is_scales_times_the_sum_of_integers(
    shape: tuple[int, int, int], input_scale: Tensor | None
) -> None:
    x, codes, scale, bias = operands(*shape)
    step = x.abs().amax(1, keepdim=True) / 127.5 if input_scale is None else input_scale
    inputs = (x / step).round().clamp(-128, 127).to(torch.int64)
    sums = inputs @ codes.to(torch.int64).T
    want = sums.double() * step.double() * scale.double().T + bias.double()
    got = int8_gemm.reference(x, codes, scale, input_scale, bias)
    assert float((got.double() - want).norm() / want.norm()) <= 1e-6


@pytest.mark.parametrize("input_scale", [None, torch.tensor([0.3])], ids=STATIC_NAMES)
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(input_scale: Tensor | None) -> None:
    x, *_ = operands(9, 1, 256)
    x[3] = 0
    if input_scale is None:
        token = arguments("token")
        scale, zero = compute_dynamic_scales_and_zp(x.unsqueeze(0), token, torch.nn.Identity())
        want = fake_quantize(x.unsqueeze(0), scale, zero, token)[0]
    else:
        want = fake_quantize(x, input_scale, torch.zeros(1), arguments("tensor"))
    codes, step = int8_gemm.quantize_activations(x, input_scale)
    assert codes.dtype == torch.int8
    assert torch.equal(codes.float() * step, want)


def test_halfway_goes_to_the_even_code_and_what_is_too_large_to_the_last() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 500.0, -500.0, -128.4]])
    codes, _ = int8_gemm.quantize_activations(x, torch.ones(1))
    assert codes.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("input_scale", STATIC, ids=STATIC_NAMES)
def test_codes_kept_as_float_change_no_bit(
    shape: tuple[int, int, int], dtype: torch.dtype, input_scale: Tensor | None
) -> None:
    x, codes, scale, bias = operands(*shape, dtype)
    chosen = int8_gemm.OP.select(
        mode="auto",
        device="cpu",
        dtype=dtype,
        shape=shape[1:],
        static_input=input_scale is not None,
    )
    assert chosen.name == "float-codes"
    assert chosen.repack is not None
    kept = chosen.repack(codes, scale, input_scale, dtype)
    for b in (bias, None):
        want = int8_gemm.reference(x, codes, scale, input_scale, b)
        assert want.dtype == dtype
        assert torch.equal(chosen.run(x, *kept, b), want)


@pytest.mark.parametrize("width", [1024, 1025])
def test_the_largest_sums_are_exact(width: int) -> None:
    ends = (-128, 127)
    for a, b in itertools.product(ends, ends):
        x = torch.full((1, width), float(a))
        codes = torch.full((2, width), b, dtype=torch.int8)
        one = torch.ones(1)
        kept = int8_gemm.OP.candidates[0].repack(codes, torch.ones(2, 1), one, torch.float32)  # type: ignore[misc]
        got = int8_gemm.OP.candidates[0].run(x, *kept, None)
        assert got.tolist() == [[float(a * b * width)] * 2]


def test_a_token_rounds_the_same_in_any_batch() -> None:
    x, *_ = operands(7, 12, 64)
    together, _ = int8_gemm.quantize_activations(x, None)
    alone, _ = int8_gemm.quantize_activations(x[4:5], None)
    assert torch.equal(together[4:5], alone)


def test_no_tokens_give_no_rows() -> None:
    x, codes, scale, bias = operands(1, 12, 64)
    assert int8_gemm.reference(x[:0], codes, scale, None, bias).shape == (0, 12)


def test_codes_are_kept_as_float_on_cpus_only() -> None:
    problem = {"device": "cuda", "dtype": torch.bfloat16, "shape": (64, 64), "static_input": False}
    assert int8_gemm.OP.select(mode="auto", **problem).name == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("input_scale", STATIC, ids=STATIC_NAMES)
def test_the_reference_on_a_gpu_equals_the_cpu(input_scale: Tensor | None) -> None:
    x, codes, scale, bias = operands(5, 200, 256)
    want = int8_gemm.reference(x, codes, scale, input_scale, bias)
    moved = (None if t is None else t.cuda() for t in (x, codes, scale, input_scale, bias))
    got = int8_gemm.reference(*moved).cpu()  # type: ignore[arg-type]
    assert float((got - want).norm() / want.norm()) <= 1e-5
