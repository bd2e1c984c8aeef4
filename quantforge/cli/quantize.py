"""``quantforge quantize``: makes a model small, block by block, and checks what it wrote."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantforge.cli.options import (
    CalibrationOption,
    ColumnOption,
    DeviceOption,
    DTypeOption,
    JsonOption,
    ModelArgument,
    NumSamplesOption,
    OverwriteOption,
    QuietOption,
    SeedOption,
    SequenceLengthOption,
)

if TYPE_CHECKING:
    from quantforge.console import Console
    from quantforge.pipeline import Evidence, QuantizeReport
    from quantforge.plan import QuantizePlan
    from quantforge.recipe import Recipe

WORST_LAYERS = 5
STATISTICS_SUFFIX = ".safetensors"


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge quantize models/smollm2 --method awq --scheme w4a16 --output "
        "models/smollm2-awq  |  quantforge quantize org/model --recipe awq_w4a16 --calibration "
        "texts.jsonl --output out  |  quantforge quantize models/smollm2 --method rtn --output out"
    )
    def quantize(
        model: ModelArgument,
        output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
        recipe: Annotated[
            str | None,
            typer.Option("--recipe", help="A shipped recipe or a .yaml file; options override it."),
        ] = None,
        method: Annotated[
            str | None, typer.Option("--method", "-m", help="awq (default), rtn, ...")
        ] = None,
        scheme: Annotated[
            str | None, typer.Option("--scheme", "-s", help="w4a16 (default), w4a16_sym, w8a16.")
        ] = None,
        group_size: Annotated[
            str | None,
            typer.Option(
                "--group-size",
                help="auto (default: the largest of 128, 64, 32 that divides), a number, channel.",
            ),
        ] = None,
        symmetric: Annotated[
            bool | None,
            typer.Option("--symmetric/--asymmetric", help="Without or with zero points."),
        ] = None,
        ignore: Annotated[
            list[str] | None,
            typer.Option("--ignore", help="Linears to leave alone; a name or glob; repeatable."),
        ] = None,
        calibration: CalibrationOption = None,
        num_samples: NumSamplesOption = None,
        sequence_length: SequenceLengthOption = None,
        seed: SeedOption = None,
        column: ColumnOption = None,
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        overwrite: OverwriteOption = False,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Quantize a model into a compressed-tensors folder, verified before it appears."""
        from quantforge.checkpoint.reader import CheckpointReader
        from quantforge.console import Console
        from quantforge.device import resolve_device, resolve_dtype
        from quantforge.models.source import resolve_model
        from quantforge.pipeline import quantize_model
        from quantforge.plan import plan_quantization

        console = Console(json_output=json_output, quiet=quiet)
        _refuse_text_options(
            calibration,
            {
                "--num-samples": num_samples,
                "--sequence-length": sequence_length,
                "--seed": seed,
                "--column": column,
            },
        )
        chosen = _recipe(
            recipe,
            {
                "method": method,
                "scheme": scheme,
                "group_size": group_size,
                "symmetric": symmetric,
                "ignore": None if ignore is None else tuple(ignore),
            },
            {
                "dataset": calibration,
                "num_samples": num_samples,
                "sequence_length": sequence_length,
                "seed": seed,
                "column": column,
            },
        )
        _refuse_output(output, overwrite)
        where = resolve_device(device)
        with console.progress() as progress:
            source = resolve_model(model, progress=progress)
            plan = plan_quantization(CheckpointReader(source), chosen.quantize)
            compute_dtype = resolve_dtype(dtype, where, plan.config.dtype)
            console.say(_announce(model, plan))
            evidence = _evidence(source, plan, chosen, device, dtype, console, progress)
            report = quantize_model(
                source,
                output,
                chosen,
                plan,
                evidence,
                device=where,
                dtype=compute_dtype,
                overwrite=overwrite,
                progress=progress,
            )
        _show(console, plan, report)


