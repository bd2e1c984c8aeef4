"""``quantforge eval``: measures a model. ``eval ppl`` gives perplexity, and KL to a baseline."""

from typing import Annotated

import typer

from quantforge.cli.options import (
    BaselineOption,
    DeviceOption,
    DTypeOption,
    JsonOption,
    KVCacheOption,
    ModelArgument,
    QuietOption,
    ReportOption,
    TextTokensOption,
)


def register(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(commands, name="eval", help="Measure a model through the runtime that serves it.")

    @commands.callback()
    def root() -> None:
        pass

    @commands.command(
        epilog="Examples:  quantforge eval ppl models/smollm2-awq --baseline models/smollm2  |  "
        "quantforge eval ppl models/smollm2 --data wikitext2 --json"
    )
    def ppl(
        model: ModelArgument,
        baseline: BaselineOption = None,
        data: Annotated[
            str, typer.Option("--data", help="bundled, wikitext2, or a text or .jsonl file.")
        ] = "bundled",
        window: Annotated[
            int, typer.Option("--window", help="Tokens that the model sees at once.")
        ] = 2048,
        stride: Annotated[
            int | None,
            typer.Option("--stride", help="Tokens from window to window; default: the window."),
        ] = None,
        bos: Annotated[
            bool, typer.Option("--bos", help="Put the BOS token first in each window.")
        ] = False,
        max_tokens: TextTokensOption = None,
        report: ReportOption = None,
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        kv_cache_dtype: KVCacheOption = "auto",
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Perplexity of a text; with a baseline also ratio, KL divergence and top-1 agreement."""
        from quantforge.console import Console
        from quantforge.evaluation.measure import EvalSettings, measure
        from quantforge.evaluation.report import check_report_path, to_text, write_report
        from quantforge.evaluation.texts import load_text
        from quantforge.models.source import resolve_model

        console = Console(json_output=json_output, quiet=quiet)
        if report is not None:
            check_report_path(report)
        settings = EvalSettings(
            window=window,
            stride=stride,
            bos=bos,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
        text = load_text(data)
        with console.progress() as progress:
            folder = resolve_model(model, progress=progress)
            other = resolve_model(baseline, progress=progress) if baseline else None
            found = measure(
                folder, other, text, settings, names=(model, baseline), progress=progress
            )
        document = found.to_dict()
        if report is not None:
            write_report(report, document)
        console.result(document, to_text(document))
