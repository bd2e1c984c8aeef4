"""AutoRound against an implementation by autograd, and the laws of what it may do to a weight."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.calibration.capture import InputStatistics
from quantforge.errors import CalibrationError, RecipeError
from quantforge.methods import base
from quantforge.methods.base import BlockResult, BlockTask, load_method
from quantforge.models.arch.base import InputGroup
from quantforge.models.arch.llama import ARCH
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import TensorQuant

K = 96
ROWS = {"self_attn.q_proj": 24, "self_attn.k_proj": 12, "self_attn.v_proj": 12}
GROUP = InputGroup(name="qkv", members=tuple(ROWS), absorber="input_layernorm")
SCHEMES = [
    TensorQuant(num_bits=bits, symmetric=symmetric, granularity=granularity, group_size=size)
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
    for granularity, size in (("group", 32), ("channel", None))
]
INT4 = TensorQuant(num_bits=4, symmetric=False, granularity="group", group_size=32)


def block_task(
    quant: TensorQuant, *, diagonal: bool = False, scale_dtype: torch.dtype = torch.float32
) -> BlockTask:
    """A block whose input channels depend on each other and differ in size."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(K, K, generator=generator) / K**0.5 + 0.5 * torch.eye(K)
    size = torch.exp(torch.randn(K, generator=generator))
    x_TK = torch.randn(400, K, generator=generator) @ mix * size
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
        weights={name: torch.randn(rows, K, generator=generator) for name, rows in ROWS.items()},
        biases={},
        norms={"input_layernorm": torch.ones(K)},
        quant=dict.fromkeys(ROWS, quant),
        statistics={"qkv": statistics},
        scale_dtype=scale_dtype,
    )


def run(method: str, task: BlockTask, **options: Any) -> BlockResult:
    chosen = load_method(method)
    return chosen.quantize_block(task, chosen.parse_options(options))


def row_losses(task: BlockTask, result: BlockResult) -> dict[str, Tensor]:
    """``e G e.T`` of each row, by name, in float64."""
    moment = task.statistics["qkv"].second_moment.double()
    found = {}
    for name, qtensor in result.qtensors.items():
        delta = qtensor.dequantize(torch.float64) - task.weights[name].double()
        found[name] = ((delta @ moment) * delta).sum(1)
    return found


