"""Quantizes a checkpoint block by block: load, calibrate, quantize, write, check.

Never more than one block of weights is held in memory beside the embedding. The activations of the
calibration samples go from block to block, through the blocks as they were quantized, so that later
blocks see the errors of earlier ones.
"""

import logging
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantforge.calibration.activations import Activations
from quantforge.calibration.capture import Capture, InputStatistics
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.statistics import StatisticsFile
from quantforge.checkpoint.base import SchemeGroup
from quantforge.checkpoint.manifest import Manifest, provenance_versions
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import verify_checkpoint
from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.errors import CalibrationError, CheckpointError, UsageError
from quantforge.fingerprint import make_fingerprint
from quantforge.methods.base import BlockResult, BlockTask, LayerReport, relative_errors
from quantforge.models.decoder import DecoderBlock
from quantforge.models.expected import check_finite
from quantforge.models.linear import Linear
from quantforge.models.loader import load_block, load_embedding
from quantforge.plan import QuantizePlan
from quantforge.progress import Progress, silent
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.recipe import Recipe
from quantforge.resume import (
    FinishedBlock,
    WorkFolder,
    open_work_folder,
    progress_bytes,
    remove_work,
    work_folder,
)

logger = logging.getLogger(__name__)

Evidence = CalibrationSet | StatisticsFile
"""What a method learns from: text to run through the model, or statistics taken earlier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeReport:
    """The outcome of a run: where it is, what happened to each layer, time and peak memory."""

    output: Path
    layers: tuple[LayerReport, ...]
    seconds: dict[str, float]
    """``calibrate`` (forward passes), ``quantize`` (the method) and ``total``."""
    written_bytes: int
    peak_device_bytes: int
    peak_host_bytes: int


class Quantizer:
    """One run of a plan. `run` does the work; the object only holds what its steps share."""

    def __init__(
        self,
        reader: CheckpointReader,
        plan: QuantizePlan,
        evidence: Evidence | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress = silent,
    ) -> None:
        if plan.method.needs_statistics and evidence is None:
            raise CalibrationError(
                f"method {plan.method.name} needs calibration data; give a data set, or use "
                "a method without (rtn)"
            )
        self.reader = reader
        self.plan = plan
        self.evidence = evidence
        self.device = device
        self.dtype = dtype
        self.progress = progress
        self.work: WorkFolder | None = None
        self.activations: Activations | None = None
        self.reports: list[LayerReport] = []
        self.seconds = {"calibrate": 0.0, "quantize": 0.0, "total": 0.0}

    def run(self, writer: CheckpointWriter, work: WorkFolder | None = None) -> None:
        """Quantizes every block into `writer`, then copies what is left of the model.

        Blocks that are finished in `work` are taken from there; the others are kept in it.
        """
        started = time.perf_counter()
        self.work = work
        config = self.plan.config
        for name in self._rest():
            check_finite(self.reader, name, self.reader.tensor(name))
        passed = 0
        if isinstance(self.evidence, CalibrationSet):
            self.activations = self._start_activations(self.evidence)
            passed = 0 if work is None else work.restore_hidden(self.activations.hidden)
        for layer in range(config.num_layers):
            self.progress("quantizing blocks", layer, config.num_layers)
            finished = None if work is None else work.block(layer)
            if finished is None:
                finished = self._quantize_block(layer)
            elif layer >= passed:
                self._advance(layer, finished, self._decoded(layer, finished))
            self._write_block(layer, finished, writer)
        self.progress("quantizing blocks", config.num_layers, config.num_layers)
        self._write_rest(writer)
        self.seconds["total"] = time.perf_counter() - started

    def _start_activations(self, calibration: CalibrationSet) -> Activations:
        embedding = load_embedding(self.reader, self.plan.architecture, self.device, self.dtype)
        return Activations(
            calibration.token_ids,
            embedding,
            self.plan.config,
            device=self.device,
            dtype=self.dtype,
        )

    def _load_block(self, layer: int) -> DecoderBlock:
        return load_block(
            self.reader,
            self.plan.config,
            self.plan.architecture,
            layer,
            device=self.device,
            dtype=self.dtype,
        )

    def _quantize_block(self, layer: int) -> FinishedBlock:
        """Block `layer`, quantized and kept for a resumed run; the hidden states move behind it."""
        plan = self.plan
        block = self._load_block(layer)
        with self._timed("calibrate"):
            statistics = self._statistics(layer, block)
        task = self._task(layer, block, statistics)
        with self._timed("quantize"):
            result = plan.method.quantize_block(task, plan.options)
        finished = self._finished(layer, task, result)
        if self.work is not None:
            self.work.add_block(layer, finished)
        self._advance(layer, finished, result.qtensors, block)
        return finished

    def _finished(self, layer: int, task: BlockTask, result: BlockResult) -> FinishedBlock:
        prefix = self._prefix(layer)
        encoded = {}
        for name, qtensor in result.qtensors.items():
            _refuse_bad_scales(prefix + name, qtensor)
            for suffix, tensor in self.plan.format.encode(qtensor.to("cpu")).items():
                encoded[f"{name}.{suffix}"] = tensor
        kept = {n: w for n, w in task.weights.items() if n not in result.qtensors} | task.norms
        dense = {f"{n}.weight": t for n, t in kept.items()}
        return FinishedBlock(
            encoded=encoded,
            dense=dense | {f"{n}.bias": t for n, t in task.biases.items()},
            reports=tuple(replace(r, name=prefix + r.name) for r in result.reports),
        )

    def _decoded(self, layer: int, finished: FinishedBlock) -> dict[str, QuantizedTensor]:
        """The quantized linears of a block that an earlier run finished."""
        if self.activations is None:
            return {}
        found = {}
        for name, scheme in self.plan.block_linears(layer).items():
            start = f"{name}."
            parts = {
                n.removeprefix(start): t for n, t in finished.encoded.items() if n.startswith(start)
            }
            found[name] = self.plan.format.decode(parts, scheme).to(self.device)
        return found

    def _advance(
        self,
        layer: int,
        finished: FinishedBlock,
        qtensors: Mapping[str, QuantizedTensor],
        block: DecoderBlock | None = None,
    ) -> None:
        """Moves the hidden states through block `layer` as it was quantized, if any need them."""
        if self.activations is None or layer + 1 == self.plan.config.num_layers:
            return
        if block is None:
            block = self._load_block(layer)
        _load_results(block, qtensors, finished.dense, self.device, self.dtype)
        with self._timed("calibrate"):
            self.activations.advance(block)
        if self.work is not None:
            self.work.keep_hidden(layer, self.activations.hidden)

    def _prefix(self, layer: int) -> str:
        return self.plan.architecture.block_prefix.format(layer=layer)

    def _statistics(self, layer: int, block: DecoderBlock) -> dict[str, InputStatistics]:
        groups = self.plan.architecture.input_groups
        if self.activations is not None:
            capture = Capture(groups)
            self.activations.observe(block, capture)
            return capture.results(layer)
        if isinstance(self.evidence, StatisticsFile):
            return self.evidence.block(layer, self.device)
        return {}

    def _task(
        self, layer: int, block: DecoderBlock, statistics: Mapping[str, InputStatistics]
    ) -> BlockTask:
        """The block's weights in float32, as stored in the source (not in the compute dtype)."""
        plan = self.plan
        prefix = self._prefix(layer)
        names = [member for g in plan.architecture.input_groups for member in g.members]

        def load(name: str) -> Tensor:
            return self.reader.tensor(prefix + name).to(self.device).float()

        norms = {
            name.removesuffix(".weight")
            for name, _ in block.named_parameters()
            if name.endswith("norm.weight")
        }
        return BlockTask(
            layer=layer,
            config=plan.config,
            groups=plan.architecture.input_groups,
            weights={name: load(f"{name}.weight") for name in names},
            biases={n: load(f"{n}.bias") for n in names if f"{prefix}{n}.bias" in self.reader},
            norms={name: load(f"{name}.weight") for name in sorted(norms)},
            quant={name: s.weight for name, s in plan.block_linears(layer).items()},
            statistics=statistics,
            scale_dtype=plan.config.dtype,
        )

    def _write_block(self, layer: int, finished: FinishedBlock, writer: CheckpointWriter) -> None:
        prefix = self._prefix(layer)
        self.reports += finished.reports
        for name, tensor in finished.encoded.items():
            writer.add(prefix + name, tensor)
        for name, tensor in finished.dense.items():
            writer.add(prefix + name, self._stored(prefix + name, tensor))

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` on the CPU in the dtype that the source has it in."""
        return tensor.to("cpu", self.reader.spec(name).dtype)

    def _rest(self) -> list[str]:
        """Tensors outside the blocks: embedding, final norm, lm_head, whatever the source holds."""
        blocks = tuple(self._prefix(layer) for layer in range(self.plan.config.num_layers))
        return [name for name in self.reader.names() if not name.startswith(blocks)]

    def _write_rest(self, writer: CheckpointWriter) -> None:
        """Everything outside the blocks, lm_head quantized if it is to be."""
        plan = self.plan
        head = f"{plan.architecture.lm_head}.weight"
        for name in self._rest():
            if not (name == head and plan.quantizes_lm_head):
                writer.add(name, self.reader.tensor(name))
        if plan.quantizes_lm_head:
            self._quantize_lm_head(
                head if head in self.reader else plan.architecture.embedding, writer
            )

    def _quantize_lm_head(self, source: str, writer: CheckpointWriter) -> None:
        """Rounds lm_head to nearest: no method sees the final hidden states."""
        name = self.plan.architecture.lm_head
        quant = self.plan.layers[name].weight
        weight = self.reader.tensor(source).to(self.device).float()
        qtensor = quantize(weight, quant, scale_dtype=self.plan.config.dtype)
        _refuse_bad_scales(name, qtensor)
        weight_error, _ = relative_errors(weight, qtensor.dequantize(weight.dtype), None)
        writer.add_linear(name, qtensor.to("cpu"), self.plan.format)
        self.reports.append(
            LayerReport(
                name=name,
                scheme=str(quant),
                method="rtn",
                weight_error=weight_error,
                output_error=None,
            )
        )

    def _timed(self, what: str) -> "_Timer":
        return _Timer(self.seconds, what, self.device)


class _Timer:
    """Adds the seconds inside a ``with`` to an entry of a dictionary, device work included."""

    def __init__(self, seconds: dict[str, float], what: str, device: torch.device) -> None:
        self.seconds, self.what, self.device = seconds, what, device

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> None:
        self.started = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.what] += self._now() - self.started


def _load_results(
    block: DecoderBlock,
    qtensors: Mapping[str, QuantizedTensor],
    dense: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Puts the quantized weights, dequantized, and what changed beside them into `block`."""
    owners = {name.rpartition(".")[0] for name in dense}
    for name in sorted(owners | qtensors.keys()):
        module = block.get_submodule(name)
        weight = (
            qtensors[name].dequantize(dtype)
            if name in qtensors
            else dense[f"{name}.weight"].to(device, dtype)
        )
        if isinstance(module, Linear):
            bias = dense.get(f"{name}.bias")
            module.load_dense(weight, None if bias is None else bias.to(device, dtype))
        else:
            module.weight = torch.nn.Parameter(weight, requires_grad=False)


def _refuse_bad_scales(name: str, qtensor: QuantizedTensor) -> None:
    scale = qtensor.scale
    if not bool(torch.isfinite(scale).all()) or bool((scale == 0).any()):
        raise CheckpointError(
            f"the scales of {name} are zero, NaN or infinite in {scale.dtype}: its weights hold "
            "NaN or values that this dtype cannot scale; check the source model"
        )


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
    progress: Progress = silent,
) -> QuantizeReport:
    """Quantizes `source` into the folder `output` as `plan` says.

    The folder appears only when it is complete, has its manifest, and was opened again and
    verified. Finished blocks are kept beside it (`quantforge.resume`) until then; `resume` goes on
    from those of an earlier run, and `resume_every` says after how many blocks the hidden states
    are written too (None: by their size; 0: nothing is kept). Raises what its parts raise, naming
    files and layers.
    """
    if resume and resume_every == 0:
        raise UsageError("--resume needs kept progress; --resume-every 0 keeps none")
    reader = CheckpointReader(source)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    quantizer = Quantizer(reader, plan, evidence, device=device, dtype=dtype, progress=progress)
    with CheckpointWriter(
        output, overwrite=overwrite, source=source, expected_bytes=plan.planned_bytes
    ) as writer:
        hashes = reader.file_hashes(progress)
        fingerprint = make_fingerprint(hashes, plan, evidence, device, dtype)
        needed = plan.planned_bytes + progress_bytes(plan, evidence, dtype)
        with _work(output, fingerprint, resume, resume_every, needed) as work:
            quantizer.run(writer, work)
            for path in reader.side_files():
                writer.copy_file(path)
            writer.commit(
                _config(reader, plan),
                manifest=_manifest(reader, hashes, recipe, plan, evidence, quantizer.reports),
                check=lambda folder: _verify(folder, plan),
            )
    return QuantizeReport(
        output=output,
        layers=tuple(quantizer.reports),
        seconds=quantizer.seconds,
        written_bytes=plan.planned_bytes,
        peak_device_bytes=(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0),
        peak_host_bytes=peak_host_bytes(),
    )


def _work(
    output: Path,
    fingerprint: Mapping[str, object],
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
    written = CheckpointReader(folder).num_weight_bytes()
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
    group = SchemeGroup(targets=("Linear",), scheme=plan.scheme)
    config = dict(reader.config)
    config["quantization_config"] = plan.format.quantization_config([group], plan.ignore)
    if plan.quantizes_lm_head:
        config["tie_word_embeddings"] = False
    return config


def _manifest(
    reader: CheckpointReader,
    hashes: Mapping[str, str],
    recipe: Recipe,
    plan: QuantizePlan,
    evidence: Evidence | None,
    reports: list[LayerReport],
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
        source={"name": reader.folder.name, "hashes": dict(hashes)},
        recipe=asdict(recipe),
        scheme=str(plan.scheme),
        method=plan.method.name,
        seed=recipe.calibration.seed,
        calibration=calibration,
        layers=tuple(asdict(r) for r in reports),
    )
