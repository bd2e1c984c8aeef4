"""From a parsed request to the engine's jobs: prompt ids, limits and sampling parameters."""

import random
from collections.abc import Sequence

from quantforge.errors import QuantForgeError
from quantforge.models.tokenizer import Tokenizer
from quantforge.runtime.request import SamplingParams
from quantforge.serving.errors import ApiError
from quantforge.serving.schemas import ChatBody, CompletionBody, GenerationBody
from quantforge.serving.worker import Job


def completion_jobs(
    body: CompletionBody, tokenizer: Tokenizer, max_model_len: int, request_id: str
) -> list[Job]:
    """One job a choice, the `n` choices of a prompt together, in the order of the prompts.

    Text is encoded with the tokenizer's special tokens (a BOS, where the model has one); token ids
    are taken as they are. Raises `ApiError`.
    """
    prompts = [
        _encode(tokenizer, prompt, param="prompt", add_special_tokens=True)
        if isinstance(prompt, str)
        else _checked_ids(prompt, tokenizer)
        for prompt in body.prompts()
    ]
    for prompt_ids in prompts:
        _check_length(len(prompt_ids), body.max_tokens, max_model_len, param="prompt")
    return _jobs(body, prompts, body.max_tokens, body.logprobs, request_id)


def chat_jobs(
    body: ChatBody, tokenizer: Tokenizer, max_model_len: int, request_id: str
) -> list[Job]:
    """`n` jobs for the rendered conversation; the default limit is the rest of the context.

    Raises `ApiError`, also when the model has no chat template or its template refuses.
    """
    if not tokenizer.has_chat_template:
        raise ApiError(
            400, f"{body.model} has no chat template; use /v1/completions", param="messages"
        )
    try:
        text = tokenizer.apply_chat_template([message.plain() for message in body.messages])
    except QuantForgeError as error:
        raise ApiError(400, str(error), param="messages") from error
    prompt_ids = _encode(tokenizer, text, param="messages", add_special_tokens=False)
    _check_length(len(prompt_ids), body.token_limit or 1, max_model_len, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _jobs(body, [prompt_ids], body.token_limit, logprobs, request_id)


def _jobs(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    logprobs: int | None,
    request_id: str,
) -> list[Job]:
    choices = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=_choice_seed(body.seed, choice),
            stop=body.stops,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
        )
        for choice in range(body.n)
    ]
    pairs = [(prompt_ids, params) for prompt_ids in prompts for params in choices]
    return [
        Job(request_id=f"{request_id}-{index}", prompt_ids=prompt_ids, params=params)
        for index, (prompt_ids, params) in enumerate(pairs)
    ]


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """The request's own seed for the first choice, one drawn from it for each other."""
    if seed is None or choice == 0:
        return seed
    return random.Random(f"{seed}/{choice}").getrandbits(31)


def _encode(tokenizer: Tokenizer, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except QuantForgeError as error:
        raise ApiError(400, str(error), param=param) from error


def _checked_ids(prompt: list[int], tokenizer: Tokenizer) -> list[int]:
    unknown = next((i for i in prompt if i >= tokenizer.vocab_size), None)
    if unknown is not None:
        raise ApiError(
            400,
            f"prompt holds token id {unknown}; the vocabulary has {tokenizer.vocab_size} tokens",
            param="prompt",
        )
    return prompt


def _check_length(num_prompt: int, num_new: int, max_model_len: int, *, param: str) -> None:
    if num_prompt == 0:
        raise ApiError(400, f"{param} has no tokens", param=param)
    if num_prompt + num_new > max_model_len:
        raise ApiError(
            400,
            f"{param} of {num_prompt} tokens and {num_new} new ones are more than this model's "
            f"context of {max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        )
