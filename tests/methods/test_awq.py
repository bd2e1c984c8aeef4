"""AWQ against brute force over real activations, and the function that its scales must keep."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.errors import RecipeError
from quantforge.methods._clip import round_clipped, search_clip
from quantforge.methods.awq import (
    AwqOptions,
    absorb_scale,
    quantize_block,
    search_scale,
    storable_scale,
    tie_query_heads,
)
from quantforge.methods.base import BlockTask, load_method, squared_error
from quantforge.models.arch.base import InputGroup
from quantforge.schemes import TensorQuant

Record = Callable[..., Any]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}

SCHEMES = [
    pytest.param(
        TensorQuant(num_bits=4, symmetric=symmetric, granularity="group", group_size=32),
        id="sym" if symmetric else "asym",
    )
    for symmetric in (True, False)
]

GROUPS = ("qkv", "o", "gate_up", "down")


def group_called(task: BlockTask, name: str) -> InputGroup:
    return next(g for g in task.groups if g.name == name)


def plain_round(weight: Tensor, quant: TensorQuant, shrink: Tensor | float = 1.0) -> Tensor:
    """The weight on its grid, by the textbook: 15 steps of 4 bits, written out for the test."""
    grouped = weight.reshape(len(weight), -1, quant.group_size or weight.shape[1])
    shrink = torch.as_tensor(shrink).expand(grouped.shape[:2]).unsqueeze(-1)
    if quant.symmetric:
        step = grouped.abs().amax(-1, keepdim=True) * shrink / 7.5
        codes = (grouped / step).round().clamp(-8, 7)
        return (codes * step).reshape(weight.shape)
    low = grouped.amin(-1, keepdim=True).clamp(max=0) * shrink
    high = grouped.amax(-1, keepdim=True).clamp(min=0) * shrink
    step = (high - low) / 15
    zero = (-low / step).round().clamp(0, 15)
    codes = ((grouped / step).round() + zero).clamp(0, 15)
    return ((codes - zero) * step).reshape(weight.shape)


def output_error(x: Tensor, delta: Tensor) -> float:
    """Squared change of the outputs, a token's mean."""
    return float((x.double() @ delta.double().T).square().sum() / len(x))


def scaled_output_error(block: Any, group: InputGroup, quant: TensorQuant, scale: Tensor) -> float:
    total = 0.0
    for member in group.members:
        weight = block.task.weights[member]
        total += output_error(
            block.inputs[group.name], plain_round(weight * scale, quant) / scale - weight
        )
    return total


def tied(block: Any, group: InputGroup, means: Tensor) -> Tensor:
    """`means` of a group; of o_proj, over all channels that one value channel feeds."""
    if group.name != "o":
        return means
    config = block.task.config
    share = config.num_heads // config.num_kv_heads
    found = torch.empty_like(means)
    for channel in range(len(means)):
        head, offset = divmod(channel, config.head_dim)
        first = head // share * share
        fed = [(first + i) * config.head_dim + offset for i in range(share)]
        found[channel] = means[fed].mean()
    return found


