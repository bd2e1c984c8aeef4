"""GPTQ against an implementation written from the paper, and what it does with bad statistics."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantforge.calibration.capture import InputStatistics
from quantforge.errors import CalibrationError, RecipeError
from quantforge.methods import _factor
from quantforge.methods.base import BlockResult, BlockTask, load_method
from quantforge.models.arch.base import InputGroup
from quantforge.models.arch.llama import ARCH
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import TensorQuant

K = 160  # more than one block of 128 columns, and no multiple of it
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ROWS = (24, 8, 8)
GROUP = InputGroup(name="qkv", members=NAMES, absorber="input_layernorm")
INT4 = TensorQuant(num_bits=4, symmetric=False, granularity="group", group_size=32)


def correlated_inputs(tokens: int = 600, seed: int = 0) -> Tensor:
    """Tokens [T, K] whose channels depend on each other and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator) / K**0.5 + 0.5 * torch.eye(K)
    size = torch.exp(torch.randn(K, generator=generator))
    return torch.randn(tokens, K, generator=generator) @ mix * size


def block_task(
    x_TK: Tensor, quants: dict[str, TensorQuant], *, diagonal: bool = False, seed: int = 1
) -> BlockTask:
    generator = torch.Generator().manual_seed(seed)
    moment = x_TK.T @ x_TK / len(x_TK)
    statistics = InputStatistics(
        second_moment=moment.diagonal().clone() if diagonal else moment,
        mean_abs=x_TK.abs().mean(0),
        absmax=x_TK.abs().amax(0),
        num_tokens=len(x_TK),
    )
    config = ARCH.config_from_hf(
        {
            "vocab_size": 64,
            "hidden_size": K,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "rope_theta": 1e4,
            "hidden_act": "silu",
            "torch_dtype": "float32",
        }
    )
    return BlockTask(
        layer=3,
        config=config,
        groups=(GROUP,),
        weights={
            n: torch.randn(r, K, generator=generator) for n, r in zip(NAMES, ROWS, strict=True)
        },
        biases={},
        norms={"input_layernorm": torch.ones(K)},
        quant=quants,
        statistics={"qkv": statistics},
        scale_dtype=torch.float32,
    )


def run(method: str, task: BlockTask, **options: Any) -> BlockResult:
    chosen = load_method(method)
    return chosen.quantize_block(task, chosen.parse_options(options))


