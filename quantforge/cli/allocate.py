"""``--target-bits`` and ``--max-kl`` of ``quantize``: measures, chooses, shows the choice."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quantforge.calibration.data import CalibrationSet
    from quantforge.checkpoint.reader import CheckpointReader
    from quantforge.console import Console
    from quantforge.pipeline import QuantizeReport
    from quantforge.plan import QuantizePlan
    from quantforge.progress import Progress
    from quantforge.recipe import QuantizeSection, Recipe
    from quantforge.sensitivity import Measured

MAX_ROUNDS = 3
"""How often ``--verify-kl`` quantizes."""
CLOSE = 0.85
"""Share of the limit above which a measured KL that meets it is good enough."""
MARGIN = 0.95
"""Share of the limit that a later round aims at."""
VERIFY_WINDOW = 2048
"""Tokens that the model sees at once, where it takes so many."""
VERIFY_TOKENS = 16384
"""Tokens of the bundled held-out text on which the KL is measured."""


@dataclass(frozen=True, kw_only=True)
class ChosenSchemes:
    """A plan whose schemes were chosen; text and measurements, unless an earlier run had chosen."""

    plan: "QuantizePlan"
    text: "CalibrationSet | None" = None
    allocator: "Allocator | None" = None


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Makes plans whose schemes are chosen by sensitivity; measured once, asked often."""

    reader: "CheckpointReader"
    section: "QuantizeSection"
    measured: "Measured"

    def plan(self, max_kl: float | None = None) -> "QuantizePlan":
        """The plan for the recipe's target, or for another limit of predicted KL."""
        from quantforge.plan import plan_quantization
        from quantforge.sensitivity import allocation_record

        limit = self.section.max_kl if max_kl is None else max_kl
        if limit is None:
            assert self.section.target_bits is not None, "one of the two targets is given"
            found = self.measured.for_bits(self.section.target_bits)
        else:
            found = self.measured.for_divergence(limit)
        record = allocation_record(self.measured, found, self.section)
        return plan_quantization(self.reader, self.section, found.schemes(), record)


def is_allocated(section: "QuantizeSection") -> bool:
    """Whether the recipe leaves the choice of schemes to their sensitivity."""
    return section.target_bits is not None or section.max_kl is not None


def choose_schemes(
    reader: "CheckpointReader",
    plan: "QuantizePlan",
    recipe: "Recipe",
    read_text: "Callable[[], CalibrationSet]",
    *,
    kept_at: Path | None,
    device: "torch.device",
    dtype: "torch.dtype",
    progress: "Progress",
) -> ChosenSchemes:
    """What a killed run to `kept_at` had chosen for the same target, or a measured choice."""
    from quantforge.sensitivity import measure_units

    kept = None if kept_at is None else _kept_plan(reader, recipe.quantize, kept_at)
    if kept is not None:
        return ChosenSchemes(plan=kept)
    text = read_text()
    measured = measure_units(
        reader,
        plan,
        recipe.quantize,
        text.token_ids,
        device=device,
        dtype=dtype,
        seed=recipe.calibration.seed,
        progress=progress,
    )
    allocator = Allocator(reader=reader, section=recipe.quantize, measured=measured)
    return ChosenSchemes(plan=allocator.plan(), text=text, allocator=allocator)


