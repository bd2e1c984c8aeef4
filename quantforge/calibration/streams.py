"""What methods learn beyond one pass over all samples: drift, held-out samples, single groups.

A block that is quantized reads x, made by the quantized blocks before it; the full-precision model
would have read f. With a second stream of hidden states, moved through the blocks as they were, the
drift ``d = f - x`` is seen too. The error that matters is then ``|W f - V x|^2`` for a rounded
weight V, which follows from the moments of x and d (GPTAQ, Li et al., arXiv 2504.02692; Qronos,
Zhang et al., arXiv 2505.11695).

The last samples may be held out: their moments compare candidates and fit nothing.

Legend: K in features, N out features.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor, nn

from quantforge.calibration.activations import Activations
from quantforge.calibration.capture import Capture, InputStatistics
from quantforge.errors import CalibrationError
from quantforge.models.arch.base import InputGroup
from quantforge.models.decoder import DecoderBlock
from quantforge.precision import tf32_products


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Mean products of one input x and its drift d, float32 [K, K].

    `inputs` is ``E[x x']``, `cross` ``E[d x']``, `drift` ``E[d d']``; the last two are None where x
    is taken for what the full-precision model reads.
    """

    inputs: Tensor
    cross: Tensor | None = None
    drift: Tensor | None = None

    def error(self, weight_NK: Tensor, restored_NK: Tensor) -> float:
        """Mean of ``|W (x + d) - V x|^2``, V the restored weight.

        With ``D = V - W`` it is ``tr(D E[xx'] D') - 2 tr(W E[dx'] D') + tr(W E[dd'] W')``, which
        loses no digits where the drift is small.
        """
        delta = restored_NK - weight_NK
        found = float(((delta @ self.inputs) * delta).sum())
        if self.cross is not None and self.drift is not None:
            found -= 2 * float(((weight_NK @ self.cross) * delta).sum())
            found += float(((weight_NK @ self.drift) * weight_NK).sum())
        return found

    def scaled(self, scale_K: Tensor) -> "Moments":
        """The moments of ``x / s`` and ``d / s``."""

        def divide(moment: Tensor | None) -> Tensor | None:
            return None if moment is None else moment / scale_K.unsqueeze(0) / scale_K.unsqueeze(1)

        inputs = divide(self.inputs)
        assert inputs is not None
        return Moments(inputs=inputs, cross=divide(self.cross), drift=divide(self.drift))


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """By input group: statistics of the samples to fit, `cross` ``E[d x']`` of the same, and the
    moments of the samples held out. What was not asked for is empty."""

    statistics: Mapping[str, InputStatistics] = field(default_factory=dict)
    cross: Mapping[str, Tensor] = field(default_factory=dict)
    held_out: Mapping[str, Moments] = field(default_factory=dict)


def num_held_out(num_samples: int, share: float) -> int:
    """How many of `num_samples` are held out: none for share 0, else at least one.

    Raises `CalibrationError` where nothing would be left to fit.
    """
    if share == 0:
        return 0
    held = max(1, round(num_samples * share))
    if held >= num_samples:
        raise CalibrationError(
            f"{num_samples} calibration sample{'' if num_samples == 1 else 's'} cannot be split "
            f"into samples to fit and {held} held out to compare candidates (held_out {share}); "
            "give more samples, or a method and options that compare nothing"
        )
    return held


