"""How much a model's predictions feel an error in each linear: one backward pass, block by block.

To second order, the KL divergence of a changed model from the original is ``E[(g . dy)^2] / 2`` a
token: dy the change of a linear's output, g the gradient of the log-likelihood of a token *drawn
from the model itself* with respect to that output (the Fisher information; HAWQ-V2, arXiv
1911.03852, and KFAC, arXiv 1503.05671, use it so). With ``dy = dW x`` and errors of different rows
of dW independent, as rounding makes them,

    KL = 1/2 sum_n r_n dW_n M dW_n.T

where ``r_n = E[g_n^2]`` weighs the output channels, and M is the second moment of the inputs with
each token weighted by ``|g|^2``: tokens that nothing depends on do not count, however large their
activations.

The hidden states before every block are kept in host memory; going backwards, one block at a time
is loaded and run again for its gradients.

Legend: S samples, T tokens of a sample, R rows (tokens of a batch), N out features, K in features,
V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quantforge.calibration.activations import Activations
from quantforge.calibration.capture import Capture, InputStatistics
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CalibrationError
from quantforge.models.arch.base import Architecture
from quantforge.models.attention import CausalAttention
from quantforge.models.config import ModelConfig
from quantforge.models.decoder import DecoderBlock
from quantforge.models.expected import read_tensor
from quantforge.models.linear import Linear
from quantforge.models.loader import (
    architecture_of,
    load_block,
    load_config,
    load_embedding,
    load_norm,
)
from quantforge.models.rope import Rope, RotaryEmbedding
from quantforge.progress import Progress, silent

HEAD_ROWS = 256
"""Tokens whose logits are held at once."""

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearSensitivity:
    """What errors of one linear's weight cost: `row_weight` [N] and `moment` [K, K], float32."""

    row_weight: Tensor
    moment: Tensor

    def divergence(self, delta_NK: Tensor) -> float:
        """KL divergence, in nats a token, that adding `delta_NK` to the weight will cost."""
        per_row = ((delta_NK @ self.moment) * delta_NK).sum(-1)
        return 0.5 * float(per_row.double() @ self.row_weight.double())


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSensitivity:
    """What was measured of one block: `linears` by name within it, `statistics` by input group."""

    layer: int
    linears: dict[str, LinearSensitivity]
    statistics: dict[str, InputStatistics]


class _Accumulator:
    """Sums over the batches for one linear."""

    def __init__(self) -> None:
        self.squares: Tensor | None = None
        self.moment: Tensor | None = None
        self.num_tokens = 0

    def add(self, x_RK: Tensor, gradient_RN: Tensor) -> None:
        x_RK = x_RK.detach().float()
        squared_RN = gradient_RN.detach().float().square()
        squares = squared_RN.sum(0)
        moment = (x_RK * squared_RN.sum(1, keepdim=True)).T @ x_RK
        if self.squares is None or self.moment is None:
            self.squares, self.moment = squares, moment
        else:
            self.squares += squares
            self.moment += moment
        self.num_tokens += len(x_RK)

    def result(self) -> LinearSensitivity:
        assert self.squares is not None
        assert self.moment is not None
        total = self.squares.sum().clamp(min=1e-30)
        return LinearSensitivity(
            row_weight=self.squares / self.num_tokens, moment=self.moment / total
        )


def block_sensitivities(
    reader: CheckpointReader,
    token_ids_ST: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_fitted: int = 0,
    seed: int = 0,
    progress: Progress = silent,
) -> Iterator[BlockSensitivity]:
    """The sensitivities of every block, the last block first.

    The first `num_fitted` samples give the statistics and the others the sensitivities, so that
    what a method fits to the statistics is judged on text that it did not see; with 0, all give
    both.
    Tokens are drawn with `seed`: the same model, text, device and seed give the same numbers.
    Raises `CalibrationError` naming the layer whose gradients are not finite.
    """
    architecture, config = architecture_of(reader.config), load_config(reader.config)
    num_layers = config.num_layers

    def load(layer: int) -> DecoderBlock:
        return load_block(reader, config, architecture, layer, device=device, dtype=dtype)

    activations = Activations(
        token_ids_ST,
        load_embedding(reader, architecture, device, dtype),
        config,
        device=device,
        dtype=dtype,
    )
    inputs: list[Tensor] = []
    for layer in range(num_layers):
        progress("measuring sensitivity", layer, 2 * num_layers)
        inputs.append(activations.hidden.to(CPU, copy=True))
        activations.advance(load(layer))
    apart = num_fitted * activations.length
    hidden = activations.hidden[apart:]
    gradient = _head_gradient(reader, architecture, config, hidden, device, dtype, seed)
    walk = _Backward(config, token_ids_ST.shape[1], activations.batch_samples, device, dtype)
    for layer in reversed(range(num_layers)):
        progress("measuring sensitivity", 2 * num_layers - layer - 1, 2 * num_layers)
        capture = Capture(architecture.input_groups)
        block, hidden = load(layer), inputs.pop()
        with capture.watching(block):
            if apart:
                walk.forward(block, hidden[:apart])
            else:
                found = walk.through(block, hidden, gradient)
        if apart:
            found = walk.through(block, hidden[apart:], gradient)
        if not all(bool(torch.isfinite(s.moment).all()) for s in found.values()):
            raise CalibrationError(
                f"NaN or infinite gradients in layer {layer}; the model overflows in {dtype} "
                "(try --dtype float32 or bfloat16)"
            )
        yield BlockSensitivity(layer=layer, linears=found, statistics=capture.results(layer))
    progress("measuring sensitivity", 2 * num_layers, 2 * num_layers)


