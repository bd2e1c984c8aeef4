"""`Manifest`: quantforge.json, the provenance of a checkpoint.

It says what made the folder out of what, and the sha256 of every other file in it. Evaluations are
appended later; the manifest itself is not hashed, so that they may be.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import torch

import quantforge
from quantforge.checkpoint.reader import read_json
from quantforge.errors import CheckpointError

MANIFEST_FILE = "quantforge.json"
FORMAT_VERSION = 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Where a checkpoint comes from.

    - `versions` of quantforge, torch, safetensors and python;
    - `source` name and hashes of the model that was quantized, `recipe` as it was resolved;
    - `calibration` id, sha256, num_samples and sequence_length, None without calibration;
    - `layers` name, scheme, method, errors and more of each quantized layer (`LayerReport`);
    - `allocation` how schemes were chosen by sensitivity, None where they were given;
    - `run` what the run took: device, dtype, seconds, peak memory, and the linears it left alone;
    - `evaluations` in the order they were made;
    - `files` name -> sha256 of everything else in the folder;
    - `created` in UTC, ISO 8601.
    """

    versions: Mapping[str, str]
    source: Mapping[str, Any]
    recipe: Mapping[str, Any]
    scheme: str
    method: str
    seed: int
    calibration: Mapping[str, Any] | None = None
    layers: tuple[Mapping[str, Any], ...] = ()
    run: Mapping[str, Any] | None = None
    allocation: Mapping[str, Any] | None = None
    evaluations: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    created: str = field(default_factory=_now)
    format_version: int = FORMAT_VERSION


_KINDS: dict[str, tuple[type, ...]] = {
    "versions": (dict,),
    "source": (dict,),
    "recipe": (dict,),
    "scheme": (str,),
    "method": (str,),
    "seed": (int,),
    "calibration": (dict, type(None)),
    "layers": (list,),
    "run": (dict, type(None)),
    "evaluations": (list,),
    "files": (dict,),
    "created": (str,),
    "format_version": (int,),
}


def provenance_versions() -> dict[str, str]:
    """Versions of what decides the bits of a checkpoint."""
    return {
        "quantforge": quantforge.__version__,
        "torch": str(torch.__version__),
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`, None where there is none. Raises `CheckpointError`."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    document = read_json(path)
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version is {version!r}; this version reads {FORMAT_VERSION}"
        )
    document.setdefault("run", None)  # folders of older versions have none
    for key, kinds in _KINDS.items():
        if key not in document:
            raise CheckpointError(f"{path}: key {key!r} is missing")
        if not isinstance(document[key], kinds):
            raise CheckpointError(
                f"{path}: {key} is a {type(document[key]).__name__}; expected {kinds[0].__name__}"
            )
    values = {key: document[key] for key in _KINDS}
    for key in ("layers", "evaluations"):
        values[key] = tuple(values[key])
    return Manifest(**values, allocation=document.get("allocation"))


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Writes quantforge.json, in one step: a reader sees the old file or the new one."""
    path = folder / MANIFEST_FILE
    text = json.dumps(to_json(manifest), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    beside = folder / f".{MANIFEST_FILE}.{os.getpid()}"
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    return path


def append_evaluation(folder: Path, result: Mapping[str, Any]) -> bool:
    """Adds `result` to the manifest's evaluations, with the time; False where there is no manifest.

    Runs at the same time wait for each other, so that none is lost.
    """
    if not (folder / MANIFEST_FILE).exists():
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        manifest = read_manifest(folder)
        if manifest is None:
            return False
        entry = {"created": _now(), **result}
        evaluations = (*manifest.evaluations, entry)
        write_manifest(folder, dataclasses.replace(manifest, evaluations=evaluations))
    finally:
        os.close(descriptor)
    return True


def to_json(value: Any) -> Any:
    """`value` in JSON's own types: dataclasses and paths resolved, NaN and infinity as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
