"""``quantforge doctor``: what this machine has, which kernel serves what, and what is missing."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from quantforge.cli.options import JsonOption, QuietOption

Report = dict[str, Any]

REQUIRED = ("torch", "safetensors", "tokenizers", "huggingface_hub", "gguf")
EXTRAS = {"serve": ("fastapi", "uvicorn"), "eval": ("datasets", "scipy")}
DRIVER_FILE = Path("/proc/driver/nvidia/version")
MEMORY_FILE = Path("/proc/meminfo")
TYPICAL_SHAPE = (4096, 4096)
"""[N, K] of the layer for which kernels are listed."""
LITTLE_DISK_BYTES = 2_000_000_000


def register(app: typer.Typer) -> None:
    @app.command(epilog="Examples:  quantforge doctor  |  quantforge doctor --json")
    def doctor(json_output: JsonOption = False, quiet: QuietOption = False) -> None:
        """Show the hardware, the libraries, the kernel of each scheme, and what is missing.

        Ends with exit code 0 whatever it finds; "problems" of the JSON document lists what to mend.
        """
        from quantforge.console import Console

        report = examine()
        Console(json_output=json_output, quiet=quiet).result(report, "\n".join(_lines(report)))


def examine() -> Report:
    """Everything that the command shows; sizes in bytes. Never raises for what is missing."""
    import quantforge
    from quantforge.models.source import cache_folder

    report: Report = {
        "quantforge": quantforge.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "cpu": _cpu(),
        "driver": _driver_version(),
        "cuda": _cuda(),
        "disk": [_disk(Path.cwd()), _disk(cache_folder())],
        "kernel_mode": os.environ.get("QUANTFORGE_KERNELS", "auto"),
        "kernels": list(_kernels()),
        "cuda_graphs": _graphs(),
    }
    return {**report, "problems": list(_problems(report))}


def _packages() -> dict[str, str | None]:
    names = (*REQUIRED, "triton", *sum(EXTRAS.values(), ()))
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu() -> Report:
    sizes = {}
    if MEMORY_FILE.is_file():
        pairs = re.findall(r"^(\w+):\s+(\d+) kB", MEMORY_FILE.read_text(), flags=re.MULTILINE)
        sizes = {name: int(number) * 1024 for name, number in pairs}
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": sizes.get("MemTotal"),
        "available_bytes": sizes.get("MemAvailable"),
    }


def _driver_version() -> str | None:
    """The NVIDIA kernel driver's version, None where there is no driver."""
    if not DRIVER_FILE.is_file():
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", DRIVER_FILE.read_text())
    return found.group(1) if found else "unknown"


def _cuda() -> Report:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": total,
                "free_bytes": free,
            }
        )
    return {"torch_build": torch.version.cuda, "available": bool(gpus), "gpus": gpus}


def _disk(folder: Path) -> Report:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return {"path": str(folder), "free_bytes": shutil.disk_usage(existing).free}


def _kernels() -> Iterator[Report]:
    """One entry a preset and device: the kernel that `Op.select` picks, and the others' reasons."""
    import torch
    from quantforge_kernels.op import KernelUnavailableError

    from quantforge.models.linear import kernel_problem, serving_op
    from quantforge.schemes import PRESETS

    places = [(torch.device("cpu"), torch.float32)]
    if torch.cuda.is_available():
        places.append((torch.device("cuda"), torch.bfloat16))
    for device, dtype in places:
        for name, scheme in PRESETS.items():
            problem = kernel_problem(scheme, TYPICAL_SHAPE, device, dtype)
            op = serving_op(scheme)
            reasons = {k: why for k, why in op.explain(**problem).items() if why is not None}
            try:
                kernel = op.select(**problem).name
            except KernelUnavailableError as error:
                kernel, reasons = None, {**reasons, "selection": str(error)}
            yield {
                "preset": name,
                "scheme": str(scheme),
                "device": device.type,
                "dtype": str(dtype).removeprefix("torch."),
                "kernel": kernel,
                "refused": reasons,
            }


