"""Statistics of the tensors that a block's linears read, taken while calibration text runs through.

For each input group (linears that read the same tensor X [tokens, K]) we keep the Gram matrix
``X.T @ X``, the mean and the largest magnitude of each channel, and the number of tokens. The
squared output error of a changed weight follows from the Gram matrix alone, ``tr(dW G dW.T)``,
which is what lets methods search without running activations again.

Legend: K in features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

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
    """Sums over the batches of one input group; nothing here waits for the device."""

    def __init__(self, diagonal: bool) -> None:
        self.diagonal = diagonal
        self.moment: Tensor | None = None
        self.abs_sum: Tensor | None = None
        self.absmax: Tensor | None = None
        self.num_tokens = 0

    def add(self, x_MK: Tensor) -> None:
        x_MK = x_MK.detach().reshape(-1, x_MK.shape[-1])
        width = x_MK.shape[1]
        if self.moment is None or self.abs_sum is None or self.absmax is None:
            with torch.inference_mode(False):  # what is kept is an ordinary tensor
                shape = (width,) if self.diagonal else (width, width)
                self.moment = torch.zeros(shape, device=x_MK.device)
                self.abs_sum = torch.zeros(width, device=x_MK.device)
                self.absmax = torch.zeros(width, device=x_MK.device)
        if self.diagonal:
            self.moment += x_MK.float().square().sum(0)
        else:
            add_gram(self.moment, x_MK)
        magnitude = x_MK.abs()
        self.abs_sum += magnitude.sum(0, dtype=torch.float32)
        torch.maximum(self.absmax, magnitude.amax(0).float(), out=self.absmax)
        self.num_tokens += x_MK.shape[0]

    def result(self) -> InputStatistics:
        """The means; the sums are used up."""
        assert self.moment is not None
        assert self.abs_sum is not None
        assert self.absmax is not None
        if not self.diagonal:
            mirror_upper(self.moment)
        return InputStatistics(
            second_moment=self.moment.div_(self.num_tokens),
            mean_abs=self.abs_sum.div_(self.num_tokens),
            absmax=self.absmax,
            num_tokens=self.num_tokens,
        )


MIN_STRIP = 2048
MAX_STRIPS = 4


def _strips(width: int) -> list[tuple[int, int]]:
    """First and last column of the strips in which a wide Gram matrix is computed."""
    size = max(MIN_STRIP, -(-width // MAX_STRIPS))
    return [(start, min(start + size, width)) for start in range(0, width, size)]


def add_gram(sum_KK: Tensor, x_MK: Tensor) -> None:
    """Adds ``x.T @ x`` to the diagonal and what is right of it; `mirror_upper` fills in the rest.

    Strips of rows start at their diagonal block, which saves up to 3/8 of the work. 16-bit
    inputs on a GPU are multiplied as they are, exactly, and added in float32 (sums are cut,
    not rounded, by tensor cores: 1e-5 off after 3,000 tokens); elsewhere
    they are converted to float32 first.
    """
    narrow = x_MK.is_cuda and x_MK.dtype in (torch.bfloat16, torch.float16)
    if not narrow:
        x_MK = x_MK.float()
    for start, stop in _strips(x_MK.shape[1]):
        left, right = x_MK[:, start:stop].T, x_MK[:, start:]
        target = sum_KK[start:stop, start:]
        if narrow:
            target += torch.mm(left, right, out_dtype=torch.float32)
        else:
            target.addmm_(left, right)


def mirror_upper(sum_KK: Tensor) -> None:
    """Completes a sum of `add_gram` in place."""
    for start, stop in _strips(sum_KK.shape[0]):
        sum_KK[stop:, start:stop] = sum_KK[start:stop, stop:].T


class Watcher(Protocol):
    """What looks at a block's inputs while samples run through it."""

    def watching(self, block: DecoderBlock) -> AbstractContextManager[None]:
        """Forward passes of `block` inside this context are seen."""


@contextmanager
def watch_inputs(
    block: DecoderBlock, groups: Sequence[InputGroup], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Calls ``see(group, x_MK)`` for what each input group reads in forward passes of `block`."""
    handles = []
    for group in groups:
        module = block.get_submodule(group.members[0])

        def hook(_: nn.Module, inputs: tuple[Tensor], name: str = group.name) -> None:
            see(name, inputs[0])

        handles.append(module.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Capture:
    """Accumulates the statistics of a block's input groups while `watching` it."""

    def __init__(self, groups: Sequence[InputGroup], *, diagonal: bool = False) -> None:
        self._sums = {g.name: _Accumulator(diagonal) for g in groups}
        self._groups = groups
        self._peaks: dict[str, list[Tensor]] = {g.name: [] for g in groups}

    def watching(self, block: DecoderBlock) -> AbstractContextManager[None]:
        """Forward passes of `block` inside this context are recorded."""
        return watch_inputs(block, self._groups, self._see)

    def _see(self, name: str, x: Tensor) -> None:
        if x.numel():  # an expert may be called without a token
            self._sums[name].add(x)
            self._peaks[name].append(_peaks(x))

    def results(self, layer: int, sample_length: int | None = None) -> dict[str, InputStatistics]:
        """Statistics by group name, of the groups that saw a token.

        Raises `CalibrationError` naming the first group that is not finite, and where it goes
        wrong: the sample too if all samples are `sample_length` tokens long.
        """
        found = {name: sums.result() for name, sums in self._sums.items() if sums.num_tokens}
        for name, statistics in found.items():
            if not bool(torch.isfinite(statistics.second_moment).all()):
                where = f"the input of group {name!r} of layer {layer}"
                raise CalibrationError(_describe(self._peaks[name], where, sample_length))
        return found


def _peaks(x_MK: Tensor) -> Tensor:
    """The largest magnitude of each token [M]; NaN where one is."""
    flat = x_MK.detach().reshape(-1, x_MK.shape[-1])
    peak_M: Tensor = torch.linalg.vector_norm(flat, torch.inf, dim=-1)
    return peak_M


def _describe(peaks: Sequence[Tensor], where: str, sample_length: int | None) -> str:
    """What is wrong with the second moment of `where`, and with which token it begins."""
    peak_M = torch.cat([p.float().cpu() for p in peaks])
    bad = (~peak_M.isfinite()).nonzero()
    token = int(bad[0]) if len(bad) else int(peak_M.argmax())
    place = f"token {token}"
    if sample_length is not None:
        sample, position = divmod(token, sample_length)
        place = f"sample {sample} (token {position} of its {sample_length})"
    if len(bad):
        return (
            f"NaN or infinite activations at {where}, first in {place}; the model overflows in "
            "this dtype (try --dtype float32 or bfloat16) or its weights are damaged"
        )
    return (
        f"activations as large as {float(peak_M[token]):.1e} at {where}, in {place}; their squares "
        "overflow float32, so the weights before it are damaged"
    )
