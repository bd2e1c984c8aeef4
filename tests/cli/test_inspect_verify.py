"""``quantforge inspect`` and ``quantforge verify`` as a user runs them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantforge.cli.app import run
from quantforge.errors import EXIT_BAD_DATA, EXIT_OK


def test_inspect_prints_one_line_on_stdout_and_tables_on_stderr(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(tiny_model())]) == EXIT_OK
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert "LlamaForCausalLM" in out
    assert "not quantized" in out
    assert "dense" in err


def test_inspect_json_is_one_document(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model()
    capsys.readouterr()  # transformers shows how it writes the model
    assert run(["inspect", str(folder), "--json", "--quiet"]) == EXIT_OK
    out, err = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)
    assert document["bits_per_weight"]["model"] == 32
    assert err == ""


def test_verify_says_what_was_checked(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(tiny_model()), "--quiet"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_verify_of_a_damaged_model_exits_with_bad_data(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    folder = tiny_model()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert run(["verify", str(folder), "--quiet", *flags]) == EXIT_BAD_DATA
    out = capsys.readouterr().out
    if flags:
        checks = {check["name"]: check["ok"] for check in json.loads(out)["checks"]}
        assert checks["dense"] is False
        assert sum(not ok for ok in checks.values()) == 1
    else:
        assert "FAIL  dense" in out
        assert "model.norm.weight" in out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_unknown_folder_is_one_line_and_bad_data(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, str(tmp_path / "nowhere")]) == EXIT_BAD_DATA
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "nowhere" in err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == EXIT_OK
    assert f"quantforge {command} models/" in capsys.readouterr().out
