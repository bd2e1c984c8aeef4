"""``quantforge verify``: checks a model folder whole."""

from typing import Annotated

import typer

from quantforge.cli.options import JsonOption, ModelArgument, QuietOption


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge verify models/smollm2-awq  |  "
        "quantforge verify models/smollm2-awq --json --no-hashes"
    )
    def verify(
        model: ModelArgument,
        hashes: Annotated[
            bool, typer.Option("--hashes/--no-hashes", help="Compare the files' sha256.")
        ] = True,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Check tensors, scales, sizes and hashes; exit 0 if all is well and 5 if not."""
        import dataclasses

        from quantforge.checkpoint.verify import verify_checkpoint
        from quantforge.console import Console
        from quantforge.errors import EXIT_BAD_DATA
        from quantforge.models.source import resolve_model

        console = Console(json_output=json_output, quiet=quiet)
        with console.progress() as progress:
            folder = resolve_model(model, progress=progress)
            report = verify_checkpoint(folder, check_hashes=hashes, progress=progress)
        lines = [f"{'ok  ' if c.ok else 'FAIL'}  {c.name:<11} {c.detail}" for c in report.checks]
        document = {
            "folder": str(folder),
            "ok": report.ok,
            "checks": [dataclasses.asdict(check) for check in report.checks],
        }
        console.result(document, "\n".join(lines))
        if not report.ok:
            raise typer.Exit(EXIT_BAD_DATA)
