"""One evaluation from folders to figures: what ``eval ppl`` and ``gate`` both run.

Everything that can be refused without weights (text, tokenizers, lengths) is refused before a model
is loaded. Both engines hold just the KV cache that a window needs, so they fit on one GPU.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.verify import bits_per_weight
from quantforge.errors import EvaluationError, UsageError
from quantforge.evaluation.divergence import Comparison, compare
from quantforge.evaluation.perplexity import (
    PerplexityResult,
    evaluate_perplexity,
    prepare,
)
from quantforge.evaluation.texts import EvalText
from quantforge.models.tokenizer import Tokenizer, load_tokenizer
from quantforge.progress import Progress, silent
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine

SCHEMA_VERSION = 1
KV_TOKENS = 8192
"""KV cache of a scoring engine, unless one window needs more."""
KV_ROUNDING = 256
"""A multiple of any page size, so that whole pages hold a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """How to score. Lengths in tokens; `bos` puts the model's BOS at the start of each window.

    `kv_cache_dtype` is that of the model; a baseline's KV cache is never quantized.
    """

    window: int = 2048
    stride: int | None = None
    bos: bool = False
    max_tokens: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What was measured, on which text and by which kernels."""

    model: str
    baseline: str | None
    text: EvalText
    perplexity: PerplexityResult
    comparison: Comparison | None
    bits_per_weight: float
    engine: Mapping[str, Any]
    baseline_engine: Mapping[str, Any] | None
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Metric -> value, under the names that a gate's limits use."""
        found = {"ppl": self.perplexity.perplexity, "bits_per_weight": self.bits_per_weight}
        if self.comparison is not None:
            found |= self.comparison.metrics()
        return found

    def to_dict(self, *, details: bool = True) -> dict[str, Any]:
        """The JSON document; `details` adds the sums of each window and the KL histogram."""
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "baseline": self.baseline,
            "text": {"name": self.text.name, "sha256": self.text.sha256},
            "protocol": self.perplexity.protocol.to_dict(),
            "ppl": self.perplexity.perplexity,
            "bits_per_weight": self.bits_per_weight,
            "comparison": None,
            "engine": dict(self.engine),
            "baseline_engine": self.baseline_engine and dict(self.baseline_engine),
            "seconds": round(self.seconds, 3),
        }
        compared = self.comparison
        if compared is not None:
            document["comparison"] = compared.to_dict()
            if details:
                document["windows"] = compared.windows()
                document["kl_histogram"] = compared.kl_histogram()
        elif details:
            document["windows"] = {
                "count": self.perplexity.count_W.tolist(),
                "nll": self.perplexity.nll_W.tolist(),
            }
        return document


def measure(
    model: Path,
    baseline: Path | None,
    text: EvalText,
    settings: EvalSettings,
    *,
    names: tuple[str, str | None] | None = None,
    progress: Progress = silent,
) -> Measurement:
    """Scores `text` with the model of a folder, and beside it with `baseline` if given.

    `names` is what the result calls the two models, else their folders' names. Raises
    `EvaluationError` for a text that is too short, logits that are not finite, and a baseline with
    another vocabulary; `UsageError` for settings that make no sense.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(model)
    token_ids = tokenizer.encode(text.text)
    if baseline is not None:
        require_same_vocabulary(tokenizer, load_tokenizer(baseline), text.text, token_ids)
    scoring: dict[str, Any] = {
        "window": settings.window,
        "stride": settings.stride,
        "bos_token_id": _bos(tokenizer, model) if settings.bos else None,
        "max_tokens": settings.max_tokens,
    }
    prepare(token_ids, **scoring)
    engine = _load(model, settings, progress)
    comparison = other = None
    if baseline is None:
        perplexity = evaluate_perplexity(engine, token_ids, **scoring, progress=progress)
    else:
        other = _load(baseline, replace(settings, kv_cache_dtype="model"), progress)
        comparison = compare(
            engine, other, token_ids, **scoring, seed=settings.seed, progress=progress
        )
        perplexity = comparison.model
    return Measurement(
        model=names[0] if names else model.name,
        baseline=names[1] if names else (baseline.name if baseline else None),
        text=text,
        perplexity=perplexity,
        comparison=comparison,
        bits_per_weight=bits_per_weight(CheckpointReader(model)),
        engine=describe_engine(engine),
        baseline_engine=describe_engine(other) if other else None,
        seconds=time.monotonic() - started,
    )


def require_same_vocabulary(
    model: Tokenizer, baseline: Tokenizer, text: str, token_ids: Sequence[int]
) -> None:
    """Raises `EvaluationError` unless both tokenizers give ids the same meaning.

    Equal tokenizer.json files do. Otherwise every token must stand for the same bytes and `text`
    (`token_ids` to the model) must be cut alike, since tools rewrite that file without changing it.
    """
    if model.fingerprint() == baseline.fingerprint():
        return
    where = f"the model ({model.folder}) and the baseline ({baseline.folder})"
    if model.vocab_size != baseline.vocab_size:
        raise EvaluationError(
            f"{where} have different vocabularies: {model.vocab_size} and {baseline.vocab_size} "
            "tokens; compare models of one tokenizer"
        )
    for token_id in range(model.vocab_size):
        ours, theirs = _meaning(model, token_id), _meaning(baseline, token_id)
        if ours != theirs:
            raise EvaluationError(
                f"{where} have different vocabularies: token {token_id} is {ours!r} and {theirs!r}"
                "; compare models of one tokenizer"
            )
    if baseline.encode(text) != list(token_ids):
        raise EvaluationError(
            f"{where} have different tokenizers: they cut the evaluation text differently; "
            "compare models of one tokenizer"
        )


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Device, dtypes and kernels: a figure holds for these."""
    return {
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kv_cache": engine.kv_cache,
        "kernels": dict(engine.kernels()),
    }


def _meaning(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """The bytes of a token; None for an id that the vocabulary skips."""
    try:
        return tokenizer.token_bytes(token_id)
    except UsageError:
        return None


def _bos(tokenizer: Tokenizer, folder: Path) -> int:
    if tokenizer.bos_token_id is None:
        raise UsageError(f"the tokenizer of {folder} has no BOS token; leave out --bos")
    return tokenizer.bos_token_id


def _load(folder: Path, settings: EvalSettings, progress: Progress) -> Engine:
    config = EngineConfig(
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.window,
        kv_cache_tokens=max(KV_TOKENS, -(-settings.window // KV_ROUNDING) * KV_ROUNDING),
        seed=settings.seed,
    )
    try:
        return Engine.from_folder(folder, config, progress)
    except UsageError as error:
        raise UsageError(
            f"{folder} cannot be run on windows of {settings.window} tokens: {error}"
        ) from error
