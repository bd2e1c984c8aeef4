"""What clients may send: OpenAI's two classic calls, with vLLM's names for the common extras.

A parameter is either honoured or refused. OpenAI's parameters that this server does not implement
are accepted only with a value that asks for nothing (``presence_penalty: 0``, ``tools: []``); any
other value, and any unknown name, is an error that says so. ``null`` means the default, as in
OpenAI's API. Types are strict: ``"5"`` is not a number.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantforge.registry import did_you_mean
from quantforge.runtime.request import MAX_LOGPROBS
from quantforge.serving.errors import ApiError

MAX_CHOICES = 128
MAX_STOPS = 16

StopString = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Neutral = Mapping[str, tuple[object, ...]]

NEUTRAL_SAMPLING: Neutral = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
"""Parameters of both calls that are not implemented, with the values that ask for nothing."""


class Body(BaseModel):
    """A JSON object of a request: unknown names refused, ``null`` read as the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name not in cls.neutral:
                known = did_you_mean(name, (*cls.model_fields, *cls.neutral))
                raise ApiError(
                    400, f"unknown parameter {name!r}{known}", param=name, code="unknown_parameter"
                )
            elif value is not None and value not in cls.neutral[name]:
                raise _unsupported(name, value, cls.neutral[name])
        return kept


def _unsupported(name: str, value: object, neutral: tuple[object, ...]) -> ApiError:
    advice = "".join(f" or send {v!r}" for v in neutral[:1])
    return ApiError(
        400,
        f"{name} is not supported by this server (got {str(value)[:60]!r}); leave it out{advice}",
        param=name,
        code="unsupported_parameter",
    )


class StreamOptions(Body):
    """``include_usage`` asks for one last chunk that counts tokens."""

    include_usage: bool = False


class GenerationBody(Body):
    """What both calls share. ``user`` names the end user to the server and changes nothing."""

    model: str
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """``POST /v1/completions``: one prompt or several, as text or as token ids."""

    neutral: ClassVar[Neutral] = {
        **NEUTRAL_SAMPLING,
        "echo": (False,),
        "best_of": (1,),
        "suffix": ("",),
    }

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one; raises `ApiError` when there is none or too many choices."""
        prompt = self.prompt
        found: list[str | list[int]]
        if isinstance(prompt, str):
            found = [prompt]
        elif prompt and isinstance(prompt[0], int):
            found = [[token for token in prompt if isinstance(token, int)]]
        else:
            found = [p for p in prompt if not isinstance(p, int)]
        if not found:
            raise ApiError(400, "prompt is empty: send text or token ids", param="prompt")
        if len(found) * self.n > MAX_CHOICES:
            raise ApiError(
                400,
                f"{len(found)} prompts x n {self.n} is more than {MAX_CHOICES} choices a request",
                param="n",
            )
        return found


class TextPart(Body):
    """A piece of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn. Fields that a client echoes from an earlier answer may come along as null."""

    neutral: ClassVar[Neutral] = dict.fromkeys(
        ("name", "refusal", "tool_calls", "function_call", "audio", "annotations"), ()
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """What a chat template reads; OpenAI's newer word ``developer`` becomes ``system``."""
        role = "system" if self.role == "developer" else self.role
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        return {"role": role, "content": "\n".join(parts)}


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``: text messages through the model's own chat template."""

    neutral: ClassVar[Neutral] = {
        **NEUTRAL_SAMPLING,
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _agreeing_parameters(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(
                400,
                f"max_tokens {self.max_tokens} and max_completion_tokens "
                f"{self.max_completion_tokens} differ; send one",
                param="max_completion_tokens",
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer; None leaves it to the model's context."""
        return self.max_completion_tokens or self.max_tokens
