"""What a checkpoint holds: its linears, their sizes in bytes and in bits per weight."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.checkpoint.base import known_formats
from quantforge.checkpoint.kv_scales import SUFFIXES, is_kv_scale, read_kv_scale
from quantforge.checkpoint.manifest import read_manifest, to_json
from quantforge.checkpoint.reader import CheckpointReader, class_name
from quantforge.errors import CheckpointError
from quantforge.schemes import QuantScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """A linear as it is stored: `num_bytes` counts codes, scales, zero points and shape, no bias.

    `scheme` is None for a dense layer.
    """

    name: str
    scheme: QuantScheme | None
    shape: tuple[int, int]
    num_bytes: int

    @property
    def num_weights(self) -> int:
        return self.shape[0] * self.shape[1]


def quantized_layers(reader: CheckpointReader) -> tuple[str, ...]:
    """Layers that have tensors of a quantized linear (``weight_packed`` ...), config or not."""
    marks = frozenset[str]().union(*(known.suffixes for known in known_formats()))
    split = (name.rpartition(".") for name in reader.names())
    found = {n for n, _, suffix in split if suffix in marks or suffix.startswith("weight_")}
    return tuple(sorted(found))


def dense_linears(reader: CheckpointReader) -> tuple[str, ...]:
    """Layers with a two-dimensional ``weight``: linears, lm_head included, but no embeddings."""
    layers = (n.removesuffix(".weight") for n in reader.names() if n.endswith(".weight"))
    return tuple(
        layer
        for layer in layers
        if len(reader.spec(f"{layer}.weight").shape) == 2 and class_name(layer) == "Linear"
    )


def layer_sizes(reader: CheckpointReader) -> list[LayerSize]:
    """Every linear of a checkpoint, in the order of names."""
    quantized = set(quantized_layers(reader))
    sizes = [_quantized_size(reader, layer) for layer in quantized]
    for layer in dense_linears(reader):
        if layer not in quantized:
            spec = reader.spec(f"{layer}.weight")
            shape = (spec.shape[0], spec.shape[1])
            sizes.append(LayerSize(name=layer, scheme=None, shape=shape, num_bytes=spec.num_bytes))
    return sorted(sizes, key=lambda size: size.name)


def bits_per_weight(reader: CheckpointReader) -> float:
    """Stored bits a weight over the quantized linears: codes, scales, zero points and shapes.

    Over all linears of a checkpoint that is not quantized; 0 for one without linears.
    """
    sizes = layer_sizes(reader)
    return _bits([s for s in sizes if s.scheme is not None] or sizes) or 0.0


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """Schemes, sizes, bits per weight and provenance of a folder, as a JSON document.

    Sizes are in bytes, ``bits_per_weight`` over the quantized linears and over the whole model.
    """
    reader = CheckpointReader(folder)
    sizes = layer_sizes(reader)
    quantized = [s for s in sizes if s.scheme is not None]
    total = reader.num_weight_bytes()
    num_weights = sum(s.num_weights for s in quantized) + _num_dense(reader)
    architectures = reader.config.get("architectures")
    manifest = read_manifest(folder)
    return {
        "folder": str(folder),
        "architecture": architectures[0] if isinstance(architectures, list) else None,
        "format": reader.format.name if reader.format else None,
        "tie_word_embeddings": reader.config.get("tie_word_embeddings"),
        "num_weights": num_weights,
        "schemes": _schemes(sizes),
        "kv_cache": describe_kv_cache(reader),
        "bytes": _bytes_by_kind(reader, sizes, total),
        "bits_per_weight": {"quantized_linears": _bits(quantized), "model": 8 * total / num_weights}
        if num_weights
        else None,
        "weight_files": [path.name for path in reader.weight_files()],
        "provenance": None if manifest is None else to_json(manifest),
    }


def describe_kv_cache(reader: CheckpointReader) -> dict[str, Any] | None:
    """What the KV cache's scales are for, and the range that they span; None without any."""
    quant = None if reader.layout is None else reader.layout.kv_cache
    if quant is None:
        return None
    names = [name for name in reader.names() if is_kv_scale(name)]
    ranges: dict[str, Any] = {}
    for suffix in SUFFIXES:
        found = [read_kv_scale(reader, name) for name in names if name.endswith(f".{suffix}")]
        kind = suffix.rpartition(".")[2]
        ranges[kind] = {"min": min(found), "max": max(found)} if found else None
    return {"scheme": str(quant), "num_layers": len(names) // len(SUFFIXES), **ranges}


def _quantized_size(reader: CheckpointReader, layer: str) -> LayerSize:
    scheme = reader.scheme(layer)
    if scheme is None or reader.format is None:
        raise CheckpointError(
            f"{reader.folder}: layer {layer} has tensors of a quantized layer, "
            "but config.json does not say that it is quantized"
        )
    try:
        shape = reader.format.layer_shape(reader.layer_tensors(layer))
    except CheckpointError as error:
        raise CheckpointError(f"{reader.folder}: layer {layer}: {error}") from error
    stored = (n for n in reader.names() if n.rpartition(".")[0] == layer)
    num_bytes = sum(reader.spec(n).num_bytes for n in stored if not n.endswith(".bias"))
    return LayerSize(name=layer, scheme=scheme, shape=shape, num_bytes=num_bytes)


def _num_dense(reader: CheckpointReader) -> int:
    """Values in the tensors that belong to no quantized weight."""
    quantized = set(quantized_layers(reader))

    def is_dense(name: str) -> bool:
        layer, _, suffix = name.rpartition(".")
        return (layer not in quantized or suffix == "bias") and not is_kv_scale(name)

    return sum(math.prod(reader.spec(n).shape) for n in reader.names() if is_dense(n))


def _bits(sizes: list[LayerSize]) -> float | None:
    weights = sum(size.num_weights for size in sizes)
    return 8 * sum(size.num_bytes for size in sizes) / weights if weights else None


def _schemes(sizes: list[LayerSize]) -> list[dict[str, Any]]:
    """One entry a scheme: how many layers, weights and bytes it has; ``dense`` for none."""
    grouped: dict[str, list[LayerSize]] = {}
    for size in sizes:
        grouped.setdefault("dense" if size.scheme is None else str(size.scheme), []).append(size)
    return [
        {
            "scheme": scheme,
            "num_layers": len(members),
            "num_weights": sum(m.num_weights for m in members),
            "bytes": sum(m.num_bytes for m in members),
            "bits_per_weight": _bits(members),
        }
        for scheme, members in sorted(grouped.items())
    ]


def _bytes_by_kind(reader: CheckpointReader, sizes: list[LayerSize], total: int) -> dict[str, int]:
    kinds = {
        "quantized_linears": sum(s.num_bytes for s in sizes if s.scheme is not None),
        "dense_linears": sum(s.num_bytes for s in sizes if s.scheme is None),
        "embeddings": sum(
            reader.spec(n).num_bytes
            for n in reader.names()
            if class_name(n.rpartition(".")[0]) == "Embedding"
        ),
    }
    return {**kinds, "other": total - sum(kinds.values()), "total": total}
