"""What is known of a run before it: ``--dry-run`` shows it, and what cannot fit is refused."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from quantforge.checkpoint.reader import CheckpointReader
    from quantforge.console import Console
    from quantforge.estimate import LayerGroup
    from quantforge.plan import QuantizePlan
    from quantforge.recipe import CalibrationSection


def show_plan(
    console: "Console",
    model: str,
    reader: "CheckpointReader",
    plan: "QuantizePlan",
    calibration: "CalibrationSection",
    device: "torch.device",
    dtype: "torch.dtype",
) -> None:
    """Prints the plan of `model`; reads no tensor and writes nothing."""
    from dataclasses import asdict

    from quantforge.capacity import free_memory, lacking_memory
    from quantforge.estimate import estimate_plan
    from quantforge.models.linear import serving_notes

    num_tokens = calibration_tokens(plan, calibration)
    estimate = estimate_plan(reader, plan, num_tokens=num_tokens, device=device, dtype=dtype)
    lacking = lacking_memory(estimate, plan, device, dtype, free_memory(device))
    precision = str(dtype).removeprefix("torch.")
    console.table(
        f"{model}: plan for {plan.method.name}",
        ("layers", "scheme", "MB", "bits", f"kernel on {device.type}"),
        [
            (
                _short(group),
                group.scheme or "as it is",
                f"{group.num_bytes / 1e6:,.1f}",
                f"{group.bits_per_weight:.3f}",
                group.kernel or f"none: {group.problem}",
            )
            for group in estimate.groups
        ],
    )
    note = "\n".join(serving_notes(plan.layers.values())) or None
    document = {
        "dry_run": True,
        "model": model,
        "method": plan.method.name,
        "scheme": plan.scheme_name,
        "kv_cache": None if plan.kv_cache is None else str(plan.kv_cache),
        "device": device.type,
        "dtype": precision,
        "calibration_tokens": num_tokens,
        "lacking_memory": lacking,
        "note": note,
        **asdict(estimate),
    }
    if lacking is not None:
        console.warn(lacking)
    memory = f"{estimate.host_bytes / 1e9:.2f} GB host"
    if estimate.device_bytes:
        memory += f", {estimate.device_bytes / 1e9:.2f} GB device"
    console.result(
        document,
        f"{model}: {plan.method.name} to {plan.describe_scheme()}, "
        f"{estimate.source_bytes / 1e6:,.1f} MB to {estimate.planned_bytes / 1e6:,.1f} MB, "
        f"{estimate.bits_per_weight:.3f} bits a weight in {len(plan.layers)} linears; "
        f"about {memory} of tensors in {precision}; nothing written"
        + ("" if note is None else f"\n{note}"),
    )


def calibration_tokens(plan: "QuantizePlan", calibration: "CalibrationSection") -> int:
    """Tokens of text that will go through the model; 0 for statistics taken earlier, or none."""
    from quantforge.cli.evidence import STATISTICS_SUFFIX

    if not plan.needs_text or calibration.dataset.endswith(STATISTICS_SUFFIX):
        return 0
    return calibration.num_samples * calibration.sequence_length


def refuse_lacking(
    reader: "CheckpointReader",
    plan: "QuantizePlan",
    calibration: "CalibrationSection",
    output: "Path",
    device: "torch.device",
    dtype: "torch.dtype",
    *,
    keeps_progress: bool,
    ignore_memory: bool,
) -> None:
    """Refuses a run for which memory (unless that is ignored) or disk will not do."""
    from quantforge.capacity import free_memory, lacking_disk, lacking_memory
    from quantforge.errors import CheckpointError, UnsupportedError
    from quantforge.estimate import estimate_plan

    num_tokens = calibration_tokens(plan, calibration)
    estimate = estimate_plan(reader, plan, num_tokens=num_tokens, device=device, dtype=dtype)
    free = free_memory(device)
    if not ignore_memory and (lacking := lacking_memory(estimate, plan, device, dtype, free)):
        raise UnsupportedError(f"{lacking}; --ignore-memory-check tries all the same")
    if lacking := lacking_disk(estimate, output, free, keeps_progress=keeps_progress):
        raise CheckpointError(lacking)


def _short(group: "LayerGroup") -> str:
    """``mlp.down_proj (30)``: what a table of 80 columns has room for."""
    name = group.name.partition("*.")[2] or group.name
    return f"{name} ({group.count})"
