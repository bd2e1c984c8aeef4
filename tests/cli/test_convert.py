"""``quantforge convert`` as a user runs it, and the other commands on what it writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.errors import EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE
from quantforge.schemes import preset, with_group_size


@pytest.fixture
def packed(tiny_model: Callable[..., Path], quantized_model: Callable[..., Path]) -> Path:
    scheme = with_group_size(preset("w4a16"), 32)
    return quantized_model(tiny_model("llama", torch.float16), lambda _layer: scheme)


@pytest.mark.parametrize("target", ["awq", "gptq", "gptq_v2"])
def test_a_converted_folder_is_verified_inspected_and_run(
    command: Callable[..., Any], packed: Path, tmp_path: Path, target: str
) -> None:
    output = tmp_path / "out"
    done = command("convert", packed, "--to", target, "-o", output, "--json")
    assert done.code == EXIT_OK, done.err
    document = json.loads(done.out)
    assert document["format"] == target
    assert document["num_layers"] == 14
    assert document["scale_error"] == 0
    assert command("verify", output).code == EXIT_OK
    inspected = json.loads(command("inspect", output, "--json").out)
    assert inspected["format"] == target
    assert [s["num_layers"] for s in inspected["schemes"] if s["scheme"] != "dense"] == [14]
    words = ("--prompt", "The river", "--max-tokens", "8", "--temperature", "0", "--device", "cpu")
    texts = {command("generate", folder, *words, "--quiet").out for folder in (packed, output)}
    assert len(texts) == 1
    assert texts != {""}


def test_refusals_are_one_line(command: Callable[..., Any], packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command("convert", packed, "--to", "awk", "-o", output).refused(
        EXIT_UNSUPPORTED, "'awk'", "did you mean 'awq'"
    )
    command("convert", packed, "--to", "pack-quantized", "-o", output).refused(
        EXIT_UNSUPPORTED, "pack-quantized already"
    )
    assert not output.exists()
    output.mkdir()
    command("convert", packed, "--to", "awq", "-o", output).refused(EXIT_USAGE, "--overwrite")
