"""Calibration statistics on disk: a safetensors file that `quantize --calibration FILE` reuses.

Tensor names are ``layers.<i>.<group>.<field>``; the header's metadata says which model and which
text the numbers come from.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantforge.calibration.capture import InputStatistics
from quantforge.calibration.data import CalibrationSet
from quantforge.checkpoint.reader import CheckpointReader, hash_files
from quantforge.errors import CalibrationError

FORMAT = "quantforge-statistics-1"
FIELDS = ("second_moment", "mean_abs", "absmax")


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsOrigin:
    """What the statistics were taken of; `model_files` are the weight files' sha256 by name."""

    model: str
    model_files: Mapping[str, str]
    calibration_id: str
    calibration_sha256: str
    num_samples: int
    sequence_length: int
    num_layers: int


def origin_of(
    reader: CheckpointReader, calibration: CalibrationSet, num_layers: int
) -> StatisticsOrigin:
    """The origin of statistics of `reader`'s model on `calibration`; hashes the weight files."""
    samples, length = calibration.token_ids.shape
    return StatisticsOrigin(
        model=reader.folder.name,
        model_files=hash_files(reader.weight_files()),
        calibration_id=calibration.id,
        calibration_sha256=calibration.sha256,
        num_samples=samples,
        sequence_length=length,
        num_layers=num_layers,
    )


def save_statistics(
    path: Path, layers: Mapping[int, Mapping[str, InputStatistics]], origin: StatisticsOrigin
) -> None:
    """Writes `layers` (by index, then group) to `path`, beside it first, then renamed.

    Raises `CalibrationError` when the disk refuses.
    """
    tensors: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for index, groups in layers.items():
        for name, statistics in groups.items():
            prefix = f"layers.{index}.{name}"
            for field in FIELDS:
                tensors[f"{prefix}.{field}"] = getattr(statistics, field).cpu().contiguous()
            counts[prefix] = statistics.num_tokens
    metadata = {
        "format": FORMAT,
        "origin": json.dumps(asdict(origin)),
        "num_tokens": json.dumps(counts),
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"cannot write the statistics file {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


class StatisticsFile:
    """Reads a file of `save_statistics`, one block at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
            metadata = self._file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"cannot read the statistics file {path}: {error}") from error
        if metadata.get("format") != FORMAT:
            raise CalibrationError(
                f"{path} is no statistics file of 'quantforge calibrate' "
                f"(format {metadata.get('format')!r}, expected {FORMAT!r})"
            )
        try:
            self.origin = StatisticsOrigin(**json.loads(metadata["origin"]))
            self._counts: dict[str, int] = dict(json.loads(metadata["num_tokens"]).items())
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CalibrationError(f"{path} has a damaged header: {error!r}") from error

    def require_model(self, folder: Path) -> Self:
        """Itself, if it was taken of the very weights in `folder`; else `CalibrationError`."""
        if hash_files(CheckpointReader(folder).weight_files()) != self.origin.model_files:
            raise CalibrationError(
                f"{self.path} holds statistics of {self.origin.model}, whose weights are not those "
                f"in {folder}; run 'quantforge calibrate' on this model"
            )
        return self

    def block(self, layer: int, device: torch.device) -> dict[str, InputStatistics]:
        """Statistics of `layer` by group name, on `device`; groups without a token are left out."""
        start = f"layers.{layer}."
        groups = [p.removeprefix(start) for p in self._counts if p.startswith(start)]
        if not groups:
            raise CalibrationError(f"{self.path} holds no statistics of layer {layer}")
        found = {}
        for group in (g for g in groups if self._counts[f"{start}{g}"]):
            fields = {f: self._tensor(f"{start}{group}.{f}") for f in FIELDS}
            statistics = InputStatistics(num_tokens=self._counts[f"{start}{group}"], **fields)
            found[group] = statistics.to(device)
        return found

    def _tensor(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CalibrationError(f"{self.path}: cannot read tensor {name}: {error}") from error
        return tensor
