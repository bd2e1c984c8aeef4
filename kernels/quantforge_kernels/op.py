"""`Op`: one piece of arithmetic, its plain-torch reference, and the kernels that may run it.

An op's file defines ``reference`` (the meaning), kernels, and ``OP = Op(...)``. A model asks
``OP.select(...)`` once, when a layer is built, and then calls the returned candidate: captured
graphs hold no Python choice. ``QUANTFORGE_KERNELS`` decides what may be picked:

- ``auto`` (default): the first candidate that supports the problem, else the reference;
- ``triton``: as auto, but the reference is refused, with every candidate's reason;
- ``reference``: the reference.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODES = ("auto", "triton", "reference")


class KernelUnavailableError(RuntimeError):
    """No kernel serves a problem, or ``QUANTFORGE_KERNELS`` holds an unknown word."""


def _supports_all(**problem: Any) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run an op: `run` has the reference's signature after `repack`.

    `supports(**problem)` returns the reason for refusing a problem, or None. `repack` turns the
    plain tensors of the reference into the layout that `run` wants; None means no change.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None] = _supports_all
    repack: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Op:
    """A named op; `candidates` stand in order of preference, best first."""

    name: str
    reference: Candidate
    candidates: tuple[Candidate, ...] = field(default=())

    def select(self, *, mode: str | None = None, **problem: Any) -> Candidate:
        """The candidate for `problem` (device type, dtypes, shapes: what the op documents).

        Raises `KernelUnavailableError` in mode ``triton`` when only the reference is left.
        """
        mode = mode or kernel_mode()
        if mode == "reference":
            return self.reference
        refusals = []
        for candidate in self.candidates:
            reason = candidate.supports(**problem)
            if reason is None:
                return candidate
            refusals.append(f"{candidate.name}: {reason}")
        if mode == "triton":
            why = "; ".join(refusals) or "no kernel is written yet"
            raise KernelUnavailableError(f"no kernel for {self.name} ({why})")
        return self.reference

    def explain(self, **problem: Any) -> dict[str, str | None]:
        """Each candidate's name with its reason for refusing `problem` (None where it serves)."""
        return {c.name: c.supports(**problem) for c in (*self.candidates, self.reference)}


def kernel_mode() -> str:
    """The value of ``QUANTFORGE_KERNELS``, ``auto`` when unset."""
    mode = os.environ.get("QUANTFORGE_KERNELS", "auto")
    if mode not in MODES:
        raise KernelUnavailableError(
            f"QUANTFORGE_KERNELS={mode!r} is not one of {', '.join(MODES)}"
        )
    return mode
