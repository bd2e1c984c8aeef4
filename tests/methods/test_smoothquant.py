"""SmoothQuant against its formula, the function that it must keep, and what it is for."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.errors import RecipeError
from quantforge.methods.base import BlockTask, load_method
from quantforge.methods.smoothquant import (
    METHOD,
    SmoothQuantOptions,
    quantize_block,
    smooth_groups,
    smoothing_scale,
)
from quantforge.models.arch.base import InputGroup
from quantforge.schemes import PRESETS, TensorQuant

Record = Callable[..., Any]

INT8 = PRESETS["w8a8_int8"].weight
FP8 = PRESETS["fp8_static"].weight

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
GROUPS = ("qkv", "o", "gate_up", "down")


def group_called(task: BlockTask, name: str) -> InputGroup:
    return next(g for g in task.groups if g.name == name)


def by_the_paper(inputs: Tensor, weights: list[Tensor], alpha: float) -> list[float]:
    """Equation 4 of the paper, channel by channel."""
    return [
        float(inputs[:, j].abs().max()) ** alpha
        / max(float(w[:, j].abs().max()) for w in weights) ** (1 - alpha)
        for j in range(inputs.shape[1])
    ]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("name", ["qkv", "gate_up", "down"])
def test_scales_are_the_papers(
    name: str, alpha: float, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model(), quant=INT8)
    group = group_called(block.task, name)
    weights = [block.task.weights[m] for m in group.members]
    expected = by_the_paper(block.inputs[name], weights, alpha)
    found = smoothing_scale(block.task, group, alpha).tolist()
    assert found == pytest.approx(expected, rel=1e-4)


def test_query_heads_of_a_value_head_share_the_largest(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model(), quant=INT8)
    group, config = group_called(block.task, "o"), block.task.config
    found = smoothing_scale(block.task, group, 1.0).reshape(-1, 2, config.head_dim)
    assert torch.equal(found[:, 0], found[:, 1])
    largest = block.inputs["o"].abs().amax(0).reshape(-1, 2, config.head_dim).amax(1)
    assert torch.allclose(found[:, 0], largest, rtol=1e-5)


def test_dead_channels_keep_scale_1(tiny_model: Callable[..., Path], record_block: Record) -> None:
    task = record_block(tiny_model(), quant=INT8).task
    group = group_called(task, "gate_up")
    task.statistics["gate_up"].absmax[3] = 0
    for member in group.members:
        task.weights[member][:, 5] = 0
    found = smoothing_scale(task, group, 0.5)
    assert found[3] == found[5] == 1
    assert bool(found.isfinite().all())


def installed(model: Any, task: BlockTask) -> Any:
    """transformers' model with block 0 as it stands in `task`."""
    changed = copy.deepcopy(model)
    block = changed.model.layers[0]
    for name, tensor in (task.weights | task.norms).items():
        block.get_submodule(name).weight.data = tensor
    for name, tensor in task.biases.items():
        block.get_submodule(name).bias.data = tensor
    return changed


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("arch", "overrides"), MODELS.values(), ids=MODELS)
def test_smoothing_keeps_the_function_of_the_model(
    arch: str,
    overrides: dict[str, Any],
    alpha: float,
    tiny_model: Callable[..., Path],
    record_block: Record,
) -> None:
    block = record_block(tiny_model(arch, **overrides), quant=INT8)
    token_ids = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        expected = block.model(token_ids).logits
        scales = smooth_groups(block.task, SmoothQuantOptions(alpha=alpha))
        found = installed(block.model, block.task)(token_ids).logits
    assert set(scales) == set(GROUPS)
    assert float((found - expected).norm() / expected.norm()) <= 1e-4


