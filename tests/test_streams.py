"""What true-sequential order, mismatch and held-out samples see, and that such runs resume."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.calibration.collect import collect_statistics
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile, origin_of, save_statistics
from quantforge.calibration.streams import Observed, Streams
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CalibrationError
from quantforge.models.arch.base import LLAMA_GROUPS
from quantforge.pipeline import QuantizeReport, quantize_model
from quantforge.plan import plan_quantization
from quantforge.qtensor import QuantizedTensor
from quantforge.quantizer import Evidence, Quantizer
from quantforge.recipe import QuantizeSection, Recipe

TinyModel = Callable[..., Path]
ReferenceModel = Callable[..., Any]

CPU = torch.device("cpu")
LAYERS = 3
SAMPLES, LENGTH = 5, 24
NUM_HELD_OUT = 1


def calibration(samples: int = SAMPLES) -> CalibrationSet:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 512, (samples, LENGTH), generator=generator)
    return CalibrationSet(token_ids=tokens, id="random", sha256="1" * 64, sources={}, warnings=())


def quantize(
    source: Path,
    output: Path,
    method: str,
    options: dict[str, Any],
    evidence: Evidence | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    ignore: tuple[str, ...] = ("lm_head",),
    **more: Any,
) -> QuantizeReport:
    section = QuantizeSection(method=method, group_size=32, options=options, ignore=ignore)
    recipe = Recipe(source="test", quantize=section)
    plan = plan_quantization(CheckpointReader(source), section)
    data = evidence or calibration()
    return quantize_model(source, output, recipe, plan, data, device=CPU, dtype=dtype, **more)


def weights_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def spy(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], Observed]:
    """Keeps what is observed of each (layer, group); of several times the last."""
    seen: dict[tuple[int, str], Observed] = {}
    real = Streams.observe

    def observe(self: Streams, layer: int, *rest: Any, **more: Any) -> Observed:
        found = real(self, layer, *rest, **more)
        for name in found.statistics:
            seen[layer, name] = found
        return found

    monkeypatch.setattr(Streams, "observe", observe)
    return seen


def inputs_of(model: Any, layer: int, member: str) -> Tensor:
    """What a linear of `model` reads [samples, length, K], by transformers' forward."""
    kept: list[Tensor] = []
    module = model.get_submodule(f"model.layers.{layer}.{member}")
    handle = module.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        model(calibration().token_ids)
    handle.remove()
    return kept[0]


def put_rounded(model: Any, output: CheckpointReader, layer: int, members: tuple[str, ...]) -> None:
    """Gives linears of `model` the restored weights of a quantized folder."""
    for member in members:
        name = f"model.layers.{layer}.{member}"
        rounded = output.linear(name)
        assert isinstance(rounded, QuantizedTensor)
        model.get_submodule(name).weight.data = rounded.dequantize(torch.float32)


