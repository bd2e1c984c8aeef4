"""What a method is: dense weights of a block in, quantized tensors out.

A method lives in one file of this folder (found by `quantforge.registry`), which defines
``METHOD = Method(...)``. It sees one block at a time and never the file system.

Legend: N out features, K in features.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantforge.calibration.capture import InputStatistics
from quantforge.calibration.streams import Moments, Observed
from quantforge.errors import RecipeError
from quantforge.models.arch.base import InputGroup
from quantforge.models.config import ModelConfig
from quantforge.precision import tf32_products
from quantforge.qtensor import QuantizedTensor
from quantforge.recipe import read_section
from quantforge.registry import did_you_mean, load_entry
from quantforge.schemes import TensorQuant


@dataclass(kw_only=True, eq=False)
class BlockTask:
    """One block to quantize. Names are within the block (``mlp.down_proj``).

    - `weights` [N, K] and `biases` [N] of the linears, `norms` [K] of the norms, in float32; a
      method may replace entries (scales that move between layers);
    - `quant` the scheme of every linear to quantize; a linear that is not in it stays dense;
    - `statistics` by input group, empty for methods that need none;
    - `scale_dtype` the dtype in which scales are stored;
    - `cross` (``E[d x']`` of inputs x and their drift d) and `held_out` by input group, where the
      method's `Needs` ask for them.

    Weights, norms and moments belong together: a method that moves a scale changes all of them.
    """

    layer: int
    config: ModelConfig
    groups: tuple[InputGroup, ...]
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    norms: dict[str, Tensor]
    quant: Mapping[str, TensorQuant]
    statistics: Mapping[str, InputStatistics]
    scale_dtype: torch.dtype
    cross: Mapping[str, Tensor] = field(default_factory=dict)
    held_out: Mapping[str, Moments] = field(default_factory=dict)

    def observe(self, group: str, seen: Observed) -> None:
        """Replaces what is known of the inputs of `group` by `seen`."""
        self.statistics = {**self.statistics, group: seen.statistics[group]}
        if group in seen.cross:
            self.cross = {**self.cross, group: seen.cross[group]}
        if group in seen.held_out:
            self.held_out = {**self.held_out, group: seen.held_out[group]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a method wants beside one pass over all samples, as its options say.

    - `true_sequential`: each input group is seen again once the groups before it are rounded;
    - `mismatch`: the inputs' drift from those of the full-precision model, in that order only;
    - `held_out`: the share of the samples that is kept from fitting, 0 for none.
    """

    true_sequential: bool = False
    mismatch: bool = False
    held_out: float = 0.0

    def __post_init__(self) -> None:
        assert self.true_sequential or not self.mismatch, "drift would be made up for twice"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """What happened to one linear. Errors are relative: squared error over squared norm.

    `output_error` is measured on the calibration text, None where there was none. `method` is the
    one that was used; where it is not the one asked for, ``notes["fallback"]`` says why. The rest
    is filled in behind the method (`methods/_run.py`, `pipeline`), None where unknown:

    - `input_group`, `num_tokens`: the input that it reads, and what calibration saw of it;
    - `outlier_ratio`, `outlier_channel`: the largest magnitude in that input's strongest channel,
      over the median of the channels' largest magnitudes;
    - `bits_per_weight` as stored; `seconds` of the method.
    """

    name: str
    scheme: str
    method: str
    weight_error: float
    output_error: float | None
    notes: Mapping[str, Any] = field(default_factory=dict)
    input_group: str | None = None
    num_tokens: int | None = None
    outlier_ratio: float | None = None
    outlier_channel: int | None = None
    bits_per_weight: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockResult:
    """The quantized linears of a block and their reports, by name within the block."""

    qtensors: dict[str, QuantizedTensor]
    reports: tuple[LayerReport, ...]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: `quantize_block(task, options)`, `options` an instance of `options_type`.

    `code_types` are the codes that it can round to: a dtype of codes (``float``), or one kind of
    them (``float4``, as `TensorQuant.code_type` has it), or that under one granularity
    (``float8-channel``). A method that knows true-sequential order
    also has `round_group(task, group, options, prepared)`, called in the order of the groups after
    `prepare(task, options)`, which sees the block's first statistics, moves what moves between
    layers and gives `prepared`. Without `prepare` there is nothing to see or do first.
    """

    name: str
    summary: str
    needs_statistics: bool
    quantize_block: Callable[[BlockTask, Any], BlockResult]
    options_type: type[Any]
    code_types: tuple[str, ...] = ("int",)
    needs: Callable[[Any], Needs] = lambda _: Needs()
    prepare: Callable[[BlockTask, Any], Any] | None = None
    round_group: Callable[[BlockTask, InputGroup, Any, Any], BlockResult] | None = None

    def parse_options(self, values: Mapping[str, Any]) -> Any:
        """The method's options from a recipe; raises `RecipeError` for a wrong name or type."""
        known = {f.name: f for f in dataclasses.fields(self.options_type)}
        for key in values:
            if key not in known:
                raise RecipeError(
                    f"method {self.name}: unknown option {key!r}{did_you_mean(key, known)}; "
                    f"known: {', '.join(known) or 'none'}"
                )
        return read_section(self.options_type, values, f"method {self.name}")

    def rounds_to(self, weight: TensorQuant) -> bool:
        """Whether the codes of `weight` are among `code_types`."""
        kinds = {weight.dtype, weight.code_type, f"{weight.code_type}-{weight.granularity}"}
        return bool(kinds & set(self.code_types))


def join_results(results: Iterable[BlockResult]) -> BlockResult:
    """The linears and reports of several results as one."""
    parts = list(results)
    return BlockResult(
        qtensors={name: q for part in parts for name, q in part.qtensors.items()},
        reports=tuple(report for part in parts for report in part.reports),
    )


def load_method(name: str) -> Method:
    """The method called `name`; raises `UnsupportedError` that lists the known ones."""
    method: Method = load_entry("quantforge.methods", name, "method").METHOD
    return method


CHUNK_WEIGHTS = 1 << 24
"""Weights that elementwise work takes at once: bounds its temporary tensors to 64 MB each."""


def chunk_rows(weight_NK: Tensor) -> int:
    """Rows of `weight_NK` that hold about `CHUNK_WEIGHTS`, at least one."""
    return max(1, CHUNK_WEIGHTS // weight_NK.shape[1])


def output_power(delta_NK: Tensor, second_moment: Tensor) -> Tensor:
    """Mean squared output error of a weight change: ``tr(dW G dW.T)``, G full or diagonal.

    A scalar on the device, nothing waits for it; the product may use TF32.
    """
    if second_moment.dim() == 1:
        return (delta_NK.square() @ second_moment).sum()
    with tf32_products():
        product = delta_NK @ second_moment
    return product.mul_(delta_NK).sum()


def squared_error(delta_NK: Tensor, second_moment: Tensor) -> float:
    """`output_power` as a number, which waits for the device."""
    parts = torch.split(delta_NK, chunk_rows(delta_NK))
    return float(torch.stack([output_power(p, second_moment) for p in parts]).double().sum())


def relative_errors(
    original_NK: Tensor, restored_NK: Tensor, second_moment: Tensor | None
) -> tuple[float, float | None]:
    """(weight error, output error) of `restored_NK`, relative to the original's squared norms."""
    sums = torch.zeros(4, dtype=torch.float64, device=original_NK.device)
    size = chunk_rows(original_NK)
    for original, restored in zip(
        torch.split(original_NK, size), torch.split(restored_NK, size), strict=True
    ):
        delta = restored - original
        parts = [delta.square().sum(), original.square().sum()]
        if second_moment is not None:
            parts += [output_power(delta, second_moment), output_power(original, second_moment)]
        sums[: len(parts)] += torch.stack(parts)
    weight_error, weight_power, output_error, power = sums.tolist()
    relative = weight_error / max(weight_power, 1e-30)
    return relative, None if second_moment is None else output_error / max(power, 1e-30)
