"""``mixed-precision``: one checkpoint whose layers lie in several formats of compressed-tensors.

Nothing is laid out here: each layer is stored as the format of its own scheme has it, and
``quantization_config`` names that format in every group::

    "format": "mixed-precision",
    "config_groups": {"group_0": {"format": "pack-quantized", "targets": [...], ...},
                      "group_1": {"format": "float-quantized", "targets": [...], ...}}

A checkpoint whose schemes all fit one format keeps that format's name, with several groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantforge.checkpoint._compressed import refuse_unfit
from quantforge.checkpoint.base import (
    Format,
    QuantizationLayout,
    SchemeGroup,
    TensorSpec,
    format_of_config,
    known_formats,
)
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme

METHOD = "compressed-tensors"


class MixedPrecision:
    """The `Format` of this file. A layer's own format is that of its scheme."""

    name = "mixed-precision"
    scale_suffix = "weight_scale"
    suffixes = frozenset({"weight_scale"})

    def member(self, scheme: QuantScheme) -> Format:
        """The format that layers of `scheme` are in; raises `UnsupportedError` without one."""
        for candidate in _members():
            if candidate.matches(scheme):
                return candidate
        raise UnsupportedError(f"format {self.name} cannot hold scheme {scheme}")

    def matches(self, scheme: QuantScheme) -> bool:
        return any(candidate.matches(scheme) for candidate in _members())

    def matches_config(self, quantization_config: Mapping[str, Any]) -> bool:
        groups = quantization_config.get("config_groups")
        if quantization_config.get("quant_method") != METHOD or not isinstance(groups, Mapping):
            return False
        own = {g.get("format") for g in groups.values() if isinstance(g, Mapping)} - {None}
        return len(own) > 1 or (not own and quantization_config.get("format") == self.name)

    def refuse(self, layer: str, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return self.member(scheme).refuse(layer, shape, scheme)

    def tensors(
        self, shape: tuple[int, int], scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        return self.member(scheme).tensors(shape, scheme, scale_dtype)

    def layer_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        for candidate in _members():
            try:
                return candidate.layer_shape(tensors)
            except CheckpointError:
                continue
        raise CheckpointError(f"the tensors {', '.join(sorted(tensors))} are those of no format")

    def encode(self, qtensor: QuantizedTensor) -> dict[str, Tensor]:
        """As the format of a weight-only scheme; for others, encode through `member`."""
        return self.member(QuantScheme(weight=qtensor.quant)).encode(qtensor)

    def decode(self, tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
        return self.member(scheme).decode(tensors, scheme)

    def quantization_config(
        self, groups: Sequence[SchemeGroup], ignore: Sequence[str]
    ) -> dict[str, Any]:
        refuse_unfit(self.name, self.matches, groups)
        used = {self.member(group.scheme).name for group in groups}
        if len(used) == 1:
            raise UnsupportedError(
                f"all layers are in format {next(iter(used))}; {self.name} is for several"
            )
        sections = {}
        for i, group in enumerate(groups):
            whole = self.member(group.scheme).quantization_config([group], ignore)
            sections[f"group_{i}"] = next(iter(whole["config_groups"].values()))
        whole = self.member(groups[0].scheme).quantization_config(groups[:1], ignore)
        return whole | {"format": self.name, "config_groups": sections}

    def parse_config(self, quantization_config: Mapping[str, Any]) -> QuantizationLayout:
        found: list[QuantizationLayout] = []
        for name, group in quantization_config["config_groups"].items():
            if not isinstance(group, Mapping) or group.get("format") is None:
                raise CheckpointError(
                    f"quantization_config: {name} names no format, which each group of a "
                    f"{self.name} checkpoint must"
                )
            alone = {"format": group["format"], "config_groups": {name: group}}
            section = {**quantization_config, **alone}
            found.append(format_of_config(section).parse_config(section))
        if not found:
            raise CheckpointError("quantization_config: config_groups is missing or empty")
        return QuantizationLayout(
            format=self.name,
            groups=tuple(group for layout in found for group in layout.groups),
            ignore=found[0].ignore,
            kv_cache=found[0].kv_cache,
        )


def _members() -> tuple[Format, ...]:
    """The formats that a group of compressed-tensors' config can name, this one left out."""
    return tuple(
        known
        for known in known_formats()
        if known.name != FORMAT.name
        and known.matches_config(
            {"quant_method": METHOD, "format": known.name, "config_groups": {}}
        )
    )


FORMAT = MixedPrecision()
