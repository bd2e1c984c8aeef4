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
from quantforge.errors import CalibrationError, CheckpointError
from quantforge.methods.base import BlockTask, LayerReport, relative_errors
from quantforge.models.decoder import DecoderBlock
from quantforge.models.expected import check_finite
from quantforge.models.linear import Linear
from quantforge.models.loader import load_block, load_embedding
from quantforge.plan import QuantizePlan
from quantforge.progress import Progress, silent
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.recipe import Recipe

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
        self.activations: Activations | None = None
        self.reports: list[LayerReport] = []
        self.seconds = {"calibrate": 0.0, "quantize": 0.0, "total": 0.0}

    def run(self, writer: CheckpointWriter) -> None:
        """Quantizes every block into `writer`, then copies what is left of the model."""
        started = time.perf_counter()
        config = self.plan.config
        for name in self._rest():
            check_finite(self.reader, name, self.reader.tensor(name))
        if isinstance(self.evidence, CalibrationSet):
            self.activations = self._start_activations(self.evidence)
        for layer in range(config.num_layers):
            self.progress("quantizing blocks", layer, config.num_layers)
            self._quantize_block(layer, writer)
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

    def _quantize_block(self, layer: int, writer: CheckpointWriter) -> None:
        plan = self.plan
        block = load_block(
            self.reader,
            plan.config,
            plan.architecture,
            layer,
            device=self.device,
            dtype=self.dtype,
        )
        with self._timed("calibrate"):
            statistics = self._statistics(layer, block)
        task = self._task(layer, block, statistics)
        with self._timed("quantize"):
            result = plan.method.quantize_block(task, plan.options)
        prefix = plan.architecture.block_prefix.format(layer=layer)
        self.reports += [replace(r, name=prefix + r.name) for r in result.reports]
        self._write_block(prefix, task, result.qtensors, writer)
        if self.activations is not None and layer + 1 < plan.config.num_layers:
            _load_results(block, task, result.qtensors, self.dtype)
            with self._timed("calibrate"):
                self.activations.advance(block)

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
        prefix = plan.architecture.block_prefix.format(layer=layer)
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

    def _write_block(
        self,
        prefix: str,
        task: BlockTask,
        qtensors: Mapping[str, QuantizedTensor],
        writer: CheckpointWriter,
    ) -> None:
        for name, qtensor in qtensors.items():
            _refuse_bad_scales(prefix + name, qtensor)
            writer.add_linear(prefix + name, qtensor.to("cpu"), self.plan.format)
        dense = {n: w for n, w in task.weights.items() if n not in qtensors} | task.norms
        for name, tensor in dense.items():
            writer.add(f"{prefix}{name}.weight", self._stored(f"{prefix}{name}.weight", tensor))
        for name, tensor in task.biases.items():
            writer.add(f"{prefix}{name}.bias", self._stored(f"{prefix}{name}.bias", tensor))

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` on the CPU in the dtype that the source has it in."""
        return tensor.to("cpu", self.reader.spec(name).dtype)

    def _rest(self) -> list[str]:
        """Tensors outside the blocks: embedding, final norm, lm_head, whatever the source holds."""
        architecture = self.plan.architecture
        blocks = tuple(
            architecture.block_prefix.format(layer=layer)
            for layer in range(self.plan.config.num_layers)
        )
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
    task: BlockTask,
    qtensors: Mapping[str, QuantizedTensor],
    dtype: torch.dtype,
) -> None:
    """Puts the quantized weights, dequantized, and the changed norms into `block`."""
    for name, weight in task.weights.items():
        linear = block.get_submodule(name)
        assert isinstance(linear, Linear)
        bias = task.biases.get(name)
        dense = qtensors[name].dequantize(dtype) if name in qtensors else weight.to(dtype)
        linear.load_dense(dense, None if bias is None else bias.to(dtype))
    for name, norm in task.norms.items():
        module = block.get_submodule(name)
        module.weight = torch.nn.Parameter(norm.to(dtype), requires_grad=False)


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
    progress: Progress = silent,
) -> QuantizeReport:
    """Quantizes `source` into the folder `output` as `plan` says.

    The folder appears only when it is complete, has its manifest, and was opened again and
    verified. Raises what its parts raise, naming files and layers.
    """
    reader = CheckpointReader(source)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    quantizer = Quantizer(reader, plan, evidence, device=device, dtype=dtype, progress=progress)
    with CheckpointWriter(
        output, overwrite=overwrite, source=source, expected_bytes=plan.planned_bytes
    ) as writer:
        quantizer.run(writer)
        for path in reader.side_files():
            writer.copy_file(path)
        manifest = _manifest(reader, recipe, plan, evidence, quantizer.reports, progress)
        writer.commit(
            _config(reader, plan), manifest=manifest, check=lambda folder: _verify(folder, plan)
        )
    return QuantizeReport(
        output=output,
        layers=tuple(quantizer.reports),
        seconds=quantizer.seconds,
        written_bytes=plan.planned_bytes,
        peak_device_bytes=(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0),
        peak_host_bytes=peak_host_bytes(),
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
    recipe: Recipe,
    plan: QuantizePlan,
    evidence: Evidence | None,
    reports: list[LayerReport],
    progress: Progress,
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
        source={"name": reader.folder.name, "hashes": reader.file_hashes(progress)},
        recipe=asdict(recipe),
        scheme=str(plan.scheme),
        method=plan.method.name,
        seed=recipe.calibration.seed,
        calibration=calibration,
        layers=tuple(asdict(r) for r in reports),
    )
