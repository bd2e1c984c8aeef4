"""``--kv-cache`` and ``--kv-cache-dtype`` on the command line, from text to figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TinyModel = Callable[..., Path]
Command = Callable[..., Any]


@pytest.fixture
def scaled(tiny_model: TinyModel, command: Command, text: Path, tmp_path: Path) -> Path:
    """A tiny model in int4 with fp8 scales of its KV cache, as the command makes it."""
    output = tmp_path / "scaled"
    done = command(
        "quantize", tiny_model(), "-o", output, "--method", "rtn", "--group-size", "32",
        "--kv-cache", "fp8", "--calibration", text, "--num-samples", "4",
        "--sequence-length", "32", "--device", "cpu", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["kv_cache"] == "fp8-tensor"
    return output


def test_a_scaled_model_is_inspected_verified_evaluated_and_run(
    scaled: Path, command: Command, text: Path
) -> None:
    shown = command("inspect", scaled)
    assert "scales for a fp8-tensor KV cache" in shown.out
    assert "k_scale" in shown.err
    assert "kv cache    scales of 2 layers" in command("verify", scaled).out
    figures = {}
    for choice in ("auto", "model", "fp8_e5m2", "int8"):
        done = command(
            "eval", "ppl", scaled, "--baseline", scaled, "--kv-cache-dtype", choice, "--data",
            text, "--window", "64", "--max-tokens", "256", "--device", "cpu", "--json",
        )  # fmt: skip
        assert done.code == 0, done.err
        document = json.loads(done.out)
        assert document["baseline_engine"]["kv_cache"] == "float32"
        figures[choice] = (document["engine"]["kv_cache"], document["comparison"]["mean_kl"])
    assert figures["auto"][0] == "float8_e4m3fn, one calibrated scale a layer"
    assert figures["int8"][0] == "int8, one scale a token and head"
    assert figures["model"][1] == 0
    assert all(figures[choice][1] > 0 for choice in ("auto", "fp8_e5m2", "int8"))
    done = command(
        "generate", scaled, "-p", "The", "--max-tokens", "3", "--json", "--kv-cache-dtype", "int8"
    )
    assert json.loads(done.out)["kv_cache"] == figures["int8"][0]


def test_a_dry_run_counts_the_scales_and_their_calibration(
    tiny_model: TinyModel, command: Command
) -> None:
    arguments = ("quantize", tiny_model(), "--method", "rtn", "--dry-run", "--json")
    found = json.loads(command(*arguments, "--kv-cache", "int8").out)
    plain = json.loads(command(*arguments).out)
    assert (found["kv_cache"], plain["kv_cache"]) == ("int8-tensor-sym", None)
    assert found["planned_bytes"] == plain["planned_bytes"] + 2 * 2 * 4
    assert (plain["calibration_tokens"], found["calibration_tokens"]) == (0, 128 * 2048)


def test_what_cannot_be_is_refused_in_one_line(
    tiny_model: TinyModel, command: Command, tmp_path: Path
) -> None:
    model, output = tiny_model(), tmp_path / "out"
    statistics = tmp_path / "statistics.safetensors"
    quantize = ("quantize", model, "-o", output, "--method", "rtn")
    command(*quantize, "--kv-cache", "fp8", "--calibration", statistics).refused(
        2, "not of keys and values", "--calibration bundled"
    )
    command(*quantize, "--kv-cache", "fp8_e5m2").refused(2, "--kv-cache-dtype fp8_e5m2")
    command("generate", model, "-p", "a", "--kv-cache-dtype", "fp8").refused(
        2, "kv_cache_dtype 'fp8'", "fp8_e4m3"
    )
    assert not output.exists()