def _graphs() -> Report:
    """Whether decode steps are recorded and replayed on the device that ``auto`` takes."""
    from quantforge.device import resolve_device
    from quantforge.runtime.graphs import refuse_graphs

    reason = refuse_graphs(resolve_device("auto"))
    return {"used": reason is None, "reason": reason}


def _problems(report: Report) -> Iterator[str]:
    yield from _cuda_problems(report)
    for entry in report["kernels"]:
        if entry["kernel"] is None:
            yield (
                f"no kernel serves {entry['preset']} on {entry['device']} with "
                f"QUANTFORGE_KERNELS={report['kernel_mode']}: {entry['refused']['selection']}"
            )
    slow = [
        entry["preset"]
        for entry in report["kernels"]
        if entry["device"] == "cuda" and entry["kernel"] == "reference"
    ]
    if slow:
        yield f"plain torch, not a kernel, serves {', '.join(slow)} on cuda: correct but slow"
    yield from _package_problems(report["packages"])
    for disk in report["disk"]:
        if disk["free_bytes"] < LITTLE_DISK_BYTES:
            yield f"only {_gigabytes(disk['free_bytes'])} free on the disk of {disk['path']}"


def _package_problems(packages: dict[str, str | None]) -> Iterator[str]:
    for target, names in {
        "quantforge": REQUIRED,
        **{f'"quantforge[{extra}]"': names for extra, names in EXTRAS.items()},
    }.items():
        missing = [name for name in names if packages[name] is None]
        if missing:
            yield f"{' and '.join(missing)} missing: pip install {target}"


def _cuda_problems(report: Report) -> Iterator[str]:
    cuda, driver = report["cuda"], report["driver"]
    torch_version = report["packages"]["torch"]
    if driver is not None and cuda["torch_build"] is None:
        yield (
            f"NVIDIA driver {driver} is installed, but torch {torch_version} is a CPU build; "
            "install torch's CUDA build to use the GPU"
        )
    elif driver is not None and not cuda["available"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        yield (
            f"torch {torch_version} (CUDA {cuda['torch_build']}) sees no GPU through driver "
            f"{driver}{shown}; the driver may be older than this CUDA version needs"
        )
    if cuda["available"] and report["packages"]["triton"] is None:
        yield "triton is missing, so the GPU runs plain torch only: pip install triton"


def _lines(report: Report) -> Iterator[str]:
    """The report for people."""
    cpu, cuda = report["cpu"], report["cuda"]
    yield f"quantforge  {report['quantforge']}, Python {report['python']}, {report['platform']}"
    yield "packages    " + ", ".join(f"{k} {v or 'missing'}" for k, v in report["packages"].items())
    yield (
        f"cpu         {cpu['cores']} cores, {_gigabytes(cpu['available_bytes'])} available of "
        f"{_gigabytes(cpu['memory_bytes'])}"
    )
    yield f"driver      {report['driver'] or 'no NVIDIA driver'}"
    yield f"cuda        {cuda['torch_build'] or 'torch is a CPU build'}"
    for gpu in cuda["gpus"]:
        yield (
            f"gpu         {gpu['name']}, capability {gpu['capability']}, "
            f"{_gigabytes(gpu['free_bytes'])} free of {_gigabytes(gpu['memory_bytes'])}"
        )
    for disk in report["disk"]:
        yield f"disk        {_gigabytes(disk['free_bytes'])} free at {disk['path']}"
    yield f"kernels     QUANTFORGE_KERNELS={report['kernel_mode']}"
    for entry in report["kernels"]:
        yield (
            f"  {entry['device']:<5} {entry['dtype']:<9} {entry['preset']:<12} "
            f"{entry['scheme']:<33} {entry['kernel'] or 'none'}"
        )
        for name, reason in entry["refused"].items():
            yield f"        not {name}: {reason}"
    graphs = report["cuda_graphs"]
    yield f"graphs      {'of decode steps' if graphs['used'] else 'none: ' + graphs['reason']}"
    problems = report["problems"]
    yield f"problems    {'none' if not problems else len(problems)}"
    yield from (f"  {problem}" for problem in problems)


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"
