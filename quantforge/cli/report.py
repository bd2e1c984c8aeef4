"""``quantforge report``: the page of a quantized model, made from its quantforge.json."""

from pathlib import Path
from typing import Annotated

import typer

from quantforge.cli.options import JsonOption, QuietOption


def register(app: typer.Typer) -> None:
    @app.command(epilog="Examples:  quantforge report models/smollm2-awq --output report.html")
    def report(
        folder: Annotated[
            Path, typer.Argument(metavar="FOLDER", help="A folder that 'quantize' wrote.")
        ],
        output: Annotated[
            Path, typer.Option("--output", "-o", help="The .html file to write, or to replace.")
        ],
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Write the HTML page of a quantized model: every layer, its errors, outliers and bits."""
        from quantforge.console import Console
        from quantforge.report import write_page

        written = write_page(folder, output)
        Console(json_output=json_output, quiet=quiet).result(
            {"folder": str(folder), "output": str(written)}, str(written)
        )
