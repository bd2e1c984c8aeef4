"""``quantforge quantize`` as a user runs it: results on stdout, one line for every bad input."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantforge import quantizer
from quantforge.checkpoint import writer
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import (
    EXIT_BAD_DATA,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNSUPPORTED,
    EXIT_USAGE,
)
from quantforge.stopwatch import PHASES

TinyModel = Callable[..., Path]
Command = Callable[..., Any]

CPU = ("--device", "cpu")
SMALL = ("--num-samples", "4", "--sequence-length", "32", *CPU)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results" / "out"


def left_behind(output: Path) -> list[str]:
    return [path.name for path in output.parent.iterdir()] if output.parent.exists() else []


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_result_is_one_line_and_the_folder_is_quantized(
    tiny_model: TinyModel, text: Path, output: Path, command: Command
) -> None:
    found = command("quantize", tiny_model(), "-o", output, "--calibration", text, *SMALL)
    assert found.code == EXIT_OK
    assert found.out.count("\n") == 1
    assert str(output) in found.out
    assert "verified" in found.out
    assert "awq to int4-g64-asym, 14 linears, 1 left as they are" in found.err
    assert CheckpointReader(output).is_quantized("model.layers.1.mlp.down_proj")
    assert left_behind(output) == ["out"]


@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_json_is_one_document_on_stdout(
    method: str, tiny_model: TinyModel, text: Path, output: Path, command: Command
) -> None:
    found = command(
        "quantize", tiny_model(), "-o", output, "-m", method, "--calibration", text, "--json",
        "--symmetric", "--group-size", "32", *SMALL,
    )  # fmt: skip
    document = json.loads(found.out)
    assert document["method"] == method
    assert document["scheme"] == "int4-g32-sym"
    assert document["output"] == str(output)
    assert len(document["layers"]) == 14
    assert document["seconds"]["total"] > 0
    assert document["seconds"].keys() == {*PHASES, "calibrate", "total"}
    assert 0 < document["peak_host_anonymous_bytes"] <= document["peak_host_bytes"] * 1.01
    held = sum(t.nbytes for t in load_file(output / "model.safetensors").values())
    assert document["written_bytes"] == held


def test_the_end_tells_totals_memory_and_what_was_left_alone(
    tiny_model: TinyModel, text: Path, output: Path, command: Command
) -> None:
    source = tiny_model(tie_word_embeddings=True)
    arguments = ("quantize", source, "--calibration", text, "--ignore", "down_proj", *SMALL)
    found = command(*arguments, "-o", output)
    assert "by method and scheme" in found.err
    assert "1 of 13 layers did not get awq: lm_head (rtn: no method sees the inputs" in found.err
    assert "GB host" in found.out
    document = json.loads(command(*arguments, "-o", output.with_name("b"), "--json").out)
    assert document["ignored"] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert document["peak_host_bytes"] > 0
    assert all(layer["seconds"] >= 0 for layer in document["layers"])


def test_quiet_says_nothing_but_warnings(
    tiny_model: TinyModel, output: Path, command: Command
) -> None:
    found = command("quantize", tiny_model(), "-o", output, "-m", "rtn", "--quiet", *CPU)
    assert found.code == EXIT_OK
    assert found.err == ""


def test_options_override_the_recipe(
    tiny_model: TinyModel, text: Path, output: Path, tmp_path: Path, command: Command
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "quantize: {method: awq, scheme: w4a16_sym, group_size: 32, options: {clip: false}}\n"
        f"calibration: {{dataset: {text}, num_samples: 4, sequence_length: 32, seed: 3}}\n"
    )
    found = command(
        "quantize", tiny_model(), "-o", output, "--recipe", recipe, "--group-size", "channel",
        "--seed", "9", "--json", *CPU,
    )  # fmt: skip
    assert json.loads(found.out)["scheme"] == "int4-channel-sym"
    manifest = json.loads((output / "quantforge.json").read_text())
    assert manifest["seed"] == 9
    assert manifest["recipe"]["quantize"]["options"] == {"clip": False}
    assert manifest["calibration"]["num_samples"] == 4


def test_the_model_itself_can_write_the_calibration_text(
    tiny_model: TinyModel, output: Path, tmp_path: Path, command: Command
) -> None:
    source = tiny_model()
    arguments = ("--calibration", "self", "--num-samples", "3", "--sequence-length", "16", *CPU)
    assert command("quantize", source, "-o", output, *arguments).code == EXIT_OK
    manifest = json.loads((output / "quantforge.json").read_text())
    assert manifest["calibration"]["id"] == "self 3x16 seed 0"
    again = tmp_path / "again"
    assert command("quantize", source, "-o", again, *arguments).code == EXIT_OK
    assert hashes(again)["model.safetensors"] == hashes(output)["model.safetensors"]


def test_statistics_of_calibrate_are_reused_for_their_model_only(
    tiny_model: TinyModel, text: Path, output: Path, tmp_path: Path, command: Command
) -> None:
    source, file = tiny_model(), tmp_path / "s.safetensors"
    assert command("calibrate", source, "-o", file, "--calibration", text, *SMALL).code == EXIT_OK
    other = command("quantize", tiny_model(seed=1), "-o", output, "--calibration", file, "-q", *CPU)
    other.refused(EXIT_BAD_DATA, "weights are not those", "quantforge calibrate")
    assert command("quantize", source, "-o", output, "--calibration", file, *CPU).code == EXIT_OK


# --- bad input: one line, a documented exit code, nothing left ------------------------------------


def test_an_unknown_model_folder(tmp_path: Path, output: Path, command: Command) -> None:
    found = command("quantize", tmp_path / "nowhere", "-o", output, "-q", *CPU)
    found.refused(EXIT_BAD_DATA, "nowhere", "Hugging Face id")
    assert left_behind(output) == []


def test_a_missing_shard(tiny_model: TinyModel, output: Path, command: Command) -> None:
    source = tiny_model(max_shard_size="100KB")
    lost = sorted(source.glob("model-*.safetensors"))[1]
    lost.unlink()
    found = command("quantize", source, "-o", output, "-q", *CPU)
    found.refused(EXIT_BAD_DATA, lost.name, "does not exist")
    assert left_behind(output) == []


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_corrupt_shard(
    damage: str, tiny_model: TinyModel, output: Path, command: Command
) -> None:
    source = tiny_model(max_shard_size="100KB")
    shard = sorted(source.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(
        {"cut": data[:-100], "header": b"\xff" * 200 + data[200:], "empty": b""}[damage]
    )
    found = command("quantize", source, "-o", output, "-q", *CPU)
    found.refused(EXIT_BAD_DATA, shard.name)
    assert left_behind(output) == []


def test_an_unsupported_architecture_lists_the_supported_ones(
    tiny_model: TinyModel, output: Path, command: Command
) -> None:
    source = tiny_model()
    edit_json(source / "config.json", architectures=["MambaForCausalLM"])
    found = command("quantize", source, "-o", output, "-q", *CPU)
    found.refused(
        EXIT_UNSUPPORTED,
        "MambaForCausalLM",
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    )


def test_a_group_size_that_does_not_divide_stops_before_the_text_is_read(
    tiny_model: TinyModel, output: Path, command: Command
) -> None:
    found = command(
        "quantize", tiny_model(), "-o", output, "--group-size", "48", "-q",
        "--calibration", "no/such/text.txt", *CPU,
    )  # fmt: skip
    found.refused(EXIT_USAGE, "group_size 48", "in_features 64", "model.layers.0.self_attn.q_proj")
    assert left_behind(output) == []


def test_nan_in_weights(tiny_model: TinyModel, output: Path, command: Command) -> None:
    source = tiny_model()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.gate_proj.weight"][3, 4] = float("nan")
    save_file(tensors, source / "model.safetensors")
    found = command("quantize", source, "-o", output, "-m", "rtn", "-q", *CPU)
    found.refused(EXIT_BAD_DATA, "model.layers.1.mlp.gate_proj.weight", "NaN")
    assert left_behind(output) == []


def test_empty_and_missing_calibration_sets(
    tiny_model: TinyModel, output: Path, tmp_path: Path, command: Command
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    source = tiny_model()
    found = command("quantize", source, "-o", output, "--calibration", empty, "-q", *SMALL)
    found.refused(EXIT_BAD_DATA, "empty.txt")
    missing = tmp_path / "missing.jsonl"
    found = command("quantize", source, "-o", output, "--calibration", missing, "-q", *SMALL)
    assert found.code in (EXIT_USAGE, EXIT_BAD_DATA)
    found.refused(found.code, "missing.jsonl")
    assert left_behind(output) == []


@pytest.mark.parametrize(
    ("yaml", "reasons"),
    [
        ("quantise: {}", ("unknown key 'quantise'", "did you mean 'quantize'")),
        ("quantize: {methd: awq}", ("unknown key 'methd'", "did you mean 'method'")),
        ("quantize: {options: {clp: true}}", ("unknown option 'clp'", "did you mean 'clip'")),
        ("calibration: {num_samples: many}", ("num_samples is 'many'", "expected int")),
        ("quantize: [", ("not valid YAML",)),
        ("- a list", ("expected a mapping of sections",)),
        ("description: \xff", ("not valid YAML",)),
    ],
)
def test_recipes_that_are_wrong(
    yaml: str,
    reasons: tuple[str, ...],
    tiny_model: TinyModel,
    output: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    recipe = tmp_path / "wrong.yaml"
    recipe.write_bytes(yaml.encode("latin-1"))
    found = command("quantize", tiny_model(), "-o", output, "--recipe", recipe, "-q", *CPU)
    found.refused(EXIT_USAGE, *reasons)
    assert left_behind(output) == []


@pytest.mark.parametrize(
    ("arguments", "code", "reasons"),
    [
        (("--recipe", "awq_w4a61"), EXIT_USAGE, ("awq_w4a61", "did you mean 'awq_w4a16'")),
        (("--recipe", "none.yaml"), EXIT_USAGE, ("none.yaml does not exist",)),
        (("--method", "awk"), EXIT_UNSUPPORTED, ("'awk'", "did you mean 'awq'")),
        (("--scheme", "w5a16"), EXIT_USAGE, ("'w5a16'", "w4a16")),
        (("--ignore", "nothing"), EXIT_USAGE, ("'nothing' matches no linear",)),
        (("--dtype", "int4"), EXIT_USAGE, ("unknown dtype 'int4'",)),
        (("--device", "tpu9"), EXIT_USAGE, ("tpu9",)),
        (("--num-samples", "0"), EXIT_USAGE, ("0 samples",)),
        (
            ("--calibration", "taken.safetensors", "--num-samples", "8"),
            EXIT_USAGE,
            ("--num-samples chooses calibration text", "taken.safetensors"),
        ),
        (("--num-samples", "few"), EXIT_USAGE, ("--num-samples", "integer")),
        (("--no-such-option",), EXIT_USAGE, ("--no-such-option",)),
    ],
)
def test_options_that_are_wrong(
    arguments: tuple[str, ...],
    code: int,
    reasons: tuple[str, ...],
    tiny_model: TinyModel,
    output: Path,
    command: Command,
) -> None:
    command("quantize", tiny_model(), "-o", output, "-q", *arguments).refused(code, *reasons)
    assert left_behind(output) == []


def test_a_quantized_model(tiny_model: TinyModel, output: Path, command: Command) -> None:
    assert command("quantize", tiny_model(), "-o", output, "-m", "rtn", *CPU).code == EXIT_OK
    twice = output.parent / "twice"
    found = command("quantize", output, "-o", twice, "-m", "rtn", "-q", *CPU)
    found.refused(EXIT_UNSUPPORTED, "quantized already")


def test_an_existing_output_is_kept_without_overwrite_and_replaced_with_it(
    tiny_model: TinyModel, output: Path, command: Command
) -> None:
    source = tiny_model()
    arguments = ("quantize", source, "-o", output, "-m", "rtn", "-q", *CPU)
    assert command(*arguments).code == EXIT_OK
    before = hashes(output)
    command(*arguments, "--symmetric").refused(EXIT_USAGE, str(output), "--overwrite")
    assert hashes(output) == before
    assert command(*arguments, "--symmetric", "--overwrite").code == EXIT_OK
    assert hashes(output) != before
    assert left_behind(output) == ["out"]


def test_the_source_cannot_be_the_output(tiny_model: TinyModel, command: Command) -> None:
    source = tiny_model()
    before = hashes(source)
    for output in (source, source.parent):
        found = command("quantize", source, "-o", output, "-m", "rtn", "--overwrite", "-q", *CPU)
        found.refused(EXIT_USAGE, "source")
    assert hashes(source) == before


@pytest.mark.parametrize("quiet", [(), ("-q",)], ids=["", "quiet"])
def test_an_interrupt_keeps_finished_blocks_says_so_and_exits_with_130(
    quiet: tuple[str, ...],
    tiny_model: TinyModel,
    output: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_model()
    before = hashes(source)

    def interrupt(self: Any, writer: Any) -> None:
        assert any(path.name.startswith(".out.partial") for path in output.parent.iterdir())
        raise KeyboardInterrupt

    arguments = ("quantize", source, "-o", output, "-m", "rtn", *CPU)
    with monkeypatch.context() as patch:
        patch.setattr(quantizer.Quantizer, "_write_rest", interrupt)
        found = command(*arguments, *quiet)
    assert (found.code, found.out) == (EXIT_INTERRUPTED, "")
    assert found.err.endswith("interrupted\n")
    kept = "2 finished blocks kept; the same command with --resume continues\n"
    assert (kept in found.err) is not bool(quiet)
    assert left_behind(output) == [".out.resume"]
    assert hashes(source) == before
    refused = command(*arguments, "--resume", "--symmetric", "-q")
    refused.refused(EXIT_USAGE, "another run", "was 'int4-g64-asym', is 'int4-g64-sym'")
    found = command(*arguments, "--resume")
    assert found.code == EXIT_OK
    assert "resuming after 2 finished blocks" in found.err
    assert left_behind(output) == ["out"]


def test_an_interrupt_before_the_first_block_is_done_leaves_nothing(
    tiny_model: TinyModel, output: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantizer.Quantizer, "_quantize_block", interrupt)
    found = command("quantize", tiny_model(), "-o", output, "-m", "rtn", "-q", *CPU)
    assert (found.code, found.out, found.err) == (EXIT_INTERRUPTED, "", "interrupted\n")
    assert left_behind(output) == []


def test_a_run_without_resume_says_that_it_replaces_progress(
    tiny_model: TinyModel, output: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    arguments = ("quantize", tiny_model(), "-o", output, "-m", "rtn", *CPU)
    with monkeypatch.context() as patch:
        patch.setattr(quantizer.Quantizer, "_write_rest", interrupt)
        assert command(*arguments).code == EXIT_INTERRUPTED
    found = command(*arguments)
    assert found.code == EXIT_OK
    assert "replacing 2 finished blocks of an earlier run, which --resume would" in found.err
    assert left_behind(output) == ["out"]
    found = command(*arguments, "--resume", "--overwrite")
    assert found.code == EXIT_OK
    assert "no run to resume; starting" in found.err


# --- dry run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("-m", "rtn"),
        ("-m", "rtn", "--symmetric", "--group-size", "32"),
        ("-m", "rtn", "--scheme", "w8a16", "--ignore", "down_proj"),
    ],
    ids=["w4a16", "symmetric", "ignore"],
)
def test_a_dry_run_writes_nothing_and_its_bytes_are_those_of_the_real_run(
    options: tuple[str, ...], tiny_model: TinyModel, output: Path, command: Command
) -> None:
    source = tiny_model()
    before = hashes(source)
    found = command("quantize", source, "-o", output, *options, "--dry-run", "--json", *CPU)
    assert found.code == EXIT_OK
    assert not output.parent.exists()
    assert hashes(source) == before
    planned = json.loads(found.out)
    found = command("quantize", source, "-o", output, *options, "--json", *CPU)
    real = json.loads(found.out)
    tensors = load_file(output / "model.safetensors")
    assert planned["planned_bytes"] == real["written_bytes"]
    assert planned["planned_bytes"] == sum(t.nbytes for t in tensors.values())
    for group in planned["groups"]:
        last = group["name"].rpartition(".")[2]
        stored = [t.nbytes for n, t in tensors.items() if n.split(".")[-2] == last]
        assert sum(stored) == group["num_bytes"], group
    measured = real["checkpoint"]["bits_per_weight"]["quantized_linears"]
    assert planned["bits_per_weight"] == pytest.approx(measured)
    assert planned["scheme"] == real["scheme"]


def test_a_dry_run_shows_layers_kernels_and_memory_and_needs_no_output(
    tiny_model: TinyModel, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(tie_word_embeddings=True)
    found = command("quantize", source, "--dry-run", *SMALL)
    assert found.code == EXIT_OK
    assert found.out.count("\n") == 1
    assert "nothing written" in found.out
    assert "self_attn.q_proj (2)" in found.err
    assert "dequantize-once" in found.err
    document = json.loads(command("quantize", source, "--dry-run", "--json", *SMALL).out)
    assert document["calibration_tokens"] == 4 * 32
    assert {group["kernel"] for group in document["groups"]} == {"dequantize-once"}
    assert [group["count"] for group in document["groups"]] == [2] * 7
    assert document["host_bytes"] > 4 * 32 * 64 * 4
    assert document["device_bytes"] == 0
    monkeypatch.setenv("QUANTFORGE_KERNELS", "triton")
    found = command("quantize", source, "--dry-run", "--json", *SMALL)
    kernels = {group["kernel"] for group in json.loads(found.out)["groups"]}
    assert kernels <= {"dequantize-once", None}


def test_without_output_only_a_dry_run_is_possible(tiny_model: TinyModel, command: Command) -> None:
    command("quantize", tiny_model(), "-q", *CPU).refused(EXIT_USAGE, "--output", "--dry-run")


def test_a_dry_run_refuses_what_a_run_would(
    tiny_model: TinyModel, output: Path, command: Command
) -> None:
    output.mkdir(parents=True)
    found = command("quantize", tiny_model(), "-o", output, "--dry-run", "-q", *CPU)
    found.refused(EXIT_USAGE, "--overwrite")
    found = command("quantize", tiny_model(), "--group-size", "48", "--dry-run", "-q", *CPU)
    found.refused(EXIT_USAGE, "group_size 48")


@pytest.mark.parametrize(
    ("options", "where", "names"),
    [((), ".out.resume", ".out.resume"), (("--resume-every", "0"), ".out.partial", "results/out:")],
)
def test_a_full_disk_is_one_line(
    options: tuple[str, ...],
    where: str,
    names: str,
    tiny_model: TinyModel,
    output: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = writer.Shard.add

    def fill(shard: Any, *tensor: Any) -> None:
        if shard.path.parent.name.startswith(where):
            raise OSError(28, "No space left on device")
        real(shard, *tensor)

    monkeypatch.setattr(writer.Shard, "add", fill)
    found = command("quantize", tiny_model(), "-o", output, "-m", "rtn", "-q", *CPU, *options)
    found.refused(EXIT_BAD_DATA, names, "No space left on device")
    assert left_behind(output) == []
