"""``quantforge quantize``: makes a model small, block by block, and checks what it wrote."""

from contextlib import contextmanager
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
    from collections.abc import Iterator

    from quantforge.calibration.data import CalibrationSet
    from quantforge.console import Console
    from quantforge.pipeline import QuantizeReport
    from quantforge.plan import QuantizePlan
    from quantforge.quantizer import Evidence
    from quantforge.recipe import Recipe


def register(app: typer.Typer) -> None:
    @app.command(
        epilog="Examples:  quantforge quantize models/smollm2 --method awq --scheme w4a16 --output "
        "models/smollm2-awq  |  quantforge quantize org/model --recipe awq_w4a16 --calibration "
        "texts.jsonl --output out  |  quantforge quantize models/smollm2 --method rtn --output out"
        "  |  quantforge quantize models/smollm2 --dry-run"
    )
    def quantize(
        model: ModelArgument,
        output: Annotated[
            Path | None,
            typer.Option("--output", "-o", help="Folder to write; --dry-run needs none."),
        ] = None,
        recipe: Annotated[
            str | None,
            typer.Option("--recipe", help="A shipped recipe or a .yaml file; options override it."),
        ] = None,
        method: Annotated[
            str | None, typer.Option("--method", "-m", help="awq (default), rtn, ...")
        ] = None,
        scheme: Annotated[
            str | None,
            typer.Option("--scheme", "-s", help="w4a16 (default), w8a16, fp8_dynamic, ..."),
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
        activation_observer: Annotated[
            str | None,
            typer.Option(
                "--activation-observer",
                help="What chooses static scales of inputs: absmax (default), percentile, "
                "percentile:99.9, or mse.",
            ),
        ] = None,
        kv_cache: Annotated[
            str | None,
            typer.Option(
                "--kv-cache", help="none (default), fp8 or int8: also calibrate KV-cache scales."
            ),
        ] = None,
        target_bits: Annotated[
            float | None,
            typer.Option(
                "--target-bits",
                help="Mix schemes: the best for this many bits a weight, scales included.",
            ),
        ] = None,
        max_kl: Annotated[
            float | None,
            typer.Option(
                "--max-kl", help="Mix schemes: the fewest bits for this KL divergence (predicted)."
            ),
        ] = None,
        candidates: Annotated[
            list[str] | None,
            typer.Option(
                "--candidate",
                help="A scheme to mix, such as int4-g64-asym or w8a16; repeatable.",
            ),
        ] = None,
        verify_kl: Annotated[
            bool,
            typer.Option(
                "--verify-kl",
                help="With --max-kl: measure the KL on held-out text, and choose again until it "
                "is met (3 rounds at most).",
            ),
        ] = False,
        calibration: CalibrationOption = None,
        num_samples: NumSamplesOption = None,
        sequence_length: SequenceLengthOption = None,
        seed: SeedOption = None,
        column: ColumnOption = None,
        device: DeviceOption = "auto",
        dtype: DTypeOption = "auto",
        overwrite: OverwriteOption = False,
        resume: Annotated[
            bool,
            typer.Option("--resume", help="Go on after the last finished block of a killed run."),
        ] = False,
        resume_every: Annotated[
            int | None,
            typer.Option(
                "--resume-every",
                min=0,
                help="Blocks between two writes of the calibration samples' hidden states "
                "(default: by their size); 0 keeps no progress at all.",
            ),
        ] = None,
        dequantize: Annotated[
            bool,
            typer.Option(
                "--dequantize", help="Take a MODEL that is quantized already, dequantized."
            ),
        ] = False,
        ignore_memory_check: Annotated[
            bool,
            typer.Option(
                "--ignore-memory-check", help="Start even where memory is expected not to do."
            ),
        ] = False,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Show the plan and its cost; write nothing.")
        ] = False,
        report: Annotated[
            Path | None,
            typer.Option("--report", help="Also write a page on every layer: a .html file."),
        ] = None,
        json_output: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        """Quantize a model into a compressed-tensors folder, verified before it appears."""
        from quantforge.cli.allocate import (
            choose_schemes,
            divergence_from,
            is_allocated,
            quantize_until_met,
            show_allocation,
        )
        from quantforge.cli.dry_run import refuse_lacking, show_plan
        from quantforge.cli.run_summary import show_run
        from quantforge.console import Console
        from quantforge.device import resolve_device, resolve_dtype
        from quantforge.errors import UsageError
        from quantforge.models.dequantized import open_source
        from quantforge.models.source import resolve_model
        from quantforge.pipeline import quantize_model
        from quantforge.plan import plan_quantization
        from quantforge.report import check_report_path
        from quantforge.sensitivity import check_target

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
                "activation_observer": activation_observer,
                "kv_cache": kv_cache,
                "target_bits": target_bits,
                "max_kl": max_kl,
                "candidates": None if candidates is None else tuple(candidates),
            },
            {
                "dataset": calibration,
                "num_samples": num_samples,
                "sequence_length": sequence_length,
                "seed": seed,
                "column": column,
            },
        )
        if output is not None:
            _refuse_output(output, overwrite)
        elif not dry_run:
            raise UsageError("give the folder to write with --output, or only plan with --dry-run")
        if report is not None:
            check_report_path(report)
        check_target(chosen.quantize)
        if verify_kl and (chosen.quantize.max_kl is None or resume or dry_run):
            raise UsageError("--verify-kl belongs to --max-kl, without --resume and --dry-run")
        where = resolve_device(device)
        with console.progress() as progress:
            source = resolve_model(model, progress=progress)
            reader = open_source(source, dequantize=dequantize)
            plan = plan_quantization(reader, chosen.quantize)
            _refuse_statistics_for_kv(plan, chosen.calibration.dataset)
            compute_dtype = resolve_dtype(dtype, where, plan.config.dtype)
            chosen_by = None
            if is_allocated(chosen.quantize):
                chosen_by = choose_schemes(
                    reader,
                    plan,
                    chosen,
                    lambda: _text(source, chosen, device, dtype, console, progress),
                    kept_at=output if resume else None,
                    device=where,
                    dtype=compute_dtype,
                    progress=progress,
                )
                plan = chosen_by.plan
                show_allocation(console, plan)
            if dry_run or output is None:
                show_plan(console, model, reader, plan, chosen.calibration, where, compute_dtype)
                return
            console.say(_announce(model, plan))
            refuse_lacking(
                reader, plan, chosen.calibration, output, where, compute_dtype,
                keeps_progress=resume_every != 0, ignore_memory=ignore_memory_check,
            )  # fmt: skip
            text = None if chosen_by is None else chosen_by.text
            evidence = _evidence(source, plan, chosen, device, dtype, console, progress, text)

            def run(plan: "QuantizePlan", folder: Path) -> "QuantizeReport":
                return quantize_model(
                    source,
                    folder,
                    chosen,
                    plan,
                    evidence,
                    device=where,
                    dtype=compute_dtype,
                    overwrite=overwrite,
                    resume=resume,
                    resume_every=resume_every,
                    dequantize=dequantize,
                    progress=progress,
                )

            with _progress_kept(console, output, resume=resume):
                if verify_kl and chosen_by is not None:
                    measured = divergence_from(source, device, dtype, progress)
                    plan, done = quantize_until_met(
                        console, chosen_by, output, run, measured, overwrite=overwrite
                    )
                else:
                    done = run(plan, output)
        show_run(console, plan, done, report)


