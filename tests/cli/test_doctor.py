"""``quantforge doctor`` names what the machine has, which kernel serves what, what is missing."""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch

import quantforge.cli.doctor as doctor
from quantforge.cli.app import run
from quantforge.schemes import PRESETS

DRIVER_TEXT = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 01:47:22 UTC 2025\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the NVIDIA kernel driver were loaded."""
    file = tmp_path / "version"
    file.write_text(DRIVER_TEXT)
    monkeypatch.setattr(doctor, "DRIVER_FILE", file)


def test_json_is_one_document_and_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["torch"] == metadata.version("torch")
    assert report["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert report["cpu"]["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert {"path": str(Path.cwd()), "free_bytes": report["disk"][0]["free_bytes"]} in (
        report["disk"]
    )
    assert report["cuda"]["available"] == torch.cuda.is_available()
    assert report["cuda_graphs"]["used"] == torch.cuda.is_available()


def test_every_preset_has_a_kernel_on_this_machine() -> None:
    served = {(entry["preset"], entry["device"]) for entry in doctor.examine()["kernels"]}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    assert served == {(name, device) for name in PRESETS for device in devices}
    assert all(entry["kernel"] for entry in doctor.examine()["kernels"])


def test_the_text_shows_kernels_and_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    for name, scheme in PRESETS.items():
        assert any(name in line and str(scheme) in line for line in text.splitlines())
    assert "problems" in text


def test_an_unknown_kernel_mode_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTFORGE_KERNELS", "cutlass")
    report = doctor.examine()
    assert all(entry["kernel"] is None for entry in report["kernels"])
    assert any("QUANTFORGE_KERNELS=cutlass" in problem for problem in report["problems"])


@pytest.mark.parametrize(
    ("package", "target"),
    [("scipy", '"quantforge[eval]"'), ("uvicorn", '"quantforge[serve]"'), ("gguf", "quantforge")],
)
def test_a_missing_package_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, package: str, target: str
) -> None:
    def version(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    report = doctor.examine()
    assert report["packages"][package] is None
    assert f"{package} missing: pip install {target}" in report["problems"]


@pytest.mark.usefixtures("driver")
def test_a_cpu_build_of_torch_beside_a_driver_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = (p for p in doctor.examine()["problems"] if "driver" in p)
    assert "NVIDIA driver 570.86.15 is installed" in problem
    assert "CPU build" in problem


@pytest.mark.usefixtures("driver")
def test_a_hidden_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (problem,) = (p for p in doctor.examine()["problems"] if "driver" in p)
    assert "sees no GPU through driver 570.86.15; CUDA_VISIBLE_DEVICES is ''" in problem


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    problems = doctor.examine()["problems"]
    assert f"only 0.0 GB free on the disk of {Path.cwd()}" in problems


def test_a_machine_without_proc_is_reported_without_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "MEMORY_FILE", tmp_path / "absent")
    assert run(["doctor"]) == 0
    assert "unknown available of unknown" in capsys.readouterr().out