def share_of_range(weight: Tensor) -> Tensor:
    """|w| over the largest of its 32 neighbours."""
    parts = weight.abs().split(32, dim=1)
    return torch.cat([part / part.amax(1, keepdim=True) for part in parts], dim=1)


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_gram_loss_is_the_direct_output_error(
    diagonal: bool, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model(), diagonal=diagonal)
    generator = torch.Generator().manual_seed(2)
    for group in block.task.groups:
        x = block.inputs[group.name]
        delta = torch.randn(block.task.weights[group.members[0]].shape, generator=generator)
        if diagonal:
            expected = float((x.square() @ delta.square().T).sum() / len(x))
        else:
            expected = output_error(x, delta)
        found = squared_error(delta, block.task.statistics[group.name].second_moment)
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("duo", ["no", "yes"])
@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("name", GROUPS)
def test_the_scale_search_equals_brute_force_over_its_grid(
    name: str, quant: TensorQuant, duo: str, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    """The search must be no worse than the coarse grid and within 5 % of the fine one.

    Scales are centred as the search centres them: the largest weight of a symmetric group lies
    between two codes (7.5 steps), so that a common factor can decide which one it gets.
    """
    block = record_block(tiny_model(), quant=quant)
    group = group_called(block.task, name)
    found = search_scale(block.task, group, AwqOptions(duo_scaling=duo))
    means = tied(block, group, block.inputs[name].abs().mean(0))
    shares = torch.cat([share_of_range(block.task.weights[m]) for m in group.members]).mean(0)
    shares = tied(block, group, shares)

    def brute_force(ratio: float) -> float:
        scale = means.clamp(min=1e-4).pow(ratio)
        if duo == "yes":
            scale = scale / shares.clamp(min=1e-4).pow(1 - ratio)
        centred = scale / (scale.max() * scale.min()).sqrt()
        return scaled_output_error(block, group, quant, centred)

    unscaled = scaled_output_error(block, group, quant, torch.ones(len(means)))
    fine = {step / 20: brute_force(step / 20) for step in range(21)}
    coarse = min(fine[ratio] for ratio in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    if found is None:
        assert coarse >= unscaled * 0.99
        return
    scale, choice = found
    direct = scaled_output_error(block, group, quant, scale)
    assert choice.error == pytest.approx(direct, rel=1e-2)
    assert direct == pytest.approx(fine[round(choice.ratio, 2)], rel=1e-2)
    assert choice.unscaled_error == pytest.approx(unscaled, rel=1e-2)
    assert direct <= coarse * 1.01
    assert direct <= min(fine.values()) * 1.05


def test_outlier_channels_are_scaled_up(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model())
    found = search_scale(
        block.task, group_called(block.task, "gate_up"), AwqOptions(duo_scaling="no")
    )
    assert found is not None
    scale, choice = found
    assert choice.ratio > 0
    assert choice.error < 0.8 * choice.unscaled_error
    ordinary = torch.ones(len(scale), dtype=torch.bool)
    ordinary[::13] = False
    assert float(scale[::13].mean()) > 1.5 * float(scale[ordinary].mean())


@pytest.mark.parametrize("family", MODELS)
def test_scales_of_any_size_keep_the_function_of_the_model(
    family: str, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    arch, overrides = MODELS[family]
    block = record_block(tiny_model(arch, **overrides))
    generator = torch.Generator().manual_seed(3)
    before = logits(block.model)
    for group in block.task.groups:
        columns = block.task.weights[group.members[0]].shape[1]
        scale = torch.exp(torch.randn(columns, generator=generator))
        if group.absorber_is_value:
            scale = tie_query_heads(scale, block.task.config)
        absorb_scale(block.task, group, storable_scale(block.task, group, scale))
    changed = load_into(block.model, block.task)
    assert changed >= 9  # all linears and both norms
    torch.testing.assert_close(logits(block.model), before, rtol=1e-5, atol=1e-5 * scale_of(before))


@pytest.mark.parametrize("family", MODELS)
def test_the_scaled_block_computes_the_same_before_it_is_rounded(
    family: str, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    arch, overrides = MODELS[family]
    block = record_block(tiny_model(arch, **overrides))
    before = logits(block.model)
    result = quantize_block(block.task, AwqOptions())
    assert any(report.notes for report in result.reports)
    assert load_into(block.model, block.task) > 0
    torch.testing.assert_close(logits(block.model), before, rtol=1e-5, atol=1e-5 * scale_of(before))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(5, 45).unsqueeze(0)).logits
    return found


def scale_of(values: Tensor) -> float:
    return float(values.abs().max())


def load_into(model: Any, task: BlockTask) -> int:
    """Puts the task's dense tensors into block 0 of `model`; how many differ from before."""
    own = dict(model.model.layers[0].named_parameters())
    new = {f"{n}.weight": w for n, w in (task.weights | task.norms).items()}
    new |= {f"{n}.bias": b for n, b in task.biases.items()}
    assert new.keys() == own.keys()
    changed = sum(not torch.equal(own[name].data, tensor) for name, tensor in new.items())
    for name, tensor in new.items():
        own[name].data.copy_(tensor)
    return changed


@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("name", GROUPS)
def test_a_scaled_group_never_loses_more_than_rounding_alone(
    name: str, quant: TensorQuant, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    """Measured as outputs on the calibration tokens; the group is scaled by itself."""
    block = record_block(tiny_model(), quant=quant)
    group = group_called(block.task, name)
    original = dict(block.task.weights)
    block.task.quant = dict.fromkeys(group.members, quant)
    block.task.groups = (group,)
    result = quantize_block(block.task, AwqOptions(clip=False))
    x = block.inputs[name]
    ours, plain = 0.0, 0.0
    for member in group.members:
        unscale = original[member] / block.task.weights[member]
        restored = result.qtensors[member].dequantize() * unscale
        ours += output_error(x, restored - original[member])
        plain += output_error(x, plain_round(original[member], quant) - original[member])
    assert ours <= plain * 1.001


@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("diagonal", [False, True])
def test_clipping_equals_brute_force_and_never_loses_more_than_the_whole_range(
    diagonal: bool, quant: TensorQuant, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    """The loss of a row's group: its error through the inputs of that group alone."""
    block = record_block(tiny_model(), quant=quant, diagonal=diagonal)
    weight, x = block.task.weights["mlp.down_proj"], block.inputs["down"]
    moment = block.task.statistics["down"].second_moment
    options = {"min_shrink": 0.6, "shrink_step": 0.05}
    chosen, upper = search_clip(weight, quant, moment, torch.float32, **options)
    assert torch.equal(chosen, upper)

    def losses(shrink: Tensor | float) -> Tensor:
        delta = (plain_round(weight, quant, shrink) - weight).reshape(len(weight), -1, 32)
        parts = x.reshape(len(x), -1, 32)
        if diagonal:
            return torch.einsum("mgs,ngs->ng", parts.square(), delta.square()) / len(x)
        return torch.einsum("mgs,ngs->mng", parts, delta).square().mean(0)

    grid = torch.stack([losses(1 - 0.05 * step) for step in range(9)])
    ours = losses(chosen)
    assert bool((ours <= grid[0] * 1.001).all())
    torch.testing.assert_close(ours, grid.amin(0), rtol=1e-3, atol=0)
    assert bool((chosen < 1).any())
    assert bool((chosen >= 0.6 - 1e-6).all())

    rounded = round_clipped(weight, quant, moment, torch.float32, **options).dequantize()
    torch.testing.assert_close(rounded, plain_round(weight, quant, chosen), rtol=1e-5, atol=1e-6)

    apart = round_clipped(weight, quant, moment, torch.float32, **options, separate_ends=True)
    delta = (apart.dequantize() - weight).reshape(len(weight), -1, 32)
    parts = x.reshape(len(x), -1, 32)
    if diagonal:
        moved = torch.einsum("mgs,ngs->ng", parts.square(), delta.square()) / len(x)
    else:
        moved = torch.einsum("mgs,ngs->mng", parts, delta).square().mean(0)
    assert bool((moved <= ours * 1.001).all())
    if quant.symmetric:
        assert torch.equal(apart.dequantize(), rounded)
    else:
        assert float(moved.sum()) < float(ours.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_that_absorbs_a_scale_is_exact_in_the_dtype_it_is_stored_in(
    dtype: torch.dtype, tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model(), scale_dtype=dtype)
    task, group = block.task, group_called(block.task, "qkv")
    norm = task.norms["input_layernorm"].to(dtype).float()
    norm[3] = 0
    task.norms["input_layernorm"] = norm
    wanted = torch.exp(torch.randn(len(norm), generator=torch.Generator().manual_seed(4)))
    before = copy.copy(task.weights)
    scale = storable_scale(task, group, wanted)
    absorb_scale(task, group, scale)
    stored = task.norms["input_layernorm"].to(dtype).float()
    torch.testing.assert_close(stored, task.norms["input_layernorm"], rtol=2e-7, atol=0)
    for member in group.members:
        torch.testing.assert_close(
            task.weights[member] * stored, before[member] * norm, rtol=1e-6, atol=1e-9
        )
    assert scale[3] == 1
    live = norm != 0
    torch.testing.assert_close(scale[live], wanted[live], rtol=2**-7, atol=0)


def test_query_heads_of_one_value_head_share_a_scale() -> None:
    """Four query heads of two channels on two value heads, worked out by hand."""

    class Config:
        num_heads, num_kv_heads, head_dim = 4, 2, 2

    values = torch.tensor([1.0, 10, 3, 30, 5, 50, 9, 90])
    expected = torch.tensor([2.0, 20, 2, 20, 7, 70, 7, 70])
    assert torch.equal(tie_query_heads(values, Config()), expected)  # type: ignore[arg-type]


def test_a_group_with_a_dense_member_is_not_scaled(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model())
    quant = dict(block.task.quant)
    del quant["self_attn.k_proj"]
    block.task.quant = quant
    norm, k_proj = block.task.norms["input_layernorm"], block.task.weights["self_attn.k_proj"]
    result = quantize_block(block.task, AwqOptions())
    assert "self_attn.k_proj" not in result.qtensors
    assert torch.equal(block.task.norms["input_layernorm"], norm)
    assert torch.equal(block.task.weights["self_attn.k_proj"], k_proj)


def test_without_scales_and_clipping_awq_is_rounding_to_nearest(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    task = record_block(tiny_model()).task
    found = quantize_block(task, AwqOptions(scale=False, clip=False))
    rtn = load_method("rtn")
    expected = rtn.quantize_block(task, rtn.parse_options({}))
    for name, qtensor in expected.qtensors.items():
        assert torch.equal(found.qtensors[name].codes, qtensor.codes)
        assert torch.equal(found.qtensors[name].scale, qtensor.scale)


def test_duo_scaling_considers_more_and_loses_no_more(
    tiny_model: Callable[..., Path], record_block: Record
) -> None:
    block = record_block(tiny_model())
    for group in block.task.groups:
        single = search_scale(block.task, group, AwqOptions(duo_scaling="no"))
        both = search_scale(block.task, group, AwqOptions(duo_scaling="both"))
        if single is not None:
            assert both is not None
            assert both[1].error <= single[1].error * 1.02


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_shrnk": 0.5}, "unknown option 'min_shrnk' .did you mean 'min_shrink'"),
        ({"min_shrink": 0.0}, "min_shrink 0.0"),
        ({"shrink_step": 1.5}, "shrink_step 1.5"),
        ({"duo_scaling": "maybe"}, "'maybe' is not one of both, yes, no"),
        ({"min_shrink": "small"}, "min_shrink is 'small'; expected float"),
        ({"clip": "no"}, "clip is 'no'; expected bool"),
        ({"duo_scaling": False}, "duo_scaling is False; expected str.*quote"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        load_method("awq").parse_options(options)
