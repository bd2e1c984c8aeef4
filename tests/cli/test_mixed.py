"""Mixed precision from the command line: patterns, targets, what is written and who reads it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import EXIT_GATE_FAILED, EXIT_OK, EXIT_USAGE
from quantforge.models.attention import CausalAttention
from quantforge.models.loader import load_decoder

Command = Callable[..., Any]
TinyModel = Callable[..., Path]
CPU = ("--device", "cpu")
SHORT = ("--num-samples", "4", "--sequence-length", "32", *CPU)

BOUNDARY = 1e-2
"""Between two programs that quantize activations, where a value may fall to either of two codes."""

MIXED = """
quantize:
  method: rtn
  scheme: w4a16
  layers:
    "*.down_proj": {scheme: fp8_dynamic}
    "model.layers.0.self_attn.*": {scheme: w8a16}
    "model.layers.1.*o_proj": {group_size: 32}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    return path


def test_a_mixed_checkpoint_is_written_verified_and_read(
    tiny_model: TinyModel, tmp_path: Path, recipe: Path, command: Command
) -> None:
    output = tmp_path / "out"
    done = command("quantize", tiny_model(), "--recipe", recipe, "-o", output, "--json", *CPU)
    assert done.code == EXIT_OK, done.err
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision"
    formats = {group["format"] for group in section["config_groups"].values()}
    assert formats == {"pack-quantized", "float-quantized"}
    assert command("verify", output).code == EXIT_OK
    described = json.loads(command("inspect", output, "--json").out)
    assert described["format"] == "mixed-precision"
    counts = {s["scheme"]: s["num_layers"] for s in described["schemes"]}
    assert counts["fp8-channel+fp8-token-dynamic"] == 2
    assert counts["int8-channel-sym"] == 4
    assert counts["int4-g32-asym"] == 1
    assert counts["int4-g64-asym"] == 7
    assert command("generate", output, "--prompt", "A", "--max-tokens", "3", *CPU).code == EXIT_OK


