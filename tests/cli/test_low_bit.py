"""Low-bit schemes as a user runs them: plan, quantize, verify, inspect, evaluate, generate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import quantforge.cli.doctor as doctor
from quantforge.errors import EXIT_OK, EXIT_USAGE

TinyModel = Callable[..., Path]
Command = Callable[..., Any]

CPU = ("--device", "cpu")
RUNS = {
    "nvfp4a16": ("nvfp4-pack-quantized", "fp4-g16-e4m3", 4.51),
    "mxfp4a16": ("mxfp4-pack-quantized", "fp4-g32-e8m0", 4.25),
    "w3a16": ("pack-quantized", "int3-g64-asym", 4.1),
    "w2a16": ("pack-quantized", "int2-g64-asym", 3.1),
}
"""Preset -> format, scheme, and bits a weight at most: its codes, scales and 32 bits a layer."""


@pytest.mark.parametrize("scheme", RUNS)
def test_a_low_bit_model_is_planned_written_verified_evaluated_and_generates(
    scheme: str, tiny_model: TinyModel, text: Path, tmp_path: Path, command: Command
) -> None:
    source, output = tiny_model(), tmp_path / "out"
    layout, name, bits = RUNS[scheme]
    note = f"dequantize-once: no fused kernel for {name}"
    options = ("-m", "rtn", "-s", scheme, *CPU)
    planned = json.loads(command("quantize", source, *options, "--dry-run", "--json").out)
    assert planned["note"].startswith(note)
    assert {g["kernel"] for g in planned["groups"]} == {"dense", "dequantize-once"}
    assert note in command("quantize", source, *options, "--dry-run").out
    done = command("quantize", source, *options, "-o", output, "--json")
    assert json.loads(done.out)["scheme"] == name
    assert note in done.err
    assert command("verify", output).code == EXIT_OK
    found = command("inspect", output, "--json")
    described = json.loads(found.out)
    assert described["format"] == layout
    assert described["serving_notes"][0].startswith(note)
    assert described["bits_per_weight"]["quantized_linears"] <= bits
    assert note in found.err
    evaluated = command(
        "eval", "ppl", output, "--baseline", source, "--data", text, "--max-tokens", "256",
        "--window", "64", "--json", *CPU,
    )  # fmt: skip
    assert evaluated.code == EXIT_OK, evaluated.err
    assert json.loads(evaluated.out)["engine"]["kernels"][name] == "dequantize-once"
    said = command("generate", output, "--prompt", "The river", "--max-tokens", "3", *CPU)
    assert said.code == EXIT_OK, said.err


@pytest.mark.parametrize("recipe", ["gptq_nvfp4", "gptq_mxfp4", "awq_gptq_w3a16"])
def test_the_shipped_recipes_run(
    recipe: str, tiny_model: TinyModel, text: Path, tmp_path: Path, command: Command
) -> None:
    done = command(
        "quantize", tiny_model(), "--recipe", recipe, "--calibration", text, "--num-samples", "4",
        "--sequence-length", "64", "-o", tmp_path / "out", "--json", *CPU,
    )  # fmt: skip
    document = json.loads(done.out)
    methods = {layer["method"] for layer in document["layers"]}
    assert methods == {recipe.rpartition("_")[0]}
    assert command("verify", tmp_path / "out").code == EXIT_OK


def test_a_quantized_head_in_fp4_is_loaded_too(
    tiny_model: TinyModel, tmp_path: Path, command: Command
) -> None:
    output, recipe = tmp_path / "out", tmp_path / "all.yaml"
    recipe.write_text("quantize: {method: rtn, scheme: nvfp4a16, ignore: []}")
    done = command("quantize", tiny_model(), "--recipe", recipe, "-o", output, "-q", *CPU)
    assert done.code == EXIT_OK
    assert "lm_head.weight_global_scale" in load_file(output / "model.safetensors")
    said = command("generate", output, "--prompt", "The river", "--max-tokens", "3", *CPU)
    assert said.code == EXIT_OK, said.err


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (("-s", "nvfp4a16"), ("method awq does not round to float4 codes", "rtn")),
        (("-s", "nvfp4a16", "-m", "rtn", "--group-size", "32"), ("its own granularity",)),
        (("-s", "mxfp4a16", "-m", "rtn", "--asymmetric"), ("symmetric",)),
    ],
)
def test_what_does_not_fit_is_refused_before_work(
    options: tuple[str, ...],
    reasons: tuple[str, ...],
    tiny_model: TinyModel,
    tmp_path: Path,
    command: Command,
) -> None:
    found = command("quantize", tiny_model(), *options, "-o", tmp_path / "out", "-q", *CPU)
    found.refused(EXIT_USAGE, *reasons)


def test_inputs_that_a_group_does_not_divide_are_refused_with_the_layer(
    tiny_model: TinyModel, command: Command
) -> None:
    source = tiny_model(intermediate_size=80)
    found = command("quantize", source, "-m", "rtn", "-s", "mxfp4a16", "--dry-run", "-q", *CPU)
    found.refused(
        EXIT_USAGE, "group_size 32 of fp4-g32-e8m0 does not divide in_features 80", "down_proj"
    )


def test_doctor_says_which_schemes_have_no_fused_kernel() -> None:
    entries = {e["preset"]: e for e in doctor.examine()["kernels"] if e["device"] == "cpu"}
    for name in RUNS:
        assert entries[name]["kernel"] == "dequantize-once"
        scheme = entries[name]["scheme"]
        assert entries[name]["refused"]["fused"] == f"no fused kernel for {scheme}"
