"""``quantforge calibrate`` as a user runs it, and the help of every command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quantforge.calibration import statistics
from quantforge.cli import app
from quantforge.errors import (
    EXIT_BAD_DATA,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNSUPPORTED,
    EXIT_USAGE,
)
from quantforge.registry import entry_names

TinyModel = Callable[..., Path]
Command = Callable[..., Any]

SMALL = ("--num-samples", "4", "--sequence-length", "32", "--device", "cpu")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder / "s.safetensors"


def left_behind(output: Path) -> list[str]:
    return [path.name for path in output.parent.iterdir()]


def test_json_is_one_document_that_names_the_outlier_channel(
    tiny_model: TinyModel, text: Path, output: Path, command: Command
) -> None:
    source = tiny_model()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][42] = 500
    save_file(tensors, source / "model.safetensors")
    found = command("calibrate", source, "-o", output, "--calibration", text, "--json", *SMALL)
    assert found.code == EXIT_OK
    document = json.loads(found.out)
    assert document["bytes"] == output.stat().st_size
    assert document["calibration"]["id"].endswith("calibration.txt 4x32 seed 0")
    assert len(document["outliers"]) == 8
    first = document["outliers"][0]
    assert (first["layer"], first["group"], first["channel"]) == (1, "gate_up", 42)
    assert left_behind(output) == ["s.safetensors"]


def test_a_quantized_model_is_refused(
    tiny_model: TinyModel, tmp_path: Path, text: Path, output: Path, command: Command
) -> None:
    folder = tmp_path / "quantized"
    made = command("quantize", tiny_model(), "-m", "rtn", "-o", folder, "--device", "cpu")
    assert made.code == EXIT_OK, made.err
    found = command("calibrate", folder, "-o", output, "--calibration", text, *SMALL)
    assert found.code == EXIT_UNSUPPORTED
    assert "is quantized already (pack-quantized); calibrate the original" in found.err
    assert left_behind(output) == []


def test_the_result_is_one_line_with_a_table_on_stderr(
    tiny_model: TinyModel, text: Path, output: Path, command: Command
) -> None:
    found = command("calibrate", tiny_model(), "-o", output, "--calibration", text, *SMALL)
    assert found.code == EXIT_OK
    assert found.out.count("\n") == 1
    assert "MB of statistics" in found.out
    assert "outlier" in found.err
    assert "128 calibration tokens are few" in found.err


def test_diagonals_are_smaller_than_gram_matrices(
    tiny_model: TinyModel, text: Path, output: Path, command: Command
) -> None:
    sizes = {}
    for kind in ("gram", "diagonal"):
        arguments = ("--calibration", text, "--statistics", kind, "--overwrite", "-q", *SMALL)
        assert command("calibrate", tiny_model(), "-o", output, *arguments).code == EXIT_OK
        moments = {n: t for n, t in load_file(output).items() if n.endswith("second_moment")}
        assert {t.dim() for t in moments.values()} == {2 if kind == "gram" else 1}
        sizes[kind] = output.stat().st_size
    assert sizes["diagonal"] < sizes["gram"] / 10


def test_the_model_itself_can_write_the_text(
    tiny_model: TinyModel, output: Path, command: Command
) -> None:
    arguments = ("--calibration", "self", "--json", *SMALL)
    found = command("calibrate", tiny_model(), "-o", output, *arguments)
    assert json.loads(found.out)["calibration"]["id"] == "self 4x32 seed 0"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--statistics", "whole"), EXIT_USAGE, "gram, diagonal"),
        (("--dtype", "int4"), EXIT_USAGE, "unknown dtype 'int4'"),
        (("--sequence-length", "513"), EXIT_BAD_DATA, "max_position_embeddings 512"),
        (("--sequence-length", "0"), EXIT_USAGE, "at least 1"),
        (("--sequence-length", "100000"), EXIT_BAD_DATA, "sequence_length 100000"),
    ],
)
def test_options_that_are_wrong(
    arguments: tuple[str, ...],
    code: int,
    reason: str,
    tiny_model: TinyModel,
    text: Path,
    output: Path,
    command: Command,
) -> None:
    base = ("calibrate", tiny_model(), "-o", output, "--calibration", text, "-q", *SMALL)
    found = command(*base, *arguments)
    assert found.code == code, found.err
    assert reason in found.err
    assert found.out == ""
    assert left_behind(output) == []


def test_outputs_that_cannot_be_are_refused_before_any_work(
    tmp_path: Path, output: Path, command: Command
) -> None:
    """The model does not exist either: the output is looked at first."""
    output.write_text("kept")
    base = ("calibrate", tmp_path / "nowhere", "-q", "-o")
    command(*base, output).refused(EXIT_USAGE, "--overwrite")
    assert output.read_text() == "kept"
    command(*base, tmp_path / "s.bin").refused(EXIT_USAGE, "must end in .safetensors")
    missing = tmp_path / "no" / "s.safetensors"
    command(*base, missing).refused(EXIT_USAGE, str(missing), "does not exist")
    (tmp_path / "d.safetensors").mkdir()
    command(*base, tmp_path / "d.safetensors", "--overwrite").refused(EXIT_USAGE, "is a folder")


def test_an_unknown_model_folder(tmp_path: Path, output: Path, command: Command) -> None:
    found = command("calibrate", tmp_path / "nowhere", "-o", output, "-q")
    found.refused(EXIT_BAD_DATA, "nowhere")


def test_activations_that_overflow_name_their_layer(
    tiny_model: TinyModel, text: Path, output: Path, command: Command
) -> None:
    source = tiny_model()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e38
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e4
    save_file(tensors, source / "model.safetensors")
    found = command("calibrate", source, "-o", output, "--calibration", text, "-q", *SMALL)
    assert found.code == EXIT_BAD_DATA
    assert "group 'qkv' of layer 1" in found.err.splitlines()[-1]
    assert left_behind(output) == []


def test_an_interrupt_and_a_full_disk_leave_nothing(
    tiny_model: TinyModel,
    text: Path,
    output: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = ("calibrate", tiny_model(), "-o", output, "--calibration", text, "-q", *SMALL)

    def fail_with(error: BaseException) -> Callable[..., None]:
        def save(_tensors: Any, path: Path, **_: Any) -> None:
            path.write_bytes(b"half")
            raise error

        return save

    monkeypatch.setattr(statistics, "save_file", fail_with(KeyboardInterrupt()))
    found = command(*base)
    assert found.code == EXIT_INTERRUPTED
    assert found.err.splitlines()[-1] == "interrupted"
    assert left_behind(output) == []
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(statistics, "save_file", fail_with(full))
    found = command(*base)
    assert found.code == EXIT_BAD_DATA
    assert "No space left on device" in found.err.splitlines()[-1]
    assert left_behind(output) == []


# --- help -----------------------------------------------------------------------------------------

GROUPS = {"eval": ("eval", "ppl"), "bench": ("bench", "latency")}
COMMANDS = [GROUPS.get(name, (name.rstrip("_"),)) for name in entry_names(app.PACKAGE, app.SHARED)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_shows_examples(words: tuple[str, ...], command: Command) -> None:
    found = command(*words, "--help")
    assert found.code == EXIT_OK
    assert "Examples:" in found.out
    example = found.out.split("Examples:")[1]
    assert f"quantforge {' '.join(words)}" in " ".join(example.split())


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from quantforge.cli.app import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'gguf', 'fastapi', 'numpy', 'triton'}\n"
        "sys.stderr.write(' '.join(sorted(heavy & set(sys.modules))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    assert done.stderr == ""
    assert "quantize" in done.stdout
    assert "calibrate" in done.stdout