def _recipe(name: str | None, quantize: dict[str, Any], calibration: dict[str, Any]) -> "Recipe":
    """The recipe called `name`, or the default one, with the command line's options over it."""
    from dataclasses import replace

    from quantforge.cli.evidence import calibration_section
    from quantforge.recipe import Recipe, load_recipe

    base = Recipe(source="command line") if name is None else load_recipe(name)
    if quantize["target_bits"] is not None or quantize["max_kl"] is not None:
        base = replace(base, quantize=replace(base.quantize, target_bits=None, max_kl=None))
    given = {key: value for key, value in quantize.items() if value is not None}
    return replace(
        base,
        quantize=replace(base.quantize, **given),
        calibration=calibration_section(base.calibration, calibration),
    )


def _refuse_text_options(calibration: str | None, given: dict[str, Any]) -> None:
    """Refuses options that choose text where a statistics file has fixed it already."""
    from quantforge.cli.evidence import STATISTICS_SUFFIX
    from quantforge.errors import UsageError

    named = [option for option, value in given.items() if value is not None]
    if named and (calibration or "").endswith(STATISTICS_SUFFIX):
        raise UsageError(
            f"{named[0]} chooses calibration text, but {calibration} holds statistics that were "
            "taken already; leave it out, or run 'quantforge calibrate' with it"
        )


