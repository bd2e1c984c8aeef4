"""Mismatch and refitted scales against least squares, and the laws of choosing on held-out text."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.calibration.capture import InputStatistics
from quantforge.calibration.streams import Moments
from quantforge.errors import CalibrationError, RecipeError
from quantforge.methods._factor import factorise
from quantforge.methods._refit import refit_scales
from quantforge.methods.base import BlockResult, BlockTask, load_method
from quantforge.models.arch.base import LLAMA_GROUPS
from quantforge.models.arch.llama import ARCH
from quantforge.qtensor import quantize
from quantforge.schemes import TensorQuant

D, F, HEADS, KV_HEADS = 64, 96, 4, 2
SIZES = {
    "self_attn.q_proj": (D, D),
    "self_attn.k_proj": (D // 2, D),
    "self_attn.v_proj": (D // 2, D),
    "self_attn.o_proj": (D, D),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
}
INT4 = TensorQuant(num_bits=4, symmetric=False, granularity="group", group_size=32)
SCHEMES = [
    TensorQuant(num_bits=bits, symmetric=symmetric, granularity=granularity, group_size=size)
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
    for granularity, size in (("group", 32), ("channel", None))
]


def tokens(width: int, seed: int, count: int = 400) -> Tensor:
    """Inputs [count, width] whose channels depend on each other; a few are large. The mixing
    depends on the width only, the tokens on `seed` too."""
    fixed = torch.Generator().manual_seed(width)
    mix = torch.randn(width, width, generator=fixed) / width**0.5 + 0.5 * torch.eye(width)
    size = torch.exp(torch.randn(width, generator=fixed))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) @ mix * size


def statistics_of(x_TK: Tensor) -> InputStatistics:
    return InputStatistics(
        second_moment=x_TK.T @ x_TK / len(x_TK),
        mean_abs=x_TK.abs().mean(0),
        absmax=x_TK.abs().amax(0),
        num_tokens=len(x_TK),
    )


def moments_of(x_TK: Tensor, d_TK: Tensor | None = None) -> Moments:
    count = len(x_TK)
    if d_TK is None:
        return Moments(inputs=x_TK.T @ x_TK / count)
    return Moments(
        inputs=x_TK.T @ x_TK / count, cross=d_TK.T @ x_TK / count, drift=d_TK.T @ d_TK / count
    )


def width_of(group: str) -> int:
    return F if group == "down" else D


def drift_of(x_TK: Tensor, size: float) -> Tensor:
    """A drift that depends on x, as rounding earlier layers makes it."""
    fixed = torch.Generator().manual_seed(99)
    width = x_TK.shape[1]
    return x_TK @ (size * torch.randn(width, width, generator=fixed) / width**0.5)


def block_task(quant: TensorQuant, *, drift: float | None = None) -> BlockTask:
    """A block of a Llama; with `drift`, its inputs' drift is known too."""
    generator = torch.Generator().manual_seed(1)
    config = ARCH.config_from_hf(
        {
            "vocab_size": 64,
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "rope_theta": 1e4,
            "hidden_act": "silu",
            "torch_dtype": "float32",
        }
    )
    fit = {g.name: tokens(width_of(g.name), 11) for g in LLAMA_GROUPS}
    held = {g.name: tokens(width_of(g.name), 12) for g in LLAMA_GROUPS}
    d_fit = {n: None if drift is None else drift_of(x, drift) for n, x in fit.items()}
    d_held = {n: None if drift is None else drift_of(x, drift) for n, x in held.items()}
    return BlockTask(
        layer=3,
        config=config,
        groups=LLAMA_GROUPS,
        weights={n: torch.randn(*s, generator=generator) for n, s in SIZES.items()},
        biases={"self_attn.v_proj": torch.randn(D // 2, generator=generator)},
        norms={n: torch.ones(D) for n in ("input_layernorm", "post_attention_layernorm")},
        quant=dict.fromkeys(SIZES, quant),
        statistics={n: statistics_of(x) for n, x in fit.items()},
        scale_dtype=torch.float32,
        cross={n: d.T @ fit[n] / len(d) for n, d in d_fit.items() if d is not None},
        held_out={n: moments_of(x, d_held[n]) for n, x in held.items()},
    )


def run(method: str, task: BlockTask, **options: Any) -> BlockResult:
    chosen = load_method(method)
    return chosen.quantize_block(task, chosen.parse_options(options))


def error_of_outputs(weight: Tensor, restored: Tensor, x_TK: Tensor, d_TK: Tensor) -> float:
    wanted = (x_TK + d_TK).double() @ weight.double().T
    found = x_TK.double() @ restored.double().T
    return float((found - wanted).square().sum(1).mean())


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_the_corrected_weight_is_the_solution_of_least_squares(
    strength: float, act_order: bool
) -> None:
    """min over V of ``|W (x + strength d) - V x|^2 + damping |V - W|^2``, by torch's lstsq."""
    x = tokens(D, 5).double()
    d = drift_of(x.float(), 0.3).double()
    weight = torch.randn(16, D, generator=torch.Generator().manual_seed(2)).double()
    moment, cross = x.T @ x / len(x), d.T @ x / len(x)
    factor = factorise(moment.float(), damping=0.02, act_order=act_order)
    found = factor.corrected(weight.float(), cross.float(), strength)
    ridge = (0.02 * moment.diagonal().mean() * len(x)).sqrt() * torch.eye(D, dtype=torch.float64)
    wanted = torch.cat([(x + strength * d) @ weight.T, ridge @ weight.T])
    expected = torch.linalg.lstsq(torch.cat([x, ridge]), wanted).solution.T
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-3)
    assert float((found - weight).norm() / weight.norm()) > 0.05


def test_error_from_moments_is_that_of_the_outputs() -> None:
    x, weight = tokens(D, 7), torch.randn(16, D, generator=torch.Generator().manual_seed(2))
    d = drift_of(x, 0.1)
    restored = quantize(weight, INT4).dequantize()
    expected = error_of_outputs(weight, restored, x, d)
    assert moments_of(x, d).error(weight, restored) == pytest.approx(expected, rel=1e-4)
    expected = error_of_outputs(weight, restored, x, torch.zeros_like(d))
    assert moments_of(x).error(weight, restored) == pytest.approx(expected, rel=1e-4)
    scale = torch.exp(torch.randn(D, generator=torch.Generator().manual_seed(3)))
    scaled = moments_of(x, d).scaled(scale)
    assert scaled.error(weight * scale, restored * scale) == pytest.approx(
        moments_of(x, d).error(weight, restored), rel=1e-3
    )


@pytest.mark.parametrize("method", ["gptq", "awq_gptq", "best"])
def test_without_drift_mismatch_changes_no_bit(method: str) -> None:
    task = block_task(INT4, drift=0.0)
    plain = run(method, block_task(INT4), mismatch=0.0)
    found = run(method, task, mismatch=1.0)
    for name, qtensor in plain.qtensors.items():
        assert torch.equal(found.qtensors[name].codes, qtensor.codes), name
        assert torch.equal(found.qtensors[name].scale, qtensor.scale), name
    assert all("mismatch" not in r.notes for r in found.reports)


def test_mismatch_lowers_the_error_against_the_full_precision_model() -> None:
    x, d = tokens(D, 12), drift_of(tokens(D, 12), 0.2)
    results = {m: run("gptq", block_task(INT4, drift=0.2), mismatch=m) for m in (0.0, 1.0)}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        weight = block_task(INT4).weights[name]
        error = {
            m: error_of_outputs(weight, r.qtensors[name].dequantize(), x, d)
            for m, r in results.items()
        }
        assert error[1.0] < 0.5 * error[0.0]
    for report in results[1.0].reports:
        assert report.notes["mismatch"] in (0.5, 1.0)
        table = report.notes["held_out_errors"]
        assert set(table) == {"gptq", "gptq, mismatch 0.5", "gptq, mismatch 1.0"}
        assert report.notes["held_out_error"] == min(table.values())


def test_a_correction_that_does_not_hold_on_other_samples_is_not_taken() -> None:
    task = block_task(INT4, drift=0.2)
    task.held_out = {n: moments_of(tokens(width_of(n), 12)) for n in task.held_out}
    task.held_out = {
        n: replace(m, cross=torch.zeros_like(m.inputs), drift=torch.zeros_like(m.inputs))
        for n, m in task.held_out.items()
    }
    plain = run("gptq", block_task(INT4))
    found = run("gptq", task, mismatch=1.0)
    for report in found.reports:
        assert "mismatch" not in report.notes
        codes = found.qtensors[report.name].codes
        assert torch.equal(codes, plain.qtensors[report.name].codes)


@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_refitted_scales_are_the_solution_of_least_squares(quant: TensorQuant) -> None:
    """Row by row, the scales that bring ``sum_g s_g (x q_g)`` closest to ``x w``."""
    x = tokens(D, 5, count=300).double()
    weight = torch.randn(12, D, generator=torch.Generator().manual_seed(2))
    rounded = quantize(weight, quant)
    moment = x.T @ x / len(x)
    fitted = refit_scales(rounded, weight, moment.float(), 0.01)
    ridge = (0.01 * moment.diagonal().mean() * len(x)).sqrt() * torch.eye(D, dtype=torch.float64)
    inputs = torch.cat([x, ridge])
    assert torch.equal(fitted.codes, rounded.codes)
    zero = 0 if rounded.zero_point is None else rounded.zero_point.double().unsqueeze(-1)
    groups = rounded.scale.shape[1]
    steps = rounded.codes.double().reshape(12, groups, -1) - zero
    changed = 0
    for row in range(12):
        parts = torch.stack(
            [inputs.reshape(len(inputs), groups, -1)[:, g] @ steps[row, g] for g in range(groups)],
            dim=1,
        )
        wanted = (inputs @ weight[row].double()).unsqueeze(1)
        expected = torch.linalg.lstsq(parts, wanted).solution[:, 0].float()
        ratio = expected / rounded.scale[row]
        if bool(((ratio > 0.5) & (ratio < 2)).all()):
            torch.testing.assert_close(fitted.scale[row], expected, rtol=1e-3, atol=1e-6)
            changed += 1
        else:
            assert torch.equal(fitted.scale[row], rounded.scale[row])
    assert changed >= 6


@pytest.mark.parametrize("act_order", [True, False])
def test_column_losses_are_what_later_columns_do_not_explain(act_order: bool) -> None:
    """``1 / U[i, i]^2`` is the damped residual of regressing input i on the inputs after it."""
    x = tokens(12, 5).double()
    moment = x.T @ x / len(x)
    factor = factorise(moment.float(), damping=0.05, act_order=act_order)
    damped = moment + 0.05 * moment.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    order = factor.order.tolist()
    for place, column in enumerate(order):
        later = order[place + 1 :]
        residual = damped[column, column]
        if later:
            seen = damped[later][:, later]
            residual = residual - damped[column, later] @ torch.linalg.solve(
                seen, damped[later, column]
            )
        found = float(factor.column_losses()[column])
        assert found == pytest.approx(float(residual), rel=1e-3)


def test_groups_whose_codes_are_all_zero_keep_their_scales() -> None:
    weight = torch.randn(4, D, generator=torch.Generator().manual_seed(2))
    weight[1, :32] = 0
    rounded = quantize(weight, INT4)
    x = tokens(D, 5)
    fitted = refit_scales(rounded, weight, x.T @ x / len(x), 0.01)
    assert fitted.scale[1, 0] == rounded.scale[1, 0]
    assert bool(torch.isfinite(fitted.scale).all())
    assert bool((fitted.scale > 0).all())


def held_out_errors(
    task: BlockTask, before: BlockTask, result: BlockResult, name: str
) -> tuple[float, float]:
    """Relative errors of one linear's outputs on the held-out tokens: as it was rounded, and
    rounded to nearest without scales of its inputs.

    Inputs are multiplied by what the layers before it have absorbed; outputs are those of the
    changed block, where a linear may have absorbed a scale itself.
    """
    group = next(g for g in LLAMA_GROUPS if name in g.members)
    x = tokens(width_of(group.name), 12)
    inputs = absorbed(task, before, group.absorber)
    outputs = absorbed(task, before, name)[: SIZES[name][0]]
    if group.absorber_is_value:
        heads = inputs.reshape(KV_HEADS, 1, -1).expand(-1, HEADS // KV_HEADS, -1)
        inputs = heads.reshape(-1)
    weight = before.weights[name] * outputs.unsqueeze(1)
    wanted = x @ weight.T
    found = (x * inputs[: x.shape[1]]) @ result.qtensors[name].dequantize().T
    nearest = x @ quantize(weight, before.quant[name]).dequantize().T
    power = wanted.square().sum()
    return tuple(float((y - wanted).square().sum() / power) for y in (found, nearest))


def absorbed(task: BlockTask, before: BlockTask, name: str | None) -> Tensor:
    """The factor that the outputs of a norm or linear got, by channel."""
    if name in task.norms:
        return task.norms[name] / before.norms[name]
    if name == "self_attn.v_proj":
        return task.biases[name] / before.biases[name]
    if name == "mlp.up_proj":
        up, old = task.weights[name], before.weights[name]
        inputs = task.norms["post_attention_layernorm"]
        return (up * inputs / old).median(1).values
    return torch.ones(max(SIZES["mlp.up_proj"]))


@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_no_linear_is_worse_than_rounded_to_nearest_on_held_out_tokens(quant: TensorQuant) -> None:
    before, task = block_task(quant), block_task(quant)
    result = run("best", task)
    assert list(result.qtensors) == list(SIZES)
    half = 2 ** (quant.num_bits - 1)
    for report in result.reports:
        name = report.name
        ours, allowed = held_out_errors(task, before, result, name)
        assert ours <= allowed * 1.001
        assert report.notes["held_out_error"] == pytest.approx(ours, rel=5e-3, abs=1e-8)
        # the ends of a symmetric range are ties, which a row's factor tips to either side
        assert report.notes["held_out_errors"]["rtn"] == pytest.approx(allowed, rel=2e-2, abs=1e-8)
        codes = result.qtensors[name].codes
        assert codes.shape == SIZES[name]
        assert -half <= int(codes.min()) <= int(codes.max()) < half
        assert (result.qtensors[name].zero_point is None) == quant.symmetric


def worse_on_fit(task: BlockTask) -> None:
    """Makes the samples to fit say nothing of the held-out ones."""
    noise = {n: torch.flip(tokens(width_of(n), 1), (1,)) * 1e-2 for n in task.statistics}
    for name, x in noise.items():
        x[:, : len(x[0]) // 2] *= 1e4
        task.statistics = {**task.statistics, name: statistics_of(x)}


def test_rounding_to_nearest_is_taken_where_calibration_misleads() -> None:
    task = block_task(INT4)
    worse_on_fit(task)
    result = run("best", task)
    methods = {r.name: r.method for r in result.reports}
    assert "rtn" in methods.values()
    for report in result.reports:
        assert report.notes["held_out_error"] <= report.notes["held_out_errors"]["rtn"]


CANDIDATES = {
    "rtn",
    "awq, clip block",
    "gptq",
    "gptq, clip block",
}


def test_best_is_the_best_of_the_roundings_that_share_its_scale() -> None:
    """A scale is kept or not for all linears of a group; with it goes half of the candidates."""
    result = run("best", block_task(INT4))
    for report in result.reports:
        error, table = report.notes["held_out_error"], report.notes["held_out_errors"]
        scaled = "ratio" in report.notes
        alike = [e for label, e in table.items() if label.startswith("awq") == scaled]
        assert error == min(alike)
        assert error <= table["rtn"]
        assert set(table) >= CANDIDATES


def test_candidates_without_scales_and_clipping_are_two() -> None:
    result = run("best", block_task(INT4), scale=False, clip=False, refit=False)
    for report in result.reports:
        assert set(report.notes["held_out_errors"]) == {"rtn", "gptq"}
        assert report.method in ("rtn", "gptq")


def test_linears_that_stay_dense_are_left_out() -> None:
    task = block_task(INT4)
    task.quant = {n: q for n, q in task.quant.items() if n != "self_attn.k_proj"}
    before = task.weights["self_attn.k_proj"]
    result = run("best", task)
    assert "self_attn.k_proj" not in result.qtensors
    assert torch.equal(task.weights["self_attn.k_proj"], before)


@pytest.mark.parametrize("method", ["gptq", "best"])
def test_statistics_without_held_out_samples_are_refused(method: str) -> None:
    task = block_task(INT4)
    task.held_out = {}
    with pytest.raises(CalibrationError, match="has no held-out statistics"):
        run(method, task, refit=True)


@pytest.mark.parametrize("method", ["gptq", "awq_gptq", "best"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mismatch", -0.1),
        ("mismatch", 1.5),
        ("mismatch", float("nan")),
        ("mismatch", True),
        ("held_out", 0.0),
        ("held_out", 1.0),
        ("true_sequential", "yes"),
        ("refit", 1),
        ("clip_by", "row"),
    ],
)
def test_impossible_options_are_refused(method: str, name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=name):
        load_method(method).parse_options({name: value})
