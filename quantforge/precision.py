"""How float32 matrices are multiplied on a GPU: in TF32, or in IEEE float32.

TF32 keeps 10 bits of the factors' mantissas and adds in float32; on tensor cores it is several
times as fast. Calibration's forward passes, Gram matrices and the errors that a search compares
are means over many values and use it. Factorisations and the rounding of columns never do. On a CPU
nothing changes. ``QUANTFORGE_TF32=0`` in the environment forbids TF32 altogether.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quantforge.errors import UsageError

VARIABLE = "QUANTFORGE_TF32"


def tf32_allowed() -> bool:
    """Whether the environment allows TF32. Raises `UsageError` for a value other than 0 and 1."""
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise UsageError(f"{VARIABLE}={value!r} is not one of 0, 1")
    return value == "1"


@contextmanager
def tf32_products() -> Iterator[None]:
    """Float32 products on a GPU use TF32 inside, if it is allowed."""
    with _products("tf32" if tf32_allowed() else "ieee"):
        yield


@contextmanager
def ieee_products() -> Iterator[None]:
    """Float32 products on a GPU are IEEE float32 inside, whatever was set before."""
    with _products("ieee"):
        yield


@contextmanager
def _products(precision: str) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before