def _refuse_statistics_for_kv(plan: "QuantizePlan", dataset: str) -> None:
    """Refuses a statistics file where scales of the KV cache need text."""
    from quantforge.cli.evidence import STATISTICS_SUFFIX
    from quantforge.errors import UsageError

    if plan.kv_cache is not None and dataset.endswith(STATISTICS_SUFFIX):
        raise UsageError(
            f"{dataset} holds statistics of the linears' inputs, not of keys and values; "
            "--kv-cache needs calibration text, such as --calibration bundled"
        )


def _refuse_output(output: Path, overwrite: bool) -> None:
    """Refuses an existing output before any work, not after hours of it."""
    from quantforge.errors import UsageError

    if output.exists() and not overwrite:
        raise UsageError(f"output {output} exists; use --overwrite to replace it")


@contextmanager
def _progress_kept(console: "Console", output: Path, *, resume: bool) -> "Iterator[None]":
    """Says what an earlier run left, and after an interrupt or error what this one leaves."""
    from quantforge.errors import CheckpointError
    from quantforge.resume import num_kept_blocks

    found = num_kept_blocks(output)
    if resume:
        console.say(f"resuming after {_blocks(found)}" if found else "no run to resume; starting")
    elif found:
        console.say(
            f"replacing {_blocks(found)} of an earlier run, which --resume would have continued"
        )
    try:
        yield
    except (KeyboardInterrupt, CheckpointError):
        if kept := num_kept_blocks(output):
            console.say(f"{_blocks(kept)} kept; the same command with --resume continues")
        raise


def _blocks(count: int) -> str:
    return f"{count} finished block{'' if count == 1 else 's'}"


def _announce(model: str, plan: "QuantizePlan") -> str:
    from quantforge.models.linear import serving_notes

    note = "\n".join(serving_notes(plan.layers.values())) or None
    kept = f", {len(plan.ignore)} left as they are" if plan.ignore else ""
    if plan.extra:
        kept += f" ({len(plan.extra)} tensors that the model does not use copied: {plan.extra[0]})"
    return (
        f"{model}: {plan.method.name} to {plan.describe_scheme()}, "
        f"{len(plan.layers)} linears{kept}, {plan.planned_bytes / 1e6:,.1f} MB to write"
        + ("" if note is None else f"\n{note}")
    )


def _evidence(
    source: Path,
    plan: "QuantizePlan",
    recipe: "Recipe",
    device: str,
    dtype: str,
    console: "Console",
    progress: Any,
    text: "CalibrationSet | None" = None,
) -> "Evidence | None":
    """Calibration text, or a file of statistics; nothing for a method that needs none.

    `text` is the calibration text where it was read already.
    """
    from quantforge.calibration.statistics import StatisticsFile
    from quantforge.cli.evidence import STATISTICS_SUFFIX

    if not plan.needs_text:
        return None
    section = recipe.calibration
    if section.dataset.endswith(STATISTICS_SUFFIX):
        return StatisticsFile(Path(section.dataset)).require_model(source)
    return text or _text(source, recipe, device, dtype, console, progress)


def _text(
    source: Path, recipe: "Recipe", device: str, dtype: str, console: "Console", progress: Any
) -> "CalibrationSet":
    """The calibration text; raises `UsageError` where a statistics file stands in for it."""
    from quantforge.cli.evidence import STATISTICS_SUFFIX, calibration_set
    from quantforge.errors import UsageError

    section = recipe.calibration
    if section.dataset.endswith(STATISTICS_SUFFIX):
        raise UsageError(
            f"sensitivities are measured on text, and {section.dataset} holds statistics; "
            "give --calibration a text"
        )
    return calibration_set(
        source, section, device=device, dtype=dtype, console=console, progress=progress
    )
