"""``quantforge convert``: writes a quantized model in another format, with the same codes."""

from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli.options import JsonOption, ModelArgument, OverwriteOption, QuietOption


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge convert models/smollm2-awq --to gptq_v2 --output "
        "models/smollm2-gptq  |  quantforge convert org/model-AWQ --to pack-quantized --output out"
    )
    def convert(
        model: ModelArgument,
        to: Annotated[str, typer.Option("--to", help="awq, gptq, gptq_v2 or pack-quantized.")],
        output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
        overwrite: OverwriteOption = False,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Write a quantized model in another format; no code changes, or it is refused."""
        from quantforge.checkpoint.base import format_named
        from quantforge.console import Console
        from quantforge.convert import convert_checkpoint
        from quantforge.errors import UsageError
        from quantforge.models.source import resolve_model

        format_named(to)
        if output.exists() and not overwrite:
            raise UsageError(f"output {output} exists; use --overwrite to replace it")
        console = Console(json_output=json_output, quiet=quiet)
        with console.progress() as progress:
            folder = resolve_model(model, progress=progress)
            report = convert_checkpoint(folder, output, to, overwrite=overwrite, progress=progress)
        document = {
            "output": str(report.output),
            "source_format": report.source_format,
            "format": report.format,
            "num_layers": report.num_layers,
            "written_bytes": report.written_bytes,
            "scale_error": report.scale_error,
            "lost": list(report.lost),
        }
        scales = "scales exact"
        if report.scale_error:
            scales = f"scales rounded to float16, by at most {report.scale_error:.2e} of each"
        lost = f"; left out, since it has no place for them: {', '.join(report.lost)}"
        console.result(
            document,
            f"{report.output}: {report.source_format} to {report.format}, "
            f"{report.written_bytes / 1e6:,.1f} MB, verified; codes less zero points "
            f"equal in {report.num_layers} linears, {scales}{lost if report.lost else ''}",
        )
