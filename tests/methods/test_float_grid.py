"""FP4 grids in the methods: shared global scales, and GPTQ on E2M1 codes against the paper."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantforge_kernels import gptq_block_fp4
from torch import Tensor

from quantforge.methods.base import BlockResult, BlockTask, load_method
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import PRESETS, TensorQuant

NVFP4, MXFP4 = PRESETS["nvfp4a16"].weight, PRESETS["mxfp4a16"].weight
FP4 = [pytest.param(NVFP4, id="nvfp4"), pytest.param(MXFP4, id="mxfp4")]
SIGNED = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
SHARING = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",)]

TinyModel = Callable[..., Path]
RecordBlock = Callable[..., Any]


def run(method: str, task: BlockTask, **options: Any) -> BlockResult:
    chosen = load_method(method)
    return chosen.quantize_block(task, chosen.parse_options(options))


def gptq_from_the_paper(
    weight: np.ndarray, moment: np.ndarray, grid: QuantizedTensor, damping: float
) -> np.ndarray:
    """Restored weights: algorithm 1 of arXiv 2210.17323, each column to the nearest of 15 values
    times its step, in float64."""
    columns = weight.shape[1]
    order = np.argsort(-np.diag(moment), kind="stable")
    hessian = moment + damping * np.mean(np.diag(moment)) * np.eye(columns)
    factor = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)])).T
    over_all = 1.0 if grid.global_scale is None else float(grid.global_scale)
    steps = grid.scale.double().numpy() / over_all
    size = columns // steps.shape[1]
    work, restored = weight[:, order].copy(), np.zeros_like(weight)
    for i, column in enumerate(order):
        step = steps[:, column // size]
        distance = np.abs(work[:, i, None] / step[:, None] - SIGNED)
        restored[:, column] = SIGNED[distance.argmin(1)] * step
        error = (work[:, i] - restored[:, column]) / factor[i, i]
        work[:, i + 1 :] -= np.outer(error, factor[i, i + 1 :])
    return restored


@pytest.mark.parametrize("quant", FP4)
def test_gptq_equals_the_paper_on_a_float_grid(
    quant: TensorQuant, tiny_model: TinyModel, record_block: RecordBlock
) -> None:
    block = record_block(tiny_model(), quant=quant)
    result = run("gptq", block.task, clip=False)
    for group in block.task.groups:
        moment = block.task.statistics[group.name].second_moment.double().numpy()
        for name in group.members:
            found = result.qtensors[name]
            weight = block.task.weights[name]
            shared = found.global_scale
            grid = quantize(weight, quant, global_scale=shared)
            assert torch.equal(found.scale, grid.scale)
            expected = gptq_from_the_paper(weight.double().numpy(), moment, grid, 0.01)
            got = found.dequantize().double().numpy()
            # a value halfway between two codes may fall to either, and moves what follows a little
            assert np.mean(np.abs(got - expected) > 1e-5) < 0.02, name


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("quant", FP4)
def test_gptq_loses_less_output_than_rounding_to_nearest(
    quant: TensorQuant, clip: bool, tiny_model: TinyModel, record_block: RecordBlock
) -> None:
    block = record_block(tiny_model(), quant=quant)
    nearest = {r.name: r.output_error for r in run("rtn", block.task).reports}
    for report in run("gptq", block.task, clip=clip).reports:
        assert report.method == "gptq"
        assert report.scheme == str(quant)
        assert report.output_error is not None
        assert report.output_error < nearest[report.name]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_linears_that_are_joined_share_a_global_scale_over_their_largest_weight(
    method: str, tiny_model: TinyModel, record_block: RecordBlock
) -> None:
    task = record_block(tiny_model(), quant=NVFP4).task
    result = run(method, task)
    for short in SHARING:
        names = [n for n in task.weights if n.endswith(short)]
        largest = max(float(task.weights[n].abs().max()) for n in names)
        scales = [result.qtensors[n].global_scale for n in names]
        assert len(names) == len(short)
        for scale in scales:
            assert scale is not None
            assert scale.tolist() == pytest.approx([448 * 6 / largest])
            assert torch.equal(scale, scales[0])


def test_only_linears_of_one_scheme_share(tiny_model: TinyModel, record_block: RecordBlock) -> None:
    task = record_block(tiny_model(), quant=NVFP4).task
    task.quant = {**task.quant, "self_attn.q_proj": MXFP4}
    task.weights["self_attn.q_proj"] *= 100
    result = run("rtn", task)
    assert result.qtensors["self_attn.q_proj"].global_scale is None
    shared = result.qtensors["self_attn.k_proj"].global_scale
    largest = max(float(task.weights[f"self_attn.{n}_proj"].abs().max()) for n in "kv")
    assert shared is not None
    assert shared.tolist() == pytest.approx([448 * 6 / largest])


@pytest.mark.parametrize("quant", FP4)
def test_a_clipped_scale_is_one_that_the_format_holds(
    quant: TensorQuant, tiny_model: TinyModel, record_block: RecordBlock
) -> None:
    result = run("gptq", record_block(tiny_model(), quant=quant).task, clip=True)
    for qtensor in result.qtensors.values():
        if quant is NVFP4:
            assert torch.equal(qtensor.scale.to(torch.float8_e4m3fn).float(), qtensor.scale)
        else:
            assert torch.equal(torch.frexp(qtensor.scale).mantissa.unique(), torch.tensor([0.5]))


def test_the_block_reference_equals_rounding_where_columns_are_independent() -> None:
    work = torch.randn(9, 33, generator=torch.Generator().manual_seed(0)) * 3
    scale = torch.rand(9, 33, generator=torch.Generator().manual_seed(1)) + 0.5
    before = work.clone()
    codes, errors = gptq_block_fp4.reference(work, torch.eye(33), scale)
    nearest: Tensor = torch.tensor(SIGNED, dtype=torch.float32)
    ratio = work / scale
    restored = nearest[(ratio.unsqueeze(-1) - nearest).abs().argmin(-1)] * scale
    assert codes.dtype == torch.uint8
    assert torch.allclose(errors, work - restored, atol=1e-6)
    assert torch.equal(work, before)


@pytest.mark.parametrize("method", ["awq", "awq_gptq"])
def test_methods_without_a_float_grid_do_not_claim_one(method: str) -> None:
    assert load_method(method).code_types == ("int",)


def test_gptq_on_an_fp8_grid_is_a_plain_loop_and_beats_rounding() -> None:
    """Codes of E4M3 with one scale a channel, against the loop of the paper in float64."""
    from quantforge_kernels import gptq_block_fp8

    generator = torch.Generator().manual_seed(2)
    mixing = torch.randn(10, 40, generator=generator)
    x = torch.randn(400, 10, generator=generator) @ mixing
    x = x + 0.3 * torch.randn(400, 40, generator=generator)
    gram = (x.T @ x / len(x)).double()
    gram.diagonal().add_(0.01 * gram.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    weight = torch.randn(24, 40, generator=generator)
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes, errors = gptq_block_fp8.reference(weight, upper.float(), scale.expand(24, 40))
    work = weight.double()
    for i in range(40):
        rounded = (work[:, i].float() / scale[:, 0]).to(torch.float8_e4m3fn)
        assert torch.equal(codes[:, i], rounded.view(torch.uint8))
        error = (work[:, i] - rounded.double() * scale[:, 0].double()) / upper[i, i]
        torch.testing.assert_close(errors[:, i].double(), error, rtol=1e-3, atol=1e-5)
        work[:, i + 1 :] -= error.unsqueeze(1) * upper[i, i + 1 :]

    def loss(restored: torch.Tensor) -> float:
        delta = restored.double() - weight.double()
        return float(((delta @ gram) * delta).sum())

    ours = codes.view(torch.float8_e4m3fn).float() * scale
    nearest = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    assert loss(ours) < 0.8 * loss(nearest)
