"""Where the time of a quantization run went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = (
    "embed",
    "load",
    "observe",
    "quantize",
    "encode",
    "advance",
    "hidden",
    "wait",
    "finish",
    "hash",
    "write",
    "verify",
)
"""The names that seconds are counted by.

The main thread embeds the calibration samples, loads blocks, observes their inputs, quantizes (the
method), moves codes to the host (encode), advances the hidden states, keeps those for a resumed
run, waits for what goes on behind it, and finishes the folder. Behind it, source files are hashed
(hash), and blocks are encoded and written (write). To verify is part of finishing.
"""


class Stopwatch:
    """Seconds by phase; those of the main thread include the work that it gave the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def measure(self, phase: str, *, on_device: bool = True) -> Iterator[None]:
        """Adds the seconds inside to those of `phase`."""
        started = self._now(on_device)
        try:
            yield
        finally:
            self.seconds[phase] += self._now(on_device) - started

    def report(self) -> dict[str, float]:
        """Seconds by phase, with ``calibrate`` (both forward passes) and ``total``."""
        passes = self.seconds["observe"] + self.seconds["advance"]
        total = time.perf_counter() - self._started
        return {**self.seconds, "calibrate": passes, "total": total}

    def _now(self, on_device: bool) -> float:
        if on_device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
