"""What ``quantize --dry-run`` shows: the plan with its bytes, kernels and memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

    from quantforge.cli.evidence import STATISTICS_SUFFIX
    from quantforge.estimate import estimate_plan

    reads_text = plan.method.needs_statistics and not calibration.dataset.endswith(
        STATISTICS_SUFFIX
    )
    num_tokens = calibration.num_samples * calibration.sequence_length if reads_text else 0
    estimate = estimate_plan(reader, plan, num_tokens=num_tokens, device=device, dtype=dtype)
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
    document = {
        "dry_run": True,
        "model": model,
        "method": plan.method.name,
        "scheme": str(plan.scheme),
        "device": device.type,
        "dtype": precision,
        "calibration_tokens": num_tokens,
        **asdict(estimate),
    }
    memory = f"{estimate.host_bytes / 1e9:.2f} GB host"
    if estimate.device_bytes:
        memory += f", {estimate.device_bytes / 1e9:.2f} GB device"
    console.result(
        document,
        f"{model}: {plan.method.name} to {plan.scheme}, {estimate.source_bytes / 1e6:,.1f} MB to "
        f"{estimate.planned_bytes / 1e6:,.1f} MB, {estimate.bits_per_weight:.3f} bits a weight in "
        f"{len(plan.layers)} linears; about {memory} of tensors in {precision}; nothing written",
    )


def _short(group: "LayerGroup") -> str:
    """``mlp.down_proj (30)``: what a table of 80 columns has room for."""
    name = group.name.partition("*.")[2] or group.name
    return f"{name} ({group.count})"
