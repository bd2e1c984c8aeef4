"""Writes a quantized checkpoint in another format: the same codes, laid out differently.

One layer is in memory at a time. Every layer is decoded again as it is written and its codes are
compared, so that a conversion which would change a weight's code is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantforge.checkpoint.base import Format, SchemeGroup, format_named
from quantforge.checkpoint.inspection import dense_linears, quantized_layers
from quantforge.checkpoint.kv_scales import holds_kv_cache, is_kv_scale, with_kv_cache
from quantforge.checkpoint.manifest import Manifest, provenance_versions, read_manifest
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import verify_checkpoint
from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.progress import Progress, silent
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme, TensorQuant

LM_HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What was written. Codes less zero points are exact; `scale_error` is the largest relative
    change of a scale (0 where the format holds the scales as they were)."""

    output: Path
    source_format: str
    format: str
    num_layers: int
    written_bytes: int
    scale_error: float
    lost: tuple[str, ...] = ()
    """What the source had and the format cannot hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversion:
    """What becomes of each quantized layer of a source."""

    reader: CheckpointReader
    format: Format
    schemes: Mapping[str, QuantScheme]
    """layer -> its scheme in the output"""
    planned_bytes: int

    keeps_kv_scales: bool = True
    """Whether the format has a place for the scales of a KV cache."""

    @property
    def kv_cache(self) -> TensorQuant | None:
        """What the source has scales of a KV cache for."""
        return None if self.reader.layout is None else self.reader.layout.kv_cache

    @property
    def lost(self) -> tuple[str, ...]:
        """What the source has and the output will not have, in words."""
        if self.kv_cache is None or self.keeps_kv_scales:
            return ()
        return (f"scales of the {self.kv_cache} KV cache",)


def convert_checkpoint(
    source: Path,
    output: Path,
    format_name: str,
    *,
    overwrite: bool = False,
    progress: Progress = silent,
) -> ConvertReport:
    """Writes the quantized checkpoint `source` as `output` in the format called `format_name`.

    The folder appears once it has been opened again and verified. Raises `UnsupportedError` for
    what the format cannot hold (naming the layer), before anything is written where shapes and
    schemes tell; and what the reader and the writer raise.
    """
    conversion = _plan(CheckpointReader(source), format_named(format_name))
    reader = conversion.reader
    with CheckpointWriter(
        output, overwrite=overwrite, source=source, expected_bytes=conversion.planned_bytes
    ) as writer:
        scale_error = _write_layers(conversion, writer, progress)
        for name in reader.names():
            layer, _, suffix = name.rpartition(".")
            if is_kv_scale(name) and not conversion.keeps_kv_scales:
                continue
            if layer not in conversion.schemes or suffix == "bias":
                writer.add(name, reader.tensor(name))
        for path in reader.side_files():
            writer.copy_file(path)
        manifest = _manifest(conversion, scale_error, progress)
        writer.commit(
            reader.config | {"quantization_config": _quantization_config(conversion)},
            manifest=manifest,
            check=lambda folder: _verify(folder, conversion.schemes),
        )
    assert reader.format is not None, "a plan was made"
    return ConvertReport(
        output=output,
        source_format=reader.format.name,
        format=format_name,
        num_layers=len(conversion.schemes),
        written_bytes=CheckpointReader(output).num_weight_bytes(),
        scale_error=scale_error,
        lost=conversion.lost,
    )


def _plan(reader: CheckpointReader, target: Format) -> _Conversion:
    if reader.format is None:
        raise UnsupportedError(
            f"{reader.folder} is not quantized; 'convert' rewrites quantized checkpoints, "
            "'quantize' makes them"
        )
    if reader.format.name == target.name:
        raise UnsupportedError(f"{reader.folder} is in format {target.name} already")
    schemes: dict[str, QuantScheme] = {}
    planned = 0
    for layer in quantized_layers(reader):
        scheme = reader.scheme(layer)
        if scheme is None:
            raise CheckpointError(
                f"{reader.folder}: layer {layer} is quantized, but not by its config.json"
            )
        try:
            shape = reader.format.layer_shape(reader.layer_tensors(layer))
        except CheckpointError as error:
            raise CheckpointError(f"{reader.folder}: layer {layer}: {error}") from error
        schemes[layer] = _held(target, layer, scheme)
        if (reason := target.refuse(layer, shape, schemes[layer])) is not None:
            raise UnsupportedError(f"{layer} cannot become {target.name}: {reason}")
        specs = target.tensors(shape, schemes[layer], torch.float16).values()
        planned += sum(spec.num_bytes for spec in specs)
    if not schemes:
        raise CheckpointError(f"{reader.folder}: config.json says quantized, but no layer is")
    split = ((name, name.rpartition(".")) for name in reader.names())
    dense = (n for n, (layer, _, suffix) in split if layer not in schemes or suffix == "bias")
    planned += sum(reader.spec(name).num_bytes for name in dense)
    conversion = _Conversion(reader=reader, format=target, schemes=schemes, planned_bytes=planned)
    section = _quantization_config(conversion)  # refuses what the format cannot hold together
    if conversion.kv_cache is None or holds_kv_cache(section):
        return conversion
    scales = sum(reader.spec(n).num_bytes for n in reader.names() if is_kv_scale(n))
    return replace(conversion, keeps_kv_scales=False, planned_bytes=planned - scales)


def _held(target: Format, layer: str, scheme: QuantScheme) -> QuantScheme:
    """`scheme`, or the same codes with explicit zero points where the format needs them."""
    if target.matches(scheme):
        return scheme
    weight = scheme.weight
    if weight.dtype == "int" and weight.symmetric:
        explicit = replace(scheme, weight=replace(weight, symmetric=False))
        if target.matches(explicit):
            return explicit
    raise UnsupportedError(
        f"{layer} cannot become {target.name}: the format does not hold scheme {scheme}"
    )


def _write_layers(conversion: _Conversion, writer: CheckpointWriter, progress: Progress) -> float:
    """Writes every quantized layer; gives the largest relative change of a scale."""
    scale_error = 0.0
    for i, (layer, scheme) in enumerate(conversion.schemes.items()):
        progress("convert layers", i, len(conversion.schemes))
        weight = conversion.reader.linear(layer)
        assert isinstance(weight, QuantizedTensor), "the layer has a scheme"
        wanted = _with_zero_points(weight, scheme)
        try:
            encoded = conversion.format.encode(wanted)
        except UnsupportedError as error:
            raise UnsupportedError(f"{layer} cannot be converted: {error}") from error
        written = conversion.format.decode(encoded, scheme)
        if changed := int((_steps(wanted) != _steps(written)).sum()):
            raise UnsupportedError(
                f"{layer} cannot become {conversion.format.name} without changing {changed} of "
                f"{wanted.codes.numel()} weights: its groups with zero point 0 use the whole "
                "range; use gptq_v2 or pack-quantized"
            )
        scale_error = max(scale_error, _scale_error(weight, written))
        for suffix, tensor in encoded.items():
            writer.add(f"{layer}.{suffix}", tensor)
    progress("convert layers", len(conversion.schemes), len(conversion.schemes))
    return scale_error


def _with_zero_points(weight: QuantizedTensor, scheme: QuantScheme) -> QuantizedTensor:
    """`weight` as `scheme` has it: with zero points of 0 where it had none."""
    if weight.quant == scheme.weight:
        return weight
    zero_point = torch.zeros(weight.scale.shape, dtype=torch.int8)
    return replace(weight, zero_point=zero_point, quant=scheme.weight)


def _steps(weight: QuantizedTensor) -> torch.Tensor:
    """Codes less their zero points: int16 [out_features, groups, inputs of a group]."""
    codes = weight.codes.to(torch.int16).reshape(*weight.scale.shape, -1)
    return codes if weight.zero_point is None else codes - weight.zero_point.short().unsqueeze(-1)


def _scale_error(before: QuantizedTensor, after: QuantizedTensor) -> float:
    old, new = before.scale.double(), after.scale.double()
    return float(((new - old).abs() / old.abs()).max())


def _quantization_config(conversion: _Conversion) -> dict[str, Any]:
    """The scheme that most layers have goes to all linears; others and dense ones are named."""
    members: dict[QuantScheme, list[str]] = {}
    for layer, scheme in conversion.schemes.items():
        members.setdefault(scheme, []).append(layer)
    first, *others = sorted(members, key=lambda scheme: -len(members[scheme]))
    groups = [SchemeGroup(targets=("Linear",), scheme=first)]
    groups += [SchemeGroup(targets=tuple(members[s]), scheme=s) for s in others]
    dense = set(dense_linears(conversion.reader)) - set(conversion.schemes)
    if LM_HEAD not in conversion.schemes:
        dense.add(LM_HEAD)
    section = conversion.format.quantization_config(groups, sorted(dense))
    return with_kv_cache(section, conversion.kv_cache) if holds_kv_cache(section) else section


def _manifest(conversion: _Conversion, scale_error: float, progress: Progress) -> Manifest:
    """The source's provenance, with the source itself; evaluations where no weight changed."""
    reader = conversion.reader
    assert reader.format is not None, "a plan was made"
    origin: dict[str, Any] = {
        "name": reader.folder.name,
        "hashes": reader.file_hashes(progress),
        "format": reader.format.name,
    }
    scheme = " + ".join(sorted({str(s) for s in conversion.schemes.values()}))
    old = read_manifest(reader.folder)
    if old is None:
        return Manifest(
            versions=provenance_versions(),
            source=origin,
            recipe={},
            scheme=scheme,
            method="convert",
            seed=0,
            layers=tuple({"name": n, "scheme": str(s)} for n, s in conversion.schemes.items()),
        )
    return Manifest(
        versions=provenance_versions(),
        source=origin | {"source": dict(old.source), "versions": dict(old.versions)},
        recipe=old.recipe,
        scheme=scheme,
        method=old.method,
        seed=old.seed,
        calibration=old.calibration,
        allocation=old.allocation,
        layers=tuple(_without_size(layer) for layer in old.layers),
        run=old.run,
        evaluations=old.evaluations if scale_error == 0 and not conversion.lost else (),
    )


def _without_size(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's report without what depends on the format."""
    return {key: value for key, value in layer.items() if key != "bits_per_weight"}


def _verify(folder: Path, schemes: Mapping[str, QuantScheme]) -> None:
    """Opens a finished folder again and checks that it holds what was planned."""
    failed = verify_checkpoint(folder, expected=schemes, check_hashes=False).failures()
    if failed:
        raise CheckpointError(
            f"the converted checkpoint does not verify: {failed[0].name}: {failed[0].detail}"
        )
