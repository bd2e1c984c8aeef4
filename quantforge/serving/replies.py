"""From the engine's outputs to OpenAI's documents, whole or as a stream of chunks.

A choice of a stream gets its text as soon as the engine says that it can no longer change, in
whole UTF-8 characters, and its ``finish_reason`` with the last of it. Log probabilities travel
with the tokens that they belong to, which may be ahead of the text. ``usage`` counts every
generated token, the one that ended the text too.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quantforge.errors import UsageError
from quantforge.models.tokenizer import Tokenizer
from quantforge.runtime.request import RequestOutput, TokenLogprob
from quantforge.serving.errors import SERVER_ERROR, ApiError
from quantforge.serving.stream import DONE, event
from quantforge.serving.worker import EngineStoppedError

Outputs = AsyncIterator[tuple[int, RequestOutput]]
Document = dict[str, Any]


class Reply(ABC):
    """Builds the answer to one request. Subclasses say how the two calls differ."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        num_prompt_tokens: int,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.created = int(time.time())
        self.tokenizer = tokenizer
        self.num_choices = num_choices
        self._num_prompt = num_prompt_tokens
        self._num_generated = 0
        self._offsets = [0] * num_choices
        """Characters of each choice's tokens so far."""

    async def document(self, outputs: Outputs) -> Document:
        """The whole answer. Raises `ApiError` if the engine gave up a choice."""
        gathered: list[list[RequestOutput]] = [[] for _ in range(self.num_choices)]
        async for index, output in outputs:
            self._count(output)
            gathered[index].append(output)
        choices = [self._whole_choice(i, _joined(parts)) for i, parts in enumerate(gathered)]
        return {**self._head(self.whole_object), "choices": choices, "usage": self.usage()}

    async def events(self, outputs: Outputs, *, include_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events of the answer; an error after the start becomes one of them."""
        usage: Document = {"usage": None} if include_usage else {}
        head = self._head(self.chunk_object)
        for opening in self._openings():
            yield event({**head, "choices": [opening], **usage})
        try:
            async for index, output in outputs:
                self._count(output)
                if output.text or output.logprobs or output.finish_reason:
                    yield event({**head, "choices": [self._chunk(index, output)], **usage})
        except EngineStoppedError as error:
            yield event(ApiError(503, str(error), kind=SERVER_ERROR).document())
        except ApiError as error:
            yield event(error.document())
        else:
            if include_usage:
                yield event({**head, "choices": [], "usage": self.usage()})
        yield DONE

    def usage(self) -> Document:
        """Tokens of the prompts (each once) and of the choices so far."""
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": self._num_prompt + self._num_generated,
        }

    def _head(self, object_name: str) -> Document:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def _count(self, output: RequestOutput) -> None:
        if output.finish_reason in ("error", "abort"):
            reason = output.error or f"the engine ended the request ({output.finish_reason})"
            raise ApiError(500, reason, kind=SERVER_ERROR)
        self._num_generated += len(output.token_ids)

    def _openings(self) -> list[Document]:
        """Choices of the chunks that come before any text."""
        return []

    def _bytes(self, token_id: int) -> bytes:
        """What a token stands for; nothing for an embedding row that the tokenizer lacks."""
        try:
            return self.tokenizer.token_bytes(token_id)
        except UsageError:
            return b""

    @abstractmethod
    def _whole_choice(self, index: int, output: RequestOutput) -> Document: ...

    @abstractmethod
    def _chunk(self, index: int, output: RequestOutput) -> Document: ...


class CompletionReply(Reply):
    """``text_completion``: choices with ``text``; the chunks of a stream look the same."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_choice(self, index: int, output: RequestOutput) -> Document:
        return self._chunk(index, output)

    def _chunk(self, index: int, output: RequestOutput) -> Document:
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(index, output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob] | None) -> Document | None:
        """Parallel lists; a token that is no whole text is written ``bytes:\\xe2\\x82``."""
        if logprobs is None:
            return None
        tokens = [self._word(entry.token_id) for entry in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {
                    self._word(token_id): logprob
                    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))
                }
                for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def _word(self, token_id: int) -> str:
        data = self._bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatReply(Reply):
    """``chat.completion`` with messages; its stream has deltas, the first of which is the role."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _openings(self) -> list[Document]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": dict(delta), "logprobs": None, "finish_reason": None}
            for i in range(self.num_choices)
        ]

    def _whole_choice(self, index: int, output: RequestOutput) -> Document:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def _chunk(self, index: int, output: RequestOutput) -> Document:
        return {
            "index": index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> Document | None:
        if logprobs is None:
            return None
        return {"content": [self._entry(entry) for entry in logprobs], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> Document:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Document:
        data = self._bytes(token_id)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}


def _joined(parts: Sequence[RequestOutput]) -> RequestOutput:
    """One output that says what `parts`, in order, say."""
    with_logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return RequestOutput(
        request_id=parts[-1].request_id,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text="".join(part.text for part in parts),
        finish_reason=parts[-1].finish_reason,
        logprobs=tuple(e for entries in with_logprobs for e in entries) if with_logprobs else None,
    )
