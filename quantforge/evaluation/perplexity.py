"""Perplexity of a text, scored through the runtime's own prefill.

The text is tokenized once without special tokens and cut into windows of `window` tokens, the next
starting `stride` tokens later. Only full windows count: tokens after the last one are dropped, as
in the published WikiText-2 protocol (window = stride). A window's first token is context only. With
a stride below the window, every later window scores its last `stride` tokens, so that no token is
scored twice::

    tokens  0 1 2 3 4 5 6 7 8 9      window 4, stride 2
            c s s s                  c context, s scored
                c c s s
                    c c s s
                        c c s s

A BOS token, when asked for, takes the place of each window's first token (as llama.cpp does), so
the scored tokens are the same with and without it.

Legend: T rows of logits (row p predicts token p + 1), V vocabulary, W windows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.errors import EvaluationError, UsageError
from quantforge.progress import Progress, silent

BLOCK_ELEMENTS = 2**24
"""Logits taken at a time: 64 MB in float32."""

Consume = Callable[[int, int, Tensor], None]


class Scorer(Protocol):
    """What evaluation needs of an engine."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def max_model_len(self) -> int: ...

    def kernels(self) -> Mapping[str, str]: ...

    def score(
        self, windows: Sequence[Sequence[int]], consume: Consume, progress: Progress = silent
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Tokens to run together; those from `first_target` on are scored."""

    token_ids: Sequence[int]
    first_target: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_target

    def scored_rows(self, start: int, num_rows: int) -> slice:
        """Which of `num_rows` rows of logits, the first at position `start`, are scored."""
        first = max(0, self.first_target - 1 - start)
        return slice(first, max(first, min(num_rows, len(self.token_ids) - 1 - start)))

    def targets(self, start: int, rows: slice) -> list[int]:
        """The tokens that `rows`, counted from position `start`, should predict."""
        return list(self.token_ids[start + rows.start + 1 : start + rows.stop + 1])


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringProtocol:
    """How a text was cut; two perplexities compare only when these agree. Lengths in tokens."""

    window: int
    stride: int
    bos_token_id: int | None
    num_text_tokens: int
    num_windows: int
    num_scored_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "stride": self.stride,
            "bos_token_id": self.bos_token_id,
            "partial_window": "dropped",
            "num_text_tokens": self.num_text_tokens,
            "num_windows": self.num_windows,
            "num_scored_tokens": self.num_scored_tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult:
    """Sums of negative log-likelihoods in nats, one a window, and how they were made."""

    protocol: ScoringProtocol
    nll_W: NDArray[np.float64]
    count_W: NDArray[np.float64]

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll_W.sum() / self.count_W.sum())


def windows(
    token_ids: Sequence[int],
    *,
    window: int = 2048,
    stride: int | None = None,
    bos_token_id: int | None = None,
) -> list[Window]:
    """The full windows of a text, in order. `stride` None means `window`.

    Raises `UsageError` for lengths that make no sense, `EvaluationError` for a text that is too
    short.
    """
    stride = window if stride is None else stride
    if window < 2:
        raise UsageError(f"window is {window} tokens; use at least 2")
    if not 1 <= stride <= window:
        raise UsageError(f"stride is {stride} tokens; use 1 to {window}, the window")
    if len(token_ids) < window:
        raise EvaluationError(
            f"the evaluation text has {len(token_ids)} tokens, fewer than a window of {window}; "
            "use a longer text or a smaller window"
        )
    cut = []
    for start in range(0, len(token_ids) - window + 1, stride):
        tokens = list(token_ids[start : start + window])
        if bos_token_id is not None:
            tokens[0] = bos_token_id
        first_target = 1 if start == 0 else max(1, window - stride)
        cut.append(Window(token_ids=tokens, first_target=first_target))
    return cut


def prepare(
    token_ids: Sequence[int],
    *,
    window: int = 2048,
    stride: int | None = None,
    bos_token_id: int | None = None,
    max_tokens: int | None = None,
) -> tuple[list[Window], ScoringProtocol]:
    """The windows of the first `max_tokens` tokens and their protocol. Raises as `windows`."""
    if max_tokens is not None and max_tokens < window:
        raise UsageError(f"max_tokens is {max_tokens}; use at least the window, {window} tokens")
    used = token_ids if max_tokens is None else token_ids[:max_tokens]
    cut = windows(used, window=window, stride=stride, bos_token_id=bos_token_id)
    protocol = ScoringProtocol(
        window=window,
        stride=window if stride is None else stride,
        bos_token_id=bos_token_id,
        num_text_tokens=len(used),
        num_windows=len(cut),
        num_scored_tokens=sum(w.num_scored for w in cut),
    )
    return cut, protocol


def require_fit(engine: Scorer, window: int, role: str) -> None:
    """Raises `UsageError` if `engine` cannot take a window of `window` tokens."""
    if window > engine.max_model_len:
        raise UsageError(
            f"window is {window} tokens; the {role} takes at most {engine.max_model_len}"
        )


def evaluate_perplexity(
    engine: Scorer,
    token_ids: Sequence[int],
    *,
    window: int = 2048,
    stride: int | None = None,
    bos_token_id: int | None = None,
    max_tokens: int | None = None,
    progress: Progress = silent,
) -> PerplexityResult:
    """Perplexity of `token_ids`, at most `max_tokens` of them. Sums are kept in float64.

    Raises `EvaluationError` for a text below a window and for logits that are not finite.
    """
    require_fit(engine, window, "model")
    cut, protocol = prepare(
        token_ids,
        window=window,
        stride=stride,
        bos_token_id=bos_token_id,
        max_tokens=max_tokens,
    )
    nll_W = np.zeros(len(cut))
    seen = 0

    def consume(index: int, start: int, logits_TV: Tensor) -> None:
        nonlocal seen
        rows = cut[index].scored_rows(start, logits_TV.shape[0])
        targets = torch.tensor(cut[index].targets(start, rows), device=logits_TV.device)
        nll_T = target_nll(logits_TV[rows], targets)
        require_finite(nll_T, "model", index, start + rows.start)
        nll_W[index] += float(nll_T.double().sum())
        seen += len(nll_T)

    engine.score([w.token_ids for w in cut], consume, progress)
    assert seen == protocol.num_scored_tokens, "the engine did not score every position"
    counts = np.array([w.num_scored for w in cut], dtype=np.float64)
    return PerplexityResult(protocol=protocol, nll_W=nll_W, count_W=counts)


def target_nll(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """``-log softmax(logits)[target]`` in nats, float32 [T]."""
    out = logits_TV.new_empty(logits_TV.shape[0], dtype=torch.float32)
    for rows in row_blocks(*logits_TV.shape):
        block = logits_TV[rows].float()
        chosen = block.gather(1, targets_T[rows].long()[:, None])[:, 0]
        out[rows] = block.logsumexp(1) - chosen
    return out


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows that hold at most `BLOCK_ELEMENTS` logits each, at least one row."""
    step = max(1, BLOCK_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def require_finite(values_T: Tensor, role: str, window: int, position: int) -> None:
    """Raises `EvaluationError` if a value of rows from `position` on is NaN or infinite."""
    bad = torch.nonzero(~torch.isfinite(values_T))
    if len(bad):
        raise EvaluationError(
            f"the {role}'s logits hold NaN or infinity at window {window}, position "
            f"{position + int(bad[0])}; its weights or its dtype's range are at fault"
        )
