"""``quantforge gate``: says yes or no to a checkpoint by the limits of a recipe."""

from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from pathlib import Path

    from quantforge.console import Console
    from quantforge.recipe import GateSection


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge gate models/smollm2-awq --baseline models/smollm2  |  "
        "quantforge gate models/smollm2-awq --baseline models/smollm2 --recipe limits.yaml "
        "--report gate.html.  Exit code: 0 passed, 1 failed, 2 wrong usage or recipe, "
        "3 unsupported, 5 bad checkpoint or data."
    )
    def gate(
        model: ModelArgument,
        baseline: BaselineOption = None,
        recipe: Annotated[
            str, typer.Option("--recipe", help="A shipped recipe or a .yaml file with a gate.")
        ] = "ci_gate",
        data: Annotated[
            str | None,
            typer.Option("--data", help="Text to use instead of the recipe's."),
        ] = None,
        window: Annotated[
            int | None, typer.Option("--window", help="Window instead of the recipe's, in tokens.")
        ] = None,
        max_tokens: TextTokensOption = None,
        report: ReportOption = None,
        no_record: Annotated[
            bool,
            typer.Option("--no-record", help="Do not add the result to MODEL's quantforge.json."),
        ] = False,
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        kv_cache_dtype: KVCacheOption = "auto",
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Compare a checkpoint with its baseline; exit 1 if a limit of the recipe is not met."""
        from dataclasses import replace

        from quantforge.console import Console
        from quantforge.errors import QualityGateError
        from quantforge.evaluation.gate import evaluate_gate
        from quantforge.evaluation.measure import EvalSettings, measure
        from quantforge.evaluation.report import check_report_path, to_text, write_report
        from quantforge.evaluation.texts import load_text
        from quantforge.models.source import resolve_model

        console = Console(json_output=json_output, quiet=quiet)
        overrides: dict[str, Any] = {"dataset": data, "window": window, "max_tokens": max_tokens}
        section = replace(
            gate_section(recipe, baseline),
            **{key: value for key, value in overrides.items() if value is not None},
        )
        if report is not None:
            check_report_path(report)
        settings = EvalSettings(
            window=section.window,
            max_tokens=section.max_tokens,
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
        text = load_text(section.dataset)
        with console.progress() as progress:
            folder = resolve_model(model, progress=progress)
            other = resolve_model(baseline, progress=progress) if baseline else None
            found = measure(
                folder, other, text, settings, names=(model, baseline), progress=progress
            )
        result = evaluate_gate(section, found.metrics())
        verdict = {"recipe": recipe, **result.to_dict()}
        document = {**found.to_dict(), "gate": verdict}
        if report is not None:
            write_report(report, document)
        console.result(document, to_text(document))
        if not no_record:
            evidence = {"kind": "gate", **found.to_dict(details=False), "gate": verdict}
            record(folder, evidence, console)
        if not result.passed:
            raise QualityGateError(f"gate {recipe} failed: {result.reasons()}")


def gate_section(recipe: str, baseline: str | None) -> "GateSection":
    """The gate of `recipe`, refused if it has none or needs a baseline that was not given."""
    from quantforge.errors import RecipeError, UsageError
    from quantforge.evaluation.gate import needs_baseline
    from quantforge.recipe import load_recipe

    section = load_recipe(recipe).gate
    if section is None:
        raise RecipeError(f"recipe {recipe} has no 'gate' section")
    relative = needs_baseline(section)
    if relative and not baseline:
        raise UsageError(
            f"recipe {recipe} limits {', '.join(relative)} relative to a baseline; "
            "give the unquantized model with --baseline"
        )
    return section


def record(folder: "Path", result: dict[str, Any], console: "Console") -> None:
    """Adds `result` to the checkpoint's quantforge.json; a failure is said, the verdict stands."""
    from quantforge.checkpoint.manifest import append_evaluation
    from quantforge.errors import CheckpointError

    try:
        if not append_evaluation(folder, result):
            console.say(f"{folder} has no quantforge.json; the result is not recorded there")
    except CheckpointError as error:
        console.warn(f"the result is not recorded: {error}")
