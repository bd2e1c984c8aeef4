"""Running a method where part of the model saw no calibration text."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantforge.calibration.collect import collect_statistics
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile, origin_of, save_statistics
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.methods._run import run_method
from quantforge.methods.base import BlockResult, BlockTask, load_method
from quantforge.models.arch.base import LLAMA_GROUPS
from quantforge.models.loader import load_config
from quantforge.pipeline import QuantizeReport, quantize_model
from quantforge.plan import plan_quantization
from quantforge.qtensor import quantize
from quantforge.recipe import QuantizeSection, Recipe

TinyModel = Callable[..., Path]

CPU = torch.device("cpu")
TEXT_METHODS = ["awq", "gptq", "awq_gptq"]


def statistics_without(folder: Path, path: Path, *unseen: str) -> StatisticsFile:
    """Statistics of random text in which the inputs `unseen` (``1.down``) saw no token."""
    reader = CheckpointReader(folder)
    data = CalibrationSet(
        token_ids=torch.randint(3, 512, (6, 32), generator=torch.Generator().manual_seed(3)),
        id="random",
        sha256="0" * 64,
        sources={},
        warnings=(),
    )
    layers = collect_statistics(reader, data, device=CPU, dtype=torch.float32)
    save_statistics(path, layers, origin_of(reader, data, 2))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    counts = json.loads(metadata["num_tokens"]) | {f"layers.{name}": 0 for name in unseen}
    save_file(load_file(path), path, metadata | {"num_tokens": json.dumps(counts)})
    return StatisticsFile(path)


def quantize_folder(
    folder: Path, output: Path, method: str, evidence: StatisticsFile | None
) -> QuantizeReport:
    recipe = Recipe(source="test", quantize=QuantizeSection(method=method))
    plan = plan_quantization(CheckpointReader(folder), recipe.quantize)
    return quantize_model(folder, output, recipe, plan, evidence, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("method", TEXT_METHODS)
def test_linears_whose_input_saw_no_token_are_rounded_to_nearest_and_say_so(
    method: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model()
    unseen = statistics_without(source, tmp_path / "s.safetensors", "1.qkv", "1.gate_up", "1.down")
    report = quantize_folder(source, tmp_path / "out", method, unseen)
    found = {layer.name: layer for layer in report.layers}
    assert [layer.name for layer in report.layers] == sorted(found, key=list(found).index)
    fallen = {name for name, layer in found.items() if "fallback" in layer.notes}
    members = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.rpartition(".")[2] for name in fallen} == set(members)
    assert len(fallen) == len(members)
    for name in fallen:
        assert name.startswith("model.layers.1.")
        assert found[name].method == "rtn"
        assert "no token of the calibration text" in found[name].notes["fallback"]
        assert found[name].num_tokens == 0
        assert found[name].output_error is None
    assert found["model.layers.1.self_attn.o_proj"].method == method
    assert found["model.layers.1.self_attn.o_proj"].num_tokens == 6 * 32
    weight = CheckpointReader(source).tensor("model.layers.1.mlp.up_proj.weight")
    stored = CheckpointReader(tmp_path / "out").linear("model.layers.1.mlp.up_proj")
    expected = quantize(weight, stored.quant)  # type: ignore[union-attr]
    assert torch.equal(stored.codes, expected.codes)  # type: ignore[union-attr]


def test_a_block_without_any_text_is_rounded_as_a_whole(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """And is then, to the bit, what the method rtn writes."""
    source = tiny_model()
    names = [f"{layer}.{group.name}" for layer in range(2) for group in LLAMA_GROUPS]
    unseen = statistics_without(source, tmp_path / "s.safetensors", *names)
    report = quantize_folder(source, tmp_path / "awq", "awq", unseen)
    assert {layer.method for layer in report.layers} == {"rtn"}
    quantize_folder(source, tmp_path / "rtn", "rtn", None)
    first, second = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("awq", "rtn"))
    assert first == second


def task_of(folder: Path, **more: Any) -> BlockTask:
    reader = CheckpointReader(folder)
    plan = plan_quantization(reader, QuantizeSection(method="rtn"))
    weights = {
        m: reader.tensor(f"model.layers.0.{m}.weight") for g in LLAMA_GROUPS for m in g.members
    }
    task = BlockTask(
        layer=0,
        config=load_config(reader.config),
        groups=LLAMA_GROUPS,
        weights=weights,
        biases={},
        norms={},
        quant={name: scheme.weight for name, scheme in plan.block_linears(0).items()},
        statistics={},
        scale_dtype=torch.float32,
    )
    return replace(task, **more)


def test_time_is_shared_by_weights_unless_the_method_measured_it(tiny_model: TinyModel) -> None:
    rtn = load_method("rtn")
    task = task_of(tiny_model())

    def slow(task: BlockTask, options: Any) -> BlockResult:
        result = rtn.quantize_block(task, options)
        first, *others = result.reports
        return replace(result, reports=(replace(first, seconds=7.0), *others))

    result = run_method(replace(rtn, quantize_block=slow), task, rtn.parse_options({}))
    seconds = {report.name: report.seconds for report in result.reports}
    assert seconds["self_attn.q_proj"] == 7.0
    assert all(value is not None and value < 5 for name, value in seconds.items() if name[0] == "m")
    assert {report.input_group for report in result.reports} == {"qkv", "o", "gate_up", "down"}
    assert {report.num_tokens for report in result.reports} == {None}
