"""Quantized folders as others read them: compressed-tensors, transformers, and our own engine."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge.calibration.collect import collect_statistics
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile, origin_of, save_statistics
from quantforge.checkpoint import writer
from quantforge.checkpoint.manifest import read_manifest
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CalibrationError, CheckpointError
from quantforge.pipeline import QuantizeReport, quantize_model
from quantforge.plan import plan_quantization
from quantforge.qtensor import QuantizedTensor
from quantforge.quantizer import Evidence
from quantforge.recipe import CalibrationSection, QuantizeSection, Recipe
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine

TinyModel = Callable[..., Path]
ReferenceModel = Callable[..., Any]

CPU = torch.device("cpu")
PROMPT = list(range(5, 60))


def calibration(seed: int = 5) -> CalibrationSet:
    generator = torch.Generator().manual_seed(seed)
    return CalibrationSet(
        token_ids=torch.randint(3, 512, (6, 32), generator=generator),
        id="random 6x32",
        sha256="1" * 64,
        sources={},
        warnings=(),
    )


def quantize_folder(
    folder: Path, output: Path, evidence: Evidence | None = None, **section: Any
) -> QuantizeReport:
    recipe = Recipe(
        source="test",
        quantize=QuantizeSection(**section),
        calibration=CalibrationSection(seed=5),
    )
    plan = plan_quantization(CheckpointReader(folder), recipe.quantize)
    if evidence is None and plan.method.needs_statistics:
        evidence = calibration()
    return quantize_model(folder, output, recipe, plan, evidence, device=CPU, dtype=torch.float32)


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def untimed_manifest(folder: Path) -> dict[str, Any]:
    """quantforge.json but for the time of its making and what the run took."""
    manifest: dict[str, Any] = json.loads((folder / "quantforge.json").read_text())
    assert manifest.pop("created")
    assert manifest.pop("run")["seconds"]["total"] > 0
    for layer in manifest["layers"]:
        assert layer.pop("seconds") >= 0
    return manifest


def engine_logits(folder: Path, prompt: list[int] = PROMPT) -> Tensor:
    engine = Engine.from_folder(folder, EngineConfig(device="cpu", dtype="float32"))
    parts: list[Tensor] = []
    engine.score([prompt], lambda _window, _start, logits: parts.append(logits.clone()))
    return torch.cat(parts)


def reference_logits(model: Any, prompt: list[int] = PROMPT) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([prompt])).logits[0]
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_opens_a_checkpoint_and_gives_our_logits(
    arch: str,
    method: str,
    symmetric: bool,
    tied: bool,
    tiny_model: TinyModel,
    reference_model: ReferenceModel,
    tmp_path: Path,
) -> None:
    source, output = tiny_model(arch, tie_word_embeddings=tied), tmp_path / "out"
    report = quantize_folder(source, output, method=method, symmetric=symmetric, group_size=32)
    assert len(report.layers) == 14
    model = reference_model(output)
    reader = CheckpointReader(output)
    for layer in report.layers:
        ours = reader.linear(layer.name)
        assert isinstance(ours, QuantizedTensor)
        decompressed = model.get_submodule(layer.name).weight
        assert torch.equal(ours.dequantize(), decompressed), layer.name
    assert relative_error(engine_logits(output), reference_logits(model)) <= 1e-3
    dense = reference_logits(reference_model(source))
    assert 1e-3 < relative_error(reference_logits(model), dense) < 0.8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_and_what_stays_keep_the_dtype_of_the_source(
    dtype: torch.dtype,
    tiny_model: TinyModel,
    reference_model: ReferenceModel,
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    quantize_folder(tiny_model(dtype=dtype), output)
    tensors = load_file(output / "model.safetensors")
    floats = {name: t.dtype for name, t in tensors.items() if t.is_floating_point()}
    assert set(floats.values()) == {dtype}
    assert relative_error(engine_logits(output), reference_logits(reference_model(output))) <= 1e-3


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_lm_head_is_quantized_when_nothing_is_ignored(
    tied: bool, tiny_model: TinyModel, reference_model: ReferenceModel, tmp_path: Path
) -> None:
    source, output = tiny_model(tie_word_embeddings=tied), tmp_path / "out"
    report = quantize_folder(source, output, ignore=())
    assert report.layers[-1].name == "lm_head"
    reader = CheckpointReader(output)
    assert reader.config["tie_word_embeddings"] is False
    embedding = "model.embed_tokens.weight"
    assert torch.equal(reader.tensor(embedding), CheckpointReader(source).tensor(embedding))
    head = reader.linear("lm_head")
    assert isinstance(head, QuantizedTensor)
    model = reference_model(output)
    assert torch.equal(head.dequantize(), model.lm_head.weight)
    assert relative_error(engine_logits(output), reference_logits(model)) <= 1e-3


def test_ignored_linears_stay_as_they_are(
    tiny_model: TinyModel, reference_model: ReferenceModel, tmp_path: Path
) -> None:
    source, output = tiny_model(), tmp_path / "out"
    quantize_folder(source, output, method="rtn", ignore=("lm_head", "down_proj"))
    before, after = CheckpointReader(source), CheckpointReader(output)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj"
        assert not after.is_quantized(name)
        assert torch.equal(after.tensor(f"{name}.weight"), before.tensor(f"{name}.weight"))
    assert relative_error(engine_logits(output), reference_logits(reference_model(output))) <= 1e-3


def test_a_buffer_that_the_model_does_not_use_is_copied(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, output = tiny_model(), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(8) for i in range(2)}
    save_file(tensors | buffers, source / "model.safetensors", {"format": "pt"})
    quantize_folder(source, output, method="rtn")
    written = load_file(output / "model.safetensors")
    assert all(torch.equal(written[name], buffer) for name, buffer in buffers.items())


def test_lm_head_says_why_it_did_not_get_the_method(tiny_model: TinyModel, tmp_path: Path) -> None:
    found = quantize_folder(tiny_model(), tmp_path / "awq", ignore=()).layers[-1]
    assert (found.name, found.method) == ("lm_head", "rtn")
    assert found.notes == {"fallback": "rtn: no method sees the inputs of lm_head"}
    found = quantize_folder(tiny_model(), tmp_path / "rtn", method="rtn", ignore=()).layers[-1]
    assert found.notes == {}


def test_a_sharded_source_gives_the_same_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole, sharded = tiny_model(), tiny_model(max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    quantize_folder(whole, tmp_path / "a")
    quantize_folder(sharded, tmp_path / "b")
    assert (
        hashes(tmp_path / "a")["model.safetensors"] == hashes(tmp_path / "b")["model.safetensors"]
    )


def test_statistics_of_calibrate_replace_the_text(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Block 0 reads the same activations either way, so its tensors are the same to the bit."""
    source, path = tiny_model(), tmp_path / "s.safetensors"
    reader, data = CheckpointReader(source), calibration()
    layers = collect_statistics(reader, data, device=CPU, dtype=torch.float32)
    save_statistics(path, layers, origin_of(reader, data, 2))
    quantize_folder(source, tmp_path / "text")
    quantize_folder(source, tmp_path / "file", StatisticsFile(path))
    text, file = (load_file(tmp_path / n / "model.safetensors") for n in ("text", "file"))
    assert text.keys() == file.keys()
    assert all(torch.equal(text[n], file[n]) for n in text if n.startswith("model.layers.0."))
    manifest = read_manifest(tmp_path / "file")
    assert manifest is not None
    assert manifest.calibration is not None
    assert manifest.calibration["statistics"] == "s.safetensors"
    assert manifest.calibration["calibration_id"] == "random 6x32"