def gram(x: Tensor, y: Tensor) -> Tensor:
    """Mean of ``x' y`` over tokens, in float64."""
    left, right = x.flatten(0, 1).double(), y.flatten(0, 1).double()
    return (left.T @ right / len(left)).float()


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_true_sequential_statistics_are_those_of_the_partly_rounded_model(
    arch: str,
    tiny_model: TinyModel,
    reference_model: ReferenceModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, output = tiny_model(arch), tmp_path / "out"
    seen = spy(monkeypatch)
    quantize(source, output, "gptq", {"true_sequential": True})
    model, reader = reference_model(source), CheckpointReader(output)
    for layer in range(2):
        for group in LLAMA_GROUPS:
            x = inputs_of(model, layer, group.members[0])
            found = seen[layer, group.name].statistics[group.name]
            assert found.num_tokens == SAMPLES * LENGTH
            torch.testing.assert_close(found.second_moment, gram(x, x), rtol=1e-3, atol=1e-5)
            put_rounded(model, reader, layer, group.members)


def test_drift_and_held_out_moments_are_those_of_both_models(
    tiny_model: TinyModel,
    reference_model: ReferenceModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last sample is held out; x is from the model rounded so far, f from the original."""
    source, output = tiny_model(), tmp_path / "out"
    seen = spy(monkeypatch)
    quantize(source, output, "gptq", {"true_sequential": True, "mismatch": 1.0})
    original, model = reference_model(source), reference_model(source)
    reader = CheckpointReader(output)
    fit = slice(0, SAMPLES - NUM_HELD_OUT)
    held = slice(SAMPLES - NUM_HELD_OUT, SAMPLES)
    for layer in range(2):
        for group in LLAMA_GROUPS:
            x = inputs_of(model, layer, group.members[0])
            d = inputs_of(original, layer, group.members[0]) - x
            found = seen[layer, group.name]
            moments = found.held_out[group.name]
            assert moments.cross is not None
            assert moments.drift is not None
            pairs = [
                (found.statistics[group.name].second_moment, gram(x[fit], x[fit])),
                (found.cross[group.name], gram(d[fit], x[fit])),
                (moments.inputs, gram(x[held], x[held])),
                (moments.cross, gram(d[held], x[held])),
                (moments.drift, gram(d[held], d[held])),
            ]
            for ours, expected in pairs:
                torch.testing.assert_close(ours, expected, rtol=1e-3, atol=2e-5)
            if (layer, group.name) == (0, "qkv"):
                assert not found.cross["qkv"].any()
            put_rounded(model, reader, layer, group.members)


@pytest.mark.parametrize("true_sequential", [False, True])
def test_scales_and_mismatch_go_together_in_the_pipeline(
    true_sequential: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    options = {"true_sequential": true_sequential, "mismatch": 1.0, "refit": True}
    source = tiny_model("qwen2", torch.bfloat16)
    report = quantize(source, tmp_path / "out", "awq_gptq", options, dtype=torch.bfloat16)
    assert all(layer.output_error is not None for layer in report.layers)
    assert all(layer.output_error < 0.1 for layer in report.layers if layer.output_error)
    for layer in report.layers:
        table = layer.notes["held_out_errors"]
        assert len(table) == 6
        assert layer.notes["held_out_error"] == min(table.values())
        assert layer.notes.get("mismatch", 0.0) in (0.0, 0.5, 1.0)


def test_mismatch_brings_the_logits_closer_to_the_original_model(
    tiny_model: TinyModel, reference_model: ReferenceModel, tmp_path: Path
) -> None:
    """On the text that it was fitted to; drift that is made up for twice would grow instead."""
    source, data = tiny_model(num_hidden_layers=4), calibration(40)
    with torch.no_grad():
        wanted = reference_model(source)(data.token_ids).logits

        def error(**options: Any) -> float:
            output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
            quantize(source, output, "gptq", options, data)
            found = reference_model(output)(data.token_ids).logits
            return float((found - wanted).square().sum() / wanted.square().sum())

        plain, matched = error(true_sequential=True), error(mismatch=1.0)
    assert matched < 0.9 * plain


def test_linears_left_dense_stay_as_they_are_in_true_sequential_order(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, output = tiny_model("qwen2"), tmp_path / "out"
    ignore = ("lm_head", "k_proj", "down_proj")
    quantize(source, output, "awq_gptq", {"true_sequential": True}, ignore=ignore)
    before, after = CheckpointReader(source), CheckpointReader(output)
    for member in ("self_attn.k_proj.weight", "self_attn.k_proj.bias", "mlp.down_proj.weight"):
        name = f"model.layers.1.{member}"
        assert torch.equal(after.tensor(name), before.tensor(name))


@pytest.mark.parametrize(
    ("arch", "dtype", "method", "options"),
    [
        ("llama", torch.float32, "gptq", {"true_sequential": True}),
        ("qwen2", torch.bfloat16, "awq_gptq", {"mismatch": 1.0}),
        ("llama", torch.float32, "best", {"true_sequential": True, "mismatch": 0.5}),
    ],
)
@pytest.mark.parametrize("every", [1, 9])
def test_a_stopped_run_resumes_to_the_same_bytes(
    arch: str,
    dtype: torch.dtype,
    method: str,
    options: dict[str, Any],
    every: int,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From kept hidden states, and from finished blocks alone; every stream goes on as it was."""
    source = tiny_model(arch, dtype, num_hidden_layers=LAYERS)
    quantize(source, tmp_path / "whole", method, options, dtype=dtype)
    real, rounded = Quantizer._quantize_block, []

    def run(self: Quantizer, layer: int) -> Any:
        if layer == LAYERS - 1 and not rounded.count("stopped"):
            rounded.append("stopped")
            raise KeyboardInterrupt
        rounded.append(str(layer))
        return real(self, layer)

    monkeypatch.setattr(Quantizer, "_quantize_block", run)
    more = {"dtype": dtype, "resume_every": every}
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", method, options, **more)
    quantize(source, tmp_path / "out", method, options, resume=True, **more)
    assert rounded == ["0", "1", "stopped", "2"]
    assert weights_sha256(tmp_path / "out") == weights_sha256(tmp_path / "whole")


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("gptq", {"true_sequential": True}, "true_sequential"),
        ("awq_gptq", {"mismatch": 1.0}, "mismatch, held-out samples"),
        ("gptq", {"refit": True}, "held-out samples"),
        ("best", {"mismatch": 0.0, "refit": False}, "held-out samples"),
    ],
)
def test_statistics_cannot_stand_for_text_that_must_be_seen_again(
    method: str, options: dict[str, Any], named: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, path = tiny_model(), tmp_path / "s.safetensors"
    reader, data = CheckpointReader(source), calibration()
    layers = collect_statistics(reader, data, device=CPU, dtype=torch.float32)
    save_statistics(path, layers, origin_of(reader, data, 2))
    with pytest.raises(CalibrationError, match=f"method {method} needs text for {named}, but s.sa"):
        quantize(source, tmp_path / "out", method, options, StatisticsFile(path))
    assert not (tmp_path / "out").exists()


def test_one_sample_cannot_be_fitted_to_and_held_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="1 calibration sample cannot be split"):
        quantize(tiny_model(), tmp_path / "out", "best", {}, calibration(1))
