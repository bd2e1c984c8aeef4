"""How far a model's next-token distributions lie from its baseline's.

Perplexity can stay while answers change; the Kullback-Leibler divergence KL(baseline || model) and
the share of positions with the same most likely token (top-1 agreement) see that. Both are taken at
the positions that perplexity scores. The arithmetic is plain functions on logits, float32, a few
rows at a time.

Legend: T rows of logits, V vocabulary, W windows, N scored positions of all windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantforge.errors import EvaluationError
from quantforge.evaluation.perplexity import (
    PerplexityResult,
    Scorer,
    ScoringProtocol,
    Window,
    prepare,
    require_finite,
    require_fit,
    row_blocks,
)
from quantforge.evaluation.side_by_side import LogitsStream
from quantforge.evaluation.uncertainty import Interval, ratio_interval
from quantforge.progress import Progress, silent

HISTOGRAM_EDGES = tuple(10.0**e for e in np.arange(-7, 1.51, 0.5).tolist())
"""Edges of the KL histogram in nats; smaller and larger values fall into the outer bins."""


class RowStatistics(NamedTuple):
    """Per row of logits [T]: nats in float32, and whether the most likely tokens agree."""

    nll: Tensor
    baseline_nll: Tensor
    kl: Tensor
    agrees: Tensor


def kl_divergence(logits_p_TV: Tensor, logits_q_TV: Tensor) -> Tensor:
    """KL(p || q) in nats, float32 [T]; what rounding takes below zero is set to zero."""
    out = logits_p_TV.new_empty(logits_p_TV.shape[0], dtype=torch.float32)
    for rows in row_blocks(*logits_p_TV.shape):
        log_p = logits_p_TV[rows].float().log_softmax(1)
        out[rows] = _kl(log_p, logits_q_TV[rows].float().log_softmax(1))
    return out


def top1_agrees(logits_p_TV: Tensor, logits_q_TV: Tensor) -> Tensor:
    """Whether both put the same token first, bool [T]; the lowest id wins a tie."""
    return logits_p_TV.argmax(1) == logits_q_TV.argmax(1)


def row_statistics(
    logits_TV: Tensor, baseline_logits_TV: Tensor, targets_T: Tensor
) -> RowStatistics:
    """All that a comparison needs of some rows, each log-softmax taken once."""
    parts = []
    for rows in row_blocks(*logits_TV.shape):
        log_q = logits_TV[rows].float().log_softmax(1)
        log_p = baseline_logits_TV[rows].float().log_softmax(1)
        chosen = targets_T[rows].long()[:, None]
        parts.append(
            RowStatistics(
                nll=-log_q.gather(1, chosen)[:, 0],
                baseline_nll=-log_p.gather(1, chosen)[:, 0],
                kl=_kl(log_p, log_q),
                agrees=top1_agrees(logits_TV[rows], baseline_logits_TV[rows]),
            )
        )
    return RowStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _kl(log_p_TV: Tensor, log_q_TV: Tensor) -> Tensor:
    return (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(1).clamp_min(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A model against its baseline on one text. KL in nats, KL(baseline || model)."""

    model: PerplexityResult
    baseline: PerplexityResult
    kl_N: NDArray[np.float32]
    kl_W: NDArray[np.float64]
    agree_W: NDArray[np.float64]
    seed: int = 0

    @property
    def protocol(self) -> ScoringProtocol:
        return self.model.protocol

    @property
    def ppl_ratio(self) -> float:
        return self.model.perplexity / self.baseline.perplexity

    @property
    def mean_kl(self) -> float:
        return float(self.kl_W.sum() / self.model.count_W.sum())

    @property
    def top1(self) -> float:
        return float(self.agree_W.sum() / self.model.count_W.sum())

    def kl_quantile(self, probability: float) -> float:
        return float(np.quantile(self.kl_N.astype(np.float64), probability))

    def ppl_ratio_interval(self) -> Interval | None:
        """95 % interval by a bootstrap over windows, paired; None for a single window."""
        difference = self.model.nll_W - self.baseline.nll_W
        logs = ratio_interval(difference, self.model.count_W, seed=self.seed)
        return None if logs is None else (math.exp(logs[0]), math.exp(logs[1]))

    def mean_kl_interval(self) -> Interval | None:
        return ratio_interval(self.kl_W, self.model.count_W, seed=self.seed)

    def top1_interval(self) -> Interval | None:
        return ratio_interval(self.agree_W, self.model.count_W, seed=self.seed)

    def metrics(self) -> dict[str, float]:
        """The figures by name, KL in nats."""
        return {
            "ppl_baseline": self.baseline.perplexity,
            "ppl_ratio": self.ppl_ratio,
            "mean_kl": self.mean_kl,
            "median_kl": self.kl_quantile(0.5),
            "p99_kl": self.kl_quantile(0.99),
            "max_kl": float(self.kl_N.max()),
            "top1": self.top1,
        }

    def to_dict(self) -> dict[str, Any]:
        """The figures and their intervals ([low, high] or None), JSON-ready."""
        return {
            **self.metrics(),
            "ppl_ratio_interval": _as_list(self.ppl_ratio_interval()),
            "mean_kl_interval": _as_list(self.mean_kl_interval()),
            "top1_interval": _as_list(self.top1_interval()),
            "interval": "95 % paired bootstrap over windows, expanded percentile",
            "seed": self.seed,
        }

    def windows(self) -> dict[str, list[float]]:
        """Sums of each window, from which every figure but the quantiles can be made again."""
        return {
            "count": self.model.count_W.tolist(),
            "nll": self.model.nll_W.tolist(),
            "baseline_nll": self.baseline.nll_W.tolist(),
            "kl": self.kl_W.tolist(),
            "top1": self.agree_W.tolist(),
        }

    def kl_histogram(self) -> dict[str, list[float]]:
        """Counts of positions between `HISTOGRAM_EDGES`."""
        inside = np.clip(self.kl_N, HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1] * (1 - 1e-6))
        counts, _ = np.histogram(inside, bins=np.array(HISTOGRAM_EDGES))
        return {"edges": list(HISTOGRAM_EDGES), "counts": counts.tolist()}


