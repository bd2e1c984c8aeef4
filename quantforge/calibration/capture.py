"""Statistics of the tensors that a block's linears read, taken while calibration text runs through.

For each input group (linears that read the same tensor X [tokens, K]) we keep the Gram matrix
``X.T @ X``, the mean and the largest magnitude of each channel, and the number of tokens. The
squared output error of a changed weight follows from the Gram matrix alone, ``tr(dW G dW.T)``,
which is what lets methods search without running activations again.

Legend: K in features.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantforge.errors import CalibrationError
from quantforge.models.arch.base import InputGroup
from quantforge.models.decoder import DecoderBlock


@dataclass(frozen=True, kw_only=True, eq=False)
class InputStatistics:
    """What was seen of one input tensor, all float32.

    `second_moment` is the Gram matrix [K, K], or its diagonal [K], divided by `num_tokens`;
    `mean_abs` and `absmax` are [K].
    """

    second_moment: Tensor
    mean_abs: Tensor
    absmax: Tensor
    num_tokens: int

    @property
    def is_diagonal(self) -> bool:
        return self.second_moment.dim() == 1

    def to(self, device: torch.device) -> "InputStatistics":
        """The same statistics on `device`."""
        return InputStatistics(
            second_moment=self.second_moment.to(device),
            mean_abs=self.mean_abs.to(device),
            absmax=self.absmax.to(device),
            num_tokens=self.num_tokens,
        )


class _Accumulator:
    """Sums over the batches of one input group."""

    def __init__(self, diagonal: bool) -> None:
        self.diagonal = diagonal
        self.moment: Tensor | None = None
        self.abs_sum: Tensor | None = None
        self.absmax: Tensor | None = None
        self.num_tokens = 0

    def add(self, x_MK: Tensor) -> None:
        wide = x_MK.detach().reshape(-1, x_MK.shape[-1]).float()
        magnitude = wide.abs()
        moment = wide.square().sum(0) if self.diagonal else wide.T @ wide
        if self.moment is None or self.abs_sum is None or self.absmax is None:
            self.moment, self.abs_sum = moment, magnitude.sum(0)
            self.absmax = magnitude.amax(0)
        else:
            self.moment += moment
            self.abs_sum += magnitude.sum(0)
            torch.maximum(self.absmax, magnitude.amax(0), out=self.absmax)
        self.num_tokens += wide.shape[0]

    def result(self) -> InputStatistics:
        assert self.moment is not None
        assert self.abs_sum is not None
        assert self.absmax is not None
        return InputStatistics(
            second_moment=self.moment / self.num_tokens,
            mean_abs=self.abs_sum / self.num_tokens,
            absmax=self.absmax,
            num_tokens=self.num_tokens,
        )


class Capture:
    """Accumulates the statistics of a block's input groups while `watching` it."""

    def __init__(self, groups: Sequence[InputGroup], *, diagonal: bool = False) -> None:
        self._sums = {g.name: _Accumulator(diagonal) for g in groups}
        self._groups = groups

    @contextmanager
    def watching(self, block: DecoderBlock) -> Iterator[None]:
        """Forward passes of `block` inside this context are recorded."""
        handles = []
        for group in self._groups:
            module = block.get_submodule(group.members[0])

            def hook(_: nn.Module, inputs: tuple[Tensor], name: str = group.name) -> None:
                self._sums[name].add(inputs[0])

            handles.append(module.register_forward_pre_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def results(self, layer: int) -> dict[str, InputStatistics]:
        """Statistics by group name. Raises `CalibrationError` naming a group that is not finite."""
        found = {name: sums.result() for name, sums in self._sums.items()}
        for name, statistics in found.items():
            if not bool(torch.isfinite(statistics.second_moment).all()):
                raise CalibrationError(
                    f"NaN or infinite activations at the input of group {name!r} of layer {layer}; "
                    "the model overflows in this dtype (try --dtype float32 or bfloat16) or its "
                    "weights are damaged"
                )
        return found
