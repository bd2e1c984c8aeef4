"""Quantizing a quantized model: its dequantized weights are a dense model like any other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import verify_checkpoint
from quantforge.cli.app import run
from quantforge.convert import convert_checkpoint
from quantforge.errors import EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE, CheckpointError
from quantforge.models.dequantized import DequantizedReader, open_source
from quantforge.schemes import PRESETS, with_group_size

TinyModel = Callable[..., Path]

W4 = with_group_size(PRESETS["w4a16"], 32)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "fp8_dynamic"])
def test_it_reads_as_transformers_decompresses_it(
    scheme: str, arch: str, tiny_model: TinyModel, quantized_model: Any, reference_model: Any
) -> None:
    chosen = W4 if scheme == "w4a16" else PRESETS[scheme]
    original = tiny_model(arch)
    folder = quantized_model(original, lambda _: chosen)
    reader = open_source(folder, dequantize=True)
    expected = reference_model(folder).state_dict()
    assert set(reader.names()) == set(CheckpointReader(original).names())
    for name in reader.names():
        assert torch.equal(reader.tensor(name), expected[name]), name
        assert reader.spec(name).shape == tuple(expected[name].shape)
        assert reader.spec(name).dtype == reader.tensor(name).dtype
    assert reader.num_weight_bytes() == CheckpointReader(original).num_weight_bytes()
    assert reader.layout is None
    assert not reader.is_quantized("model.layers.0.mlp.up_proj")
    assert "quantization_config" not in reader.config


def test_weights_take_the_dtype_of_the_model(tiny_model: TinyModel, quantized_model: Any) -> None:
    folder = quantized_model(tiny_model(dtype=torch.bfloat16), lambda _: W4)
    reader = DequantizedReader(folder)
    assert {reader.tensor(name).dtype for name in reader.names()} == {torch.bfloat16}


def quantize(*arguments: object) -> int:
    return run(["quantize", *(str(a) for a in arguments), "--device", "cpu", "-q"])


@pytest.mark.parametrize("layout", ["pack-quantized", "awq", "gptq_v2"])
def test_a_quantized_model_is_requantized_on_request_only(
    layout: str,
    tiny_model: TinyModel,
    quantized_model: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, output = quantized_model(tiny_model(), lambda _: W4), tmp_path / "out"
    if layout != "pack-quantized":
        convert_checkpoint(folder, tmp_path / layout, layout)
        folder = tmp_path / layout
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert quantize(folder, "-o", output, "-m", "rtn") == EXIT_UNSUPPORTED
    assert "give --dequantize" in capfd.readouterr().err
    assert not output.exists()
    arguments = (folder, "-o", output, "--method", "rtn", "--scheme", "w8a16", "--dequantize")
    assert quantize(*arguments) == EXIT_OK, capfd.readouterr().err
    assert not verify_checkpoint(output).failures()
    dense, stored = DequantizedReader(folder), CheckpointReader(output)
    for name in (f"model.layers.1.{n}" for n in ("self_attn.q_proj", "mlp.down_proj")):
        weight = dense.tensor(f"{name}.weight")
        again = stored.linear(name).dequantize(torch.float32)  # type: ignore[union-attr]
        step = weight.abs().amax(1, keepdim=True) / 127.5
        assert ((again - weight).abs() <= step * 0.501).all()
    origin = json.loads((output / "quantforge.json").read_text())["source"]
    assert origin["dequantized_from"]["format"] == layout
    assert [scheme.partition("-")[0] for scheme in origin["dequantized_from"]["schemes"]] == [
        "int4"
    ]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_the_same_scheme_again_changes_almost_nothing(
    tiny_model: TinyModel, quantized_model: Any, tmp_path: Path
) -> None:
    """Every value lies on the old grid, whose ends the new one has too."""
    folder = quantized_model(tiny_model(), lambda _: PRESETS["w8a16"])
    output = tmp_path / "out"
    arguments = ("-o", output, "-m", "rtn", "--scheme", "w8a16", "--dequantize")
    assert quantize(folder, *arguments) == EXIT_OK
    for name in (f"model.layers.0.{n}" for n in ("self_attn.v_proj", "mlp.gate_proj")):
        old, new = (CheckpointReader(f).linear(name) for f in (folder, output))
        first, second = (w.dequantize(torch.float32) for w in (old, new))  # type: ignore[union-attr]
        assert float((first - second).norm() / first.norm()) < 0.01


def test_provenance_goes_back_to_the_first_source(
    tiny_model: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tiny_model()
    assert quantize(source, "-o", tmp_path / "one", "-m", "rtn") == EXIT_OK
    arguments = ("-o", tmp_path / "two", "-m", "rtn", "--scheme", "w8a16", "--dequantize")
    assert quantize(tmp_path / "one", *arguments) == EXIT_OK
    found = json.loads((tmp_path / "two" / "quantforge.json").read_text())["source"]
    assert found["name"] == "one"
    assert found["dequantized_from"]["method"] == "rtn"
    assert found["dequantized_from"]["source"]["name"] == source.name


def test_what_cannot_be_dequantized_is_refused(
    tiny_model: TinyModel,
    quantized_model: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = tiny_model()
    assert quantize(source, "-o", tmp_path / "out", "-m", "rtn", "--dequantize") == EXIT_USAGE
    assert "is not quantized; leave --dequantize out" in capfd.readouterr().err
    folder = quantized_model(source, lambda _: W4)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    save_file(tensors | {name: tensors[name] * float("nan")}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds"):
        DequantizedReader(folder).tensor("model.layers.1.mlp.up_proj.weight")
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale is missing"):
        DequantizedReader(folder)
