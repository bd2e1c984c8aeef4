"""The column loop of GPTQ: the reference against numpy, the Triton kernel against the reference."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantforge_kernels import gptq_block
from torch import Tensor

SHAPES = [(1, 1), (1, 128), (17, 33), (33, 128), (5, 100)]
BITS = [2, 3, 4, 8]

INTERPRETED = """
import sys
import torch
from quantforge_kernels import gptq_block, gptq_block_triton

torch.set_num_threads(1)
for case in torch.load(sys.argv[1], weights_only=True):
    expected = gptq_block.reference(*case)
    found = gptq_block_triton.run(*case)
    for name, a, b in zip(("codes", "errors"), expected, found, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), (name, tuple(case[0].shape), (a != b).sum())
print("equal")
"""


def problem(
    rows: int, columns: int, num_bits: int, symmetric: bool, *, seed: int = 0, device: str = "cpu"
) -> tuple[Any, ...]:
    """Arguments of the op; `work` and `upper` are views into larger tensors, as in GPTQ."""
    generator = torch.Generator().manual_seed(seed)
    work = torch.randn(rows, columns + 9, generator=generator)[:, 3 : 3 + columns]
    x = torch.randn(2 * columns + 2, columns + 5, generator=generator)
    inverse = torch.linalg.inv((x.T @ x / len(x) + 0.1 * torch.eye(columns + 5)).double())
    upper = torch.linalg.cholesky(inverse, upper=True).float()[:columns, :columns]
    half = 2 ** (num_bits - 1)
    scale = (0.5 + torch.rand(rows, columns, generator=generator)) * 2.5 / half
    zero = None
    if not symmetric:
        zero = torch.randint(-half, half, (rows, columns), generator=generator).float().to(device)
    return work.to(device), upper.to(device), scale.to(device), zero, -half, half - 1


def column_loop(
    work: Tensor, upper: Tensor, scale: Tensor, zero: Tensor | None, low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """(codes, errors) in float64, one element at a time over columns."""
    w, u, s = (t.double().numpy().copy() for t in (work, upper, scale))
    z = np.zeros_like(s) if zero is None else zero.double().numpy()
    codes, errors = np.zeros_like(w), np.zeros_like(w)
    for row in range(w.shape[0]):
        for i in range(w.shape[1]):
            code = min(max(round(w[row, i] / s[row, i] + z[row, i]), low), high)
            codes[row, i] = code
            errors[row, i] = (w[row, i] - (code - z[row, i]) * s[row, i]) / u[i, i]
            for j in range(i + 1, w.shape[1]):
                w[row, j] -= errors[row, i] * u[i, j]
    return codes, errors


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (9, 17), (6, 64)])
def test_reference_equals_a_plain_loop(
    rows: int, columns: int, num_bits: int, symmetric: bool
) -> None:
    args = problem(rows, columns, num_bits, symmetric)
    codes, errors = gptq_block.reference(*args)
    expected_codes, expected_errors = column_loop(*args)
    assert np.array_equal(codes.numpy(), expected_codes)
    # each error is a difference of values near 1, rounded to 2^-24 at every earlier column
    np.testing.assert_allclose(errors.numpy(), expected_errors, atol=columns * 2**-22)


def test_reference_leaves_its_inputs_alone() -> None:
    args = problem(4, 16, 4, symmetric=False)
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    gptq_block.reference(*args)
    assert all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(args, before, strict=True)
    )


def test_ties_go_to_even_codes() -> None:
    work = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    codes, _ = gptq_block.reference(work, torch.eye(6), torch.ones(1, 6), None, -8, 7)
    assert codes.tolist() == [[0, 2, 2, 0, -2, -2]]


def test_triton_kernel_equals_the_reference_bit_for_bit_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    cases = [
        problem(1, 1, 2, symmetric=False),
        problem(5, 33, 2, symmetric=True),
        problem(5, 33, 3, symmetric=False),
        problem(1, 17, 8, symmetric=True),
        problem(9, 128, 4, symmetric=False),
    ]
    halves = torch.arange(-20, 20).reshape(4, 10) / 2
    cases.append((halves, torch.eye(10), torch.ones(4, 10), None, -8, 7))
    file = tmp_path / "cases.pt"
    torch.save(cases, file)
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (1000, 128)])
def test_triton_kernel_equals_the_reference_on_the_device(
    rows: int, columns: int, num_bits: int, symmetric: bool
) -> None:
    args = problem(rows, columns, num_bits, symmetric, device="cuda")
    kernel = gptq_block.OP.select(mode="triton", device="cuda", dtype=torch.float32)
    expected, found = gptq_block.reference(*args), kernel.run(*args)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_kernel_says_why_it_refuses() -> None:
    refusals = gptq_block.OP.explain(device="cpu", dtype=torch.float32)
    assert refusals["triton"] == "runs on cuda, not on cpu"
    refusals = gptq_block.OP.explain(device="cuda", dtype=torch.bfloat16)
    assert refusals["triton"] == "takes float32, not torch.bfloat16"
