"""What tests of commands share: a small calibration text and a way to run a command."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from quantforge.cli.app import run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exit code, stdout and stderr of one command line."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *reasons: str) -> None:
        """Asserts one line on stderr with all of `reasons`, nothing on stdout, and `code`."""
        assert self.code == code, self.err
        assert self.out == ""
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("error: ")
        for reason in reasons:
            assert reason in self.err


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """``command("quantize", folder, "-o", output)``: runs it here and gives its outcome."""

    def call(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(code=code, out=out, err=err)

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A calibration text of a few thousand tokens."""
    path = tmp_path / "calibration.txt"
    lines = (
        f"The {i}th cart of barley crossed the bridge after {i * 7} steps." for i in range(300)
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
