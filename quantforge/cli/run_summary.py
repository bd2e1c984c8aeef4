"""What ``quantize`` shows at its end: worst layers, fallbacks, totals, time and peak memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quantforge.console import Console
    from quantforge.pipeline import QuantizeReport
    from quantforge.plan import QuantizePlan

WORST_LAYERS = 5
SHOWN_FALLBACKS = 8


def show_run(
    console: "Console", plan: "QuantizePlan", report: "QuantizeReport", page: "Path | None"
) -> None:
    """Tables for people on stderr, the outcome on stdout; writes `page` where it is wanted."""
    from dataclasses import asdict

    from quantforge.checkpoint.inspection import describe_checkpoint
    from quantforge.report import (
        TOTAL_COLUMNS,
        fallback_rows,
        memory,
        total_rows,
        worst_layers,
        write_page,
    )

    layers = [asdict(layer) for layer in report.layers]
    console.table(
        "largest relative errors (squared)",
        ("layer", "scheme", "weight", "output"),
        [
            (
                layer["name"],
                layer["scheme"],
                f"{layer['weight_error']:.2e}",
                "-" if layer["output_error"] is None else f"{layer['output_error']:.2e}",
            )
            for layer in worst_layers(layers, WORST_LAYERS)
        ],
    )
    console.table("by method and scheme", TOTAL_COLUMNS, total_rows(layers))
    fallen = fallback_rows(layers)
    if fallen:
        console.warn(
            f"{len(fallen)} of {len(layers)} layers did not get {plan.method.name}: "
            + "; ".join(f"{name} ({reason})" for name, reason in fallen[:SHOWN_FALLBACKS])
            + (f"; and {len(fallen) - SHOWN_FALLBACKS} more" if fallen[SHOWN_FALLBACKS:] else "")
        )
    if page is not None:
        console.say(f"report: {write_page(report.output, page)}")
    document = {
        "output": str(report.output),
        "report": None if page is None else str(page),
        "method": plan.method.name,
        "scheme": plan.scheme_name,
        "kv_cache": None if plan.kv_cache is None else str(plan.kv_cache),
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
        "written_bytes": report.written_bytes,
        "peak_device_bytes": report.peak_device_bytes,
        "peak_host_bytes": report.peak_host_bytes,
        "peak_host_anonymous_bytes": report.peak_host_anonymous_bytes,
        "checkpoint": describe_checkpoint(report.output),
        "ignored": list(plan.ignore),
        "layers": layers,
    }
    held = report.peak_host_anonymous_bytes or report.peak_host_bytes
    console.result(
        document,
        f"{report.output}: {report.written_bytes / 1e6:,.1f} MB, verified; "
        f"{report.seconds['total']:.1f} s ({report.seconds['calibrate']:.1f} forward passes, "
        f"{report.seconds['quantize']:.1f} {plan.method.name}); peak memory "
        f"{memory(held, report.peak_device_bytes)}",
    )
