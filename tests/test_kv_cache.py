"""Scales of a KV cache from calibration to serving: against the key/value cache of transformers,
compressed-tensors' own config, and damage of every kind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.calibration.data import CalibrationSet
from quantforge.checkpoint._compressed import parse_layout
from quantforge.checkpoint.inspection import describe_checkpoint
from quantforge.checkpoint.manifest import append_evaluation, read_manifest
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import verify_checkpoint
from quantforge.convert import convert_checkpoint
from quantforge.errors import CalibrationError, CheckpointError, RecipeError, UnsupportedError
from quantforge.pipeline import quantize_model
from quantforge.plan import plan_quantization
from quantforge.quantizer import Quantizer
from quantforge.recipe import QuantizeSection, Recipe, parse_recipe
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine

TinyModel = Callable[..., Path]
ReferenceModel = Callable[..., Any]

CPU = torch.device("cpu")
LARGEST = {"fp8": 448.0, "int8": 127.0}
NAMES = [f"model.layers.{i}.self_attn.{kind}_scale" for i in (0, 1) for kind in ("k", "v")]


def calibration() -> CalibrationSet:
    generator = torch.Generator().manual_seed(5)
    return CalibrationSet(
        token_ids=torch.randint(3, 512, (6, 32), generator=generator),
        id="random 6x32",
        sha256="1" * 64,
        sources={},
        warnings=(),
    )


def quantize(
    source: Path, output: Path, *, kv_cache: str = "fp8", resume: bool = False, **section: Any
) -> Path:
    settings = {"method": "rtn", "group_size": 32, **section}
    recipe = Recipe(source="test", quantize=QuantizeSection(kv_cache=kv_cache, **settings))
    plan = plan_quantization(CheckpointReader(source), recipe.quantize)
    quantize_model(
        source, output, recipe, plan, calibration(), device=CPU, dtype=torch.float32, resume=resume
    )
    return output


def cached_absmax(model: Any, layer: int) -> tuple[float, float]:
    """Largest key and value that transformers caches for the calibration samples."""
    with torch.no_grad():
        cache = model(calibration().token_ids, use_cache=True).past_key_values
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    return float(keys.abs().max()), float(values.abs().max())


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def change_section(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_scales_are_those_of_what_transformers_caches_for_the_quantized_model(
    arch: str,
    kv_cache: str,
    tiny_model: TinyModel,
    reference_model: ReferenceModel,
    tmp_path: Path,
) -> None:
    output = quantize(tiny_model(arch), tmp_path / "out", kv_cache=kv_cache)
    tensors = load_file(output / "model.safetensors")
    assert sorted(name for name in tensors if name.endswith(("k_scale", "v_scale"))) == NAMES
    model = reference_model(output)
    for layer in (0, 1):
        for kind, absmax in zip("kv", cached_absmax(model, layer), strict=True):
            scale = tensors[f"model.layers.{layer}.self_attn.{kind}_scale"]
            assert scale.dtype == torch.float32
            assert scale.shape == (1,)
            assert float(scale) == pytest.approx(absmax / LARGEST[kv_cache], rel=1e-4)


@pytest.mark.parametrize(
    "section",
    [
        {"method": "rtn", "scheme": "w8a16", "group_size": "auto"},
        {"method": "rtn", "scheme": "fp8_dynamic", "group_size": "auto"},
        {"method": "awq"},
        {"method": "gptq"},
    ],
    ids=lambda section: f"{section['method']}-{section.get('scheme', 'w4a16')}",
)
def test_any_method_and_scheme_may_have_scales_and_weights_stay_as_they_are_without(
    section: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model()
    output = quantize(source, tmp_path / "with", **section)
    assert verify_checkpoint(output).ok
    with_scales = load_file(output / "model.safetensors")
    plain = load_file(
        quantize(source, tmp_path / "without", kv_cache="none", **section) / "model.safetensors"
    )
    assert {n for n in with_scales if n not in plain} == set(NAMES)
    assert all(torch.equal(with_scales[name], plain[name]) for name in plain)
    manifest = read_manifest(output)
    assert manifest is not None
    assert manifest.scheme.endswith(", KV cache fp8-tensor")
    assert manifest.recipe["quantize"]["kv_cache"] == "fp8"


@pytest.mark.parametrize(("kv_cache", "kind"), [("fp8", "float"), ("int8", "int")])
def test_compressed_tensors_reads_the_scheme_of_the_cache(
    kv_cache: str, kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    output = quantize(tiny_model(), tmp_path / "out", kv_cache=kv_cache)
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    arguments = QuantizationConfig.model_validate(section).kv_cache_scheme
    assert arguments.num_bits == 8
    assert arguments.type == kind
    assert arguments.strategy == "tensor"
    assert arguments.symmetric is True
    assert arguments.dynamic is False


def test_a_model_with_scales_is_served_with_them(tiny_model: TinyModel, tmp_path: Path) -> None:
    output = quantize(tiny_model(), tmp_path / "out")
    config = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 256}
    calibrated = Engine.from_folder(output, EngineConfig(**config))
    plain = Engine.from_folder(output, EngineConfig(kv_cache_dtype="model", **config))
    assert calibrated.kv_cache == "float8_e4m3fn, one calibrated scale a layer"
    found: dict[str, torch.Tensor] = {}
    for name, engine in (("calibrated", calibrated), ("plain", plain)):
        parts: list[torch.Tensor] = []
        engine.score([list(range(5, 60))], lambda _w, _s, got, to=parts: to.append(got.clone()))
        found[name] = torch.cat(parts)
    error = (found["calibrated"] - found["plain"]).norm() / found["plain"].norm()
    assert 1e-3 < error < 0.1


def test_a_resumed_run_ends_with_the_bytes_of_an_undisturbed_one(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(num_hidden_layers=3)
    whole = quantize(source, tmp_path / "whole", method="awq")
    real = Quantizer._quantize_block
    for stop in (1, 2):
        output = tmp_path / f"out-{stop}"

        def interrupted(self: Quantizer, layer: int, stop: int = stop) -> Any:
            if layer == stop:
                raise KeyboardInterrupt
            return real(self, layer)

        with monkeypatch.context() as patch:
            patch.setattr(Quantizer, "_quantize_block", interrupted)
            with pytest.raises(KeyboardInterrupt):
                quantize(source, output, method="awq")
        quantize(source, output, method="awq", resume=True)
        for name in ("model.safetensors", "config.json"):
            assert (output / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("projection", "kind"), [("k_proj", "keys"), ("v_proj", "values")], ids=lambda word: word
)
def test_a_layer_without_keys_or_values_is_named(
    projection: str, kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model()
    name = f"model.layers.1.self_attn.{projection}.weight"
    change_tensors(source, lambda tensors: tensors[name].zero_())
    with pytest.raises(CalibrationError, match=rf"largest {kind} of layer 1 is 0\.0"):
        quantize(source, tmp_path / "out", scheme="w8a16", group_size="auto")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp8_e5m2", "E5M2 needs no calibrated scale"),
        ("fp9", "unknown kv_cache 'fp9'.*known: none, fp8, int8"),
    ],
)
def test_a_recipe_cannot_ask_for_scales_that_do_not_exist(
    value: str, message: str, tiny_model: TinyModel
) -> None:
    recipe = parse_recipe({"quantize": {"kv_cache": value}}, "test")
    with pytest.raises(RecipeError, match=message):
        plan_quantization(CheckpointReader(tiny_model()), recipe.quantize)


SCALE = NAMES[3]
DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "missing": ("is missing", lambda t: t.pop(SCALE)),
    "zero": ("is 0.0", lambda t: t[SCALE].zero_()),
    "negative": ("is -1.0", lambda t: t[SCALE].fill_(-1)),
    "nan": ("is nan", lambda t: t[SCALE].fill_(float("nan"))),
    "infinite": ("is inf", lambda t: t[SCALE].fill_(float("inf"))),
    "shape": (r"\[2\]", lambda t: t.update({SCALE: torch.ones(2)})),
    "dtype": ("int32", lambda t: t.update({SCALE: torch.ones(1, dtype=torch.int32)})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_scale_is_named_by_verify_and_when_the_model_is_loaded(
    damage: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    reason, change = DAMAGE[damage]
    output = quantize(tiny_model(), tmp_path / "out")
    change_tensors(output, change)
    failed = {c.name: c.detail for c in verify_checkpoint(output, check_hashes=False).failures()}
    assert SCALE in failed["kv cache"]
    with pytest.raises(CheckpointError, match=rf"{SCALE}.*{reason}"):
        Engine.from_folder(output, EngineConfig(device="cpu", kv_cache_tokens=64))


def test_scales_that_config_does_not_know_and_scales_never_calibrated_do_not_verify(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    output = quantize(tiny_model(), tmp_path / "out")
    ones = Path(shutil.copytree(output, tmp_path / "ones"))
    change_tensors(ones, lambda tensors: [tensors[name].fill_(1) for name in NAMES])
    failed = {c.name: c.detail for c in verify_checkpoint(ones, check_hashes=False).failures()}
    assert "never calibrated" in failed["kv cache"]
    change_section(output, kv_cache_scheme=None)
    failed = {c.name: c.detail for c in verify_checkpoint(output, check_hashes=False).failures()}
    assert NAMES[0] in failed["kv cache"]


@pytest.mark.parametrize(
    "scheme",
    [
        {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True},
        {"num_bits": 8, "type": "float", "strategy": "attn_head"},
        {"num_bits": 4, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False},
    ],
    ids=str,
)
def test_a_scheme_that_the_runtime_does_not_serve_is_refused(
    scheme: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    output = quantize(tiny_model(), tmp_path / "out")
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    with pytest.raises(UnsupportedError, match="kv_cache_scheme"):
        parse_layout("pack-quantized", section | {"kv_cache_scheme": scheme})
    with pytest.raises(CheckpointError, match="kv_cache_scheme is 'fp8'"):
        parse_layout("pack-quantized", section | {"kv_cache_scheme": "fp8"})


def test_inspect_shows_the_range_of_the_scales_and_counts_no_weight_for_them(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model()
    found = describe_checkpoint(quantize(source, tmp_path / "with"))
    plain = describe_checkpoint(quantize(source, tmp_path / "without", kv_cache="none"))
    tensors = load_file(tmp_path / "with" / "model.safetensors")
    keys = sorted(float(tensors[name]) for name in NAMES if name.endswith("k_scale"))
    assert found["kv_cache"]["scheme"] == "fp8-tensor"
    assert found["kv_cache"]["num_layers"] == 2
    assert found["kv_cache"]["k_scale"] == {"min": keys[0], "max": keys[1]}
    assert plain["kv_cache"] is None
    assert found["num_weights"] == plain["num_weights"]
    assert found["bytes"]["total"] == plain["bytes"]["total"] + 4 * len(NAMES)


def test_a_format_without_a_place_for_scales_says_that_they_are_lost(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = quantize(tiny_model(dtype=torch.float16), tmp_path / "out")
    append_evaluation(source, {"ppl": 3.0})
    report = convert_checkpoint(source, tmp_path / "gptq", "gptq_v2")
    assert report.lost == ("scales of the fp8-tensor KV cache",)
    assert verify_checkpoint(report.output).ok
    assert not any(n.endswith("k_scale") for n in CheckpointReader(report.output).names())
    manifest = read_manifest(report.output)
    assert manifest is not None
    assert manifest.evaluations == (), "they were made with the scales"
    plain = quantize(tiny_model(), tmp_path / "plain", kv_cache="none")
    assert convert_checkpoint(plain, tmp_path / "again", "gptq_v2").lost == ()