def _recipe(name: str | None, quantize: dict[str, Any], calibration: dict[str, Any]) -> "Recipe":
    """The recipe called `name`, or the default one, with the command line's options over it."""
    from dataclasses import replace

    from quantforge.cli.evidence import calibration_section
    from quantforge.recipe import Recipe, load_recipe

    base = Recipe(source="command line") if name is None else load_recipe(name)
    given = {key: value for key, value in quantize.items() if value is not None}
    return replace(
        base,
        quantize=replace(base.quantize, **given),
        calibration=calibration_section(base.calibration, calibration),
    )


def _refuse_text_options(calibration: str | None, given: dict[str, Any]) -> None:
    """Refuses options that choose text where a statistics file has fixed it already."""
    from quantforge.errors import UsageError

    named = [option for option, value in given.items() if value is not None]
    if named and (calibration or "").endswith(STATISTICS_SUFFIX):
        raise UsageError(
            f"{named[0]} chooses calibration text, but {calibration} holds statistics that were "
            "taken already; leave it out, or run 'quantforge calibrate' with it"
        )


def _refuse_output(output: Path, overwrite: bool) -> None:
    """Refuses an existing output before any work, not after hours of it."""
    from quantforge.errors import UsageError

    if output.exists() and not overwrite:
        raise UsageError(f"output {output} exists; use --overwrite to replace it")


def _announce(model: str, plan: "QuantizePlan") -> str:
    kept = f", {len(plan.ignore)} left as they are" if plan.ignore else ""
    return (
        f"{model}: {plan.method.name} to {plan.scheme}, {len(plan.layers)} linears{kept}, "
        f"{plan.planned_bytes / 1e6:,.1f} MB to write"
    )


def _evidence(
    source: Path,
    plan: "QuantizePlan",
    recipe: "Recipe",
    device: str,
    dtype: str,
    console: "Console",
    progress: Any,
) -> "Evidence | None":
    """Calibration text, or a file of statistics; nothing for a method that needs none."""
    from quantforge.calibration.statistics import StatisticsFile
    from quantforge.cli.evidence import calibration_set

    if not plan.method.needs_statistics:
        return None
    section = recipe.calibration
    if section.dataset.endswith(STATISTICS_SUFFIX):
        return StatisticsFile(Path(section.dataset)).require_model(source)
    return calibration_set(
        source, section, device=device, dtype=dtype, console=console, progress=progress
    )


def _show(console: "Console", plan: "QuantizePlan", report: "QuantizeReport") -> None:
    from dataclasses import asdict

    from quantforge.checkpoint.verify import describe_checkpoint

    described = describe_checkpoint(report.output)
    worst = sorted(report.layers, key=lambda r: -(r.output_error or r.weight_error))[:WORST_LAYERS]
    console.table(
        "largest relative errors (squared)",
        ("layer", "scheme", "weight", "output"),
        [
            (
                r.name,
                r.scheme,
                f"{r.weight_error:.2e}",
                "-" if r.output_error is None else f"{r.output_error:.2e}",
            )
            for r in worst
        ],
    )
    document = {
        "output": str(report.output),
        "method": plan.method.name,
        "scheme": str(plan.scheme),
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
        "written_bytes": report.written_bytes,
        "peak_device_bytes": report.peak_device_bytes,
        "peak_host_bytes": report.peak_host_bytes,
        "checkpoint": described,
        "layers": [asdict(layer) for layer in report.layers],
    }
    memory = f"{report.peak_host_bytes / 1e9:.2f} GB host"
    if report.peak_device_bytes:
        memory += f", {report.peak_device_bytes / 1e9:.2f} GB device"
    console.result(
        document,
        f"{report.output}: {report.written_bytes / 1e6:,.1f} MB, verified; "
        f"{report.seconds['total']:.1f} s ({report.seconds['calibrate']:.1f} forward passes, "
        f"{report.seconds['quantize']:.1f} {plan.method.name}); peak memory {memory}",
    )