def gptq_from_the_paper(
    weight: np.ndarray, moment: np.ndarray, grid: QuantizedTensor, damping: float, act_order: bool
) -> np.ndarray:
    """Restored weights: algorithm 1 of arXiv 2210.17323 with blocks of one column, in float64."""
    columns = weight.shape[1]
    order = np.argsort(-np.diag(moment), kind="stable") if act_order else np.arange(columns)
    hessian = 2 * moment + damping * np.mean(np.diag(2 * moment)) * np.eye(columns)
    inverse = np.linalg.inv(hessian[np.ix_(order, order)])
    factor = np.linalg.cholesky(inverse).T
    work = weight[:, order].copy()
    low, high = -(2 ** (grid.quant.num_bits - 1)), 2 ** (grid.quant.num_bits - 1) - 1
    size = columns // grid.scale.shape[1]
    restored = np.zeros_like(work)
    for i, column in enumerate(order):
        scale = grid.scale[:, column // size].double().numpy()
        zero = 0 if grid.zero_point is None else grid.zero_point[:, column // size].double().numpy()
        code = np.clip(np.rint(work[:, i] / scale + zero), low, high)
        restored[:, column] = (code - zero) * scale
        error = (work[:, i] - restored[:, column]) / factor[i, i]
        work[:, i + 1 :] -= np.outer(error, factor[i, i + 1 :])
    return restored


def output_error(result: BlockResult) -> dict[str, float]:
    found = {r.name: r.output_error for r in result.reports}
    assert all(e is not None for e in found.values())
    return {n: e for n, e in found.items() if e is not None}


SCHEMES = [
    TensorQuant(num_bits=bits, symmetric=symmetric, granularity=granularity, group_size=size)
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
    for granularity, size in (("group", 32), ("channel", None))
]


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_equals_the_algorithm_of_the_paper(quant: TensorQuant, act_order: bool) -> None:
    task = block_task(correlated_inputs(), dict.fromkeys(NAMES, quant))
    result = run("gptq", task, act_order=act_order, clip=False)
    moment = task.statistics["qkv"].second_moment.double().numpy()
    for name in NAMES:
        weight = task.weights[name]
        grid = quantize(weight, quant)
        expected = gptq_from_the_paper(weight.double().numpy(), moment, grid, 0.01, act_order)
        ours = result.qtensors[name].dequantize(torch.float32).double().numpy()
        # float32 may tip a value on the edge of two codes, and with it the rest of its row
        same = np.isclose(ours, expected, rtol=1e-5, atol=1e-6).all(axis=1)
        assert same.mean() >= 0.8
        loss = [
            np.trace((w - weight.numpy()) @ moment @ (w - weight.numpy()).T)
            for w in (ours, expected)
        ]
        assert loss[0] == pytest.approx(loss[1], rel=0.02)


@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_codes_lie_in_the_range_of_their_bits(quant: TensorQuant) -> None:
    result = run("gptq", block_task(correlated_inputs(), dict.fromkeys(NAMES, quant)))
    half = 2 ** (quant.num_bits - 1)
    for name, rows in zip(NAMES, ROWS, strict=True):
        codes = result.qtensors[name].codes
        assert codes.shape == (rows, K)
        assert codes.dtype == torch.int8
        assert -half <= int(codes.min())
        assert int(codes.max()) < half


@pytest.mark.parametrize("method", ["gptq", "awq_gptq"])
@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_output_error_is_below_that_of_rounding_to_nearest(method: str, quant: TensorQuant) -> None:
    quants = dict.fromkeys(NAMES, quant)
    nearest = output_error(run("rtn", block_task(correlated_inputs(), quants)))
    ours = output_error(run(method, block_task(correlated_inputs(), quants)))
    assert all(ours[n] < nearest[n] for n in NAMES)


def test_awq_then_gptq_is_below_either() -> None:
    quants = dict.fromkeys(NAMES, INT4)
    total = {
        method: sum(output_error(run(method, block_task(correlated_inputs(), quants))).values())
        for method in ("awq", "gptq", "awq_gptq")
    }
    assert total["awq_gptq"] < min(total["awq"], total["gptq"])


@pytest.mark.parametrize("method", ["gptq", "awq_gptq"])
def test_reported_output_error_is_that_of_the_outputs(method: str) -> None:
    x = correlated_inputs()
    task = block_task(x, dict.fromkeys(NAMES, INT4))
    before = {n: w.clone() for n, w in task.weights.items()}
    result = run(method, task)
    scaled_x = x * task.norms["input_layernorm"]
    for report in result.reports:
        wanted = x @ before[report.name].T
        got = scaled_x @ result.qtensors[report.name].dequantize(torch.float32).T
        error = float((got - wanted).square().sum() / wanted.square().sum())
        assert report.output_error == pytest.approx(error, rel=1e-3)


def test_a_shared_second_moment_gives_what_each_linear_gets_alone() -> None:
    together = run("gptq", block_task(correlated_inputs(), dict.fromkeys(NAMES, INT4)))
    for name in NAMES:
        alone = run("gptq", block_task(correlated_inputs(), {name: INT4}))
        assert set(alone.qtensors) == {name}
        assert torch.equal(alone.qtensors[name].scale, together.qtensors[name].scale)
        same = alone.qtensors[name].codes == together.qtensors[name].codes
        assert float(same.float().mean()) > 0.98  # matrix products of other sizes sum otherwise


def test_linears_of_one_input_may_have_different_schemes() -> None:
    quants = dict(zip(NAMES, (SCHEMES[0], INT4, SCHEMES[-1]), strict=True))
    result = run("gptq", block_task(correlated_inputs(), quants))
    assert {n: q.quant for n, q in result.qtensors.items()} == quants
    assert tuple(result.qtensors) == NAMES


@pytest.mark.parametrize("method", ["gptq", "awq_gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_of_dead_inputs_become_zero(method: str, symmetric: bool) -> None:
    x = correlated_inputs()
    dead = torch.tensor([0, 31, 130])
    x[:, dead] = 0.0
    quant = TensorQuant(num_bits=4, symmetric=symmetric, granularity="group", group_size=32)
    result = run(method, block_task(x, dict.fromkeys(NAMES, quant)))
    for report in result.reports:
        assert report.notes["dead_columns"] == 3
        assert not result.qtensors[report.name].dequantize()[:, dead].any()


@pytest.mark.parametrize("method", ["gptq", "awq_gptq"])
def test_fewer_tokens_than_inputs_are_enough(method: str) -> None:
    quants = dict.fromkeys(NAMES, INT4)
    nearest = output_error(run("rtn", block_task(correlated_inputs(tokens=20), quants)))
    result = run(method, block_task(correlated_inputs(tokens=20), quants))
    assert all(error < nearest[n] for n, error in output_error(result).items())
    assert all("fallback" not in r.notes for r in result.reports)


def indefinite(eigenvalue: float) -> Callable[[BlockTask], None]:
    """Gives the second moment one eigenvalue below zero, as a share of the mean diagonal."""

    def change(task: BlockTask) -> None:
        moment = torch.eye(K)
        moment[:2, :2] = torch.tensor([[1.0, 1.0 - eigenvalue], [1.0 - eigenvalue, 1.0]])
        task.statistics["qkv"].second_moment.copy_(moment)

    return change


def test_damping_is_raised_until_the_factorisation_succeeds() -> None:
    task = block_task(correlated_inputs(), dict.fromkeys(NAMES, INT4))
    indefinite(-0.05)(task)
    result = run("gptq", task)
    for report in result.reports:
        assert report.method == "gptq"
        assert report.notes["damping"] == 0.1
        assert "(0.01, 0.03)" in report.notes["damping_reason"]


def test_float64_is_tried_where_float32_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.cholesky_ex

    def fail_in_float32(x: Tensor) -> Any:
        factor, info = real(x)
        return factor, torch.ones_like(info) if x.dtype == torch.float32 else info

    monkeypatch.setattr(_factor.torch.linalg, "cholesky_ex", fail_in_float32)
    result = run("gptq", block_task(correlated_inputs(), dict.fromkeys(NAMES, INT4)))
    notes = result.reports[0].notes
    assert notes["factorised_in"] == "float64"
    assert notes["damping"] == 0.01
    assert "float32" in notes["damping_reason"]


def test_rounding_to_nearest_is_the_last_resort_and_says_so() -> None:
    task = block_task(correlated_inputs(), dict.fromkeys(NAMES, INT4))
    indefinite(-5.0)(task)
    result = run("gptq", task, clip=False)
    for report in result.reports:
        assert report.method == "rtn"
        assert "no Cholesky factor" in report.notes["fallback"]
        expected = quantize(task.weights[report.name], INT4)
        assert torch.equal(result.qtensors[report.name].codes, expected.codes)


def test_inputs_that_are_all_zero_keep_their_weights() -> None:
    task = block_task(torch.zeros(10, K), dict.fromkeys(NAMES, INT4))
    result = run("gptq", task, clip=False)
    for report in result.reports:
        assert report.method == "rtn"
        assert "zero" in report.notes["fallback"]
        expected = quantize(task.weights[report.name], INT4)
        assert torch.equal(result.qtensors[report.name].codes, expected.codes)


@pytest.mark.parametrize("method", ["gptq", "awq_gptq"])
def test_diagonal_statistics_are_refused(method: str) -> None:
    task = block_task(correlated_inputs(), dict.fromkeys(NAMES, INT4), diagonal=True)
    with pytest.raises(CalibrationError, match=r"only its diagonal.*--statistics gram"):
        run(method, task)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_are_refused(value: float) -> None:
    task = block_task(correlated_inputs(), dict.fromkeys(NAMES, INT4))
    task.statistics["qkv"].second_moment[5, 7] = value
    with pytest.raises(CalibrationError, match="qkv of layer 3"):
        run("gptq", task)


@pytest.mark.parametrize("method", ["gptq", "awq_gptq"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("damping", 0.0),
        ("damping", 2),
        ("damping", float("nan")),
        ("damping", "high"),
        ("damping", True),
        ("act_order", "yes"),
        ("clip", 1),
    ],
)
def test_impossible_options_are_refused(method: str, name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=name):
        load_method(method).parse_options({name: value})


def test_the_second_run_gives_the_same_codes() -> None:
    first, second = (
        run("awq_gptq", block_task(correlated_inputs(), dict.fromkeys(NAMES, INT4)))
        for _ in range(2)
    )
    assert all(torch.equal(first.qtensors[n].codes, second.qtensors[n].codes) for n in NAMES)