def spread(values_NG: Tensor, weight: Tensor) -> Tensor:
    return values_NG.repeat_interleave(weight.shape[1] // values_NG.shape[1], dim=1)


def straight_round(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def by_autograd(
    weight: Tensor, moment: Tensor, quant: TensorQuant, steps: int, learn_range: bool
) -> Tensor:
    """The least losses [N] of the rows: section 3 of arXiv 2309.05516, gradients by autograd."""
    weight, moment = weight.double(), moment.double()
    groups = 1 if quant.group_size is None else weight.shape[1] // quant.group_size
    grouped = weight.reshape(len(weight), groups, -1)
    top = 2**quant.num_bits - 1
    offset = torch.zeros_like(grouped, requires_grad=True)
    low, high = (torch.ones_like(grouped[:, :, :1], requires_grad=True) for _ in range(2))
    least = torch.full((len(weight),), torch.inf, dtype=torch.float64)
    for step in range(steps + 1):
        if quant.symmetric:
            scale = grouped.abs().amax(-1, keepdim=True) * low / (top / 2)
            zero = torch.full_like(scale, 2 ** (quant.num_bits - 1))
        else:
            first = grouped.amin(-1, keepdim=True).clamp(max=0) * low
            last = grouped.amax(-1, keepdim=True).clamp(min=0) * high
            scale = (last - first) / top
            zero = straight_round(-first / scale)
        codes = straight_round(grouped / scale + zero + offset).clamp(0, top)
        delta = ((codes - zero) * scale - grouped).reshape(weight.shape)
        losses = ((delta @ moment) * delta).sum(1)
        least = torch.minimum(least, losses.detach())
        learned = [offset]
        if learn_range:
            learned += [low] if quant.symmetric else [low, high]
        slopes = torch.autograd.grad(losses.sum(), learned)
        rate = (1 - step / steps) / steps
        with torch.no_grad():
            for value, slope in zip(learned, slopes, strict=True):
                pace = 1.0 if value is offset else min(1.0, 15 / top)
                value -= rate * pace * slope.sign()
            offset.clamp_(-0.5, 0.5)
            low.clamp_(0.1, 1)
            high.clamp_(0.1, 1)
    return least


@pytest.mark.parametrize("learn_range", [True, False])
@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_equals_signed_gradient_descent_by_autograd(quant: TensorQuant, learn_range: bool) -> None:
    task = block_task(quant)
    result = run("autoround", task, steps=3, scale=False, learn_range=learn_range)
    moment = task.statistics["qkv"].second_moment
    ours = torch.cat(list(row_losses(task, result).values()))
    expected = torch.cat(
        [by_autograd(w, moment, quant, 3, learn_range) for w in task.weights.values()]
    )
    # The largest weights of a symmetric grid lie on the edge of two codes, which float32 tips, and
    # so do learned ranges; the loss of such a row is near the other. Without either all are equal.
    equal = torch.isclose(ours, expected, rtol=1e-3).float().mean()
    assert equal >= (0.6 if quant.symmetric or learn_range else 0.97)
    assert float(ours.sum()) == pytest.approx(float(expected.sum()), rel=0.03)


@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_no_row_ends_above_rounding_to_nearest_and_the_whole_below(quant: TensorQuant) -> None:
    task = block_task(quant)
    learned = row_losses(task, run("autoround", task, steps=30, scale=False))
    nearest = row_losses(task, run("rtn", task))
    for name in ROWS:
        assert (learned[name] <= nearest[name] * (1 + 1e-5)).all()
        assert learned[name].sum() < 0.9 * nearest[name].sum()


@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_codes_are_in_range_and_one_from_the_nearest_at_most(quant: TensorQuant) -> None:
    """An offset of half a step cannot move a code further; the scale is the one that is stored."""
    task = block_task(quant, scale_dtype=torch.bfloat16)
    for name, qtensor in run("autoround", task, steps=30).qtensors.items():
        assert qtensor.scale.dtype == torch.bfloat16
        assert (qtensor.zero_point is None) == quant.symmetric
        low, high = -(2 ** (quant.num_bits - 1)), 2 ** (quant.num_bits - 1) - 1
        assert low <= int(qtensor.codes.min())
        assert int(qtensor.codes.max()) <= high
        assert (codes_apart(task.weights[name], qtensor, low, high) <= 1).all()


def codes_apart(weight: Tensor, qtensor: QuantizedTensor, low: int, high: int) -> Tensor:
    """How many codes lie between those of `qtensor` and the nearest under its scale."""
    place = weight / spread(qtensor.scale.float(), weight)
    if qtensor.zero_point is not None:
        place = place + spread(qtensor.zero_point.float(), weight)
    return (place.round().clamp(low, high) - qtensor.codes.float()).abs()


def test_learned_ranges_lower_the_loss() -> None:
    task = block_task(INT4)

    def loss(**options: Any) -> float:
        result = run("autoround", task, scale=False, **options)
        return float(torch.cat(list(row_losses(task, result).values())).sum())

    assert loss(steps=30) < loss(steps=30, learn_range=False)


def test_awq_scales_move_into_weights_norm_and_moment_alike() -> None:
    """The product of the two layers stays; the scaled problem obeys the law of the plain one."""
    plain, task = block_task(INT4), block_task(INT4)
    learned = row_losses(task, run("autoround", task, steps=20, scale=True))
    scale_K = plain.norms["input_layernorm"] / task.norms["input_layernorm"]
    assert (scale_K != 1).any()
    nearest = row_losses(task, run("rtn", task))
    for name in ROWS:
        torch.testing.assert_close(task.weights[name], plain.weights[name] * scale_K)
        assert (learned[name] <= nearest[name] * (1 + 1e-5)).all()


def test_two_runs_are_equal_and_rows_by_chunks_nearly_so(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("autoround", block_task(INT4), steps=20)
    second = run("autoround", block_task(INT4), steps=20)
    monkeypatch.setattr(base, "CHUNK_WEIGHTS", 8 * K)
    chunked = run("autoround", block_task(INT4), steps=20)
    for name, qtensor in first.qtensors.items():
        assert torch.equal(qtensor.codes, second.qtensors[name].codes)
        assert torch.equal(qtensor.scale, second.qtensors[name].scale)
        # products of other shapes add in another order, which tips a few signs
        same = (qtensor.codes == chunked.qtensors[name].codes).float().mean()
        assert same > 0.9
        assert chunked.qtensors[name].shape == qtensor.shape


def test_report_names_method_steps_and_losses() -> None:
    task = block_task(INT4)
    result = run("autoround", task, steps=10, scale=False)
    after = row_losses(task, result)
    before = row_losses(task, run("rtn", task))
    for report in result.reports:
        assert report.method == "autoround"
        assert report.notes["steps"] == 10
        assert report.notes["loss_before"] == pytest.approx(float(before[report.name].sum()), 1e-4)
        assert report.notes["loss_after"] == pytest.approx(float(after[report.name].sum()), 1e-4)


def test_channels_and_rows_of_zeros_stay_zero() -> None:
    task = block_task(INT4)
    name = "self_attn.q_proj"
    task.weights[name][3] = 0
    restored = run("autoround", task, steps=10).qtensors[name].dequantize()
    assert torch.isfinite(restored).all()
    assert (restored[3] == 0).all()


def test_diagonal_statistics_are_refused() -> None:
    with pytest.raises(CalibrationError, match="autoround needs the whole second moment"):
        run("autoround", block_task(INT4, diagonal=True))


@pytest.mark.parametrize("steps", [0, -1, 10_001])
def test_impossible_steps_are_refused(steps: int) -> None:
    with pytest.raises(RecipeError, match=f"steps {steps} must lie within 1 to 10000"):
        load_method("autoround").parse_options({"steps": steps})
