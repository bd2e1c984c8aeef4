"""W8A8 as a user runs it: quantize with the shipped recipes, verify, inspect, gate, generate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantforge.errors import EXIT_BAD_DATA, EXIT_OK, EXIT_USAGE

TinyModel = Callable[..., Path]
Command = Callable[..., Any]

CPU = ("--device", "cpu")
FEW = ("--num-samples", "4", "--sequence-length", "64")
GATE = "gate: {max_ppl_ratio: 1.2, max_mean_kl: 0.3, min_top1: 0.3, max_bits_per_weight: 9}"
RECIPES = {
    "fp8_static": ("fp8-tensor+fp8-tensor", "float-quantized", torch.float8_e4m3fn, 14),
    "w8a8_smoothquant": (
        "int8-channel-sym+int8-token-sym-dynamic",
        "int-quantized",
        torch.int8,
        0,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shipped_recipe_is_written_verified_gated_and_generates(
    recipe: str,
    dtype: torch.dtype,
    tiny_model: TinyModel,
    text: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    scheme, layout, code_dtype, num_input_scales = RECIPES[recipe]
    source, output = tiny_model(dtype=dtype), tmp_path / "out"
    options = ("--recipe", recipe, "--calibration", text, *FEW, "-o", output, "--json", *CPU)
    document = json.loads(command("quantize", source, *options).out)
    assert document["scheme"] == scheme
    stored = load_file(output / "model.safetensors")
    assert sum(t.dtype == code_dtype for t in stored.values()) == len(document["layers"]) == 14
    inputs = [t for n, t in stored.items() if n.endswith(".input_scale")]
    assert [(t.dtype, tuple(t.shape)) for t in inputs] == [(dtype, (1,))] * num_input_scales
    assert command("verify", output).code == EXIT_OK
    described = json.loads(command("inspect", output, "--json").out)
    assert described["format"] == layout
    assert {s["scheme"] for s in described["schemes"]} == {"dense", scheme}
    limits = tmp_path / "limits.yaml"
    limits.write_text(GATE)
    gated = command(
        "gate", output, "--baseline", source, "--recipe", limits, "--data", text,
        "--max-tokens", "512", "--window", "64", "--json", *CPU,
    )  # fmt: skip
    assert gated.code == EXIT_OK, gated.out + gated.err
    assert scheme in gated.out
    said = command("generate", output, "--prompt", "The river", "--max-tokens", "5", *CPU)
    assert said.code == EXIT_OK


def test_the_observer_is_an_option_of_the_command(
    tiny_model: TinyModel, text: Path, tmp_path: Path, command: Command
) -> None:
    source = tiny_model()
    scales = {}
    for observer in ("absmax", "percentile:90"):
        output = tmp_path / observer.replace(":", "-")
        done = command(
            "quantize", source, "-m", "rtn", "-s", "fp8_static", "--activation-observer", observer,
            "--calibration", text, *FEW, "-o", output, *CPU,
        )  # fmt: skip
        assert done.code == EXIT_OK, done.err
        stored = load_file(output / "model.safetensors")
        scales[observer] = {n: float(t) for n, t in stored.items() if n.endswith("input_scale")}
    assert all(scales["percentile:90"][n] < s for n, s in scales["absmax"].items())


def test_a_plan_of_static_inputs_counts_its_text(tiny_model: TinyModel, command: Command) -> None:
    done = command("quantize", tiny_model(), "--recipe", "fp8_static", "--dry-run", "--json", *CPU)
    document = json.loads(done.out)
    assert document["calibration_tokens"] == 128 * 2048
    assert {g["kernel"] for g in document["groups"]} == {"dequantize-once", "dense"}


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (("-m", "rtn", "-s", "fp8_dynamic", "--activation-observer", "mse"), ("no static scale",)),
        (("-m", "rtn", "-s", "fp8_static", "--activation-observer", "maxabs"), ("'maxabs'", "mse")),
        (("-m", "smoothquant", "-s", "fp8_static", "--ignore", "q_proj"), ("lm_head",)),
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
    assert not (tmp_path / "out").exists()


def test_statistics_hold_no_ranges(
    tiny_model: TinyModel, text: Path, tmp_path: Path, command: Command
) -> None:
    source, seen = tiny_model(), tmp_path / "seen.safetensors"
    calibrated = command("calibrate", source, "--calibration", text, *FEW, "-o", seen, *CPU)
    assert calibrated.code == EXIT_OK, calibrated.err
    found = command(
        "quantize", source, "-m", "rtn", "-s", "fp8_static", "--calibration", seen,
        "-o", tmp_path / "out", "-q", *CPU,
    )  # fmt: skip
    found.refused(EXIT_BAD_DATA, "static scales of inputs", "no statistics file")
