"""Progress on a stderr that is no terminal: lines with the time of a step and the time left."""

import pytest

from quantforge import console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as the console reads it: ``clock[0]``."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def lines_of(
    clock: list[float], steps: list[float], capfd: pytest.CaptureFixture[str]
) -> list[str]:
    """What is said while the steps of a stage take `steps` seconds."""
    with console.Console().progress() as progress:
        progress("quantizing blocks", 0, len(steps))
        for done, seconds in enumerate(steps, start=1):
            clock[0] += seconds
            progress("quantizing blocks", done, len(steps))
    return capfd.readouterr().err.splitlines()


def test_slow_steps_tell_their_own_time_and_what_is_left(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    assert lines_of(clock, [12.0, 14.0, 10.0, 4.0], capfd) == [
        "quantizing blocks: 1/4 in 12 s, 12.0 s each, 36 s left",
        "quantizing blocks: 2/4 in 26 s, 13.0 s each, 26 s left",
        "quantizing blocks: 3/4 in 36 s, 12.0 s each, 12 s left",
        "quantizing blocks: 4/4 in 40 s, 10.0 s each",
    ]


def test_quick_steps_are_one_line_at_the_end(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    assert lines_of(clock, [0.5] * 8, capfd) == ["quantizing blocks: 8/8 in 4 s"]
