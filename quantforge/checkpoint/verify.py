"""Checks that a checkpoint is what it says: the last step of a run, and ``quantforge verify``."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantforge.checkpoint.inspection import (
    bits_per_weight,
    dense_linears,
    describe_checkpoint,
    quantized_layers,
)
from quantforge.checkpoint.kv_scales import is_kv_scale, kv_scale_problems
from quantforge.checkpoint.manifest import read_manifest
from quantforge.checkpoint.reader import INDEX_FILE, CheckpointReader, class_name, read_json
from quantforge.errors import CheckpointError
from quantforge.progress import Progress, silent
from quantforge.qtensor import QuantizedTensor
from quantforge.schemes import QuantScheme

__all__ = ["Check", "VerifyReport", "bits_per_weight", "describe_checkpoint", "verify_checkpoint"]

NUM_SHOWN = 3
"""Problems that a check spells out; the rest is counted."""

FINITE_BLOCK = 1 << 22

BLOCK = re.compile(r"(.*\blayers)\.(\d+)\.(.+)\.[^.]+")
"""(prefix, block, module within the block) of a tensor's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at. `detail` says what was found, and what is wrong if not ok."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """All checks of a checkpoint, in order."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)


def verify_checkpoint(
    folder: Path,
    *,
    expected: Mapping[str, QuantScheme] | None = None,
    check_hashes: bool = True,
    progress: Progress = silent,
) -> VerifyReport:
    """Opens `folder` afresh and checks it whole; reads every tensor once.

    `expected` is layer -> scheme as planned; without it config.json is the plan. Files that cannot
    be read become a failed check; a quantization format that we do not read raises
    `UnsupportedError`.
    """
    try:
        reader = CheckpointReader(folder)
    except CheckpointError as error:
        return VerifyReport(checks=(Check(name="files", ok=False, detail=str(error)),))
    checks = [
        _check_files(reader),
        _check_targets(reader, expected),
        _check_blocks(reader),
        _check_embeddings(reader),
        *_check_quantized(reader, progress),
        *_check_kv_cache(reader),
        _check_dense(reader, progress),
        _check_size(reader),
    ]
    if check_hashes:
        checks.append(_check_hashes(reader, progress))
    return VerifyReport(checks=tuple(checks))


def _verdict(name: str, problems: Iterable[str], fine: str) -> Check:
    found = list(problems)
    if not found:
        return Check(name=name, ok=True, detail=fine)
    more = f"; and {len(found) - NUM_SHOWN} more" if len(found) > NUM_SHOWN else ""
    return Check(name=name, ok=False, detail="; ".join(found[:NUM_SHOWN]) + more)


def _check_files(reader: CheckpointReader) -> Check:
    """No shard and no tensor lies there that the index does not know."""
    used = reader.weight_files()
    stray = sorted(set(reader.folder.glob("*.safetensors")) - set(used))
    problems = [f"{path.name} is not part of the model" for path in stray]
    problems += [f"tensor {name} is not in {INDEX_FILE}" for name in reader.unlisted()]
    return _verdict("files", problems, f"{len(used)} weight file(s), {len(reader.names())} tensors")


def _check_targets(reader: CheckpointReader, expected: Mapping[str, QuantScheme] | None) -> Check:
    """What should be quantized is, and nothing else."""
    quantized = set(quantized_layers(reader))
    dense = set(dense_linears(reader)) - quantized
    problems = [f"{n} is a target of config.json, but is dense" for n in dense if reader.scheme(n)]
    problems += [
        f"{n} is quantized, but not by config.json" for n in quantized if not reader.scheme(n)
    ]
    for group in reader.layout.groups if reader.layout else ():
        named = (t for t in group.targets if "." in t and not t.startswith("re:"))
        problems += [f"target {t} does not exist" for t in named if t not in quantized | dense]
    if reader.layout is not None and not quantized:
        problems.append("config.json declares quantization, but no layer is quantized")
    for layer, scheme in (expected or {}).items():
        found = reader.scheme(layer)
        if layer not in quantized:
            problems.append(f"{layer} should be {scheme}, but is not quantized")
        elif found != scheme:
            problems.append(f"{layer} should be {scheme}, but is {found}")
    if expected is not None:
        problems += [f"{n} should not be quantized" for n in quantized - set(expected)]
    fine = f"{len(quantized)} linears quantized, {len(dense)} dense"
    return _verdict("targets", sorted(problems), fine)


def _check_blocks(reader: CheckpointReader) -> Check:
    """Every block of the model is there, and all have the same modules."""
    blocks: dict[tuple[str, int], set[str]] = {}
    for name in reader.names():
        if found := BLOCK.fullmatch(name):
            blocks.setdefault((found[1], int(found[2])), set()).add(found[3])
    problems = []
    declared = reader.config.get("num_hidden_layers")
    prefixes = {prefix for prefix, _ in blocks}
    if isinstance(declared, int):
        for prefix in prefixes:
            present = {block for owner, block in blocks if owner == prefix}
            problems += [f"block {prefix}.{i} is missing" for i in set(range(declared)) - present]
            problems += [
                f"block {prefix}.{i} is beyond num_hidden_layers {declared}"
                for i in present - set(range(declared))
            ]
    for (prefix, block), modules in blocks.items():
        everywhere = set.union(*(m for (owner, _), m in blocks.items() if owner == prefix))
        problems += [f"{prefix}.{block}.{m} is missing" for m in sorted(everywhere - modules)]
    if not blocks:
        problems.append("there are no blocks")
    return _verdict("blocks", problems, f"{len(blocks)} blocks with the same modules")


