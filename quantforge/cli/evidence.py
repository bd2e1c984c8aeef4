"""What ``quantize`` and ``calibrate`` share: turning ``--calibration`` into data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantforge.calibration.data import CalibrationSet
    from quantforge.console import Console
    from quantforge.progress import Progress
    from quantforge.recipe import CalibrationSection

STATISTICS_SUFFIX = ".safetensors"
"""What tells statistics of ``quantforge calibrate`` from text."""


def calibration_section(
    section: "CalibrationSection", overrides: dict[str, Any]
) -> "CalibrationSection":
    """`section` with the options that were given on the command line."""
    return replace(section, **{k: v for k, v in overrides.items() if v is not None})


def calibration_set(
    folder: Path,
    section: "CalibrationSection",
    *,
    device: str,
    dtype: str,
    console: "Console",
    progress: "Progress",
) -> "CalibrationSet":
    """The calibration text of `section`, tokenized for the model in `folder`.

    Warns where it shares text with the bundled evaluation text.
    """
    from quantforge.calibration.data import load_calibration
    from quantforge.evaluation.texts import load_text
    from quantforge.models.tokenizer import load_tokenizer

    found = load_calibration(
        section,
        load_tokenizer(folder),
        evaluation_text=load_text("bundled").text,
        generate=_self_sampler(folder, device, dtype, progress),
        progress=progress,
    )
    for warning in found.warnings:
        console.warn(warning)
    return found


def _self_sampler(
    folder: Path, device: str, dtype: str, progress: "Progress"
) -> Callable[[int, int, int], Sequence[Sequence[int]]]:
    """Samples from the model itself at temperature 1, from its BOS or else a random token."""

    def sample(num_samples: int, length: int, seed: int) -> Sequence[Sequence[int]]:
        import random

        from quantforge.runtime.config import EngineConfig
        from quantforge.runtime.engine import Engine
        from quantforge.runtime.request import SamplingParams

        engine = Engine.from_folder(
            folder, EngineConfig(device=device, dtype=dtype, seed=seed), progress=progress
        )
        assert engine.tokenizer is not None
        draw = random.Random(seed)
        first = engine.tokenizer.bos_token_id
        starts = [
            [first] if first is not None else [draw.randrange(engine.tokenizer.vocab_size)]
            for _ in range(num_samples)
        ]
        params = [
            SamplingParams(
                max_tokens=length - 1, temperature=1.0, ignore_eos=True, seed=seed + index
            )
            for index in range(num_samples)
        ]
        completions = engine.generate(starts, params, progress=progress)
        return [start + list(c.token_ids) for start, c in zip(starts, completions, strict=True)]

    return sample
