"""What is asked of the engine, and what it gives back. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quantforge.errors import QuantForgeError, UsageError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Raises `UsageError`.

    - `max_tokens`: most tokens to generate, None for as many as the context has room for;
    - `temperature`: 0 always takes the likeliest token (greedy);
    - `top_k` (0 or -1: all), `top_p`, `min_p`: leave out unlikely tokens, in this order;
    - `seed`: makes the result repeatable whatever else is in the batch; None: the engine's choice;
    - `stop`: strings that end the text and are not part of it;
    - `stop_token_ids`: tokens that end it beside the model's own, which `ignore_eos` disregards;
    - `logprobs`: None for none, n for each token's own and the n likeliest tokens' (before
      temperature).
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("temperature", 0 <= self.temperature < float("inf"), "0 or more")
        self._check("top_k", self.top_k >= -1, "at least 1, or 0 for all")
        self._check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._check(
            "seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit signed integer"
        )
        self._check("stop", not isinstance(self.stop, str), "a tuple of strings")
        self._check("stop", all(self.stop), "strings that are not empty")
        self._check(
            "logprobs",
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"in 0..{MAX_LOGPROBS}",
        )

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise UsageError(f"{name} {getattr(self, name)!r} must be {allowed}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's natural log probability, and the likeliest tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What a step added to a request: new tokens, and text that can no longer change.

    The text may lag behind the tokens: a token may end inside a character, or begin a stop string.
    The last output of a request has a `finish_reason`; `error` says why when that is ``error``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished request: every token (the one that ended it too) and the text without it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(slots=True)
class Collected:
    """The outputs of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        if output.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += output.logprobs
        self.last = output

    def completion(self) -> Completion:
        """Raises `QuantForgeError` for a request that failed."""
        assert self.last is not None
        assert self.last.finish_reason is not None
        if self.last.finish_reason == "error":
            raise QuantForgeError(f"{self.last.request_id}: {self.last.error}")
        return Completion(
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=self.last.finish_reason,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A request inside the engine: its tokens so far, and how many of them the KV cache holds.

    A text to be scored is a request with `max_tokens` 0: it generates nothing.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    seed: int
    arrival: int
    num_computed: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that the KV cache holds at most: the last one generated never enters it."""
        return self.num_prompt + max(self.max_tokens - 1, 0)

    def finish_reason(self) -> FinishReason | None:
        """Why the latest token ends the request, None if it goes on."""
        if self.num_generated and self.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if self.num_generated >= self.max_tokens else None


def check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Raises `UsageError` for a prompt without tokens or with ids outside the vocabulary."""
    if not prompt_ids:
        raise UsageError("the prompt has no tokens; give at least one")
    for position, token in enumerate(prompt_ids):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"token id {token} at position {position} of the prompt is not in "
                f"0..{vocab_size - 1}"
            )
