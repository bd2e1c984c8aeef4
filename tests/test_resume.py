"""A run that is killed at any moment and resumed ends with the bytes of an undisturbed one."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge import fingerprint, resume
from quantforge.calibration.activations import Activations
from quantforge.calibration.collect import collect_statistics
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile, origin_of, save_statistics
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError, UsageError
from quantforge.pipeline import quantize_model
from quantforge.plan import plan_quantization
from quantforge.quantizer import Evidence, Quantizer
from quantforge.recipe import QuantizeSection, Recipe

TinyModel = Callable[..., Path]

CPU = torch.device("cpu")
DRIVER = Path(__file__).with_name("resume_driver.py")
LAYERS = 4


def calibration(seed: int = 5) -> CalibrationSet:
    generator = torch.Generator().manual_seed(seed)
    return CalibrationSet(
        token_ids=torch.randint(3, 512, (4, 16), generator=generator),
        id="random 4x16",
        sha256="1" * 64,
        sources={},
        warnings=(),
    )


def quantize(
    source: Path,
    output: Path,
    evidence: Evidence | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    overwrite: bool = False,
    **section: Any,
) -> None:
    recipe = Recipe(source="test", quantize=QuantizeSection(**{"group_size": 32, **section}))
    plan = plan_quantization(CheckpointReader(source), recipe.quantize)
    if evidence is None and plan.method.needs_statistics:
        evidence = calibration()
    quantize_model(
        source, output, recipe, plan, evidence, device=CPU, dtype=dtype, overwrite=overwrite,
        **(options or {}),
    )  # fmt: skip


def contents(folder: Path) -> dict[str, Any]:
    """sha256 of every file, and quantforge.json but for the time of its making and what it took."""
    found: dict[str, Any] = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())
    }
    manifest = json.loads((folder / "quantforge.json").read_text())
    assert manifest.pop("created")
    assert manifest.pop("run")
    assert all(layer.pop("seconds") is not None for layer in manifest["layers"])
    return found | {"quantforge.json": manifest}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def stop_at(
    monkeypatch: pytest.MonkeyPatch, layer: int, error: BaseException | None = None
) -> list[int]:
    """Interrupts the next run when it starts block `layer`; gives the blocks that later runs do."""
    real, quantized = Quantizer._quantize_block, []
    armed = True

    def run(self: Quantizer, index: int) -> Any:
        nonlocal armed
        if armed and index == layer:
            armed = False
            quantized.clear()
            raise error or KeyboardInterrupt
        quantized.append(index)
        return real(self, index)

    monkeypatch.setattr(Quantizer, "_quantize_block", run)
    return quantized


def drive(source: Path, results: Path, spec: dict[str, Any]) -> dict[str, Any]:
    results.mkdir()
    arguments = [sys.executable, str(DRIVER), str(source), str(results), json.dumps(spec)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    expected = contents(results / "whole")
    for run in document["runs"]:
        assert (run["status"], run["resumed"]) == (-9, 0), (run, done.stderr)
        assert contents(Path(run["output"])) == expected, run
    return document


def test_a_run_killed_at_ten_random_moments_resumes_to_the_same_bytes(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model(num_hidden_layers=LAYERS)
    document = drive(source, tmp_path / "results", {"seed": 1, "events": 10})
    assert len(document["runs"]) == 10
    assert len({run["kept"] for run in document["runs"]}) >= 3, "kills fell into different blocks"
    left = [n for n in names(tmp_path / "results") if ".resume" in n or ".partial" in n]
    assert left == []


def test_a_run_killed_between_the_steps_of_a_commit_resumes_to_the_same_bytes(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Renames of a run: fingerprint, 2 blocks and the hidden states between, the shard, the
    manifest, the folder. After the last one the output is complete, and only the work folder is
    too much."""
    renames = [[n, moment] for n in range(1, 8) for moment in ("before", "after")]
    document = drive(tiny_model(), tmp_path / "results", {"renames": renames})
    published = [run["point"] for run in document["runs"] if run["published"]]
    assert published == [[7, "after"]]
    left = [n for n in names(tmp_path / "results") if ".resume" in n or ".partial" in n]
    assert left == [".out-13.resume"]


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("every", [None, 2, 3])
def test_hidden_states_are_written_as_often_as_asked_and_change_no_bit(
    every: int | None,
    layer: int,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, output = tiny_model(num_hidden_layers=LAYERS), tmp_path / "results" / "out"
    quantize(source, tmp_path / "whole", method="awq")
    quantized = stop_at(monkeypatch, layer)
    options = {"resume_every": every}
    with pytest.raises(KeyboardInterrupt):
        quantize(source, output, method="awq", options=options)
    last = layer // (every or 1) * (every or 1) - 1
    hidden = [f"hidden-{last:05d}.safetensors"] if last >= 0 else []
    assert names(output.parent) == [".out.resume"]
    assert names(output.parent / ".out.resume") == [
        *(f"block-{i:05d}.safetensors" for i in range(layer)),
        "fingerprint.json",
        *hidden,
    ]
    quantize(source, output, method="awq", options=options | {"resume": True})
    assert quantized == list(range(layer, LAYERS))
    assert contents(output) == contents(tmp_path / "whole")
    assert names(output.parent) == ["out"]


@pytest.mark.parametrize(
    ("arch", "dtype", "section"),
    [
        ("llama", torch.bfloat16, {"method": "awq"}),
        ("qwen2", torch.float16, {"method": "awq", "ignore": ("lm_head", "down_proj")}),
        ("qwen3", torch.float32, {"method": "gptq", "symmetric": True}),
        ("llama", torch.bfloat16, {"method": "awq_gptq", "ignore": ()}),
        ("mistral", torch.float32, {"method": "rtn", "scheme": "w8a16", "group_size": "channel"}),
    ],
)
def test_every_method_resumes_by_running_finished_blocks_forward(
    arch: str,
    dtype: torch.dtype,
    section: dict[str, Any],
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without hidden states, so that weights, norms and biases come from the kept blocks."""
    source = tiny_model(arch, dtype, num_hidden_layers=3)
    quantize(source, tmp_path / "whole", **section)
    quantized = stop_at(monkeypatch, 2)
    options = {"resume_every": 9}
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", options=options, **section)
    quantize(source, tmp_path / "out", options=options | {"resume": True}, **section)
    assert quantized == [2]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_on_a_statistics_file_resumes(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = tiny_model(num_hidden_layers=LAYERS), tmp_path / "s.safetensors"
    reader, data = CheckpointReader(source), calibration()
    layers = collect_statistics(reader, data, device=CPU, dtype=torch.float32)
    save_statistics(path, layers, origin_of(reader, data, LAYERS))
    quantize(source, tmp_path / "whole", StatisticsFile(path))
    quantized = stop_at(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", StatisticsFile(path))
    quantize(source, tmp_path / "out", StatisticsFile(path), options={"resume": True})
    assert quantized == [2, 3]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def edit_weights(source: Path) -> None:
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (source / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "gptq"}, "plan.method was 'awq', is 'gptq'"),
        ({"symmetric": True}, "was 'int4-g32-asym', is 'int4-g32-sym'; and"),
        ({"ignore": ("lm_head", "down_proj")}, "plan.ignore was"),
        ({"options": {"clip": False}}, "plan.options.clip was True, is False"),
        ({"dtype": torch.bfloat16}, "dtype was 'torch.float32', is 'torch.bfloat16'"),
        ({"evidence": calibration(6)}, "calibration.token_ids was"),
        ({"edit": edit_weights}, "model.model.safetensors was"),
        ({"code": "0.9.9"}, "code.quantforge was '0.1.0', is '0.9.9'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_that_differs_is_refused_with_what_differs_and_keeps_the_progress(
    change: dict[str, Any],
    reason: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, output = tiny_model(), tmp_path / "results" / "out"
    stop_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, output)
    kept = names(output.parent / ".out.resume")
    if edit := change.get("edit"):
        edit(source)
    if version := change.get("code"):
        monkeypatch.setattr(fingerprint.quantforge, "__version__", version)
    section = {k: v for k, v in change.items() if k not in ("edit", "code", "options", "evidence")}
    recipe_options = change.get("options")
    if recipe_options is not None:
        real = QuantizeSection
        monkeypatch.setitem(
            quantize.__globals__, "QuantizeSection",
            lambda **values: real(**values, options=recipe_options),
        )  # fmt: skip
    with pytest.raises(UsageError, match="holds the progress of another run") as caught:
        quantize(source, output, change.get("evidence"), options={"resume": True}, **section)
    assert reason in str(caught.value)
    assert names(output.parent) == [".out.resume"]
    assert names(output.parent / ".out.resume") == kept


def test_changed_code_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "quantforge"
    package.mkdir()
    monkeypatch.setattr(fingerprint.quantforge, "__path__", [str(package)])
    (package / "a.py").write_text("x = 1\n")
    before = fingerprint._code_hash()
    (package / "a.py").write_text("x = 2\n")
    assert fingerprint._code_hash() != before


def test_without_resume_the_progress_of_a_dead_run_is_replaced(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tiny_model(), tmp_path / "results" / "out"
    quantized = stop_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, output)
    quantize(source, output)
    assert quantized == [0, 1]
    assert names(output.parent) == ["out"]


def test_two_runs_to_one_output_are_not_mixed(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with resume.open_work_folder(output, {"a": 1}, resume=False):
        for again in (True, False):
            with pytest.raises(UsageError, match="another run is writing"):
                resume.open_work_folder(output, {"a": 1}, resume=again)
    assert names(tmp_path) == []


def test_no_progress_is_kept_when_none_is_asked_for(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tiny_model(), tmp_path / "results" / "out"
    stop_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, output, options={"resume_every": 0})
    assert names(output.parent) == []
    with pytest.raises(UsageError, match="--resume-every 0 keeps none"):
        quantize(source, output, options={"resume_every": 0, "resume": True})


@pytest.mark.parametrize("damage", ["block-00000.safetensors", "hidden-00000.safetensors"])
def test_a_damaged_work_folder_is_named(
    damage: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tiny_model(), tmp_path / "results" / "out"
    stop_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, output)
    path = output.parent / ".out.resume" / damage
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{damage} is damaged; start over without --resume"):
        quantize(source, output, options={"resume": True})
    assert not output.exists()


@pytest.mark.parametrize("layer", [0, 2])
def test_a_full_disk_keeps_finished_blocks_for_when_there_is_room(
    layer: int, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tiny_model(num_hidden_layers=LAYERS), tmp_path / "results" / "out"
    quantize(source, tmp_path / "whole")
    real = os.replace

    def fill(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == f"block-{layer:05d}.safetensors":
            raise OSError(28, "No space left on device")
        real(source, target, **options)

    monkeypatch.setattr(os, "replace", fill)
    with pytest.raises(CheckpointError, match="No space left on device; make room"):
        quantize(source, output)
    assert names(output.parent) == ([".out.resume"] if layer else [])
    assert not [n for n in names(output.parent / ".out.resume") if n.endswith(".partial")]
    monkeypatch.setattr(os, "replace", real)
    quantize(source, output, options={"resume": True})
    assert contents(output) == contents(tmp_path / "whole")


def test_too_little_disk_for_the_progress_is_refused_before_any_work(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tiny_model(), tmp_path / "results" / "out"
    planned = plan_quantization(CheckpointReader(source), QuantizeSection()).planned_bytes
    usage = shutil.disk_usage(tmp_path)._replace(free=planned + planned // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="progress kept beside it need"):
        quantize(source, output)
    assert names(output.parent) == []
    quantize(source, output, options={"resume_every": 0})


def test_an_overwriting_run_resumes_and_the_old_output_stays_until_then(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tiny_model(), tmp_path / "results" / "out"
    quantize(source, output, method="rtn")
    before = contents(output)
    stop_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, output, overwrite=True)
    with pytest.raises(UsageError, match="use --overwrite"):
        quantize(source, output, options={"resume": True})
    assert contents(output) == before
    assert names(output.parent) == [".out.resume", "out"]
    quantize(source, output, overwrite=True, options={"resume": True})
    quantize(source, tmp_path / "whole")
    assert contents(output) == contents(tmp_path / "whole")


def test_hidden_states_cost_at_most_a_fixed_number_of_bytes_a_block() -> None:
    for size in (1, resume.HIDDEN_BYTES_PER_BLOCK, 10**10):
        assert size / resume.hidden_interval(size) <= resume.HIDDEN_BYTES_PER_BLOCK
    assert resume.hidden_interval(1) == 1


def test_hidden_states_are_read_back_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "PART_BYTES", 100)
    hidden = torch.randn(37, 5).to(torch.bfloat16)
    block = resume.FinishedBlock(encoded={}, dense={}, reports=())
    with resume.open_work_folder(tmp_path / "out", {}, resume=False) as work:
        work.add_block(0, block)
        work.keep_hidden(0, hidden)
        reopened = resume.WorkFolder(work.folder, None, every=None)
        again = torch.zeros_like(hidden)
        assert reopened.restore_hidden(again) == 1
        assert torch.equal(again, hidden)


def test_activations_are_what_is_kept(tiny_model: TinyModel) -> None:
    """The hidden states are one tensor, the only thing that goes from block to block."""
    reader = CheckpointReader(tiny_model())
    plan = plan_quantization(reader, QuantizeSection())
    embedding = reader.tensor(plan.architecture.embedding)
    found = Activations(
        calibration().token_ids, embedding, plan.config, device=CPU, dtype=torch.float32
    )
    tensors = [name for name, value in vars(found).items() if isinstance(value, torch.Tensor)]
    assert tensors == ["hidden"]
