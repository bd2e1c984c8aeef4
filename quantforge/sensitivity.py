"""Measures what each candidate scheme would cost each merge unit, for `allocation` to choose from.

Every candidate is rounded by the method of the run, block by block: how much a method gains over
rounding to nearest differs from layer to layer (most where few inputs are large) and from scheme to
scheme, so much that a choice by rounding to nearest can lose to a uniform scheme. Only candidates
of 8 bits are rounded to nearest, since their errors are too small to matter.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantforge.allocation import Allocation, Choice, Frontier, Unit
from quantforge.calibration.fisher import BlockSensitivity, block_sensitivities
from quantforge.calibration.streams import Moments
from quantforge.checkpoint.base import format_for
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import RecipeError
from quantforge.methods.base import BlockTask
from quantforge.methods.rtn import METHOD as NEAREST
from quantforge.plan import QuantizePlan, is_named, linear_shapes, merge_units
from quantforge.progress import Progress, silent
from quantforge.recipe import QuantizeSection
from quantforge.schemes import PRESETS, QuantScheme, TensorQuant, preset

DEFAULT_CANDIDATES = (
    "int4-channel-asym",
    "int4-g128-asym",
    "int4-g64-asym",
    "int4-g32-asym",
    "int8-channel-sym",
)
"""Schemes that the runtimes multiply by without decoding, from about 4 to 8 bits."""

MEASURED_TOKENS = 4096
"""Calibration tokens that sensitivities are measured on, at most; whole samples, at least one."""
FITTED_TOKENS = 12288
"""Other calibration tokens, at most, whose statistics the method sees in the measurement."""

NEAREST_BITS = 8
"""From this width on candidates are rounded to nearest, which costs next to nothing."""

INT_NAME = re.compile(r"int(?P<bits>\d)-(channel|g(?P<size>\d+))-(?P<symmetry>sym|asym)")


def candidate_scheme(name: str) -> QuantScheme:
    """The scheme called `name`: a preset, or as reports write it, such as ``int4-g64-asym``.

    Raises `RecipeError` for others, and for schemes that quantize activations too.
    """
    if match := INT_NAME.fullmatch(name):
        size = match["size"]
        return QuantScheme(
            weight=TensorQuant(
                num_bits=int(match["bits"]),
                symmetric=match["symmetry"] == "sym",
                granularity="channel" if size is None else "group",
                group_size=None if size is None else int(size),
            )
        )
    try:
        scheme = preset(name)
    except RecipeError as error:
        raise RecipeError(
            f"candidates: {name!r} is neither like int4-g64-asym or int8-channel-sym, nor a "
            f"scheme; schemes: {', '.join(PRESETS)}"
        ) from error
    if scheme.activation is not None:
        raise RecipeError(
            f"candidates: {name} quantizes activations, whose errors the sensitivities do not "
            "measure; use weight-only schemes"
        )
    return scheme


def check_target(section: QuantizeSection) -> None:
    """Raises `RecipeError` for targets and candidates that no measurement is needed to refuse."""
    for key, value in (("target_bits", section.target_bits), ("max_kl", section.max_kl)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise RecipeError(f"{key} {value} must be a number above 0")
    if section.target_bits is not None and section.max_kl is not None:
        raise RecipeError("target_bits and max_kl are given; one of them decides, not both")
    if section.candidates and section.target_bits is None and section.max_kl is None:
        raise RecipeError("candidates are for target_bits or max_kl, and neither is given")
    for name in section.candidates:
        candidate_scheme(name)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What the units of a plan can have: the frontier of their choices, and what is fixed beside.

    `fixed_bytes` and `fixed_weights` are those of quantized linears whose scheme was given:
    lm_head, and what `layers` of the recipe names.
    """

    frontier: Frontier
    fixed_bytes: int
    fixed_weights: int
    num_tokens: int

    @property
    def num_weights(self) -> int:
        """Weights of all quantized linears."""
        return self.fixed_weights + sum(unit.num_weights for unit in self.frontier.units)

    def bits_per_weight(self, allocation: Allocation) -> float:
        """Bits on disk over all quantized linears: codes, scales, zero points, shapes."""
        return 8 * (self.fixed_bytes + allocation.num_bytes) / self.num_weights

    def for_bits(self, target_bits: float) -> Allocation:
        """The allocation of least divergence in `target_bits` a weight; raises `RecipeError`."""
        budget = math.floor(target_bits * self.num_weights / 8) - self.fixed_bytes
        found = self.frontier.within_bytes(budget)
        if found is None:
            least = 8 * (self.fixed_bytes + self.frontier.least) / self.num_weights
            raise RecipeError(
                f"target_bits {target_bits} is less than the smallest candidates take, "
                f"{least:.3f} bits a weight with scales and zero points; raise it, or add smaller "
                "candidates such as int3-g128-asym"
            )
        return found

    def for_divergence(self, limit: float) -> Allocation:
        """The smallest allocation of at most `limit` nats a token; raises `RecipeError`."""
        found = self.frontier.within_divergence(limit)
        if found is None:
            best = self.frontier.within_bytes(2**62)
            assert best is not None, "the budget holds everything"
            raise RecipeError(
                f"max_kl {limit:.3g} is less than the {best.divergence:.3g} that the best "
                "candidates are predicted to cost; raise it, or add candidates of more bits"
            )
        return found