def _as_list(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)


def compare(
    engine: Scorer,
    baseline: Scorer,
    token_ids: Sequence[int],
    *,
    window: int = 2048,
    stride: int | None = None,
    bos_token_id: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Comparison:
    """Runs both engines over `token_ids`, window by window, a block of logits of each at a time.

    Raises `EvaluationError` for a text below a window, logits that are not finite, and logits of
    different widths.
    """
    require_fit(engine, window, "model")
    require_fit(baseline, window, "baseline")
    cut, protocol = prepare(
        token_ids,
        window=window,
        stride=stride,
        bos_token_id=bos_token_id,
        max_tokens=max_tokens,
    )
    sums, kl = [], []
    with torch.inference_mode():
        for index, part in enumerate(cut):
            progress("compare", index * window, len(cut) * window)
            rows = _compare_window(engine, baseline, part, index)
            sums.append([float(v.double().sum()) for v in rows])
            kl.append(rows.kl.cpu().numpy())
    progress("compare", len(cut) * window, len(cut) * window)
    nll_W, baseline_nll_W, kl_W, agree_W = np.array(sums).T
    counts = np.array([part.num_scored for part in cut], dtype=np.float64)
    return Comparison(
        model=PerplexityResult(protocol=protocol, nll_W=nll_W, count_W=counts),
        baseline=PerplexityResult(protocol=protocol, nll_W=baseline_nll_W, count_W=counts),
        kl_N=np.concatenate(kl),
        kl_W=kl_W,
        agree_W=agree_W,
        seed=seed,
    )


def _compare_window(engine: Scorer, baseline: Scorer, window: Window, index: int) -> RowStatistics:
    """Statistics of the scored rows of one window, in order."""
    parts: list[RowStatistics] = []
    with LogitsStream(baseline, window.token_ids) as stream:

        def consume(_: int, start: int, logits_TV: Tensor) -> None:
            scored = window.scored_rows(start, logits_TV.shape[0])
            row = scored.start
            while row < scored.stop:
                theirs = stream.at(start + row)[: scored.stop - row]
                _require_same_width(logits_TV, theirs)
                rows = slice(row, row + len(theirs))
                targets = torch.tensor(window.targets(start, rows), device=logits_TV.device)
                found = row_statistics(logits_TV[rows], theirs.to(logits_TV.device), targets)
                require_finite(found.nll, "model", index, start + row)
                require_finite(found.baseline_nll, "baseline", index, start + row)
                require_finite(found.kl, "model or baseline", index, start + row)
                parts.append(found)
                row = rows.stop

        engine.score([window.token_ids], consume)
    rows = RowStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))
    assert len(rows.kl) == window.num_scored, "the engine did not score every position"
    return rows


def _require_same_width(logits_TV: Tensor, baseline_logits_TV: Tensor) -> None:
    ours, theirs = logits_TV.shape[1], baseline_logits_TV.shape[1]
    if ours != theirs:
        raise EvaluationError(
            f"the model scores a vocabulary of {ours}, the baseline one of {theirs}; "
            "they cannot be compared"
        )
