"""Who may multiply in TF32, and that the setting of the program is put back."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantforge.errors import UsageError
from quantforge.methods import _factor
from quantforge.methods.base import output_power
from quantforge.precision import ieee_products, tf32_allowed, tf32_products

SETTINGS = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = SETTINGS.fp32_precision
    yield
    SETTINGS.fp32_precision = before


@pytest.mark.parametrize("before", ["ieee", "tf32"])
def test_the_setting_is_put_back_behind_an_error(before: str) -> None:
    SETTINGS.fp32_precision = before
    seen: list[str] = []

    def fail() -> None:
        with tf32_products():
            seen.append(SETTINGS.fp32_precision)
            with ieee_products():
                seen.append(SETTINGS.fp32_precision)
            seen.append(SETTINGS.fp32_precision)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["tf32", "ieee", "tf32"]
    assert SETTINGS.fp32_precision == before


def test_the_environment_forbids_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTFORGE_TF32", "0")
    SETTINGS.fp32_precision = "tf32"
    with tf32_products():
        assert SETTINGS.fp32_precision == "ieee"
    monkeypatch.setenv("QUANTFORGE_TF32", "no")
    with pytest.raises(UsageError, match="QUANTFORGE_TF32='no' is not one of 0, 1"):
        tf32_allowed()


def test_a_factorisation_is_ieee_even_in_a_program_that_uses_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    real = torch.linalg.solve_triangular

    def solve(*arguments: Tensor, **options: Tensor) -> Tensor:
        seen.append(SETTINGS.fp32_precision)
        return real(*arguments, **options)

    monkeypatch.setattr(_factor.torch.linalg, "solve_triangular", solve)
    SETTINGS.fp32_precision = "tf32"
    _factor.factorise(torch.eye(8), damping=0.01, act_order=True)
    assert seen == ["ieee"]


@pytest.mark.gpu
def test_tf32_errors_are_within_its_precision_of_the_exact_ones() -> None:
    """Factors keep 10 bits of mantissa: relative error at most 2^-9 for a sum of squares."""
    generator = torch.Generator().manual_seed(0)
    delta = torch.randn(512, 2048, generator=generator, dtype=torch.float64)
    x = torch.randn(4096, 2048, generator=generator, dtype=torch.float64)
    exact = float((x @ delta.T).square().sum() / 4096)
    moment = (x.T @ x / 4096).float().cuda()
    assert float(output_power(delta.float().cuda(), moment)) == pytest.approx(exact, rel=2**-9)