class _Backward:
    """Moves the gradient of the log-likelihood through blocks, from the last to the first."""

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        batch_samples: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.length = length
        self.batch_samples = batch_samples
        self.device = device
        positions = torch.arange(length, device=device).repeat(batch_samples)
        self.rope = RotaryEmbedding(config)(positions, dtype)

    def through(
        self, block: DecoderBlock, hidden: Tensor, gradient: Tensor
    ) -> dict[str, LinearSensitivity]:
        """The sensitivities of the linears of `block`, whose inputs were `hidden`.

        `gradient` (of its outputs, on the CPU) becomes that of its inputs, in place.
        """
        sums: dict[str, _Accumulator] = {}
        with torch.enable_grad(), _watching(block, sums):
            for rows in self._batches(len(hidden)):
                x = hidden[rows].to(self.device).requires_grad_(True)
                torch.autograd.backward(self._run(block, x), gradient[rows].to(self.device))
                assert x.grad is not None, "the block's output depends on its input"
                gradient[rows] = x.grad.to(gradient.device)
        return {name: s.result() for name, s in sums.items()}

    @torch.no_grad()
    def forward(self, block: DecoderBlock, hidden: Tensor) -> None:
        """Runs `hidden` through `block`, for those who watch it."""
        for rows in self._batches(len(hidden)):
            self._run(block, hidden[rows].to(self.device))

    def _batches(self, num_rows: int) -> Iterator[slice]:
        step = self.batch_samples * self.length
        for start in range(0, num_rows, step):
            yield slice(start, min(start + step, num_rows))

    def _run(self, block: DecoderBlock, x: Tensor) -> Tensor:
        rope = Rope(cos=self.rope.cos[: len(x)], sin=self.rope.sin[: len(x)])
        attention = CausalAttention(self.config, len(x) // self.length)
        out, residual = block(x, None, rope, attention)
        total: Tensor = out + residual
        return total


@contextmanager
def _watching(block: DecoderBlock, sums: dict[str, _Accumulator]) -> Iterator[None]:
    """Backward passes of `block` inside this context are recorded, linear by linear."""
    handles = []
    for name, module in block.named_modules():
        if not isinstance(module, Linear):
            continue
        sums[name] = _Accumulator()

        def hook(_: nn.Module, inputs: tuple[Tensor], out: Tensor, name: str = name) -> None:
            out.register_hook(partial(sums[name].add, inputs[0]))  # type: ignore[no-untyped-call]

        handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _head_gradient(
    reader: CheckpointReader,
    architecture: Architecture,
    config: ModelConfig,
    hidden: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> Tensor:
    """Gradient [S T, D] (CPU) at the last block's output, of drawn tokens' log-likelihoods."""
    norm = load_norm(reader, architecture.final_norm, config.rms_norm_eps, device, dtype)
    head = f"{architecture.lm_head}.weight"
    tied = config.tie_word_embeddings or head not in reader
    weight_VD = read_tensor(reader, architecture.embedding if tied else head, device, dtype)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(hidden), generator=generator)
    gradient = torch.empty(hidden.shape, dtype=hidden.dtype)
    for start in range(0, len(hidden), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        with torch.enable_grad():
            x = hidden[rows].to(device).requires_grad_(True)
            logits_RV = (norm(x, None)[0] @ weight_VD.T).float()
            log_p = logits_RV.log_softmax(-1)
        cumulative = log_p.detach().exp().cumsum(-1)
        drawn = torch.searchsorted(cumulative, draws[rows].to(device).unsqueeze(1))
        drawn = drawn.clamp(max=log_p.shape[1] - 1)
        log_p.gather(1, drawn).sum().backward()
        assert x.grad is not None
        gradient[rows] = x.grad.to(CPU)
    return gradient
