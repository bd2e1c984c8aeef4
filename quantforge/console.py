"""The terminal: people read stderr, programs read stdout.

Tables, progress bars and messages go to stderr through Rich; stdout carries the result alone, and
with ``--json`` exactly one JSON document. ``NO_COLOR``, ``--quiet`` and a stderr that is not a
terminal are respected (no bars there, but a line at most every ten seconds).
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from quantforge.progress import Progress, silent

LINE_INTERVAL_S = 10.0
SLOW_STEP_S = 1.0
"""From this duration on, a step's own time is worth saying."""
PACE_PERIOD_S = 3600.0
"""How far back steps count for the time left: blocks of a large model take minutes each."""


class Console:
    """What a command says, and where. `json_output` and `quiet` are the command's own flags."""

    def __init__(self, *, json_output: bool = False, quiet: bool = False) -> None:
        self.json_output = json_output
        self.quiet = quiet
        self.err = RichConsole(stderr=True, highlight=False)

    def say(self, message: str) -> None:
        """A line for people, on stderr."""
        if not self.quiet:
            self.err.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """A warning, on stderr even with ``--quiet``."""
        self.err.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for people, on stderr."""
        if self.quiet:
            return
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        self.err.print(table)

    def result(self, document: Mapping[str, Any], text: str | None = None) -> None:
        """The result on stdout: `document` with ``--json``, else `text` if there is one."""
        if self.json_output:
            sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        elif text is not None:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A callback that draws one bar a stage, with the time left."""
        if self.quiet:
            yield silent
        elif self.err.is_terminal:
            with _bars(self.err) as callback:
                yield callback
        else:
            yield _lines(self.err)


def pace(elapsed: float, done: float) -> str:
    """``3.2 s each``, or nothing where steps are quick or none is done."""
    return f"{elapsed / done:.1f} s each" if done and elapsed / done >= SLOW_STEP_S else ""


class _PaceColumn(ProgressColumn):
    """Seconds a step."""

    def render(self, task: Task) -> Text:
        return Text(pace(task.elapsed or 0.0, task.completed))


@contextmanager
def _bars(console: RichConsole) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _PaceColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, speed_estimate_period=PACE_PERIOD_S) as bars:
        tasks: dict[str, Any] = {}

        def callback(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield callback


def _lines(console: RichConsole) -> Progress:
    """For logs: a line when a stage ends, and at most one every ten seconds before."""
    started: dict[str, float] = {}
    said: dict[str, float] = {}

    def callback(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begin = started.setdefault(stage, now)
        if done < total and now - said.get(stage, begin) < LINE_INTERVAL_S:
            return
        said[stage] = now
        elapsed = now - begin
        left = f", {elapsed / done * (total - done):.0f} s left" if 0 < done < total else ""
        each = f", {found}" if (found := pace(elapsed, done)) else ""
        console.print(f"{stage}: {done}/{total} in {elapsed:.0f} s{each}{left}", markup=False)

    return callback
