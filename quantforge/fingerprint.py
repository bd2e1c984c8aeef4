"""What decides the bits of a run's output, so that two runs can be told apart before they mix."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import quantforge_kernels
import torch

import quantforge
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile
from quantforge.checkpoint.manifest import provenance_versions, to_json
from quantforge.checkpoint.reader import hash_files
from quantforge.plan import QuantizePlan
from quantforge.precision import tf32_allowed


def make_fingerprint(
    model_hashes: Mapping[str, str],
    plan: QuantizePlan,
    evidence: CalibrationSet | StatisticsFile | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Everything that decides the bits of a run's output, in JSON's types."""
    return {
        "model": dict(model_hashes),
        "calibration": _evidence_fingerprint(evidence),
        "plan": {
            "method": plan.method.name,
            "options": to_json(plan.options),
            "format": plan.format.name,
            "layers": {name: str(scheme) for name, scheme in plan.layers.items()},
            "ignore": list(plan.ignore),
            "activation_observer": None if plan.observer is None else str(plan.observer),
            "kv_cache": None if plan.kv_cache is None else str(plan.kv_cache),
            **({} if plan.allocation is None else {"allocation": dict(plan.allocation)}),
        },
        "dtype": str(dtype),
        "device": device.type,
        "tf32": device.type == "cuda" and tf32_allowed(),
        "code": {**provenance_versions(), "sha256": _code_hash()},
    }


def _evidence_fingerprint(evidence: CalibrationSet | StatisticsFile | None) -> dict[str, Any]:
    if isinstance(evidence, CalibrationSet):
        tokens = evidence.token_ids.contiguous()
        return {
            "sha256": evidence.sha256,
            "shape": list(tokens.shape),
            "token_ids": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        }
    if isinstance(evidence, StatisticsFile):
        return {"statistics": next(iter(hash_files([evidence.path]).values()))}
    return {}


def _code_hash() -> str:
    """sha256 over the Python sources of the package and of its kernels."""
    digest = hashlib.sha256()
    for package in (quantforge, quantforge_kernels):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def differences(kept: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``plan.method was 'awq', is 'rtn'`` for every entry in which two fingerprints differ."""
    found = []
    for key in sorted(kept.keys() | now.keys()):
        before, after = kept.get(key), now.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} was {_short(before)}, is {_short(after)}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:20]}...{text[-4:]}"