def _check_embeddings(reader: CheckpointReader) -> Check:
    """The embedding is there; so is lm_head, unless the two are tied."""
    layers = {name.rpartition(".")[0] for name in reader.names()}
    has_head = any(layer.rpartition(".")[2] == "lm_head" for layer in layers)
    tied = reader.config.get("tie_word_embeddings")
    problems = []
    if not any(class_name(layer) == "Embedding" for layer in layers):
        problems.append("the embedding is missing")
    if tied is False and not has_head:
        problems.append("lm_head is missing, and tie_word_embeddings is false")
    fine = "embedding and lm_head present" if has_head else "embedding present, lm_head tied to it"
    return _verdict("embeddings", problems, fine)


def _check_quantized(reader: CheckpointReader, progress: Progress) -> Iterator[Check]:
    """Shapes and dtypes as the format says; scales finite and not zero."""
    layers = quantized_layers(reader)
    tensor_problems: list[str] = []
    scale_problems: list[str] = []
    for i, layer in enumerate(layers):
        if (scheme := reader.scheme(layer)) is not None:
            try:
                scale = _decoded_scale(reader, layer, scheme)
            except CheckpointError as error:
                tensor_problems.append(str(error))
            else:
                if bad := int((~scale.isfinite() | (scale == 0)).sum()):
                    scale_problems.append(f"{bad} scales of {layer} are zero, NaN or infinite")
        progress("verify quantized layers", i + 1, len(layers))
    fine = f"{len(layers)} layers as their scheme lays them out"
    yield _verdict("tensors", tensor_problems, fine)
    yield _verdict("scales", scale_problems, f"finite and non-zero in {len(layers)} layers")


def _decoded_scale(reader: CheckpointReader, layer: str, scheme: QuantScheme) -> Tensor:
    """The scale of a layer that decodes; raises `CheckpointError` where something is left over."""
    assert reader.format is not None, "a layer with a scheme has a format"
    weight = reader.linear(layer)
    assert isinstance(weight, QuantizedTensor), "a layer with a scheme is quantized"
    stored = reader.layer_tensors(layer)
    scale = stored[reader.format.scale_suffix]
    shape = reader.format.layer_shape(stored)
    known = {*reader.format.tensors(shape, scheme, scale.dtype), "bias"}
    if left := sorted(set(stored) - known):
        raise CheckpointError(f"{layer} ({scheme}) has left-over tensors: {', '.join(left)}")
    return weight.scale


def _check_kv_cache(reader: CheckpointReader) -> Iterator[Check]:
    """Each block has the scales of its keys and values that config.json announces; none is extra.

    Nothing where there are neither.
    """
    quant = None if reader.layout is None else reader.layout.kv_cache
    if quant is None and not any(is_kv_scale(name) for name in reader.names()):
        return
    found = (BLOCK.fullmatch(name) for name in reader.names())
    blocks = tuple(sorted({f"{m[1]}.{m[2]}" for m in found if m}))
    fine = f"scales of {len(blocks)} layers for a {quant} KV cache"
    yield _verdict("kv cache", kv_scale_problems(reader, blocks), fine)


def _check_dense(reader: CheckpointReader, progress: Progress) -> Check:
    """No NaN and no infinity in what is not quantized."""
    quantized = set(quantized_layers(reader))

    def is_dense(name: str) -> bool:
        layer, _, suffix = name.rpartition(".")
        floating = reader.spec(name).dtype.is_floating_point
        return floating and (layer not in quantized or suffix == "bias")

    names = [name for name in reader.names() if is_dense(name)]
    problems = []
    for i, name in enumerate(names):
        if not _is_finite(reader.tensor(name)):
            problems.append(f"{name} holds NaN or infinity")
        progress("verify dense tensors", i + 1, len(names))
    return _verdict("dense", problems, f"{len(names)} dense tensors finite")


def _is_finite(tensor: Tensor) -> bool:
    """Looks at `FINITE_BLOCK` values at a time, so that a large embedding costs no second one."""
    parts = torch.split(tensor.reshape(-1), FINITE_BLOCK)
    return all(bool(torch.isfinite(part.float()).all()) for part in parts)


def _check_size(reader: CheckpointReader) -> Check:
    """As large as the plan makes it, and quantized layers smaller than in 16 bits."""
    total = reader.num_weight_bytes()
    problems = []
    index = reader.folder / INDEX_FILE
    if len(reader.weight_files()) > 1 and index.is_file():
        metadata = read_json(index).get("metadata")
        said = metadata.get("total_size") if isinstance(metadata, dict) else None
        if said is not None and said != total:
            problems.append(f"{INDEX_FILE} says {said} bytes; the tensors have {total}")
    try:
        bits = bits_per_weight(reader)
    except CheckpointError as error:
        problems.append(str(error))
        return _verdict("size", problems, "")
    if reader.layout is not None and bits >= 16:
        problems.append(f"quantized layers take {bits:.2f} bits per weight, 16 or more")
    return _verdict("size", problems, f"{total} bytes, {bits:.3f} bits per weight in linears")


def _check_hashes(reader: CheckpointReader, progress: Progress) -> Check:
    """Files are those that quantforge.json was written for."""
    try:
        manifest = read_manifest(reader.folder)
    except CheckpointError as error:
        return Check(name="hashes", ok=False, detail=str(error))
    if manifest is None or not manifest.files:
        return Check(name="hashes", ok=True, detail="no quantforge.json to compare with")
    found = reader.file_hashes(progress)
    gone = manifest.files.keys() - found.keys()
    problems = [f"{name} is missing" for name in sorted(gone)]
    problems += [f"{n} was added" for n in found if n not in manifest.files]
    problems += [f"{n} was changed" for n, h in found.items() if manifest.files.get(n, h) != h]
    return _verdict("hashes", problems, f"{len(found)} files as in quantforge.json")
