"""One run of a plan over the blocks of a model: load, calibrate, quantize, hand on to be written.

Never more than one block of weights is held in memory beside the embedding. The activations of the
calibration samples go from block to block, through the blocks as they were quantized, so that later
blocks see the errors of earlier ones.
"""

import math
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantforge.background import Background
from quantforge.calibration.activations import Activations
from quantforge.calibration.capture import Capture, InputStatistics
from quantforge.calibration.data import CalibrationSet
from quantforge.calibration.kv_ranges import calibrate_kv_scales
from quantforge.calibration.ranges import RangeCapture, static_scale
from quantforge.calibration.statistics import StatisticsFile
from quantforge.calibration.streams import Observed, Streams
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.errors import CalibrationError, CheckpointError
from quantforge.methods._run import run_method
from quantforge.methods.base import (
    BlockResult,
    BlockTask,
    LayerReport,
    Needs,
    join_results,
    relative_errors,
)
from quantforge.models.decoder import DecoderBlock
from quantforge.models.expected import check_finite
from quantforge.models.linear import Linear
from quantforge.models.loader import load_block, load_embedding
from quantforge.plan import QuantizePlan
from quantforge.progress import Progress, silent
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.resume import (
    FinishedBlock,
    WorkFolder,
)
from quantforge.stopwatch import Stopwatch

NO_INPUTS = "no method sees the inputs of lm_head"

