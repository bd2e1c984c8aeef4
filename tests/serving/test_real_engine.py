"""From OpenAI's client to paged attention and back, on a tiny model; transformers is the oracle."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from quantforge.models.tokenizer import load_tokenizer
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine

PROMPT = "The river ran past the mill"
QUESTION = [{"role": "user", "content": "Who built the bridge?"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(_tiny_models: Callable[..., Path]) -> Path:
    return _tiny_models(arch="llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    config = EngineConfig(device="cpu", max_model_len=256, kv_cache_tokens=2048)
    return Engine.from_folder(folder, config)


@pytest.fixture
def url(serve: Callable[..., str], engine: Engine) -> Iterator[str]:
    """A server over the engine, which must end with nothing left in its pool."""
    yield serve(engine, engine.tokenizer)
    assert not engine.has_work()
    engine.check()


@pytest.fixture(scope="module")
def greedy_text(folder: Path) -> Callable[..., str]:
    """``greedy_text(prompt_ids, num_tokens)``: what transformers generates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder)

    def generate(prompt_ids: list[int], num_tokens: int) -> str:
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt_ids]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        return tokenizer.decode(ids[0, len(prompt_ids) :].tolist())

    return generate


def test_a_completion_says_what_transformers_says(
    client: openai.OpenAI, lenient_client: openai.OpenAI, engine: Engine, greedy_text: Any
) -> None:
    expected = greedy_text(engine.tokenizer.encode(PROMPT, add_special_tokens=True), 24)
    assert client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text == expected
    stream = lenient_client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_a_chat_says_what_transformers_says(
    client: openai.OpenAI, engine: Engine, greedy_text: Any
) -> None:
    prompt = engine.tokenizer.apply_chat_template(QUESTION)
    expected = greedy_text(engine.tokenizer.encode(prompt), 24)
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert answer.choices[0].message.content == expected
    stream = client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_a_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, lenient_client: openai.OpenAI
) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = whole[7:10]
    answer = client.completions.create(prompt=PROMPT, stop=stop, **GREEDY)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(
        lenient_client.completions.create(prompt=PROMPT, stop=stop, stream=True, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_a_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    sampled = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 1.0}
    first = client.completions.create(seed=11, n=2, **sampled)
    again = client.completions.create(seed=11, **sampled)
    other = client.completions.create(seed=12, **sampled)
    assert again.choices[0].text == first.choices[0].text
    assert first.choices[1].text != first.choices[0].text
    assert other.choices[0].text != first.choices[0].text


def test_logprobs_are_the_models(
    client: openai.OpenAI, engine: Engine, folder: Path, reference_model: Callable[..., Any]
) -> None:
    prompt_ids = engine.tokenizer.encode(PROMPT)
    answer = client.completions.create(
        model="tiny", prompt=prompt_ids, temperature=0, max_tokens=1, logprobs=3
    )
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([prompt_ids])).logits[0, -1]
    likeliest = logits.log_softmax(-1).topk(3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx(likeliest.values[:1].tolist(), abs=1e-4)
    assert found.top_logprobs is not None
    assert sorted(found.top_logprobs[0].values(), reverse=True) == pytest.approx(
        likeliest.values.tolist(), abs=1e-4
    )


def test_streams_hold_whole_characters(url: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "東京 🌍"}],
        "max_tokens": 60,
        "temperature": 2.0,
        "seed": 1,
        "ignore_eos": True,
    }
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).json()
    content = whole["choices"][0]["message"]["content"]
    pieces = []
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=20
    ) as response:
        pieces = [
            chunk["choices"][0]["delta"].get("content", "")
            for chunk in _documents(response.iter_raw())
        ]
    assert "".join(pieces) == content
    assert len(pieces) > 10


def test_concurrent_requests_do_not_mix(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "A letter arrived on Thursday", "By noon", "They agreed that"]
    alone = [client.completions.create(prompt=p, **GREEDY).choices[0].text for p in prompts]

    def complete(prompt: str) -> str:
        return client.completions.create(prompt=prompt, **GREEDY).choices[0].text

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(complete, prompts)) == alone


def test_a_client_that_leaves_frees_the_pool(
    url: str, engine: Engine, eventually: Callable[..., bool]
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "n": 3}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=20
    ) as response:
        next(response.iter_lines())
        assert engine.has_work()
    assert eventually(lambda: not engine.has_work())
    engine.check()


def test_the_engine_refuses_nothing_that_fits_the_context(url: str, engine: Engine) -> None:
    limit = engine.max_model_len
    body = {"model": "tiny", "prompt": [5] * (limit - 1), "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
    body["max_tokens"] = 2
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def _documents(raw: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each event; every event must be valid UTF-8 by itself."""
    for event in b"".join(raw).split(b"\n\n"):
        text = event.decode("utf-8", "strict").removeprefix("data: ")
        if text and text != "[DONE]":
            yield json.loads(text)