def measure_units(
    reader: CheckpointReader,
    plan: QuantizePlan,
    section: QuantizeSection,
    token_ids_ST: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    progress: Progress = silent,
) -> Measured:
    """The measured choices of every merge unit of `plan`: one pass forward, one back, and one run
    of the method over each block for every candidate.

    `token_ids_ST` are calibration tokens: a quarter measures (`MEASURED_TOKENS` at most), others
    give the method its statistics. Raises `RecipeError` for a unit that no candidate fits.
    """
    check_target(section)
    candidates = _candidates(plan, section)
    shapes = linear_shapes(reader, plan.architecture, plan.config)
    free = _free_units(plan, section)
    fitting = {unit: _fitting(unit, shapes, candidates) for unit in free}
    num_fitted, num_measured = _split(*token_ids_ST.shape)
    tokens = token_ids_ST[: num_fitted + num_measured]
    divergences: dict[tuple[str, QuantScheme], float] = {}
    for found in block_sensitivities(
        reader,
        tokens,
        device=device,
        dtype=dtype,
        num_fitted=num_fitted,
        seed=seed,
        progress=progress,
    ):
        prefix = plan.architecture.block_prefix.format(layer=found.layer)
        units = [unit for unit in free if unit[0].startswith(prefix)]
        for scheme in candidates:
            names_in_block = [n for unit in units if scheme in fitting[unit] for n in unit]
            costs = _block_divergences(reader, plan, found, prefix, names_in_block, scheme, device)
            divergences |= {(name, scheme): cost for name, cost in costs.items()}
    measured = [
        Unit(
            members=unit,
            num_weights=sum(math.prod(shapes[name]) for name in unit),
            choices=tuple(
                Choice(
                    scheme=scheme,
                    num_bytes=sum(_num_bytes(shapes[n], scheme, plan) for n in unit),
                    divergence=sum(divergences[name, scheme] for name in unit),
                )
                for scheme in fitting[unit]
            ),
        )
        for unit in free
    ]
    fixed = set(plan.layers) - {name for unit in free for name in unit}
    return Measured(
        frontier=Frontier(measured),
        fixed_bytes=sum(_num_bytes(shapes[n], plan.layers[n], plan) for n in fixed),
        fixed_weights=sum(math.prod(shapes[n]) for n in fixed),
        num_tokens=num_measured * tokens.shape[1],
    )


