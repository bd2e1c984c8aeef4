"""Runs with static input scales: measured on the block as quantized, resumable, refused in time."""

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
from quantforge.checkpoint.manifest import read_manifest
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import verify_checkpoint
from quantforge.errors import CalibrationError, RecipeError, UsageError
from quantforge.pipeline import quantize_model
from quantforge.plan import QuantizePlan, plan_quantization
from quantforge.quantizer import Evidence, Quantizer
from quantforge.recipe import LayerSection, QuantizeSection, Recipe

TinyModel = Callable[..., Path]

CPU = torch.device("cpu")
LAYERS = 3
GROUPS = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def text() -> CalibrationSet:
    generator = torch.Generator().manual_seed(5)
    return CalibrationSet(
        token_ids=torch.randint(3, 512, (4, 24), generator=generator),
        id="random 4x24",
        sha256="1" * 64,
        sources={},
        warnings=(),
    )


def plan_of(folder: Path, **section: Any) -> tuple[Recipe, QuantizePlan]:
    settings = {"method": "rtn", "scheme": "fp8_static"} | section
    recipe = Recipe(source="test", quantize=QuantizeSection(**settings))
    return recipe, plan_quantization(CheckpointReader(folder), recipe.quantize)


def quantize(
    folder: Path,
    output: Path,
    evidence: Evidence | None = None,
    *,
    options: dict[str, Any] | None = None,
    **section: Any,
) -> Path:
    recipe, plan = plan_of(folder, **section)
    quantize_model(
        folder, output, recipe, plan, evidence or text(), device=CPU, dtype=torch.float32,
        **(options or {}),
    )  # fmt: skip
    return output


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Layer -> what its linear reads of `text`, by transformers' forward."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: found.update({name: inputs[0].detach()})
            )
    with torch.no_grad():
        model(text().token_ids)
    return found


@pytest.mark.parametrize(
    ("method", "scheme", "last"),
    [
        ("rtn", "fp8_static", 448),
        ("smoothquant", "fp8_static", 448),
        ("smoothquant", "w8a8_int8_static", 127.5),
        ("awq", "w8a8_int8_static", 127.5),
        ("gptq", "w8a8_int8_static", 127.5),
    ],
)
def test_scales_are_those_of_the_inputs_of_the_quantized_model(
    method: str,
    scheme: str,
    last: float,
    tiny_model: TinyModel,
    tmp_path: Path,
    reference_model: Callable[..., Any],
) -> None:
    """Of every block, the last one too, with its weights rounded and its scales moved."""
    source = tiny_model(num_hidden_layers=LAYERS)
    output = quantize(source, tmp_path / "out", method=method, scheme=scheme)
    seen, reader = inputs_of(reference_model(output)), CheckpointReader(output)
    for layer in range(LAYERS):
        for first, members in GROUPS.items():
            prefix = f"model.layers.{layer}."
            expected = float(seen[prefix + first].abs().max()) / last
            for name in members:
                found = float(reader.tensor(f"{prefix}{name}.input_scale"))
                assert found == pytest.approx(expected, rel=1e-4), prefix + name
    assert verify_checkpoint(output).ok


def test_an_observer_changes_input_scales_and_nothing_else(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model()
    plain = CheckpointReader(quantize(source, tmp_path / "absmax"))
    clipped = quantize(source, tmp_path / "clipped", activation_observer="percentile:90")
    reader = CheckpointReader(clipped)
    assert reader.names() == plain.names()
    for name in plain.names():
        before, after = plain.tensor(name), reader.tensor(name)
        if name.endswith("input_scale"):
            assert float(after) < float(before)
        else:
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), name
    manifest = read_manifest(clipped)
    assert manifest is not None
    assert manifest.recipe["quantize"]["activation_observer"] == "percentile:90"


def hashes(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.iterdir()
        if p.name != "quantforge.json"
    }


@pytest.mark.parametrize("every", [None, LAYERS], ids=["hidden kept", "hidden run again"])
@pytest.mark.parametrize("stop", range(1, LAYERS))
@pytest.mark.parametrize("method", ["rtn", "smoothquant"])
def test_a_run_that_was_stopped_resumes_to_the_same_bytes(
    method: str,
    stop: int,
    every: int | None,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_model(num_hidden_layers=LAYERS)
    section = {"method": method, "activation_observer": "mse"}
    whole = quantize(source, tmp_path / "whole", **section)
    real = Quantizer._quantize_block

    def run(self: Quantizer, layer: int) -> Any:
        if layer == stop:
            raise KeyboardInterrupt
        return real(self, layer)

    monkeypatch.setattr(Quantizer, "_quantize_block", run)
    options = {"resume_every": every}
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", options=options, **section)
    monkeypatch.undo()
    resumed = quantize(source, tmp_path / "out", options=options | {"resume": True}, **section)
    assert hashes(resumed) == hashes(whole)


def test_a_run_with_another_observer_is_not_resumed(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = tiny_model(), Quantizer._quantize_block

    def run(self: Quantizer, layer: int) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return real(self, layer)

    monkeypatch.setattr(Quantizer, "_quantize_block", run)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="activation_observer was 'absmax', is 'mse'"):
        quantize(source, tmp_path / "out", options={"resume": True}, activation_observer="mse")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"scheme": "fp8_dynamic", "activation_observer": "mse"}, "no static scale of inputs"),
        ({"method": "awq", "scheme": "w4a16", "activation_observer": "mse"}, "no static scale"),
        ({"activation_observer": "max"}, "'max'.* is not one of absmax, percentile"),
        ({"ignore": ()}, "cannot quantize lm_head, whose inputs are not calibrated"),
        ({"method": "awq"}, "method awq does not round to float"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_plan(
    section: dict[str, Any], says: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(RecipeError, match=says):
        plan_of(tiny_model(hidden_size=128), **section)


def test_only_a_head_of_static_inputs_is_refused(tiny_model: TinyModel) -> None:
    folder, static = tiny_model(), LayerSection(scheme="fp8_static")
    head = {"ignore": (), "layers": {"lm_head": LayerSection(scheme="w8a16")}}
    _, plan = plan_of(folder, **head)
    assert str(plan.layers["lm_head"]) == "int8-channel-sym"
    assert plan.observer is not None
    with pytest.raises(RecipeError, match="cannot quantize lm_head"):
        plan_of(folder, scheme="w8a16", ignore=(), layers={"lm_head": static})


def test_statistics_of_another_run_and_no_text_at_all_are_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model()
    reader, evidence = CheckpointReader(folder), text()
    _, plan = plan_of(folder)
    assert plan.needs_text
    layers = collect_statistics(reader, evidence, device=CPU, dtype=torch.float32)
    path = tmp_path / "seen.safetensors"
    save_statistics(path, layers, origin_of(reader, evidence, len(layers)))
    for given in (StatisticsFile(path), None):
        with pytest.raises(CalibrationError, match="measured on calibration text; give text"):
            Quantizer(reader, plan, given, device=CPU, dtype=torch.float32)


def test_schemes_with_dynamic_inputs_need_no_text_for_rounding_to_nearest(
    tiny_model: TinyModel,
) -> None:
    for scheme in ("fp8_dynamic", "w8a8_int8"):
        assert not plan_of(tiny_model(), scheme=scheme)[1].needs_text
