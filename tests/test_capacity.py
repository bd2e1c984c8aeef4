"""Memory and disk are asked before any work, and a refusal says what would do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge import capacity
from quantforge.capacity import FreeMemory, free_memory, lacking_disk, lacking_memory
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.cli.app import run
from quantforge.errors import EXIT_BAD_DATA, EXIT_OK, EXIT_UNSUPPORTED
from quantforge.estimate import PlanEstimate, estimate_plan
from quantforge.plan import QuantizePlan, plan_quantization
from quantforge.recipe import QuantizeSection
from quantforge.resume import work_folder

TinyModel = Callable[..., Path]

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NOTHING = FreeMemory(host_bytes=0, device_bytes=None)


def estimated(folder: Path, *, num_tokens: int = 0, **section: Any) -> Any:
    reader = CheckpointReader(folder)
    plan = plan_quantization(reader, QuantizeSection(**section))
    estimate = estimate_plan(reader, plan, num_tokens=num_tokens, device=CPU, dtype=torch.float32)
    return plan, estimate


@pytest.fixture
def case(tiny_model: TinyModel) -> tuple[QuantizePlan, PlanEstimate]:
    found: tuple[QuantizePlan, PlanEstimate] = estimated(tiny_model(), num_tokens=1 << 16)
    return found


def test_hidden_states_and_embedding_are_counted(case: tuple[QuantizePlan, PlanEstimate]) -> None:
    _, estimate = case
    assert estimate.hidden_bytes == (1 << 16) * 64 * 4
    assert estimate.working_bytes >= 512 * 64 * 4
    assert estimate.host_bytes == estimate.hidden_bytes + estimate.working_bytes


def test_what_fits_is_not_refused(case: tuple[QuantizePlan, PlanEstimate]) -> None:
    plan, estimate = case
    for free in (estimate.host_bytes, None):
        enough = FreeMemory(host_bytes=free, device_bytes=None)
        assert lacking_memory(estimate, plan, CPU, torch.float32, enough) is None


def test_one_byte_too_few_is_refused_with_need_and_advice(
    case: tuple[QuantizePlan, PlanEstimate],
) -> None:
    plan, estimate = case
    free = FreeMemory(host_bytes=estimate.host_bytes - 1, device_bytes=None)
    reason = lacking_memory(estimate, plan, CPU, torch.float32, free)
    assert reason is not None
    assert f"{estimate.host_bytes / 1e9:.2f} GB of host memory" in reason
    for option in ("--num-samples", "--sequence-length", "--dtype bfloat16", "--method rtn"):
        assert option in reason
    assert "--device cpu" not in reason


def test_advice_is_only_what_helps(tiny_model: TinyModel) -> None:
    plan, estimate = estimated(tiny_model(), method="rtn")
    reason = lacking_memory(estimate, plan, CPU, torch.bfloat16, NOTHING)
    assert reason is not None
    assert reason.endswith("less is needed with a smaller model")


def test_hidden_states_go_where_there_is_room(case: tuple[QuantizePlan, PlanEstimate]) -> None:
    """On the device up to a quarter of what is free there, on the host up to half, then to disk."""
    plan, estimate = case

    def reason(host: int, device: int) -> str | None:
        free = FreeMemory(host_bytes=host, device_bytes=device)
        return lacking_memory(estimate, plan, CUDA, torch.float32, free)

    roomy = 4 * estimate.hidden_bytes + estimate.working_bytes
    assert reason(0, roomy) is None
    assert reason(2 * estimate.hidden_bytes, estimate.working_bytes) is None
    assert reason(0, estimate.working_bytes) is None
    assert "memory of cuda:0" in str(reason(estimate.hidden_bytes, estimate.working_bytes - 1))
    assert "--device cpu" in str(reason(0, 0))


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
             2: ("max", "current", "inactive_file")}[version]  # fmt: skip
    limit, use, reclaimable = names
    (tmp_path / f"memory.{limit}").write_text("1000000\n")
    (tmp_path / f"memory.{use}").write_text("900000\n")
    (tmp_path / "memory.stat").write_text(f"anon 700000\n{reclaimable} 150000\n")
    places = ((str(tmp_path), f"memory.{limit}", f"memory.{use}", reclaimable),)
    monkeypatch.setattr(capacity, "CGROUPS", places)
    assert free_memory(CPU).host_bytes == 250000
    (tmp_path / f"memory.{limit}").write_text("max\n")
    unlimited = free_memory(CPU).host_bytes
    assert unlimited is not None
    assert unlimited > 1_000_000


def test_disk_counts_output_progress_and_hidden_states(
    case: tuple[QuantizePlan, PlanEstimate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, estimate = case
    output = tmp_path / "new" / "out"
    needed = 2 * plan.planned_bytes + 2 * estimate.hidden_bytes
    usage = shutil.disk_usage(tmp_path)

    def lacking(free: int, *, keeps_progress: bool = True) -> str | None:
        monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: usage._replace(free=free))
        return lacking_disk(estimate, output, memory, keeps_progress=keeps_progress)

    memory = FreeMemory(host_bytes=2 * estimate.hidden_bytes, device_bytes=None)
    assert lacking(needed) is None
    assert "--resume-every 0" in str(lacking(needed - 1))
    assert str(tmp_path) in str(lacking(needed - 1))
    assert lacking(plan.planned_bytes, keeps_progress=False) is None
    assert "--resume-every" not in str(lacking(plan.planned_bytes - 1, keeps_progress=False))
    memory = NOTHING  # the hidden states of the running block go to disk, too
    assert lacking(needed + estimate.hidden_bytes) is None
    assert lacking(needed + estimate.hidden_bytes - 1) is not None
    memory = FreeMemory(host_bytes=None, device_bytes=None)
    work = work_folder(output)
    work.mkdir(parents=True)
    (work / "block-00000.safetensors").write_bytes(b"x" * 1000)
    assert lacking(needed - 1000) is None
    assert lacking(needed - 1001) is not None


def quantize(*arguments: object) -> int:
    return run(["quantize", *(str(a) for a in arguments), "--device", "cpu"])


def test_too_little_memory_stops_the_command_before_the_text_is_read(
    tiny_model: TinyModel,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda _: NOTHING)
    source, output = tiny_model(), tmp_path / "out"
    arguments = (source, "-o", output, "-q")
    assert quantize(*arguments, "--calibration", "no/such/text.txt") == EXIT_UNSUPPORTED
    captured = capfd.readouterr()
    assert captured.err.startswith("error: this run needs about")
    assert captured.err.endswith("--ignore-memory-check tries all the same\n")
    assert captured.err.count("\n") == 1
    assert not output.exists()
    assert quantize(*arguments, "--method", "rtn", "--ignore-memory-check") == EXIT_OK
    capfd.readouterr()
    assert quantize(source, "--dry-run", "--json") == EXIT_OK
    captured = capfd.readouterr()
    assert "this run needs about" in json.loads(captured.out)["lacking_memory"]
    assert "warning: this run needs about" in captured.err


def test_too_little_disk_stops_the_command_before_the_text_is_read(
    tiny_model: TinyModel,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: usage)
    arguments = (tiny_model(), "-o", tmp_path / "out", "-q", "--calibration", "no/such/text.txt")
    assert quantize(*arguments) == EXIT_BAD_DATA
    assert "GB free; the output and the progress" in capfd.readouterr().err
