"""``/v1/chat/completions`` through OpenAI's client, over a scripted engine."""

from typing import Any

import openai
import pytest

QUESTION = [{"role": "user", "content": "Who built the bridge?"}]


@pytest.fixture
def script(tokenizer: Any, engine: Any) -> str:
    """What the stub engine says."""
    return tokenizer.decode(engine.script)


def test_a_chat_answers_with_a_message(client: openai.OpenAI, script: str) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == script
    assert answer.choices[0].finish_reason == "stop"


def test_messages_go_through_the_chat_template(
    client: openai.OpenAI, engine: Any, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "Who built"}, {"type": "text", "text": "the bridge?"}]
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
        ],
    )
    prompt = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWho built\nthe bridge?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert engine.prompts == [tokenizer.encode(prompt)]


def test_an_answer_of_the_client_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=QUESTION)
    history = [*QUESTION, first.choices[0].message.model_dump(), *QUESTION]
    assert client.chat.completions.create(model="tiny", messages=history).choices


def test_without_a_limit_an_answer_may_fill_the_context(client: openai.OpenAI, engine: Any) -> None:
    client.chat.completions.create(model="tiny", messages=QUESTION)
    assert engine.params[0].max_tokens is None


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_work(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, **{name: 2})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(
    client: openai.OpenAI, script: str
) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=QUESTION, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert len({chunk.id for chunk in chunks}) == 1
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == script
    assert len(pieces) > 10
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


def test_usage_comes_last_in_a_stream_when_asked_for(client: openai.OpenAI) -> None:
    *rest, last = client.chat.completions.create(
        model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None and chunk.choices for chunk in rest)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_logprobs_carry_the_bytes_of_each_token(client: openai.OpenAI, script: str) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, logprobs=True, top_logprobs=2
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    data = b"".join(bytes(entry.bytes or []) for entry in found.content)
    assert data == script.encode() + b"<|im_end|>"
    assert [top.logprob for top in found.content[0].top_logprobs] == [-0.5, -2.0]


def test_logprobs_alone_list_no_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, logprobs=True)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert found.content[0].top_logprobs == []


def test_choices_of_a_chat_stream_each_have_a_role(client: openai.OpenAI, script: str) -> None:
    texts, roles = {0: "", 1: ""}, []
    for chunk in client.chat.completions.create(model="tiny", messages=QUESTION, n=2, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
    assert roles == [0, 1]
    assert texts == {0: script, 1: script}