class Streams:
    """The calibration samples in front of one block: as the quantized model sees them, and
    (`reference`, or None) as the full-precision model does."""

    def __init__(
        self, activations: Activations, reference: Activations | None, *, held_out: float
    ) -> None:
        self.activations = activations
        self.reference = reference
        self.num_fit = activations.num_samples - num_held_out(activations.num_samples, held_out)

    def observe(
        self,
        layer: int,
        block: DecoderBlock,
        groups: Sequence[InputGroup],
        *,
        reference_block: DecoderBlock | None = None,
        stop: bool = False,
    ) -> Observed:
        """What `groups` of `block` read; with `stop` passes end in front of the last of them.

        `reference_block` moves the reference; without it no drift is seen. The hidden states stay
        as they are. Raises `CalibrationError` naming a group that is not finite.
        """
        names = [group.name for group in groups]
        blocks = (block, reference_block)
        total = self.activations.num_samples
        fit = self._pass(range(self.num_fit), blocks, groups, stop, only_cross=True)
        statistics = fit.capture.results(layer, self.activations.length)
        cross = {n: fit.drifts[n].cross() for n in names} if reference_block is not None else {}
        if self.num_fit == total:
            return Observed(statistics=statistics, cross=cross)
        held = self._pass(range(self.num_fit, total), blocks, groups, stop, only_cross=False)
        moments = {
            name: Moments(
                inputs=seen.second_moment,
                cross=held.drifts[name].cross() if reference_block is not None else None,
                drift=held.drifts[name].moment() if reference_block is not None else None,
            )
            for name, seen in held.capture.results(layer).items()
        }
        return Observed(statistics=statistics, cross=cross, held_out=moments)

    def _pass(
        self,
        samples: range,
        blocks: tuple[DecoderBlock, DecoderBlock | None],
        groups: Sequence[InputGroup],
        stop: bool,
        *,
        only_cross: bool,
    ) -> "_Pass":
        """One run of `samples` through both blocks."""
        block, reference_block = blocks
        found = _Pass(capture=Capture(groups), drifts={g.name: _Drift(only_cross) for g in groups})
        step = self.activations.batch_samples
        for first in range(samples.start, samples.stop, step):
            count = min(step, samples.stop - first)
            full: dict[str, Tensor] = {}
            if reference_block is not None:
                assert self.reference is not None
                with _keeping(reference_block, groups, full, stop), tf32_products():
                    self.reference.forward(reference_block, first, count)
            seen: dict[str, Tensor] = {}
            keeping = reference_block is not None or stop
            with (
                tf32_products(),
                found.capture.watching(block),
                _keeping(block, groups, seen, stop) if keeping else nullcontext(),
            ):
                self.activations.forward(block, first, count)
            for name, x_MK in full.items():
                found.drifts[name].add(x_MK, seen[name])
        return found


class _Drift:
    """Sums of the products of an input with its drift, and of the drift with itself."""

    def __init__(self, only_cross: bool) -> None:
        self.only_cross = only_cross
        self._cross: Tensor | None = None
        self._moment: Tensor | None = None
        self._num_tokens = 0

    def add(self, full_MK: Tensor, seen_MK: Tensor) -> None:
        wide = seen_MK.float()
        drift = full_MK.float() - wide
        cross = drift.T @ wide
        self._cross = cross if self._cross is None else self._cross.add_(cross)
        if not self.only_cross:
            moment = drift.T @ drift
            self._moment = moment if self._moment is None else self._moment.add_(moment)
        self._num_tokens += wide.shape[0]

    def cross(self) -> Tensor:
        assert self._cross is not None
        return self._cross / self._num_tokens

    def moment(self) -> Tensor:
        assert self._moment is not None
        return self._moment / self._num_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pass:
    capture: Capture
    drifts: dict[str, _Drift]


class _Stop(Exception):
    """Ends a forward pass in front of the last group that is wanted."""


@contextmanager
def _keeping(
    block: DecoderBlock, groups: Sequence[InputGroup], kept: dict[str, Tensor], stop: bool
) -> Iterator[None]:
    """A forward pass of `block` leaves the inputs of `groups` in `kept`; with `stop` it ends there.

    The groups are in the order in which the block computes them.
    """
    handles = []
    for group in groups:
        ends = stop and group is groups[-1]

        def hook(
            _: nn.Module, inputs: tuple[Tensor], name: str = group.name, ends: bool = ends
        ) -> None:
            kept[name] = inputs[0]
            if ends:
                raise _Stop

        module = block.get_submodule(group.members[0])
        handles.append(module.register_forward_pre_hook(hook))
    try:
        yield
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