Evidence = CalibrationSet | StatisticsFile
"""What a method learns from: text to run through the model, or statistics taken earlier."""


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
        scratch: Path | None = None,
    ) -> None:
        if plan.method.needs_statistics and evidence is None:
            raise CalibrationError(
                f"method {plan.method.name} needs calibration data; give a data set, or use "
                "a method without (rtn)"
            )
        if plan.observer is not None and not isinstance(evidence, CalibrationSet):
            raise CalibrationError(
                f"scheme {plan.scheme} has static scales of inputs, which are measured on "
                "calibration text; give text (--calibration bundled), no statistics file"
            )
        if plan.kv_cache is not None and not isinstance(evidence, CalibrationSet):
            raise CalibrationError(
                "scales of the KV cache are calibrated on text, which statistics of 'quantforge "
                "calibrate' do not hold; give text with --calibration, or leave kv_cache at none"
            )
        self.needs: Needs = plan.method.needs(plan.options)
        _refuse_statistics_file(plan, self.needs, evidence)
        self.reader = reader
        self.plan = plan
        self.evidence = evidence
        self.device = device
        self.dtype = dtype
        self.progress = progress
        self.scratch = scratch
        self.work: WorkFolder | None = None
        self.activations: Activations | None = None
        self.streams: Streams | None = None
        self.reports: list[LayerReport] = []
        self.watch = Stopwatch(device)

    def run(
        self,
        writer: CheckpointWriter,
        work: WorkFolder | None = None,
        before_blocks: Callable[[], None] | None = None,
    ) -> None:
        """Quantizes every block into `writer`, with what is outside the blocks before them.

        Blocks that are finished in `work` are taken from there; the others are kept in it. All
        writing goes on behind the work on the next block, `before_blocks` as the first of it.
        """
        self.work, self.writer = work, writer
        with Background() as self.background:
            if before_blocks is not None:
                self.background.submit(before_blocks)
            self._run_blocks(writer)
            with self.watch.measure("wait"):
                self.background.wait()
        self._write_rest(writer)

    def _run_blocks(self, writer: CheckpointWriter) -> None:
        """All but the rest; ends before the background does."""
        config, work = self.plan.config, self.work
        with self.watch.measure("embed"):
            for name in self._rest():
                check_finite(self.reader, name, self.reader.tensor(name))
            self._behind(lambda: self._write_dense(writer))
            passed = 0
            if isinstance(self.evidence, CalibrationSet):
                self.activations = self._start_activations(self.evidence)
                self.streams = self._start_streams(self.activations, self.evidence)
                passed = 0 if work is None else work.restore_hidden(*self._hidden())
        for layer in range(config.num_layers):
            self.progress("quantizing blocks", layer, config.num_layers)
            finished = None if work is None else work.block(layer)
            if finished is None:
                self._quantize_block(layer)
                continue
            if layer >= passed:
                self._advance(layer, finished.dense, self._decoded(layer, finished))
            self.reports += finished.reports
            self._behind(partial(self._write_block, layer, finished, writer))
        self.progress("quantizing blocks", config.num_layers, config.num_layers)

    def _behind(self, work: Callable[[], None]) -> None:
        """Hands `work` to the background; its seconds count as ``write``."""

        def timed() -> None:
            with self.watch.measure("write", on_device=False):
                work()

        with self.watch.measure("wait", on_device=False):
            self.background.submit(timed)

    def _start_activations(self, calibration: CalibrationSet) -> Activations:
        embedding = load_embedding(self.reader, self.plan.architecture, self.device, self.dtype)
        return Activations(
            calibration.token_ids,
            embedding,
            self.plan.config,
            device=self.device,
            dtype=self.dtype,
            folder=self.scratch,
        )

    def _start_streams(
        self, activations: Activations, calibration: CalibrationSet
    ) -> Streams | None:
        """What sees more than a plain pass does, where the method needs it."""
        if self.needs == Needs():
            return None
        reference = self._start_activations(calibration) if self.needs.mismatch else None
        return Streams(activations, reference, held_out=self.needs.held_out)

    def _hidden(self) -> list[Tensor]:
        """The hidden states of every stream."""
        assert self.activations is not None
        reference = None if self.streams is None else self.streams.reference
        streams = [self.activations] if reference is None else [self.activations, reference]
        return [stream.hidden for stream in streams]

    def _load_block(self, layer: int) -> DecoderBlock:
        return load_block(
            self.reader,
            self.plan.config,
            self.plan.architecture,
            layer,
            device=self.device,
            dtype=self.dtype,
            fused=True,
        )

    def _quantize_block(self, layer: int) -> None:
        """Quantizes block `layer`, has it kept and written, and moves the hidden states behind it.

        What the method needed is let go before the hidden states move.
        """
        plan = self.plan
        with self.watch.measure("load"):
            block = self._load_block(layer)
        with self.watch.measure("observe"):
            seen = self._observe(layer, block)
        with self.watch.measure("load"):
            task = self._task(layer, block, seen)
        del seen
        streams = self.streams
        if self.needs.true_sequential and streams is not None:
            rounding = partial(self._round_in_turn, task, block, streams)
            result = run_method(plan.method, task, plan.options, rounding)
        else:
            with self.watch.measure("quantize"):
                result = run_method(plan.method, task, plan.options)
        if plan.observer is not None:
            result = self._with_input_scales(layer, block, task, result)
        with self.watch.measure("encode"):
            qtensors = self._on_host(layer, result)
            dense = _dense(task, without=result.qtensors)
        del task
        scales: dict[str, Tensor] = {}
        if plan.kv_cache is not None:
            scales = self._kv_scales(layer, block, dense, result.qtensors)
        prefix = self._prefix(layer)
        bits = {name: self._stored_bits(prefix + name, q) for name, q in qtensors.items()}
        reports = tuple(
            replace(r, name=prefix + r.name, bits_per_weight=bits[r.name]) for r in result.reports
        )
        self.reports += reports

        def write() -> None:
            encoded = self._encoded(prefix, qtensors) | scales
            finished = FinishedBlock(encoded=encoded, dense=dense, reports=reports)
            if self.work is not None:
                self.work.add_block(layer, finished)
            self._write_block(layer, finished, self.writer)

        self._behind(write)
        self._advance(layer, dense, result.qtensors, block)

    def _round_in_turn(self, task: BlockTask, block: DecoderBlock, streams: Streams) -> BlockResult:
        """True-sequential order: each input group is seen again behind the ones rounded before it.

        What moves between layers moves first. `block` is left with the rounded weights.
        """
        method, options, layer = self.plan.method, self.plan.options, task.layer
        assert method.round_group is not None
        prepared = None
        if method.prepare is not None:
            with self.watch.measure("quantize"):
                prepared = method.prepare(task, options)
        reference = None
        if streams.reference is not None:
            reference = self._load_block(layer)
            _load_results(reference, {}, _dense(task), self.device, self.dtype)
        _load_results(block, {}, _dense(task), self.device, self.dtype)
        parts = []
        for group in task.groups:
            with self.watch.measure("observe"):
                seen = streams.observe(layer, block, [group], reference_block=reference, stop=True)
            task.observe(group.name, seen)
            with self.watch.measure("quantize"):
                part = method.round_group(task, group, options, prepared)
            biases = {f"{n}.bias": task.biases[n] for n in part.qtensors if n in task.biases}
            _load_results(block, part.qtensors, biases, self.device, self.dtype)
            parts.append(part)
        return join_results(parts)

    def _on_host(self, layer: int, result: BlockResult) -> dict[str, QuantizedTensor]:
        found = {}
        for name, qtensor in result.qtensors.items():
            _refuse_bad_scales(self._prefix(layer) + name, qtensor)
            found[name] = qtensor.to("cpu")
        return found

    def _stored_bits(self, name: str, qtensor: QuantizedTensor) -> float:
        """Bits a weight that the linear `name` takes on disk, scales and zero points included."""
        scheme = self.plan.layers[name]
        layout = self.plan.format_of(name)
        specs = layout.tensors(qtensor.shape, scheme, qtensor.scale.dtype)
        return 8 * sum(spec.num_bytes for spec in specs.values()) / math.prod(qtensor.shape)

    def _encoded(self, prefix: str, qtensors: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
        return {
            f"{name}.{suffix}": tensor
            for name, qtensor in qtensors.items()
            for suffix, tensor in self.plan.format_of(prefix + name).encode(qtensor).items()
        }

    def _kv_scales(
        self,
        layer: int,
        block: DecoderBlock,
        dense: Mapping[str, Tensor],
        qtensors: Mapping[str, QuantizedTensor],
    ) -> dict[str, Tensor]:
        """The scales of the block's keys and values, as the quantized block makes them."""
        assert self.plan.kv_cache is not None
        assert self.activations is not None, "checked when the run was made"
        _load_results(block, qtensors, dense, self.device, self.dtype)
        with self.watch.measure("observe"):
            return calibrate_kv_scales(layer, block, self.activations, self.plan.kv_cache)

    def _with_input_scales(
        self, layer: int, block: DecoderBlock, task: BlockTask, result: BlockResult
    ) -> BlockResult:
        """`result` with the static scales of its inputs, seen in the block as it was quantized."""
        assert self.activations is not None, "text was asked for"
        assert self.plan.observer is not None
        _load_results(
            block, result.qtensors, _dense(task, without=result.qtensors), self.device, self.dtype
        )
        capture = RangeCapture(task.groups, self.plan.observer)
        with self.watch.measure("observe"):
            self.activations.observe(block, capture)
        schemes, qtensors = self.plan.block_linears(layer), dict(result.qtensors)
        for group, seen in capture.results(layer).items():
            for name in (n for n in group.members if n in qtensors):
                activation = schemes[name].activation
                if activation is not None and not activation.dynamic:
                    scale = static_scale(seen, activation, self.plan.observer, task.scale_dtype)
                    qtensors[name] = replace(qtensors[name], input_scale=scale)
        return replace(result, qtensors=qtensors)

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
        dense: Mapping[str, Tensor],
        qtensors: Mapping[str, QuantizedTensor],
        block: DecoderBlock | None = None,
    ) -> None:
        """Moves the hidden states through block `layer` as it was quantized, if any need them."""
        if self.activations is None or layer + 1 == self.plan.config.num_layers:
            return
        if block is None:
            with self.watch.measure("load"):
                block = self._load_block(layer)
        if self.streams is not None and self.streams.reference is not None:
            with self.watch.measure("load"):
                original = self._load_block(layer)
            with self.watch.measure("advance"):
                self.streams.reference.advance(original)
        with self.watch.measure("advance"):
            _load_results(block, qtensors, dense, self.device, self.dtype)
            self.activations.advance(block)
        if self.work is not None:
            with self.watch.measure("hidden"):
                self.work.keep_hidden(layer, *self._hidden())

    def _prefix(self, layer: int) -> str:
        return self.plan.architecture.block_prefix.format(layer=layer)

    def _observe(self, layer: int, block: DecoderBlock) -> Observed:
        """What the method sees of the block before it starts."""
        if self.streams is None:
            return Observed(statistics=self._statistics(layer, block))
        if self.needs.true_sequential and self.plan.method.prepare is None:
            return Observed()
        return self.streams.observe(layer, block, self.plan.architecture.input_groups)

    def _statistics(self, layer: int, block: DecoderBlock) -> dict[str, InputStatistics]:
        groups = self.plan.architecture.input_groups
        wanted = self.plan.method.needs_statistics or self.plan.observer is not None
        if self.activations is not None and wanted:
            capture = Capture(groups)
            self.activations.observe(block, capture)
            return capture.results(layer, self.activations.length)
        if isinstance(self.evidence, StatisticsFile):
            return self.evidence.block(layer, self.device)
        return {}

    def _task(self, layer: int, block: DecoderBlock, seen: Observed) -> BlockTask:
        """The block's weights in float32, as stored in the source (not in the compute dtype)."""
        plan = self.plan
        prefix = self._prefix(layer)
        names = [member for g in plan.architecture.input_groups for member in g.members]

        def load(name: str) -> Tensor:
            if self.device.type != "cpu" and self.reader.spec(prefix + name).dtype == self.dtype:
                module, _, kind = name.rpartition(".")  # it was read for the block, bit for bit
                there: Tensor = getattr(block.get_submodule(module), kind)
                return there.detach().to(torch.float32, copy=True)
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
            statistics=seen.statistics,
            scale_dtype=plan.config.dtype,
            cross=seen.cross,
            held_out=seen.held_out,
        )

    def _write_block(self, layer: int, finished: FinishedBlock, writer: CheckpointWriter) -> None:
        prefix = self._prefix(layer)
        for name, tensor in finished.encoded.items():
            writer.add(prefix + name, tensor)
        for name, tensor in finished.dense.items():
            writer.add(prefix + name, self._stored(prefix + name, tensor))

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` on the CPU in the dtype that the source has it in."""
        return tensor.to("cpu", self.reader.spec(name).dtype)

    def _rest(self) -> list[str]:
        """Tensors outside the blocks (embedding, final norm, lm_head), and what is left in them."""
        blocks = tuple(self._prefix(layer) for layer in range(self.plan.config.num_layers))
        extra = set(self.plan.extra)
        return [n for n in self.reader.names() if n in extra or not n.startswith(blocks)]

    def _write_dense(self, writer: CheckpointWriter) -> None:
        """Everything outside the blocks but an lm_head that is to be quantized."""
        head = f"{self.plan.architecture.lm_head}.weight"
        for name in self._rest():
            if not (name == head and self.plan.quantizes_lm_head):
                writer.add(name, self.reader.tensor(name))

    def _write_rest(self, writer: CheckpointWriter) -> None:
        """What comes last: lm_head, if it is to be quantized."""
        if self.plan.quantizes_lm_head:
            self._quantize_lm_head(writer)

    def _quantize_lm_head(self, writer: CheckpointWriter) -> None:
        """Rounds lm_head to nearest: no method sees the final hidden states."""
        name = self.plan.architecture.lm_head
        held = f"{name}.weight" in self.reader
        source = f"{name}.weight" if held else self.plan.architecture.embedding
        quant = self.plan.layers[name].weight
        started = time.perf_counter()
        weight = self.reader.tensor(source).to(self.device).float()
        qtensor = quantize(weight, quant, scale_dtype=self.plan.config.dtype)
        _refuse_bad_scales(name, qtensor)
        weight_error, _ = relative_errors(weight, qtensor.dequantize(weight.dtype), None)
        stored = self.plan.format_of(name).encode(qtensor.to("cpu"))
        for suffix, tensor in stored.items():
            writer.add(f"{name}.{suffix}", tensor)
        asked = self.plan.method.name
        self.reports.append(
            LayerReport(
                name=name,
                scheme=str(quant),
                method="rtn",
                weight_error=weight_error,
                output_error=None,
                notes={} if asked == "rtn" else {"fallback": f"rtn: {NO_INPUTS}"},
                bits_per_weight=self._stored_bits(name, qtensor),
                seconds=round(time.perf_counter() - started, 4),
            )
        )


def _refuse_statistics_file(plan: QuantizePlan, needs: Needs, evidence: Evidence | None) -> None:
    """Raises `CalibrationError` where statistics taken earlier cannot give what is needed."""
    if needs == Needs() or not isinstance(evidence, StatisticsFile):
        return
    wants = {
        "true_sequential": needs.true_sequential and not needs.mismatch,
        "mismatch": needs.mismatch,
        "held-out samples": needs.held_out > 0,
    }
    named = ", ".join(name for name, wanted in wants.items() if wanted)
    raise CalibrationError(
        f"method {plan.method.name} needs text for {named}, but {evidence.path.name} holds "
        "statistics only, taken of the unquantized model; give calibration text, or use a method "
        "and options that need no more than statistics"
    )


def _dense(task: BlockTask, without: Container[str] = ()) -> dict[str, Tensor]:
    """Weights but those of the linears in `without`, norms and biases, by tensor name."""
    kept = {n: w for n, w in task.weights.items() if n not in without} | task.norms
    dense = {f"{n}.weight": t for n, t in kept.items()}
    return dense | {f"{n}.bias": t for n, t in task.biases.items()}


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
    inputs = qtensor.input_scale
    if inputs is not None and (not bool(inputs.isfinite()) or float(inputs) == 0):
        raise CalibrationError(
            f"the input scale of {name} is {float(inputs)} in {inputs.dtype}: its inputs are too "
            "large or too small for this dtype; use a scheme with dynamic scales"
        )
    scale = qtensor.scale
    if not bool(torch.isfinite(scale).all()) or bool((scale == 0).any()):
        raise CheckpointError(
            f"the scales of {name} are zero, NaN or infinite in {scale.dtype}: its weights hold "
            "NaN or values that this dtype cannot scale; check the source model"
        )
