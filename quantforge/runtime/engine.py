"""`Engine`: requests in, tokens and text out, step by step; and the scoring of whole texts.

Generation and evaluation run the same decoder over the same paged cache through the same kernels.
An engine belongs to one thread.
"""

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.device import resolve_device, resolve_dtype
from quantforge.errors import UsageError
from quantforge.models.decoder import Decoder
from quantforge.models.loader import load_config, load_decoder
from quantforge.models.tokenizer import Tokenizer, load_tokenizer
from quantforge.progress import Progress, silent
from quantforge.runtime.batch import build_batch
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.graphs import DecodeSteps
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.limits import cache_limits, storage_of
from quantforge.runtime.request import (
    Collected,
    Completion,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    check_prompt,
)
from quantforge.runtime.runner import Runner
from quantforge.runtime.sampling import NO_TOKEN, Sampler
from quantforge.runtime.scheduler import Schedule, Scheduler
from quantforge.runtime.text import OutputText

logger = logging.getLogger(__name__)

Consume = Callable[[int, int, Tensor], None]


class Engine:
    """Serves one decoder. `config`'s device and dtype are those the decoder was loaded with."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer | None, config: EngineConfig | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.device = decoder.embed_tokens.device
        self.dtype = decoder.embed_tokens.dtype
        self.vocab_size = decoder.config.vocab_size
        num_pages, self.max_model_len = cache_limits(decoder, self.config)
        storage = storage_of(decoder, self.config)
        self.kv_cache = str(storage)
        self._runner = Runner(decoder, num_pages, self.config.page_size, storage)
        self._decode = DecodeSteps.for_runner(
            self._runner,
            self.config.cuda_graphs,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self._sampler = Sampler(self.device, self.vocab_size)
        self.pool = BlockManager(num_pages, self.config.page_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        eos_ids = (*decoder.config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))
        self._eos_ids = frozenset(eos_ids)
        self._texts: dict[str, OutputText] = {}
        self._arrivals = 0

    @classmethod
    def from_folder(
        cls, folder: Path, config: EngineConfig | None = None, progress: Progress = silent
    ) -> "Engine":
        """An engine for the checkpoint in `folder`, on the device and in the dtype of `config`."""
        config = config or EngineConfig()
        device = resolve_device(config.device)
        reader = CheckpointReader(folder)
        dtype = resolve_dtype(config.dtype, device, load_config(reader.config).dtype)
        tokenizer = load_tokenizer(folder)
        decoder = load_decoder(reader, device=device, dtype=dtype, progress=progress)
        return cls(decoder, tokenizer, config)

    def kernels(self) -> dict[str, str]:
        """Op, or scheme of a linear, -> name of the kernel that serves it; ``decode_step`` says
        whether decode steps are CUDA graphs, or why not."""
        return {
            **self._runner.kernels(),
            "sample": self._sampler.op.name,
            "decode_step": self._decode.kernel,
        }

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    def check(self) -> None:
        """Raises `AssertionError` if pages, queues and texts do not agree."""
        self.scheduler.check()
        assert all(request_id in self.scheduler for request_id in self._texts), "a text is leaked"

    def add_request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams | None = None
    ) -> None:
        """Queues a request. Raises `UsageError` at once if it is malformed or can never fit."""
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer; use stop_token_ids")
        check_prompt(prompt_ids, self.vocab_size)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(self.scheduler.room(len(prompt_ids)), 1)
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        self._add(request_id, prompt_ids, params, max_tokens, eos_ids.union(params.stop_token_ids))
        if self.tokenizer is not None:
            self._texts[request_id] = OutputText(self.tokenizer, params.stop)

    def step(self) -> list[RequestOutput]:
        """Computes one step; what it added to each request that got a token.

        A device error, or NaN scores, ends the requests of the step with ``error``; the engine
        goes on with the others.
        """
        schedule = self.scheduler.schedule()
        if not schedule.chunks:
            return []
        try:
            sampled = self._compute(schedule)
        except RuntimeError as error:  # torch's only class for errors of a device
            logger.exception("a step failed")
            return [
                self._end(chunk.request, "error", error=f"the step failed: {error}")
                for chunk in schedule.chunks
            ]
        return [self._advance(request, *token) for request, token in sampled]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its pages; its last output, None if there is no such request."""
        request = self.scheduler.finish(request_id)
        return None if request is None else self._end(request, "abort")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress = silent,
    ) -> list[Completion]:
        """Completions in the order of `prompts`, with `params` for all or one for each.

        Raises `UsageError` before any work for a prompt that cannot be served, and
        `QuantForgeError` if one fails.
        """
        each = _one_each(params, len(prompts))
        ids = [f"generate-{index}" for index in range(len(prompts))]
        results = {request_id: Collected() for request_id in ids}
        self._require_idle("generate")
        done = 0
        try:
            for request_id, prompt, own in zip(ids, prompts, each, strict=True):
                self.add_request(request_id, prompt, own)
            while self.has_work():
                for output in self.step():
                    results[output.request_id].add(output)
                    done += output.finish_reason is not None
                progress("generate", done, len(prompts))
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [results[request_id].completion() for request_id in ids]

    def score(
        self, windows: Sequence[Sequence[int]], consume: Consume, progress: Progress = silent
    ) -> None:
        """Calls ``consume(window, start, logits)`` for every position of every window.

        `logits` [T, V] (float32, on the device) follow the tokens at `start` .. `start` + T - 1;
        the calls of a window come in order, those of several may mix. Windows run through the
        engine's own chunked prefill. Raises `UsageError` for a window that does not fit.
        """
        self._require_idle("score")
        ids = {f"score-{index}": index for index in range(len(windows))}
        done, total = 0, sum(len(window) for window in windows)
        try:
            for request_id, index in ids.items():
                check_prompt(windows[index], self.vocab_size)
                self._add(request_id, windows[index], SamplingParams(temperature=0), 0, frozenset())
            while self.has_work():
                schedule = self.scheduler.schedule()
                self._score_step(schedule, ids, consume)
                done += sum(chunk.num_tokens for chunk in schedule.chunks)
                progress("score", done, total)
        finally:
            for request_id in ids:
                self.scheduler.finish(request_id)

    def _score_step(self, schedule: Schedule, ids: dict[str, int], consume: Consume) -> None:
        hidden = self._hidden(schedule)
        first = 0
        for chunk in schedule.chunks:
            rows = hidden[first : first + chunk.num_tokens]
            first += chunk.num_tokens
            for start, logits in self._runner.all_logits(rows):
                consume(ids[chunk.request.request_id], chunk.start + start, logits)
            if not chunk.request.num_uncomputed:
                self.scheduler.finish(chunk.request.request_id)

    def _add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        stop_ids: frozenset[int],
    ) -> None:
        seed = params.seed
        if seed is None:
            seed = random.Random(f"{self.config.seed}/{self._arrivals}").getrandbits(63)
        request = Request(
            request_id=request_id,
            token_ids=list(token_ids),
            num_prompt=len(token_ids),
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            arrival=self._arrivals,
            stop_ids=stop_ids,
        )
        self.scheduler.add(request)
        self._arrivals += 1

    def _hidden(self, schedule: Schedule) -> Tensor:
        if schedule.chunks[-1].num_tokens == 1:  # the last is the longest: all decode
            return self._decode.hidden(schedule.chunks, self.pool)
        return self._runner.hidden(build_batch(schedule.chunks, self.pool, self.device))

    @torch.inference_mode()
    def _compute(self, schedule: Schedule) -> list[tuple[Request, tuple[int, TokenLogprob | None]]]:
        """Each request that gets a token in this step, with the token."""
        hidden = self._hidden(schedule)
        requests = [chunk.request for chunk in schedule.chunks if chunk.samples]
        if not requests:
            return []
        logits = self._runner.sample_logits(hidden, schedule.chunks)
        return list(zip(requests, self._sampler(logits, requests), strict=True))

    def _advance(self, request: Request, token: int, logprob: TokenLogprob | None) -> RequestOutput:
        """Gives `request` its next token, and ends it where that is due."""
        if token == NO_TOKEN:
            return self._end(request, "error", error="the model's scores hold NaN")
        request.token_ids.append(token)
        reason = request.finish_reason()
        text = self._texts.get(request.request_id)
        shown = ""
        if text is not None and reason != "stop":
            shown = text.push(token)
            reason = "stop" if text.stopped else reason
        logprobs = None if logprob is None else (logprob,)
        if reason is not None:
            return self._end(request, reason, token_ids=(token,), text=shown, logprobs=logprobs)
        return RequestOutput(
            request_id=request.request_id, token_ids=(token,), text=shown, logprobs=logprobs
        )

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """Frees what `request` holds; its last output, with the text that was held back."""
        self.scheduler.finish(request.request_id)
        held = self._texts.pop(request.request_id, None)
        if held is not None:
            text += held.finish()
            reason = "stop" if held.stopped and reason == "length" else reason
        return RequestOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            text=text,
            finish_reason=reason,
            logprobs=logprobs,
            error=error,
        )

    def _require_idle(self, what: str) -> None:
        if self.has_work():
            raise UsageError(f"{what} needs an engine without other requests; finish them first")


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters for {count} prompts")
    return params
