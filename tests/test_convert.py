"""Conversion keeps codes, and AutoAWQ's and GPTQ's folders are served as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.checkpoint.base import known_formats
from quantforge.checkpoint.inspection import describe_checkpoint, quantized_layers
from quantforge.checkpoint.manifest import read_manifest
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import verify_checkpoint
from quantforge.convert import convert_checkpoint
from quantforge.errors import CheckpointError, UnsupportedError, UsageError
from quantforge.qtensor import QuantizedTensor
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine
from quantforge.schemes import QuantScheme, preset, with_group_size

ASYM = with_group_size(preset("w4a16"), 32)
SYM = with_group_size(preset("w4a16_sym"), 32)
WINDOW = [5, 9, 200, 77, 3, 150, 42, 311, 8, 19, 64]

TinyModel = Callable[..., Path]
QuantizedModel = Callable[[Path, Callable[[str], Any]], Path]


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    config = EngineConfig(device="cpu", dtype=dtype, kv_cache_tokens=256)
    parts: dict[int, torch.Tensor] = {}
    engine = Engine.from_folder(folder, config)
    engine.score([WINDOW], lambda _window, start, got: parts.update({start: got.clone()}))
    return torch.cat([parts[start] for start in sorted(parts)])


def quantized(folder: Path, layer: str) -> QuantizedTensor:
    weight = CheckpointReader(folder).linear(layer)
    assert isinstance(weight, QuantizedTensor)
    return weight


@pytest.fixture
def source(tiny_model: TinyModel, quantized_model: QuantizedModel) -> Callable[[QuantScheme], Path]:
    """``source(scheme)``: a tiny float16 qwen2 (its q, k and v have biases), pack-quantized."""

    def make(scheme: QuantScheme) -> Path:
        return quantized_model(tiny_model("qwen2", torch.float16), lambda _layer: scheme)

    return make


@pytest.mark.parametrize("target", ["awq", "gptq", "gptq_v2"])
@pytest.mark.parametrize("scheme", [ASYM, SYM], ids=str)
def test_a_converted_model_gives_equal_logits_and_comes_back_bit_for_bit(
    source: Callable[[QuantScheme], Path], tmp_path: Path, target: str, scheme: QuantScheme
) -> None:
    original = source(scheme)
    report = convert_checkpoint(original, tmp_path / "there", target)
    assert (report.source_format, report.format) == ("pack-quantized", target)
    assert report.scale_error == 0
    assert report.num_layers == 14
    assert verify_checkpoint(report.output).ok
    expected = logits(original)
    assert torch.equal(logits(report.output), expected)
    assert (report.output / "tokenizer.json").read_bytes() == (
        original / "tokenizer.json"
    ).read_bytes()
    back = convert_checkpoint(report.output, tmp_path / "back", "pack-quantized").output
    assert torch.equal(logits(back), expected)
    for layer in quantized_layers(CheckpointReader(original)):
        assert torch.equal(quantized(back, layer).codes, quantized(original, layer).codes)
        assert torch.equal(quantized(back, layer).scale, quantized(original, layer).scale)


def test_eight_bits_a_channel_go_through_gptq(
    source: Callable[[QuantScheme], Path], tmp_path: Path
) -> None:
    original = source(preset("w8a16"))
    output = convert_checkpoint(original, tmp_path / "out", "gptq").output
    assert torch.equal(logits(output), logits(original))
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["sym"]) == (8, -1, True)
    with pytest.raises(UnsupportedError, match=r"q_proj|k_proj|down_proj.*int8-channel-sym"):
        convert_checkpoint(original, tmp_path / "no", "awq")


def test_between_the_foreign_formats(source: Callable[[QuantScheme], Path], tmp_path: Path) -> None:
    original = source(ASYM)
    folder, expected = original, logits(original)
    for target in ("awq", "gptq_v2", "gptq", "awq"):
        step = tmp_path / f"{folder.name}-{target}"
        folder = convert_checkpoint(folder, step, target).output
    assert torch.equal(logits(folder), expected)


def test_the_provenance_names_the_source_and_its_hashes(
    source: Callable[[QuantScheme], Path], tmp_path: Path
) -> None:
    original = source(ASYM)
    first = convert_checkpoint(original, tmp_path / "first", "awq").output
    second = convert_checkpoint(first, tmp_path / "second", "gptq_v2").output
    manifest = read_manifest(second)
    assert manifest is not None
    assert manifest.source["format"] == "awq"
    assert manifest.source["hashes"] == CheckpointReader(first).file_hashes()
    assert manifest.source["source"]["hashes"] == CheckpointReader(original).file_hashes()
    assert len(manifest.layers) == 14


def test_scales_that_are_no_float16_are_rounded_and_reported(
    tiny_model: TinyModel, quantized_model: QuantizedModel, tmp_path: Path
) -> None:
    original = quantized_model(tiny_model("llama", torch.float32), lambda _layer: ASYM)
    report = convert_checkpoint(original, tmp_path / "out", "awq")
    assert 0 < report.scale_error <= 2**-11
    layer = "model.layers.0.mlp.down_proj"
    assert torch.equal(quantized(report.output, layer).codes, quantized(original, layer).codes)
    assert torch.allclose(logits(report.output), logits(original), atol=0.05)


def test_what_cannot_be_converted_is_refused_and_nothing_appears(
    tiny_model: TinyModel, quantized_model: QuantizedModel, tmp_path: Path
) -> None:
    dense = tiny_model("llama", torch.float16)
    output = tmp_path / "out"
    with pytest.raises(UnsupportedError, match="is not quantized"):
        convert_checkpoint(dense, output, "awq")
    with pytest.raises(UnsupportedError, match="unknown format 'exl2'"):
        convert_checkpoint(dense, output, "exl2")

    def mixed(layer: str) -> QuantScheme:
        return with_group_size(ASYM, 64) if "q_proj" in layer else ASYM

    folder = quantized_model(dense, mixed)
    with pytest.raises(UnsupportedError, match="pack-quantized already"):
        convert_checkpoint(folder, output, "pack-quantized")
    with pytest.raises(UnsupportedError, match="holds one int4 scheme"):
        convert_checkpoint(folder, output, "awq")
    with pytest.raises(UsageError, match="is or contains the source"):
        convert_checkpoint(folder, folder, "gptq_v2", overwrite=True)
    assert not output.exists()
    converted = convert_checkpoint(folder, output, "gptq_v2").output
    assert torch.equal(logits(converted), logits(folder))


def test_a_shape_that_does_not_fill_words_is_refused(
    tiny_model: TinyModel, quantized_model: QuantizedModel, tmp_path: Path
) -> None:
    dense = tiny_model("llama", torch.float16, intermediate_size=100)
    channel = with_group_size(ASYM, None)
    folder = quantized_model(dense, lambda _layer: channel)
    with pytest.raises(UnsupportedError, match=r"down_proj|gate_proj.*100.*not a multiple of 8"):
        convert_checkpoint(folder, tmp_path / "out", "gptq_v2")


def test_a_zero_point_that_version_1_cannot_hold_is_refused(
    source: Callable[[QuantScheme], Path], tmp_path: Path
) -> None:
    folder = convert_checkpoint(source(ASYM), tmp_path / "awq", "awq").output
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.1.mlp.up_proj"
    tensors[f"{layer}.qzeros"] = tensors[f"{layer}.qzeros"] * 0
    save_file(tensors, path)
    with pytest.raises(UnsupportedError, match=rf"{layer} cannot become gptq.*use gptq_v2"):
        convert_checkpoint(folder, tmp_path / "v1", "gptq")
    output = convert_checkpoint(folder, tmp_path / "v2", "gptq_v2").output
    assert torch.equal(logits(output), logits(folder))


@pytest.fixture
def activation_ordered(tiny_model: TinyModel, layouts: Any, tmp_path: Path) -> tuple[Path, Path]:
    """(a GPTQ folder packed by the oracle with a g_idx a layer, the dense model it stands for)."""
    dense = tiny_model("llama", torch.float16)
    tensors = load_file(dense / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(1)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        order = torch.randperm(columns, generator=generator)
        made = layouts.gptq_tensors(
            torch.randint(0, 16, (rows, columns), generator=generator).numpy(),
            torch.randint(4, 12, (columns // 32, rows), generator=generator).numpy(),
            (0.01 + 0.02 * torch.rand(columns // 32, rows, generator=generator)).numpy(),
            (torch.arange(columns) // 32)[order].numpy(),
            version=1,
        )
        layer = name.removesuffix(".weight")
        del packed[name]
        packed |= {f"{layer}.{suffix}": torch.from_numpy(a) for suffix, a in made.items()}
        packed[f"{layer}.bias"] = torch.zeros(rows).half()  # as old AutoGPTQ writes them
        plain[name] = torch.from_numpy(layouts.gptq_weight(made, 4, 1).copy()).half()
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    folder = tmp_path / "gptq"
    folder.mkdir()
    for path in dense.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(packed, folder / "model.safetensors")
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": True,
        "sym": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, dense


def test_an_activation_ordered_model_is_served_as_its_dense_weights_in_transformers(
    activation_ordered: tuple[Path, Path], reference_model: Callable[..., Any]
) -> None:
    folder, dense = activation_ordered
    assert verify_checkpoint(folder).ok
    assert describe_checkpoint(folder)["format"] == "gptq"
    with torch.no_grad():
        expected = reference_model(dense)(torch.tensor([WINDOW])).logits[0]
    assert (logits(folder) - expected).abs().max() < 1e-4


def test_activation_order_is_not_converted(
    activation_ordered: tuple[Path, Path], tmp_path: Path
) -> None:
    for target in ("awq", "gptq_v2", "pack-quantized"):
        with pytest.raises(UnsupportedError, match="in activation order"):
            convert_checkpoint(activation_ordered[0], tmp_path / target, target)
        assert not (tmp_path / target).exists()


def test_a_bias_that_the_model_lacks_must_be_zero(activation_ordered: tuple[Path, Path]) -> None:
    path = activation_ordered[0] / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"up_proj\.bias is there"):
        logits(activation_ordered[0])


@pytest.mark.parametrize(
    ("suffix", "tensor"),
    [
        ("g_idx", torch.full((64,), 10**6, dtype=torch.int32)),
        ("qweight", torch.zeros(8, 0, dtype=torch.int32)),
        ("qzeros", torch.zeros(2, 1, dtype=torch.int32)),
        ("scales", torch.full((2, 128), float("nan")).half()),
    ],
)
def test_a_hostile_tensor_is_named_with_its_file(
    activation_ordered: tuple[Path, Path], suffix: str, tensor: torch.Tensor
) -> None:
    folder = activation_ordered[0]
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        logits(folder)
    for part in (str(folder), "model.layers.0.mlp.up_proj", suffix):
        assert part in str(caught.value)
    assert not verify_checkpoint(folder).ok


def test_every_format_that_can_be_written_is_offered() -> None:
    names = {layout.name for layout in known_formats()}
    fp4 = {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}
    packed = {"pack-quantized", "float-quantized", "int-quantized", "mixed-precision"}
    assert names == packed | fp4 | {"awq", "gptq", "gptq_v2"}