def test_the_same_input_gives_the_same_bytes(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model()
    quantize_folder(source, tmp_path / "a")
    quantize_folder(source, tmp_path / "b")
    first, second = hashes(tmp_path / "a"), hashes(tmp_path / "b")
    assert first.pop("quantforge.json")
    assert second.pop("quantforge.json")
    assert first == second
    assert untimed_manifest(tmp_path / "a") == untimed_manifest(tmp_path / "b")
    quantize_folder(source, tmp_path / "c", calibration(seed=6))
    assert hashes(tmp_path / "c")["model.safetensors"] != first["model.safetensors"]


def test_the_manifest_says_what_made_the_folder(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, output = tiny_model(), tmp_path / "out"
    before = hashes(source)
    report = quantize_folder(source, output)
    assert hashes(source) == before
    manifest = read_manifest(output)
    assert manifest is not None
    assert manifest.method == "awq"
    assert manifest.scheme == "int4-g64-asym"
    assert manifest.seed == 5
    assert manifest.source["name"] == source.name
    assert manifest.source["hashes"]["model.safetensors"] == before["model.safetensors"]
    assert [layer["name"] for layer in manifest.layers] == [r.name for r in report.layers]
    assert all(0 < layer["output_error"] < 0.1 for layer in manifest.layers)
    written = hashes(output)
    del written["quantforge.json"]
    assert dict(manifest.files) == written
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= written.keys()


def test_awq_needs_calibration(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model()
    recipe = Recipe(source="test")
    plan = plan_quantization(CheckpointReader(source), recipe.quantize)
    with pytest.raises(CalibrationError, match="awq needs calibration data"):
        quantize_model(
            source, tmp_path / "out", recipe, plan, None, device=CPU, dtype=torch.float32
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize(
    "section",
    [{"method": "awq"}, {"method": "rtn"}, {"method": "rtn", "ignore": ()}],
    ids=["awq", "rtn", "rtn all"],
)
def test_nan_in_a_weight_is_refused_by_name_and_leaves_nothing(
    name: str, section: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model()
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, source / "model.safetensors")
    results = tmp_path / "results"
    with pytest.raises(CheckpointError, match=rf"{source.name}: tensor {name} holds 1 values"):
        quantize_folder(source, results / "out", **section)
    assert list(results.glob("*")) + list(results.glob(".*")) == []


def test_a_full_disk_is_one_error_and_leaves_nothing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, results = tiny_model(), tmp_path / "results"
    before, count = hashes(source), 0
    real = writer.Shard.add

    def fill(self: Any, name: str, tensor: Tensor) -> None:
        nonlocal count
        count += 1
        if count == 20:
            raise OSError(28, "No space left on device")
        real(self, name, tensor)

    monkeypatch.setattr(writer.Shard, "add", fill)
    with pytest.raises(CheckpointError, match="No space left on device"):
        quantize_folder(source, results / "out", method="rtn")
    assert list(results.glob("*")) + list(results.glob(".*")) == []
    assert hashes(source) == before


def test_a_disk_too_small_is_refused_before_any_work(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="free; the output needs"):
        quantize_folder(source, tmp_path / "out", method="rtn")
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from quantforge import quantizer
from quantforge.cli.app import run

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

quantizer.Quantizer._write_rest = die
run(["quantize", sys.argv[1], "--output", sys.argv[2], "--method", "rtn", "--device", "cpu"])
"""


def test_a_killed_run_leaves_no_output_and_the_next_one_cleans_up(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, results = tiny_model(), tmp_path / "results"
    before = hashes(source)
    command = [sys.executable, "-c", KILLED, str(source), str(results / "out")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    left = sorted(path.name for path in results.iterdir())
    assert len(left) == 2
    assert left[0].startswith(".out.partial-")
    assert left[1] == ".out.resume"
    assert hashes(source) == before
    quantize_folder(source, results / "out", method="rtn")
    assert [path.name for path in results.iterdir()] == ["out"]
