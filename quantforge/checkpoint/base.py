"""What a format is: how the tensors of one quantized layer lie on disk.

A format lives in one file of this folder (found by `quantforge.registry`), which defines
``FORMAT: Format``. Tensor names, packing orders and config keys of a format stand there only.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quantforge.errors import UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.registry import did_you_mean, entry_names, load_entry
from quantforge.schemes import QuantScheme, TensorQuant

PACKAGE = "quantforge.checkpoint"
SHARED = (
    "base",
    "inspection",
    "kv_scales",
    "manifest",
    "reader",
    "shard",
    "targets",
    "verify",
    "writer",
)
"""Files of this folder that are not formats."""

NATIVE = "compressed_tensors"
"""The file of the format that `format_for` prefers."""

COMPOSITE = "mixed"
"""The file of the format that is made of others; `format_for` takes it last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype that a tensor has on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemeGroup:
    """Layers that share a scheme. `targets` are layer names (``model.layers.0.mlp.down_proj``),
    class names (``Linear``) or ``re:`` patterns, as compressed-tensors writes them."""

    targets: tuple[str, ...]
    scheme: QuantScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationLayout:
    """Which layers of a checkpoint are quantized how, independent of a format's config keys."""

    format: str
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...]
    kv_cache: TensorQuant | None = None
    """What the calibrated scales of the KV cache are for (`checkpoint/kv_scales.py`)."""

    def scheme(self, layer: str, class_name: str = "Linear") -> QuantScheme | None:
        """The scheme of a layer of class `class_name`, None where it stays as it is.

        An exact name goes before a pattern, and a pattern before a class, as compressed-tensors
        resolves them; `ignore` goes before all.
        """
        if any(_rank(target, layer, class_name) is not None for target in self.ignore):
            return None
        ranked = [
            (rank, group.scheme)
            for group in self.groups
            for target in group.targets
            if (rank := _rank(target, layer, class_name)) is not None
        ]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _rank(target: str, layer: str, class_name: str) -> int | None:
    """How closely `target` names `layer`: 0 exactly, 1 by pattern, 2 by class, None not at all."""
    if target == layer:
        return 0
    if target.startswith("re:") and re.match(target.removeprefix("re:"), layer):
        return 1
    return 2 if target == class_name else None


class Format(Protocol):
    """One on-disk layout of quantized linears. Implementations hold no state.

    `suffixes` are those that only tensors of a quantized layer have (``weight_packed``), and
    `scale_suffix` is the one of the scales.
    """

    name: str
    scale_suffix: str
    suffixes: frozenset[str]

    def matches(self, scheme: QuantScheme) -> bool:
        """Whether this format can hold `scheme`."""

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        """Whether a ``quantization_config`` of a config.json was written in this format."""

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        """Why `layer` of `shape` [out_features, in_features] cannot be stored, or None."""

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Suffix -> shape and dtype of a layer's tensors: ``weight_packed``, ``weight_scale``."""

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """[out_features, in_features] of a layer, without decoding it. Raises `CheckpointError`."""

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        """Suffix -> tensor, exactly as `tensors` announces them."""

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        """The inverse of `encode`. Raises `CheckpointError` naming what does not fit."""

    def quantization_config(
        self, groups: Sequence[SchemeGroup], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """The ``quantization_config`` that config.json gets."""

    def parse_config(self, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
        """The inverse of `quantization_config`; raises `CheckpointError` or `UnsupportedError`."""


def known_formats() -> tuple[Format, ...]:
    """Every format of this folder, the native one first, the composite one last."""
    names = sorted(
        entry_names(PACKAGE, SHARED), key=lambda name: (name != NATIVE, name == COMPOSITE, name)
    )
    return tuple(load_entry(PACKAGE, name, "format", SHARED).FORMAT for name in names)


def format_named(name: str) -> Format:
    """The format called `name`; raises `UnsupportedError` naming the formats."""
    known = {candidate.name: candidate for candidate in known_formats()}
    if name not in known:
        raise UnsupportedError(
            f"unknown format {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
        )
    return known[name]


def format_for(scheme: QuantScheme) -> Format:
    """The first format that can hold `scheme`; raises `UnsupportedError` naming the formats."""
    known = known_formats()
    for candidate in known:
        if candidate.matches(scheme):
            return candidate
    names = ", ".join(f.name for f in known)
    raise UnsupportedError(f"no checkpoint format holds scheme {scheme}; formats: {names}")


def format_for_all(schemes: Iterable[QuantScheme]) -> Format:
    """The format of a checkpoint with layers of all of `schemes`: that of each where it is the
    same, else the composite one. Raises `UnsupportedError` naming a scheme that does not fit."""
    found = {scheme: format_for(scheme) for scheme in schemes}
    if len({layout.name for layout in found.values()}) == 1:
        return next(iter(found.values()))
    composite: Format = load_entry(PACKAGE, COMPOSITE, "format", SHARED).FORMAT
    for scheme, layout in found.items():
        if not composite.matches(scheme):
            raise UnsupportedError(
                f"format {layout.name}, which holds scheme {scheme}, cannot be mixed with others "
                "in one checkpoint; give all layers schemes of one format"
            )
    return composite


def format_of_config(quantization_config: Mapping[str, Any]) -> Format:
    """The format that wrote `quantization_config`; raises `UnsupportedError` naming the formats."""
    known = known_formats()
    for candidate in known:
        if candidate.matches_config(quantization_config):
            return candidate
    method = quantization_config.get("quant_method")
    kind = quantization_config.get("format")
    raise UnsupportedError(
        f"quantization_config has quant_method {method!r} and format {kind!r}, which this version "
        f"does not read; formats: {', '.join(f.name for f in known)}"
    )
