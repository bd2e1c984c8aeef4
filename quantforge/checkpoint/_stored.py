"""Checks that formats share: tensors as they are stored, and numbers of a config."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantforge.checkpoint.base import TensorSpec
from quantforge.errors import CheckpointError, RecipeError, UnsupportedError
from quantforge.schemes import QuantScheme, TensorQuant

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def take(tensors: Mapping[str, Tensor], suffix: str) -> Tensor:
    """The tensor `suffix` of a layer; raises `CheckpointError` if it is missing."""
    if suffix not in tensors:
        raise CheckpointError(f"{suffix} is missing")
    return tensors[suffix]


def take_scale(tensors: Mapping[str, Tensor], suffix: str) -> Tensor:
    """The scales of a layer, of a dtype that scales may have."""
    scale = take(tensors, suffix)
    if scale.dtype not in SCALE_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in SCALE_DTYPES)
        raise CheckpointError(f"{suffix} is {scale.dtype}; expected one of {allowed}")
    return scale


def take_input_scale(tensors: Mapping[str, Tensor], scheme: QuantScheme) -> Tensor | None:
    """``input_scale`` [1], the static scale of a layer's inputs; None where `scheme` has none."""
    if not scheme.has_static_inputs:
        if "input_scale" in tensors:
            raise CheckpointError(
                f"input_scale is there, but scheme {scheme} has no static scale of its inputs"
            )
        return None
    scale = take_scale(tensors, "input_scale")
    if tuple(scale.shape) != (1,):
        raise CheckpointError(f"input_scale is {list(scale.shape)}; scheme {scheme} needs [1]")
    if not bool(scale.isfinite().all()) or not bool((scale > 0).all()):
        raise CheckpointError(f"input_scale is {float(scale)}; expected a finite number above 0")
    return scale


def check_spec(suffix: str, tensor: Tensor, spec: TensorSpec, scheme: QuantScheme) -> None:
    """Raises `CheckpointError` unless `tensor` has the shape and dtype of `spec`."""
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise CheckpointError(
            f"{suffix} is {tensor.dtype} {list(tensor.shape)}; "
            f"scheme {scheme} needs {spec.dtype} {list(spec.shape)}"
        )


def check_matrix(suffix: str, tensor: Tensor) -> None:
    """Raises `CheckpointError` unless `tensor` is int32 with two sizes above 0."""
    if tensor.dim() != 2 or tensor.dtype != torch.int32 or 0 in tensor.shape:
        raise CheckpointError(
            f"{suffix} is {tensor.dtype} {list(tensor.shape)}; "
            "expected int32 with two sizes above 0"
        )


def half_scale(scale: Tensor) -> Tensor:
    """`scale` in float16, rounded where it must be.

    Raises `UnsupportedError` where a scale would become zero or infinite.
    """
    rounded = scale.to(torch.float16)
    lost = int((~rounded.isfinite() | (rounded == 0)).sum())
    if lost:
        raise UnsupportedError(
            f"{lost} scales are zero or infinite in float16, the dtype of this format; they span "
            f"{float(scale.abs().min()):.3g} .. {float(scale.abs().max()):.3g}"
        )
    return rounded


def parse_quant(
    where: str, section: Mapping[str, Any], *, symmetric: object, widths: tuple[int, ...]
) -> TensorQuant:
    """``bits`` and ``group_size`` (-1: one group) of a config as a weight scheme."""
    bits, size = section.get("bits"), section.get("group_size")
    for key, value in (("bits", bits), ("group_size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{where}: {key} is {value!r}; expected a whole number")
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"{where}: sym is {symmetric!r}; expected true or false")
    if bits not in widths:
        raise UnsupportedError(f"{where}: bits {bits} is not one of {widths}")
    assert isinstance(bits, int), "one of widths"
    try:
        return TensorQuant(
            num_bits=bits,
            symmetric=symmetric,
            granularity="channel" if size == -1 else "group",
            group_size=None if size == -1 else size,
        )
    except RecipeError as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_pattern(where: str, pattern: str) -> str:
    """`pattern`, if it compiles; raises `CheckpointError`."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {pattern!r} is no pattern: {error}") from error
    return pattern