def test_with_alpha_1_inputs_and_with_alpha_0_weights_become_even(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    for alpha in (0.0, 1.0):
        block = record_block(tiny_model(), quant=INT8)
        scales = smooth_groups(block.task, SmoothQuantOptions(alpha=alpha))
        for name in ("qkv", "gate_up", "down"):
            weights = [block.task.weights[m] for m in group_called(block.task, name).members]
            evened = (
                torch.stack([w.abs().amax(0) for w in weights]).amax(0)
                if alpha == 0
                else (block.inputs[name] / scales[name]).abs().amax(0)
            )
            assert torch.allclose(evened, torch.ones_like(evened), rtol=1e-4), (alpha, name)


def output_error(x: Tensor, weight: Tensor, rounded_weight: Tensor) -> float:
    """Of inputs rounded to int8 codes of a token times a rounded weight, squared and relative."""
    x = x.double()
    step = x.abs().amax(1, keepdim=True) / 127.5
    rounded = (x / step).round().clamp(-128, 127) * step
    want = x @ weight.double().T
    got = rounded @ rounded_weight.double().T
    return float((got - want).square().sum() / want.square().sum())


def test_outliers_of_inputs_cost_less_after_smoothing(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model(), quant=INT8, outliers=True)
    rtn, plain, smooth = load_method("rtn"), copied(block.task), copied(block.task)
    scales = smooth_groups(copied(block.task), SmoothQuantOptions())
    before = rtn.quantize_block(plain, rtn.parse_options({})).qtensors
    after = quantize_block(smooth, SmoothQuantOptions()).qtensors
    for group in ("qkv", "gate_up"):
        x = block.inputs[group]
        for name in group_called(plain, group).members:
            old = output_error(x, plain.weights[name], before[name].dequantize())
            new = output_error(x / scales[group], smooth.weights[name], after[name].dequantize())
            assert new < 0.8 * old, name


@pytest.mark.parametrize("quant", [INT8, FP8], ids=str)
def test_reported_errors_equal_the_direct_ones(
    quant: TensorQuant, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model(), quant=quant)
    scales = smooth_groups(copied(block.task), SmoothQuantOptions())
    task = copied(block.task)
    result = METHOD.quantize_block(task, SmoothQuantOptions())
    group_of = {m: g.name for g in task.groups for m in g.members}
    assert {r.name for r in result.reports} == task.quant.keys()
    for report in result.reports:
        group = group_of[report.name]
        weight = task.weights[report.name].double()
        delta = result.qtensors[report.name].dequantize().double() - weight
        x = block.inputs[group].double() / scales[group].double()
        expected = (x @ delta.T).square().sum() / (x @ weight.T).square().sum()
        assert report.output_error == pytest.approx(float(expected), rel=1e-3)
        assert report.notes == {"alpha": 0.5}


def copied(task: BlockTask) -> BlockTask:
    other = copy.copy(task)
    other.weights, other.norms = dict(task.weights), dict(task.norms)
    other.biases = dict(task.biases)
    return other


def test_a_group_with_a_dense_linear_is_left_alone(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    task = record_block(tiny_model(), quant=INT8).task
    task.quant = {n: q for n, q in task.quant.items() if n != "self_attn.k_proj"}
    scales = smooth_groups(task, SmoothQuantOptions())
    assert set(scales) == {"o", "gate_up", "down"}


def test_a_norm_in_bf16_stays_exact(tiny_model: Callable[..., Path], record_block: Record) -> None:
    block = record_block(tiny_model(), quant=INT8, scale_dtype=torch.bfloat16)
    before = copied(block.task)
    smooth_groups(block.task, SmoothQuantOptions())
    for member in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):
        norm = next(g.absorber for g in before.groups if member in g.members)
        stored = block.task.norms[norm].to(torch.bfloat16).float()
        expected = before.weights[member] * before.norms[norm]
        assert torch.allclose(block.task.weights[member] * stored, expected, rtol=1e-5)


def test_linears_of_one_input_share_a_scale_a_tensor(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    for method in ("rtn", "smoothquant"):
        task = record_block(tiny_model(), quant=FP8).task
        found = load_method(method)
        qtensors = found.quantize_block(task, found.parse_options({})).qtensors
        for group in task.groups:
            scales = {float(qtensors[m].scale) for m in group.members}
            largest = max(float(task.weights[m].abs().max()) for m in group.members)
            assert len(scales) == 1
            assert scales.pop() == pytest.approx(largest / 448, rel=1e-6)
            assert max(float(qtensors[m].codes.float().abs().max()) for m in group.members) == 448


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_an_alpha_outside_0_to_1_is_refused(alpha: float) -> None:
    with pytest.raises(RecipeError, match="is not between 0 and 1"):
        METHOD.parse_options({"alpha": alpha})


def test_alpha_may_be_a_whole_number() -> None:
    assert METHOD.parse_options({"alpha": 1}) == SmoothQuantOptions(alpha=1.0)
    with pytest.raises(RecipeError, match=r"unknown option 'alfa' .did you mean 'alpha'"):
        METHOD.parse_options({"alfa": 1})
