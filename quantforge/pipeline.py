"""Quantizes a checkpoint into a folder that appears when it is complete, recorded and verified.

The work on the blocks is `quantizer`'s; here are the folder, what is kept for a resumed run, the
config, the manifest and the check at the end.
"""

import os
import resource
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile
from quantforge.checkpoint.kv_scales import with_kv_cache
from quantforge.checkpoint.manifest import Manifest, provenance_versions
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.targets import scheme_groups
from quantforge.checkpoint.verify import verify_checkpoint
from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.errors import CheckpointError, UsageError
from quantforge.fingerprint import make_fingerprint
from quantforge.memory import AnonymousPeak
from quantforge.methods.base import (
    LayerReport,
)
from quantforge.models.dequantized import open_source, source_origin
from quantforge.plan import QuantizePlan
from quantforge.progress import Progress, silent
from quantforge.quantizer import Evidence, Quantizer
from quantforge.recipe import Recipe
from quantforge.resume import (
    WorkFolder,
    open_work_folder,
    progress_bytes,
    remove_work,
    work_folder,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeReport:
    """The outcome of a run: where it is, what happened to each layer, time and peak memory."""

    output: Path
    layers: tuple[LayerReport, ...]
    seconds: dict[str, float]
    """Where time went: `stopwatch.PHASES`, ``calibrate`` (both forward passes), ``total``."""
    written_bytes: int
    peak_device_bytes: int
    peak_host_bytes: int
    """Resident memory, mapped files included."""
    peak_host_anonymous_bytes: int
    """Resident memory without mapped files; 0 where the system does not tell."""


def quantize_model(
    source: Path,
    output: Path,
    recipe: Recipe,
    plan: QuantizePlan,
    evidence: Evidence | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    overwrite: bool = False,
    resume: bool = False,
    resume_every: int | None = None,
    dequantize: bool = False,
    progress: Progress = silent,
) -> QuantizeReport:
    """Quantizes `source` into the folder `output` as `plan` says.

    The folder appears only when it is complete, has its manifest, and was opened again and
    verified. Finished blocks are kept beside it (`quantforge.resume`) until then; `resume` goes on
    from those of an earlier run, and `resume_every` says after how many blocks the hidden states
    are written too (None: by their size; 0: nothing is kept). With `dequantize` a source that is
    quantized already is read as the dense model that it stands for. Raises what its parts raise,
    naming files and layers.
    """
    if resume and resume_every == 0:
        raise UsageError("--resume needs kept progress; --resume-every 0 keeps none")
    reader = open_source(source, dequantize=dequantize)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    scratch = Path(os.path.realpath(output)).parent
    quantizer = Quantizer(
        reader, plan, evidence, device=device, dtype=dtype, progress=progress, scratch=scratch
    )
    watch = quantizer.watch

    def hash_source() -> dict[str, str]:
        with watch.measure("hash", on_device=False):
            return reader.file_hashes(progress if resume else silent)

    def check(folder: Path) -> None:
        with watch.measure("verify"):
            _verify(folder, plan)

    with (
        AnonymousPeak() as peak,
        CheckpointWriter(
            output, overwrite=overwrite, source=source, expected_bytes=plan.planned_bytes
        ) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        hashing = pool.submit(hash_source)

        def fingerprint() -> dict[str, object]:
            return make_fingerprint(hashing.result(), plan, evidence, device, dtype)

        needed = plan.planned_bytes + progress_bytes(plan, evidence, dtype)
        known = fingerprint() if resume else None
        with _work(output, known, resume, resume_every, needed) as work:
            learn = None
            if work is not None and known is None:
                learn = partial(_identify, work, fingerprint)
            quantizer.run(writer, work, learn)
            with watch.measure("finish"):
                for path in reader.side_files():
                    writer.copy_file(path)
                hashes = hashing.result()
                writer.commit(
                    _config(reader, plan),
                    manifest=_manifest(reader, hashes, recipe, plan, evidence, quantizer),
                    check=check,
                )
    return QuantizeReport(
        output=output,
        layers=tuple(quantizer.reports),
        seconds=watch.report(),
        written_bytes=plan.planned_bytes,
        peak_device_bytes=_peak_device_bytes(device),
        peak_host_bytes=peak_host_bytes(),
        peak_host_anonymous_bytes=peak.num_bytes,
    )


def _identify(work: WorkFolder, fingerprint: Callable[[], dict[str, object]]) -> None:
    """Commits the fingerprint of a fresh run, once the source is hashed."""
    work.identify(fingerprint())


def _work(
    output: Path,
    fingerprint: Mapping[str, object] | None,
    resume: bool,
    every: int | None,
    expected_bytes: int,
) -> AbstractContextManager[WorkFolder | None]:
    """The run's work folder; nothing, and an older one removed, where none is wanted."""
    if every == 0:
        remove_work(work_folder(output))
        return nullcontext()
    return open_work_folder(
        output, fingerprint, resume=resume, every=every, expected_bytes=expected_bytes
    )


def _verify(folder: Path, plan: QuantizePlan) -> None:
    """Opens a finished folder again and checks that it holds what was planned."""
    failed = verify_checkpoint(folder, expected=plan.layers, check_hashes=False).failures()
    if failed:
        raise CheckpointError(
            f"the written checkpoint does not verify: {failed[0].name}: {failed[0].detail}"
        )
    reader = CheckpointReader(folder)
    kv_cache = None if reader.layout is None else reader.layout.kv_cache
    if kv_cache != plan.kv_cache:
        raise CheckpointError(
            f"the written checkpoint has KV-cache scales for {kv_cache}; planned: {plan.kv_cache}"
        )
    written = reader.num_weight_bytes()
    if written != plan.planned_bytes:
        raise CheckpointError(
            f"the written checkpoint holds {written} bytes of tensors; "
            f"{plan.planned_bytes} were planned"
        )


def peak_host_bytes() -> int:
    """The most resident memory that this process has held, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _config(reader: CheckpointReader, plan: QuantizePlan) -> dict[str, object]:
    groups = scheme_groups(plan.layers, plan.ignore)
    config = dict(reader.config)
    section = plan.format.quantization_config(groups, plan.ignore)
    config["quantization_config"] = with_kv_cache(section, plan.kv_cache)
    if plan.quantizes_lm_head:
        config["tie_word_embeddings"] = False
    return config


def _manifest(
    reader: CheckpointReader,
    hashes: Mapping[str, str],
    recipe: Recipe,
    plan: QuantizePlan,
    evidence: Evidence | None,
    quantizer: Quantizer,
) -> Manifest:
    calibration: dict[str, object] | None = None
    if isinstance(evidence, CalibrationSet):
        samples, length = evidence.token_ids.shape
        calibration = {
            "id": evidence.id,
            "sha256": evidence.sha256,
            "num_samples": samples,
            "sequence_length": length,
        }
    elif isinstance(evidence, StatisticsFile):
        calibration = {"statistics": evidence.path.name, **asdict(evidence.origin)}
    return Manifest(
        versions=provenance_versions(),
        source={"name": reader.folder.name, "hashes": dict(hashes), **source_origin(reader)},
        recipe=asdict(recipe),
        scheme=plan.describe_scheme(),
        method=plan.method.name,
        seed=recipe.calibration.seed,
        calibration=calibration,
        allocation=plan.allocation,
        layers=tuple(asdict(r) for r in quantizer.reports),
        run={
            "device": _device_name(quantizer.device),
            "dtype": str(quantizer.dtype).removeprefix("torch."),
            "seconds": {name: round(value, 3) for name, value in quantizer.watch.report().items()},
            "peak_device_bytes": _peak_device_bytes(quantizer.device),
            "peak_host_bytes": peak_host_bytes(),
            "ignored": list(plan.ignore),
        },
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _peak_device_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
