"""``/v1/completions`` and ``/v1/models`` through OpenAI's client, over a scripted engine."""

import json
from typing import Any

import httpx
import openai
import pytest


@pytest.fixture
def script(tokenizer: Any, engine: Any) -> str:
    """What the stub engine says."""
    return tokenizer.decode(engine.script)


def test_the_model_is_listed_with_its_context(client: openai.OpenAI, engine: Any) -> None:
    (listed,) = client.models.list().data
    assert listed.id == "tiny"
    assert listed.model_extra == {"max_model_len": engine.max_model_len}
    assert client.models.retrieve("tiny") == listed


def test_a_completion_has_the_text_and_counts_tokens(
    client: openai.OpenAI, engine: Any, tokenizer: Any, script: str
) -> None:
    answer = client.completions.create(model="tiny", prompt="The mill", max_tokens=100)
    assert answer.choices[0].text == script
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode("The mill", add_special_tokens=True))
    assert answer.usage.completion_tokens == len(engine.script) + 1
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_max_tokens_ends_a_completion_with_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="The mill", max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_sixteen_tokens_are_the_default(client: openai.OpenAI, engine: Any) -> None:
    client.completions.create(model="tiny", prompt="The mill")
    assert engine.params[0].max_tokens == 16


def test_streamed_pieces_are_whole_characters_and_make_the_text(url: str, script: str) -> None:
    body = {"model": "tiny", "prompt": "The mill", "max_tokens": 100, "stream": True}
    pieces, finish = [], None
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        raw = b"".join(response.iter_raw())
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for line in events[:-2]:
        document = json.loads(line.decode("utf-8", "strict").removeprefix("data: "))
        assert document["object"] == "text_completion"
        pieces.append(document["choices"][0]["text"])
        finish = document["choices"][0]["finish_reason"]
    assert len(pieces) > 10
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == script
    assert finish == "stop"


def test_usage_comes_last_in_a_stream_when_asked_for(lenient_client: openai.OpenAI) -> None:
    stream = lenient_client.completions.create(
        model="tiny", prompt="The mill", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16


def test_several_prompts_and_choices_come_in_order(
    client: openai.OpenAI, engine: Any, tokenizer: Any
) -> None:
    prompts = ["The mill", "A letter arrived"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=7, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    assert engine.prompts == [ids[0], ids[0], ids[1], ids[1]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert answer.usage.completion_tokens == 16
    seeds = [params.seed for params in engine.params]
    assert seeds[0] == seeds[2] == 7
    assert seeds[1] == seeds[3] != 7


def test_streamed_choices_are_told_apart_by_index(
    lenient_client: openai.OpenAI, script: str
) -> None:
    texts = {0: "", 1: ""}
    for chunk in lenient_client.completions.create(
        model="tiny", prompt="The mill", n=2, max_tokens=100, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: script, 1: script}


def test_a_prompt_may_be_token_ids(client: openai.OpenAI, engine: Any) -> None:
    client.completions.create(model="tiny", prompt=[5, 6, 7])
    client.completions.create(model="tiny", prompt=[[8, 9], [10]])
    assert engine.prompts == [[5, 6, 7], [8, 9], [10]]


def test_every_sampling_parameter_reaches_the_engine(client: openai.OpenAI, engine: Any) -> None:
    client.completions.create(
        model="tiny",
        prompt="x",
        temperature=0,
        top_p=0.5,
        seed=3,
        stop=["a", "b"],
        logprobs=2,
        max_tokens=9,
        extra_body={"top_k": 4, "min_p": 0.25, "stop_token_ids": [7], "ignore_eos": True},
    )
    (params,) = engine.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 4, 0.25)
    assert (params.seed, params.stop, params.stop_token_ids) == (3, ("a", "b"), (7,))
    assert (params.ignore_eos, params.logprobs, params.max_tokens) == (True, 2, 9)


def test_logprobs_name_tokens_and_where_they_stand(
    client: openai.OpenAI, engine: Any, tokenizer: Any
) -> None:
    whole = client.completions.create(model="tiny", prompt="x", max_tokens=100, logprobs=2)
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(engine.script) + 1
    assert found.token_logprobs == [-0.5] * len(found.tokens)
    assert any(token.startswith("bytes:\\x") for token in found.tokens)
    starts = [sum(map(len, found.tokens[:i])) for i in range(len(found.tokens))]
    assert found.text_offset == starts
    assert found.top_logprobs[0] == {found.tokens[0]: -0.5, tokenizer.decode([5]): -2.0}


def test_streamed_logprobs_are_those_of_the_whole(lenient_client: openai.OpenAI) -> None:
    whole = lenient_client.completions.create(model="tiny", prompt="x", max_tokens=100, logprobs=1)
    tokens: list[str] = []
    offsets: list[int] = []
    for chunk in lenient_client.completions.create(
        model="tiny", prompt="x", max_tokens=100, logprobs=1, stream=True
    ):
        piece = chunk.choices[0].logprobs
        assert piece is not None
        tokens += piece.tokens or []
        offsets += piece.text_offset or []
    assert whole.choices[0].logprobs is not None
    assert tokens == whole.choices[0].logprobs.tokens
    assert offsets == whole.choices[0].logprobs.text_offset
