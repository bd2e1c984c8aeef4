"""``quantforge calibrate``: takes activation statistics once, for many runs of ``quantize``."""

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
    from quantforge.calibration.collect import LayerStatistics

SHOWN_OUTLIERS = 10


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge calibrate models/smollm2 --output smollm2.safetensors  |  "
        "quantforge quantize models/smollm2 --calibration smollm2.safetensors --output out"
    )
    def calibrate(
        model: ModelArgument,
        output: Annotated[
            Path, typer.Option("--output", "-o", help="The .safetensors file to write.")
        ],
        calibration: CalibrationOption = None,
        num_samples: NumSamplesOption = None,
        sequence_length: SequenceLengthOption = None,
        seed: SeedOption = None,
        column: ColumnOption = None,
        statistics: Annotated[
            str,
            typer.Option(
                "--statistics",
                help="gram, diagonal, or auto: whole Gram matrices up to 4 GB, then diagonals.",
            ),
        ] = "auto",
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        overwrite: OverwriteOption = False,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Write the statistics of a model's activations, and show where outliers sit."""
        from quantforge.calibration.collect import collect_statistics
        from quantforge.calibration.statistics import origin_of, save_statistics
        from quantforge.checkpoint.reader import CheckpointReader
        from quantforge.cli.evidence import calibration_section, calibration_set
        from quantforge.console import Console
        from quantforge.device import resolve_device, resolve_dtype
        from quantforge.errors import UnsupportedError
        from quantforge.models.loader import load_config
        from quantforge.models.source import resolve_model
        from quantforge.recipe import CalibrationSection

        console = Console(json_output=json_output, quiet=quiet)
        diagonal = _diagonal(statistics)
        _refuse_output(output, overwrite)
        overrides: dict[str, Any] = {
            "dataset": calibration,
            "num_samples": num_samples,
            "sequence_length": sequence_length,
            "seed": seed,
            "column": column,
        }
        section = calibration_section(CalibrationSection(), overrides)
        where = resolve_device(device)
        with console.progress() as progress:
            source = resolve_model(model, progress=progress)
            reader = CheckpointReader(source)
            if reader.layout is not None:
                raise UnsupportedError(
                    f"{source} is quantized already ({reader.layout.format}); "
                    "calibrate the original model instead"
                )
            config = load_config(reader.config)
            compute_dtype = resolve_dtype(dtype, where, config.dtype)
            data = calibration_set(
                source, section, device=device, dtype=dtype, console=console, progress=progress
            )
            layers = collect_statistics(
                reader,
                data,
                device=where,
                dtype=compute_dtype,
                diagonal=diagonal,
                progress=progress,
            )
            save_statistics(output, layers, origin_of(reader, data, config.num_layers))
        outliers = find_outliers(layers)
        console.table(
            "strongest outlier channels: largest |x| over the mean |x| of the input",
            ("layer", "input", "channel", "largest", "ratio"),
            [
                (o["layer"], o["group"], o["channel"], f"{o['absmax']:.1f}", f"{o['ratio']:.0f}")
                for o in outliers[:SHOWN_OUTLIERS]
            ],
        )
        size = output.stat().st_size
        document = {
            "output": str(output),
            "bytes": size,
            "calibration": {"id": data.id, "sha256": data.sha256},
            "outliers": outliers,
        }
        console.result(document, f"{output}: {size / 1e6:,.1f} MB of statistics of {data.id}")


def _diagonal(statistics: str) -> bool | None:
    from quantforge.errors import UsageError

    choices = {"auto": None, "gram": False, "diagonal": True}
    if statistics not in choices:
        raise UsageError(f"--statistics {statistics!r} is not one of {', '.join(choices)}")
    return choices[statistics]


def _refuse_output(output: Path, overwrite: bool) -> None:
    from quantforge.errors import UsageError

    if output.suffix != ".safetensors":
        raise UsageError(f"output {output} must end in .safetensors")
    if output.is_dir():
        raise UsageError(f"output {output} is a folder; name a file")
    if output.exists() and not overwrite:
        raise UsageError(f"output {output} exists; use --overwrite to replace it")
    if not output.parent.is_dir():
        raise UsageError(f"the folder of output {output} does not exist")


def find_outliers(layers: "LayerStatistics") -> list[dict[str, Any]]:
    """The strongest channel of each input, by its largest value over the mean magnitude."""
    found = []
    for index, groups in layers.items():
        for name, statistics in groups.items():
            channel = int(statistics.absmax.argmax())
            largest = float(statistics.absmax[channel])
            found.append(
                {
                    "layer": index,
                    "group": name,
                    "channel": channel,
                    "absmax": largest,
                    "ratio": largest / max(float(statistics.mean_abs.mean()), 1e-12),
                }
            )
    return sorted(found, key=lambda outlier: -float(outlier["ratio"]))
