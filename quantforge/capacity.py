"""Whether this machine has room for a run, asked before any work: memory, then disk.

Memory is compared with an estimate (`estimate.py`), so that a run which cannot end well is refused
in a second instead of after an hour; what the estimate leaves out (the program, mapped files) is
resident already or can be given back.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from quantforge.calibration.hidden import DEVICE_SHARE, HOST_SHARE, Place
from quantforge.estimate import PlanEstimate
from quantforge.memory import available_host_bytes
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
    known = [n for n in (available_host_bytes(), _control_group_bytes()) if n is not None]
    return FreeMemory(host_bytes=min(known, default=None), device_bytes=on_device)


def lacking_memory(
    estimate: PlanEstimate,
    plan: QuantizePlan,
    device: torch.device,
    dtype: torch.dtype,
    free: FreeMemory,
) -> str | None:
    """Why the run does not fit into `free`, with what it needs and what lowers it, or None."""
    place = hidden_place(estimate, free)
    on_host = estimate.hidden_bytes if place == Place.HOST else 0
    if free.device_bytes is None:
        needs = {"host": estimate.working_bytes + on_host}
    else:
        on_device = estimate.hidden_bytes if place == Place.DEVICE else 0
        needs = {"host": on_host, str(device): estimate.working_bytes + on_device}
    for name, needed in needs.items():
        there = free.host_bytes if name == "host" else free.device_bytes
        if there is not None and needed > there:
            where = "host memory" if name == "host" else f"memory of {name}"
            return (
                f"this run needs about {needed / 1e9:.2f} GB of {where}, and {there / 1e9:.2f} GB "
                f"are free; less is needed with {_what_lowers(estimate, plan, device, dtype)}"
            )
    return None


def hidden_place(estimate: PlanEstimate, free: FreeMemory) -> Place:
    """Where `calibration.hidden` will keep the hidden states."""
    size = estimate.hidden_bytes
    if free.device_bytes is not None and size <= free.device_bytes * DEVICE_SHARE:
        return Place.DEVICE
    fits = free.host_bytes is None or size <= free.host_bytes * HOST_SHARE
    return Place.HOST if fits else Place.DISK


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


def lacking_disk(
    estimate: PlanEstimate, output: Path, free: FreeMemory, *, keeps_progress: bool
) -> str | None:
    """Why the output and what is kept beside it during the run do not fit on the disk, or None."""
    work = work_folder(output)
    needed = estimate.planned_bytes
    if hidden_place(estimate, free) == Place.DISK:
        needed += estimate.hidden_bytes
    if keeps_progress:
        needed += estimate.planned_bytes + 2 * estimate.hidden_bytes
    present = sum(path.stat().st_size for path in work.glob("*"))  # used again, or removed first
    parent = next(p for p in work.parents if p.is_dir())
    there = shutil.disk_usage(parent).free + present
    if needed <= there:
        return None
    advice = ", or keep no progress with --resume-every 0" if keeps_progress else ""
    return (
        f"{parent} has {there / 1e9:.2f} GB free; the output and the progress kept beside it need "
        f"{needed / 1e9:.2f} GB; make room{advice}"
    )


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
