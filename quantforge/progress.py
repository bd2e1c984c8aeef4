"""How long work tells its caller where it stands, without knowing about terminals."""

from typing import Protocol


class Progress(Protocol):
    """Called with the stage's name, the steps done and the steps in all (same unit)."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that says nothing: the default of library calls."""
