"""FP8 as a user runs it: quantize, verify, inspect, gate, generate; misfits are refused."""

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
WIDE = {"hidden_size": 128, "intermediate_size": 256}
GATE = "gate: {max_ppl_ratio: 1.2, max_mean_kl: 0.3, min_top1: 0.3, max_bits_per_weight: 9}"
SCHEMES = {
    "fp8_dynamic": "fp8-channel+fp8-token-dynamic",
    "fp8_block": "fp8-block128x128+fp8-g128-dynamic",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_fp8_model_is_written_verified_gated_and_generates(
    scheme: str,
    dtype: torch.dtype,
    tiny_model: TinyModel,
    text: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    source, output = tiny_model(dtype=dtype, **WIDE), tmp_path / "out"
    done = command("quantize", source, "-m", "rtn", "-s", scheme, "-o", output, "--json", *CPU)
    document = json.loads(done.out)
    assert document["scheme"] == SCHEMES[scheme]
    stored = load_file(output / "model.safetensors")
    codes = [t for t in stored.values() if t.dtype == torch.float8_e4m3fn]
    assert len(codes) == len(document["layers"]) == 14
    assert {t.dtype for n, t in stored.items() if n.endswith("weight_scale")} == {dtype}
    assert command("verify", output).code == EXIT_OK
    described = json.loads(command("inspect", output, "--json").out)
    assert described["format"] == "float-quantized"
    assert {s["scheme"] for s in described["schemes"]} == {"dense", SCHEMES[scheme]}
    limits = tmp_path / "limits.yaml"
    limits.write_text(GATE)
    gated = command(
        "gate", output, "--baseline", source, "--recipe", limits, "--data", text,
        "--max-tokens", "512", "--window", "64", "--json", *CPU,
    )  # fmt: skip
    assert gated.code == EXIT_OK, gated.out + gated.err
    assert SCHEMES[scheme] in gated.out
    said = command("generate", output, "--prompt", "The river", "--max-tokens", "5", *CPU)
    assert said.code == EXIT_OK


def test_the_shipped_recipe_writes_fp8(
    tiny_model: TinyModel, tmp_path: Path, command: Command
) -> None:
    done = command(
        "quantize", tiny_model(), "--recipe", "fp8_dynamic", "-o", tmp_path / "out", "--json", *CPU
    )
    assert json.loads(done.out)["scheme"] == SCHEMES["fp8_dynamic"]


def test_a_quantized_head_is_loaded_too(
    tiny_model: TinyModel, tmp_path: Path, command: Command
) -> None:
    source, output = tiny_model(tie_word_embeddings=True), tmp_path / "out"
    recipe = tmp_path / "all.yaml"
    recipe.write_text("quantize: {method: rtn, scheme: fp8_dynamic, ignore: []}")
    assert command("quantize", source, "--recipe", recipe, "-o", output, *CPU).code == EXIT_OK
    stored = load_file(output / "model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.float8_e4m3fn
    said = command("generate", output, "--prompt", "The river", "--max-tokens", "3", *CPU)
    assert said.code == EXIT_OK, said.err


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (("-s", "fp8_dynamic"), ("method awq does not round to float", "rtn")),
        (("-s", "fp8_block", "-m", "gptq"), ("method gptq does not round",)),
        (("-s", "fp8_dynamic", "-m", "rtn", "--group-size", "64"), ("granularity",)),
        (("-s", "fp8_dynamic", "-m", "rtn", "--asymmetric"), ("symmetric",)),
        (
            ("-s", "fp8_block", "-m", "rtn"),
            ("128", "in_features 64 of model.layers.0.self_attn.q_proj", "fp8_dynamic"),
        ),
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


def test_a_nan_code_fails_verification(
    tiny_model: TinyModel, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "out"
    command("quantize", tiny_model(), "-m", "rtn", "-s", "fp8_dynamic", "-o", output, *CPU)
    path = output / "model.safetensors"
    whole = path.read_bytes()
    stored = load_file(path)
    row = stored["model.layers.1.mlp.down_proj.weight"][5].view(torch.uint8)
    raw = bytes(row.tolist())
    assert whole.count(raw) == 1
    path.write_bytes(whole.replace(raw, b"\x7f" + raw[1:]))
    found = command("verify", output)
    assert found.code == EXIT_BAD_DATA
    assert "down_proj" in found.out
    assert "weight holds 1 values that are NaN" in found.out