def quantize_until_met(
    console: "Console",
    chosen: ChosenSchemes,
    output: Path,
    run: "Callable[[QuantizePlan, Path], QuantizeReport]",
    divergence_of: Callable[[Path], float],
    *,
    overwrite: bool,
) -> "tuple[QuantizePlan, QuantizeReport]":
    """Quantizes, measures and chooses again; the smallest result that meets the limit stays.

    Each round corrects the prediction by the ratio that the last one measured. Rounds are written
    beside `output`, which appears at the end. Raises `QualityGateError` where none meets the limit,
    and `UsageError` where `output` must not be replaced.
    """
    from quantforge.checkpoint.writer import refuse_output
    from quantforge.errors import QualityGateError, RecipeError
    from quantforge.resume import remove_work, work_folder

    allocator = chosen.allocator
    assert allocator is not None, "a verified run is not resumed"
    real = Path(os.path.realpath(output))
    refuse_output(real, overwrite, allocator.reader.folder)
    limit = allocator.section.max_kl
    assert limit is not None, "a verified run has a limit"
    plan, best = chosen.plan, None
    said = []
    folders = []
    try:
        for number in range(1, MAX_ROUNDS + 1):
            folders.append(real.with_name(f".{real.name}.round-{number}"))
            shutil.rmtree(folders[-1], ignore_errors=True)
            report = run(plan, folders[-1])
            divergence = divergence_of(folders[-1])
            record = plan.allocation
            assert record is not None, "the plan was chosen"
            said.append(f"{divergence:.4f} at {record['bits_per_weight']:.3f} bits")
            console.say(f"round {number}: measured KL {said[-1]}")
            met = divergence <= limit
            if met and (best is None or report.written_bytes < best[1].written_bytes):
                best = plan, report
            if met and divergence >= CLOSE * limit:
                break
            predicted, before = record["predicted_kl"], plan.layers
            if divergence <= 0 or predicted <= 0:
                break  # there is no ratio to correct by
            try:
                plan = allocator.plan(MARGIN * limit * predicted / divergence)
            except RecipeError:  # beyond the best candidates
                break
            if plan.layers == before:
                break
        if best is None:
            raise QualityGateError(f"max_kl {limit} is not met: measured KL {'; '.join(said)}")
        if overwrite:
            shutil.rmtree(real, ignore_errors=True)
        best[1].output.rename(real)
        return best[0], replace(best[1], output=output)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            remove_work(work_folder(folder))


def divergence_from(
    source: Path, device: str, dtype: str, progress: "Progress"
) -> Callable[[Path], float]:
    """Gives the mean KL of a folder from `source` on the bundled held-out text."""
    from quantforge.checkpoint.reader import CheckpointReader
    from quantforge.evaluation.measure import EvalSettings, measure
    from quantforge.evaluation.texts import load_text
    from quantforge.models.loader import load_config

    longest = load_config(CheckpointReader(source).config).max_position_embeddings
    settings = EvalSettings(
        window=min(VERIFY_WINDOW, longest), max_tokens=VERIFY_TOKENS, device=device, dtype=dtype
    )
    text = load_text("bundled")

    def divergence(folder: Path) -> float:
        names = (folder.name, source.name)
        found = measure(folder, source, text, settings, names=names, progress=progress)
        assert found.comparison is not None, "there is a baseline"
        return found.comparison.mean_kl

    return divergence


def _kept_plan(
    reader: "CheckpointReader", section: "QuantizeSection", output: Path
) -> "QuantizePlan | None":
    """The plan that a killed run to `output` had chosen for the same target, if one is kept."""
    from quantforge.plan import plan_quantization
    from quantforge.resume import kept_allocation
    from quantforge.sensitivity import DEFAULT_CANDIDATES, candidate_scheme

    kept = kept_allocation(output)
    wanted = {
        "target_bits": section.target_bits,
        "max_kl": section.max_kl,
        "candidates": list(section.candidates or DEFAULT_CANDIDATES),
    }
    if kept is None or any(kept.get(key) != value for key, value in wanted.items()):
        return None
    schemes = {str(s): s for s in map(candidate_scheme, kept["candidates"])}
    assigned = {n: schemes[unit["scheme"]] for unit in kept["units"] for n in unit["layers"]}
    return plan_quantization(reader, section, assigned, kept)


def show_allocation(console: "Console", plan: "QuantizePlan") -> None:
    """A table of the chosen schemes by kind of layer, and what they are predicted to cost."""
    record = plan.allocation
    assert record is not None, "the plan was chosen"
    costs: dict[tuple[str, str], list[float]] = {}
    for unit in record["units"]:
        kind = ", ".join(name.rsplit(".", 1)[-1] for name in unit["layers"])
        costs.setdefault((kind, unit["scheme"]), []).append(unit["predicted_kl"])
    console.table(
        f"chosen schemes: {record['bits_per_weight']:.4f} bits a weight, predicted KL "
        f"{record['predicted_kl']:.4f}",
        ("layers", "scheme", "blocks", "predicted KL"),
        [
            (kind, scheme, str(len(values)), f"{sum(values):.5f}")
            for (kind, scheme), values in sorted(costs.items())
        ],
    )
