"""Whether this machine has room for a run, asked before any work: memory, then disk.

Memory is compared with an estimate (`estimate.py`), so that a run which cannot end well is refused
in a second instead of after an hour; what the estimate leaves out (the program, mapped files) is
resident already or can be given back.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from quantforge.calibration.activations import DEVICE_SHARE
from quantforge.estimate import PlanEstimate
from quantforge.plan import QuantizePlan
from quantforge.resume import work_folder

CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Folder, limit, use and the reclaimable part of the use, of version 2 and of version 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Bytes that a run may take; None where they are not known, or there is no such device."""

    host_bytes: int | None
    device_bytes: int | None


def free_memory(device: torch.device) -> FreeMemory:
    """What is free on the host, within the limits of its control group, and on `device`."""
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    known = [n for n in (_available_host_bytes(), _control_group_bytes()) if n is not None]
    return FreeMemory(host_bytes=min(known, default=None), device_bytes=on_device)


def lacking_memory(
    estimate: PlanEstimate,
    plan: QuantizePlan,
    device: torch.device,
    dtype: torch.dtype,
    free: FreeMemory,
) -> str | None:
    """Why the run does not fit into `free` (what it needs, what there is, what lowers it), or None.

    The hidden states go to the host where they would take too much of the device, as
    `Activations` decides.
    """
    needs = {"host": estimate.host_bytes}
    if free.device_bytes is not None:
        stays = estimate.hidden_bytes <= free.device_bytes * DEVICE_SHARE
        needs["host"] = 0 if stays else estimate.hidden_bytes
        needs[str(device)] = estimate.working_bytes + (estimate.hidden_bytes if stays else 0)
    for place, needed in needs.items():
        there = free.host_bytes if place == "host" else free.device_bytes
        if there is not None and needed > there:
            where = "host memory" if place == "host" else f"memory of {place}"
            return (
                f"this run needs about {needed / 1e9:.2f} GB of {where}, and {there / 1e9:.2f} GB "
                f"are free; less is needed with {_what_lowers(estimate, plan, device, dtype)}"
            )
    return None


def _what_lowers(
    estimate: PlanEstimate, plan: QuantizePlan, device: torch.device, dtype: torch.dtype
) -> str:
    options = []
    if estimate.hidden_bytes:
        options.append("fewer or shorter samples (--num-samples, --sequence-length)")
    if dtype == torch.float32:
        options.append("--dtype bfloat16")
    if plan.method.needs_statistics:
        options.append("--method rtn")
    if device.type == "cuda":
        options.append("--device cpu")
    return ", ".join(options) or "a smaller model"


def lacking_disk(estimate: PlanEstimate, output: Path, *, keeps_progress: bool) -> str | None:
    """Why the output and the progress kept beside it do not fit on the disk, or None."""
    work = work_folder(output)
    needed = estimate.planned_bytes
    if keeps_progress:
        needed += estimate.planned_bytes + 2 * estimate.hidden_bytes
    present = sum(path.stat().st_size for path in work.glob("*"))  # used again, or removed first
    parent = next(p for p in work.parents if p.is_dir())
    free = shutil.disk_usage(parent).free + present
    if needed <= free:
        return None
    advice = ", or keep no progress with --resume-every 0" if keeps_progress else ""
    return (
        f"{parent} has {free / 1e9:.2f} GB free; the output and the progress kept beside it need "
        f"{needed / 1e9:.2f} GB; make room{advice}"
    )


def _available_host_bytes() -> int | None:
    """Memory that programs can get without swapping: free, or held by caches of files."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _control_group_bytes() -> int | None:
    """What a container's limit leaves; None without a limit."""
    for folder, limit, use, reclaimable in CGROUPS:
        try:
            allowed = int((Path(folder) / limit).read_text(encoding="ascii"))
            used = int((Path(folder) / use).read_text(encoding="ascii"))
            stat = (Path(folder) / "memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):  # no such version, or the word "max"
            continue
        counts = dict(line.split() for line in stat.splitlines())
        return max(0, allowed - used + int(counts.get(reclaimable, 0)))
    return None