def _split(num_samples: int, length: int) -> tuple[int, int]:
    """(samples that give the method its statistics, others that measure); (0, 1) of one sample."""
    measured = min(max(1, num_samples // 4), max(1, MEASURED_TOKENS // length))
    return min(num_samples - measured, max(1, FITTED_TOKENS // length)), measured


def _candidates(plan: QuantizePlan, section: QuantizeSection) -> tuple[QuantScheme, ...]:
    """The schemes to choose from; raises `RecipeError` where the method does not round to one."""
    names = section.candidates or DEFAULT_CANDIDATES
    found = tuple(dict.fromkeys(candidate_scheme(name) for name in names))
    for scheme in found:
        if not plan.method.rounds_to(scheme.weight):
            raise RecipeError(
                f"candidates: method {plan.method.name} does not round to "
                f"{scheme.weight.code_type} codes, which {scheme} has; use method rtn, or leave "
                "the candidate out"
            )
    return found


def _free_units(plan: QuantizePlan, section: QuantizeSection) -> list[tuple[str, ...]]:
    """The merge units whose schemes are to be chosen: those that `layers` does not name."""
    found = [
        unit
        for unit in merge_units(plan.layers, plan.architecture, plan.config)
        if not any(is_named(name, pattern) for name in unit for pattern in section.layers)
    ]
    if not found:
        raise RecipeError(
            "target_bits and max_kl choose schemes for linears of blocks that `ignore` and "
            "`layers` do not name, and there are none"
        )
    return found


def _fitting(
    unit: tuple[str, ...],
    shapes: Mapping[str, tuple[int, int]],
    candidates: Sequence[QuantScheme],
) -> tuple[QuantScheme, ...]:
    """The candidates that every member of a unit can have; raises `RecipeError` without any."""
    found = tuple(
        c for c in candidates if all(c.refuse_shape(shapes[name]) is None for name in unit)
    )
    if not found:
        reason = candidates[0].refuse_shape(shapes[unit[0]])
        raise RecipeError(f"candidates: none fits {unit[0]}: {reason}")
    return found


def _num_bytes(shape: tuple[int, int], scheme: QuantScheme, plan: QuantizePlan) -> int:
    specs = format_for(scheme).tensors(shape, scheme, plan.config.dtype).values()
    return sum(spec.num_bytes for spec in specs)


def _block_divergences(
    reader: CheckpointReader,
    plan: QuantizePlan,
    found: BlockSensitivity,
    prefix: str,
    names: Sequence[str],
    scheme: QuantScheme,
    device: torch.device,
) -> dict[str, float]:
    """KL that each of the linears `names` of a block costs if the method rounds them to `scheme`.

    A method may move scales between layers; a weight's ratio to what it was takes its error back.
    The inputs are those of the full-precision model, so they do not drift. A method that compares
    candidates does so on the samples that it fits: the errors are judged on others.
    """
    if not names:
        return {}

    def load(name: str) -> Tensor:
        return reader.tensor(prefix + name).to(device).float()

    members = [m for group in plan.architecture.input_groups for m in group.members]
    needs = plan.method.needs(plan.options)
    moments = {name: seen.second_moment for name, seen in found.statistics.items()}
    norms = [
        n.removeprefix(prefix).removesuffix(".weight")
        for n in reader.names()
        if n.startswith(prefix) and n.endswith("norm.weight")
    ]
    weights = {name: load(f"{name}.weight") for name in members}
    task = BlockTask(
        layer=found.layer,
        config=plan.config,
        groups=plan.architecture.input_groups,
        weights=dict(weights),
        biases={n: load(f"{n}.bias") for n in members if f"{prefix}{n}.bias" in reader},
        norms={name: load(f"{name}.weight") for name in norms},
        quant={name.removeprefix(prefix): scheme.weight for name in names},
        statistics=found.statistics,
        scale_dtype=plan.config.dtype,
        cross={n: torch.zeros_like(m) for n, m in moments.items()} if needs.mismatch else {},
        held_out={n: Moments(inputs=m) for n, m in moments.items()} if needs.held_out else {},
    )
    if scheme.weight.num_bits >= NEAREST_BITS:
        result = NEAREST.quantize_block(task, NEAREST.parse_options({}))
    else:
        result = plan.method.quantize_block(task, plan.options)
    costs = {}
    for name, qtensor in result.qtensors.items():
        scaled, original = task.weights[name], weights[name]
        ratio = torch.where(scaled == 0, 1.0, original / scaled)
        delta = (qtensor.dequantize(torch.float32) - scaled) * ratio
        costs[prefix + name] = found.linears[name].divergence(delta)
    return costs


def allocation_record(
    measured: Measured, allocation: Allocation, section: QuantizeSection
) -> dict[str, Any]:
    """What was asked, chosen and predicted, in JSON's types: for the manifest and for resuming."""
    return {
        "target_bits": section.target_bits,
        "max_kl": section.max_kl,
        "candidates": list(section.candidates or DEFAULT_CANDIDATES),
        "tokens": measured.num_tokens,
        "bits_per_weight": measured.bits_per_weight(allocation),
        "predicted_kl": allocation.divergence,
        "units": [
            {
                "layers": list(unit.members),
                "scheme": str(chosen.scheme),
                "predicted_kl": chosen.divergence,
                "choices": {str(c.scheme): c.divergence for c in unit.choices},
            }
            for unit, chosen in zip(allocation.units, allocation.chosen, strict=True)
        ],
    }