def test_every_scheme_without_a_fused_kernel_is_told_of(
    tiny_model: TinyModel, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "low.yaml"
    low = "{down_proj: {scheme: w3a16}, o_proj: {scheme: nvfp4a16}}"
    path.write_text(f"quantize: {{method: rtn, layers: {low}}}")
    options = ("--recipe", path, *CPU)
    planned = json.loads(command("quantize", tiny_model(), *options, "--dry-run", "--json").out)
    done = command("quantize", tiny_model(), *options, "-o", tmp_path / "out")
    for said in (planned["note"], done.err):
        for scheme in ("int3-g128-asym", "fp4-g16-e4m3"):
            assert f"no fused kernel for {scheme}" in said


def decompressed_by_compressed_tensors(folder: Path, model: Any) -> dict[str, Any]:
    """Layer -> dense weight: compressed-tensors resolves the targets on `model`, and unpacks."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    section.pop("quant_method")
    apply_quantization_config(model, QuantizationConfig.model_validate(section))
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            prefix = f"{name}."
            parts = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
            compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
            weights[name] = compressor.decompress(parts, scheme)["weight"]
    return weights


def test_weights_equal_those_that_compressed_tensors_unpacks(
    tiny_model: TinyModel,
    tmp_path: Path,
    recipe: Path,
    command: Command,
    reference_model: Callable[..., Any],
) -> None:
    source, output = tiny_model(), tmp_path / "out"
    command("quantize", source, "--recipe", recipe, "-o", output, *CPU)
    reader = CheckpointReader(output)
    theirs = decompressed_by_compressed_tensors(output, reference_model(source))
    assert len(theirs) == 14
    for name, weight in theirs.items():
        ours: Any = reader.linear(name)
        assert torch.equal(ours.dequantize(torch.float32), weight.float())


@pytest.mark.parametrize(
    ("other", "bound"), [("w8a16", 1e-5), ("fp8_dynamic", BOUNDARY)], ids=["int8", "fp8"]
)
def test_logits_equal_transformers(
    other: str, bound: float, tiny_model: TinyModel, tmp_path: Path, command: Command
) -> None:
    """Symmetric schemes: for zero points transformers 5.24 makes tensors of a wrong shape, and
    where it dequantizes, it takes the scheme of the first group for all layers."""
    from transformers import AutoModelForCausalLM

    path, output = tmp_path / "symmetric.yaml", tmp_path / "out"
    path.write_text(
        "quantize: {method: rtn, scheme: w4a16_sym,\n"
        f"  layers: {{down_proj: {{scheme: {other}}}, '*.1.*o_proj': {{group_size: 32}}}}}}"
    )
    assert command("quantize", tiny_model(), "--recipe", path, "-o", output, *CPU).code == EXIT_OK
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    decoder = load_decoder(CheckpointReader(output), device="cpu", dtype=torch.float32)
    tokens = torch.randint(3, 512, (30,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden = decoder(tokens, torch.arange(30), CausalAttention(decoder.config, 1))
        ours, want = decoder.logits(hidden), model(tokens.unsqueeze(0)).logits[0]
    assert float((ours - want).norm() / want.norm()) <= bound


def test_target_bits_are_met_and_recorded(
    tiny_model: TinyModel, tmp_path: Path, text: Path, command: Command
) -> None:
    output = tmp_path / "out"
    options = ("--target-bits", "6", "--method", "awq", "--calibration", text, *SHORT)
    done = command("quantize", tiny_model(), *options, "-o", output, "--json")
    assert done.code == EXIT_OK, done.err
    document = json.loads(done.out)
    bits = document["checkpoint"]["bits_per_weight"]["quantized_linears"]
    assert 5 < bits <= 6
    manifest = json.loads((output / "quantforge.json").read_text())
    record = manifest["allocation"]
    assert record["target_bits"] == 6
    assert record["bits_per_weight"] == pytest.approx(bits)
    chosen = {n: unit["scheme"] for unit in record["units"] for n in unit["layers"]}
    assert chosen == {layer["name"]: layer["scheme"] for layer in manifest["layers"]}
    assert len(set(chosen.values())) > 1
    for block in range(2):
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            kinds = {s for n, s in chosen.items() if f".{block}." in n and n.endswith(parts)}
            assert len(kinds) == 1
    assert command("verify", output).code == EXIT_OK


def test_a_dry_run_shows_the_allocation_that_a_run_makes(
    tiny_model: TinyModel, tmp_path: Path, text: Path, command: Command
) -> None:
    source, output = tiny_model(), tmp_path / "out"
    options = ("--target-bits", "6", "-m", "rtn", "--calibration", text, *SHORT, "--json")
    planned = json.loads(command("quantize", source, *options, "--dry-run").out)
    assert not output.exists()
    written = json.loads(command("quantize", source, *options, "-o", output).out)
    assert planned["planned_bytes"] == written["written_bytes"]
    assert planned["scheme"] == written["scheme"]


def test_layers_of_the_recipe_keep_their_scheme(
    tiny_model: TinyModel, tmp_path: Path, text: Path, command: Command
) -> None:
    path = tmp_path / "pinned.yaml"
    path.write_text(
        "quantize: {method: rtn, target_bits: 5.5, candidates: [int4-g32-asym, w8a16],\n"
        '  layers: {"model.layers.1.*": {scheme: w4a16_sym}}}'
    )
    output = tmp_path / "out"
    options = ("--recipe", path, "--calibration", text, *SHORT)
    done = command("quantize", tiny_model(), *options, "-o", output, "--json")
    document = json.loads(done.out)
    schemes = {layer["name"]: layer["scheme"] for layer in document["layers"]}
    assert {s for n, s in schemes.items() if ".1." in n} == {"int4-g64-sym"}
    assert {s for n, s in schemes.items() if ".0." in n} <= {"int4-g32-asym", "int8-channel-sym"}
    assert document["checkpoint"]["bits_per_weight"]["quantized_linears"] <= 5.5


def test_a_smaller_limit_of_kl_takes_more_bits(
    tiny_model: TinyModel, text: Path, command: Command
) -> None:
    source = tiny_model()
    found = []
    for limit in ("0.2", "0.02"):
        options = ("--max-kl", limit, "-m", "rtn", "--calibration", text, *SHORT, "--json")
        found.append(json.loads(command("quantize", source, *options, "--dry-run").out))
    assert found[0]["bits_per_weight"] < found[1]["bits_per_weight"]


def test_a_verified_limit_is_met_on_held_out_text(
    tiny_model: TinyModel, tmp_path: Path, text: Path, command: Command
) -> None:
    source, output = tiny_model(), tmp_path / "out"
    options = ("--max-kl", "0.1", "--verify-kl", "-m", "rtn", "--calibration", text, *SHORT)
    done = command("quantize", source, *options, "-o", output)
    assert done.code == EXIT_OK, done.err
    assert "measured KL" in done.err
    assert [p.name for p in tmp_path.glob("*round*")] == []
    options = ("--baseline", source, "--max-tokens", "16384", "--window", "512", *CPU, "--json")
    judged = json.loads(command("eval", "ppl", output, *options).out)
    assert judged["comparison"]["mean_kl"] <= 0.1


def test_a_verified_run_never_replaces_its_source(
    tiny_model: TinyModel, text: Path, command: Command
) -> None:
    source = tiny_model()
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    options = ("--max-kl", "100", "--verify-kl", "-m", "rtn", "--calibration", text, *SHORT)
    done = command("quantize", source, *options, "-o", source, "--overwrite")
    assert done.code == EXIT_USAGE
    assert "is or contains the source" in done.err
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_verified_limit_that_is_not_met_is_the_gates_to_refuse(
    tiny_model: TinyModel, tmp_path: Path, text: Path, command: Command, monkeypatch: Any
) -> None:
    from quantforge.cli import allocate

    monkeypatch.setattr(allocate, "divergence_from", lambda *_: lambda _: 1e6)
    options = ("--max-kl", "0.1", "--verify-kl", "-m", "rtn", "--calibration", text, *SHORT)
    done = command("quantize", tiny_model(), *options, "-o", tmp_path / "out")
    assert done.code == EXIT_GATE_FAILED
    assert "error: max_kl 0.1 is not met: measured KL 1000000" in done.err
    assert [path for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("best", "{}"),
        ("best", "{mismatch: 0.5}"),
        ("gptq", "{mismatch: 0.5}"),
        ("gptq", "{refit: true}"),
    ],
)
def test_methods_that_see_more_than_one_pass_measure_candidates_too(
    method: str,
    options: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    text: Path,
    command: Command,
) -> None:
    recipe, output = tmp_path / "more.yaml", tmp_path / "out"
    recipe.write_text(f"quantize: {{method: {method}, target_bits: 6, options: {options}}}")
    done = command(
        "quantize", tiny_model(), "--recipe", recipe, "--calibration", text, *SHORT, "-o", output
    )
    assert done.code == EXIT_OK, done.err
    assert command("verify", output).code == EXIT_OK


def test_candidates_may_be_any_codes_that_the_method_rounds_to(
    tiny_model: TinyModel, tmp_path: Path, text: Path, command: Command
) -> None:
    names = ("--candidate", "nvfp4a16", "--candidate", "w8a16")
    options = ("--target-bits", "6", *names, "--calibration", text, *SHORT, "--json")
    run = ("quantize", tiny_model(), *options, "-o", tmp_path / "out")
    refused = command(*run, "-m", "awq")
    assert refused.code == EXIT_USAGE
    assert "method awq does not round to float4 codes" in refused.err
    done = command(*run, "-m", "gptq", "--kv-cache", "fp8")
    assert done.code == EXIT_OK, done.err
    assert "fp4-g16-e4m3" in json.loads(done.out)["scheme"]
    assert command("verify", tmp_path / "out").code == EXIT_OK


def test_a_resumed_run_takes_the_schemes_that_were_chosen(
    tiny_model: TinyModel,
    tmp_path: Path,
    text: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quantforge import quantizer, sensitivity

    source = tiny_model()
    options = ("--target-bits", "6", "-m", "awq", "--calibration", text, *SHORT, "--json")
    whole = command("quantize", source, *options, "-o", tmp_path / "whole")
    load = quantizer.load_block

    def stop_at_the_second(*arguments: Any, **named: Any) -> Any:
        if arguments[3] == 1:
            raise KeyboardInterrupt
        return load(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(quantizer, "load_block", stop_at_the_second)
        assert command("quantize", source, *options, "-o", tmp_path / "out").code == 130

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("sensitivities were measured again")

    monkeypatch.setattr(sensitivity, "measure_units", refuse)
    done = command("quantize", source, *options, "-o", tmp_path / "out", "--resume")
    assert done.code == EXIT_OK, done.err
    assert json.loads(done.out)["scheme"] == json.loads(whole.out)["scheme"]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (("--target-bits", "3"), ("target_bits 3.0", "smallest", "bits a weight")),
        (("--target-bits", "0"), ("target_bits 0.0", "above 0")),
        (("--max-kl", "nan"), ("max_kl nan", "above 0")),
        (("--max-kl", "1e-12"), ("max_kl 1e-12", "predicted")),
        (("--target-bits", "5", "--max-kl", "1"), ("target_bits and max_kl",)),
        (("--candidate", "w8a16"), ("candidates are for target_bits or max_kl",)),
        (("--target-bits", "5", "--candidate", "int4-g64"), ("'int4-g64'", "int4-g64-asym")),
        (("--target-bits", "5", "--candidate", "fp8_dynamic"), ("quantizes activations",)),
        (("--target-bits", "5", "--candidate", "int4-g128-asym"), ("none fits", "q_proj", "128")),
        (("--target-bits", "5", "--verify-kl"), ("--verify-kl belongs to --max-kl",)),
    ],
)
def test_impossible_targets_are_refused(
    options: tuple[str, ...],
    reasons: tuple[str, ...],
    tiny_model: TinyModel,
    tmp_path: Path,
    text: Path,
    command: Command,
) -> None:
    found = command(
        "quantize", tiny_model(), *options, "--calibration", text, *SHORT, "-q",
        "-o", tmp_path / "out",
    )  # fmt: skip
    assert found.code == EXIT_USAGE
    assert found.out == ""
    error = found.err.splitlines()[-1]  # the few tokens are warned of before
    assert error.startswith("error: ")
    assert [reason for reason in reasons if reason not in error] == []
    assert not (tmp_path / "out").exists()
