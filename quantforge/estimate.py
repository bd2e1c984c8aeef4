"""What a plan will cost and how its result will be served, known before any work.

Bytes and bits are exact: they follow from the format. Memory is an estimate of the tensors that a
run holds at once; mapped source files and the program itself are not counted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quantforge.calibration.activations import BATCH_TOKENS
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.models.linear import serving_kernel
from quantforge.plan import QuantizePlan, linear_shapes

WORK_COPIES = 4
"""Float32 copies of a block's largest linear that a method's search holds at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Linears of one name, shape and scheme: ``model.layers.*.mlp.down_proj``.

    `scheme` is None where they stay dense. `kernel` will multiply by each of them, None with
    `problem` if nothing can.
    """

    name: str
    count: int
    shape: tuple[int, int]
    scheme: str | None
    num_bytes: int
    bits_per_weight: float
    kernel: str | None
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanEstimate:
    """The layers of a plan, what it writes, and about what a run holds in memory, in bytes.

    `bits_per_weight` is over the quantized linears; `device_bytes` is 0 on a CPU, where everything
    is host memory. `hidden_bytes` are the hidden states of the calibration samples, which lie on
    the device or in host memory, and `working_bytes` what is held beside them where the work is.
    """

    groups: tuple[LayerGroup, ...]
    planned_bytes: int
    source_bytes: int
    bits_per_weight: float
    device_bytes: int
    host_bytes: int
    hidden_bytes: int
    working_bytes: int


def estimate_plan(
    reader: CheckpointReader,
    plan: QuantizePlan,
    *,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> PlanEstimate:
    """The estimate of `plan` for a run over `num_tokens` of calibration text, 0 without text."""
    shapes = linear_shapes(reader, plan.architecture, plan.config)
    groups = _groups(reader, plan, shapes, device, dtype)
    quantized = [g for g in groups if g.scheme is not None]
    weights = sum(g.count * g.shape[0] * g.shape[1] for g in quantized)
    streams = 2 if plan.method.needs(plan.options).mismatch else 1
    hidden = num_tokens * plan.config.hidden_size * dtype.itemsize * streams
    working = _block_bytes(plan, shapes, num_tokens, dtype)
    if num_tokens:  # the embedding is there before the first block is
        working = max(working, plan.config.vocab_size * plan.config.hidden_size * dtype.itemsize)
    on_device = device.type != "cpu"
    return PlanEstimate(
        groups=groups,
        planned_bytes=plan.planned_bytes,
        source_bytes=sum(reader.spec(name).num_bytes for name in reader.names()),
        bits_per_weight=8 * sum(g.num_bytes for g in quantized) / weights,
        device_bytes=hidden + working if on_device else 0,
        host_bytes=hidden if on_device else hidden + working,
        hidden_bytes=hidden,
        working_bytes=working,
    )


def _groups(
    reader: CheckpointReader,
    plan: QuantizePlan,
    shapes: Mapping[str, tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[LayerGroup, ...]:
    """Linears that share name and shape, in the order of the model; a tied lm_head is left out."""
    members: dict[tuple[str, tuple[int, int]], list[str]] = {}
    pattern = re.escape(plan.architecture.block_prefix).replace(re.escape("{layer}"), r"\d+")
    for name, shape in shapes.items():
        if name in plan.layers or f"{name}.weight" in reader:
            short = re.sub(f"^{pattern}", plan.architecture.block_prefix.format(layer="*"), name)
            scheme = plan.layers.get(name)
            members.setdefault((f"{short}|{scheme}", shape), []).append(name)
    return tuple(
        _group(key.partition("|")[0], names, shape, reader, plan, device, dtype)
        for (key, shape), names in members.items()
    )


def _group(
    name: str,
    names: list[str],
    shape: tuple[int, int],
    reader: CheckpointReader,
    plan: QuantizePlan,
    device: torch.device,
    dtype: torch.dtype,
) -> LayerGroup:
    scheme = plan.layers.get(names[0])
    kernel: str | None = "dense"
    problem = None
    if scheme is None:
        num_bytes = sum(reader.spec(f"{n}.weight").num_bytes for n in names)
    else:
        specs = plan.format.tensors(shape, scheme, plan.config.dtype).values()
        num_bytes = len(names) * sum(spec.num_bytes for spec in specs)
        kernel, problem = serving_kernel(scheme, shape, device, dtype)
    return LayerGroup(
        name=name,
        count=len(names),
        shape=shape,
        scheme=None if scheme is None else str(scheme),
        num_bytes=num_bytes,
        bits_per_weight=8 * num_bytes / (len(names) * shape[0] * shape[1]),
        kernel=kernel,
        problem=problem,
    )


def _block_bytes(
    plan: QuantizePlan,
    shapes: Mapping[str, tuple[int, int]],
    num_tokens: int,
    dtype: torch.dtype,
) -> int:
    """One block in the compute dtype, in float32 and as codes; its statistics; one batch."""
    prefix = plan.architecture.block_prefix.format(layer=0)
    block = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    sizes = [rows * columns for rows, columns in block.values()]
    total = sum(sizes) * (dtype.itemsize + 4 + 1) + max(sizes) * 4 * WORK_COPIES
    if plan.needs_text:
        inputs = [block[group.members[0]][1] for group in plan.architecture.input_groups]
        needs = plan.method.needs(plan.options)
        held = 2 if needs.held_out else 1
        moments = held + needs.mismatch * (2 * held - 1)
        total += sum(4 * width * width for width in inputs) * moments
    widest = sum(rows + columns for rows, columns in block.values())
    return total + min(num_tokens, BATCH_TOKENS) * widest * dtype.itemsize
