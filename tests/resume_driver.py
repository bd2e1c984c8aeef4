"""Runs that kill themselves: a script that `test_resume.py` starts.

``python resume_driver.py SOURCE RESULTS SPEC``: quantizes SOURCE once undisturbed into
RESULTS/whole, then once for every kill point of SPEC into RESULTS/out-<i>, each in a process of its
own that gets SIGKILL there, and resumes it. Prints a JSON document. SPEC is JSON: ``events`` (a
seed and a number of points, drawn from all Python and C calls of a run) and ``renames`` (list of
[which rename, "before" or "after"]).
"""

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantforge.calibration.data import CalibrationSet
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.pipeline import quantize_model
from quantforge.plan import plan_quantization
from quantforge.recipe import QuantizeSection, Recipe


def calibration() -> CalibrationSet:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 512, (4, 16), generator=generator)
    return CalibrationSet(
        token_ids=tokens, id="random 4x16", sha256="1" * 64, sources={}, warnings=()
    )


def quantize(source: Path, output: Path, *, resume: bool) -> None:
    recipe = Recipe(source="test", quantize=QuantizeSection(method="awq", group_size=32))
    plan = plan_quantization(CheckpointReader(source), recipe.quantize)
    quantize_model(
        source,
        output,
        recipe,
        plan,
        calibration(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        resume=resume,
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], None]) -> int:
    """The wait status of a forked process that does `work`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def counted(work: Callable[[], None], stop_at: int | None = None) -> int:
    """Does `work`; gives the calls that it made, or kills the process at one of them."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            if count == stop_at:
                die()

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def killed_at_rename(work: Callable[[], None], which: int, moment: str) -> None:
    """Does `work` and dies before or after its rename number `which`, of files and folders."""
    count = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def rename(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == which and moment == "before":
                die()
            found = real(*arguments, **options)
            if count == which and moment == "after":
                die()
            return found

        return rename

    os.replace, os.rename = wrap(os.replace), wrap(os.rename)
    work()


def main(source: Path, results: Path, spec: dict[str, Any]) -> dict[str, Any]:
    total_file = results / "total"

    def whole() -> None:
        quantize(source, results / "first", resume=False)  # what is imported late is imported here
        total = counted(lambda: quantize(source, results / "whole", resume=False))
        total_file.write_text(str(total))

    assert in_child(whole) == 0
    total = int(total_file.read_text())
    draw = random.Random(spec.get("seed", 0))
    events = sorted(draw.randrange(1, total) for _ in range(spec.get("events", 0)))
    points: list[Any] = [*events, *spec.get("renames", [])]
    runs = []
    for index, point in enumerate(points):
        output = results / f"out-{index}"

        def run(output: Path = output) -> None:
            quantize(source, output, resume=False)

        def killed(run: Callable[[], None] = run, point: Any = point) -> None:
            if isinstance(point, int):
                counted(run, point)
            else:
                killed_at_rename(run, *point)

        status = in_child(killed)
        work = results / f".{output.name}.resume"
        kept = len(list(work.glob("block-*.safetensors"))) if work.exists() else 0
        published = output.exists()

        def resumed_run(output: Path = output) -> None:
            quantize(source, output, resume=True)

        resumed = 0 if published else in_child(resumed_run)
        runs.append(
            {
                "point": point,
                "status": status,
                "kept": kept,
                "published": published,
                "resumed": resumed,
                "output": str(output),
            }
        )
    return {"total": total, "runs": runs}


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.write(json.dumps(found))
