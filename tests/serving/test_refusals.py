"""What the server refuses, and that each refusal has OpenAI's shape."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "Hello"}]
PATHS = {"completions": {"prompt": "Hello"}, "chat/completions": {"messages": QUESTION}}


def refusal(url: str, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of a POST to ``/v1/path`` whose body is a good one changed by `body`."""
    response = httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **PATHS[path], **body})
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_model_is_not_found(url: str, path: str) -> None:
    error = refusal(url, path, 404, model="gpt-4")
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", presence_penalty=1.5)
    assert bad.value.param == "presence_penalty"


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(url: str, path: str) -> None:
    error = refusal(url, path, temperatur=0.5)
    assert error["code"] == "unknown_parameter"
    assert error["param"] == "temperatur"
    assert "did you mean 'temperature'?" in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("completions", "echo", True),
        ("completions", "best_of", 3),
        ("completions", "suffix", "tail"),
        ("completions", "frequency_penalty", 0.5),
        ("completions", "logit_bias", {"5": 1}),
        ("chat/completions", "presence_penalty", -1),
        ("chat/completions", "response_format", {"type": "json_object"}),
        ("chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("chat/completions", "tool_choice", "required"),
        ("chat/completions", "modalities", ["text", "audio"]),
        ("chat/completions", "store", True),
    ],
)
def test_an_unsupported_parameter_is_refused_by_name(
    url: str, path: str, name: str, value: object
) -> None:
    error = refusal(url, path, **{name: value})
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"echo": False, "best_of": 1, "logit_bias": {}, "suffix": None}),
        ("completions", {"presence_penalty": 0.0, "temperature": None, "stop": None}),
        ("chat/completions", {"tools": [], "tool_choice": "none", "metadata": None}),
        ("chat/completions", {"response_format": {"type": "text"}, "user": "u-1"}),
    ],
)
def test_values_that_ask_for_nothing_are_taken(url: str, path: str, body: dict[str, Any]) -> None:
    document = {"model": "tiny", **PATHS[path], **body}
    assert httpx.post(f"{url}/v1/{path}", json=document).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"temperature": -1}, "temperature"),
        ("completions", {"temperature": "0"}, "temperature"),
        ("completions", {"temperature": True}, "temperature"),
        ("completions", {"top_p": 0}, "top_p"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 2.5}, "max_tokens"),
        ("completions", {"n": 0}, "n"),
        ("completions", {"n": 65, "prompt": ["a", "b"]}, "n"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"stop": ""}, "stop"),
        ("completions", {"stop": ["a", 5]}, "stop.1"),
        ("completions", {"seed": 2**63}, "seed"),
        ("completions", {"prompt": None}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [512]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt.0"),
        ("completions", {"prompt": {"text": "x"}}, "prompt"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"stream": True, "stream_options": {"usage": True}}, "usage"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x", "name": "Al"}]},
            "name",
        ),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        (
            "chat/completions",
            {"max_tokens": 2, "max_completion_tokens": 3},
            "max_completion_tokens",
        ),
    ],
)
def test_a_bad_value_is_refused_by_name(
    url: str, path: str, body: dict[str, Any], param: str
) -> None:
    error = refusal(url, path, **body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert "pydantic" not in error["message"]


def test_the_message_shows_the_bad_value(url: str) -> None:
    error = refusal(url, "completions", temperature=7)
    assert error["message"] == "temperature: Input should be less than or equal to 2, got 7"


@pytest.mark.parametrize("path", PATHS)
def test_what_exceeds_the_context_is_refused(url: str, path: str, engine: Any) -> None:
    limit = engine.max_model_len
    too_long = "word " * limit
    body = (
        {"prompt": too_long}
        if path == "completions"
        else {"messages": [{"role": "user", "content": too_long}]}
    )
    for oversized in (body, {"max_tokens": limit}):
        error = refusal(url, path, **oversized)
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"]
    assert engine.params == []


def test_what_the_engine_refuses_is_a_bad_request(url: str) -> None:
    for stream in (False, True):
        body = {"prompt": "too large for the pool", "stream": stream}
        assert "can never fit" in refusal(url, "completions", **body)["message"]


def test_one_refused_prompt_frees_the_others(
    url: str, engine: Any, eventually: Callable[..., bool]
) -> None:
    refusal(url, "completions", prompt=["The mill", "too large for the pool", "x"])
    assert eventually(lambda: not engine.has_work())
    assert len(engine.aborted) == 1


def test_a_lone_surrogate_is_a_bad_request(url: str) -> None:
    for body in (
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "x", "\\ud800": 1}',
        b'{"model": "tiny", "prompt": "x", "suffix": "\\ud800"}',
    ):
        response = httpx.post(
            f"{url}/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code in (400, 404), response.text
        assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000]
)
def test_a_malformed_body_is_a_bad_request(url: str, content: bytes) -> None:
    response = httpx.post(
        f"{url}/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_not_a_number_is_refused(url: str) -> None:
    response = httpx.post(
        f"{url}/v1/completions",
        content=b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def test_unknown_addresses_and_methods_have_the_same_shape(url: str) -> None:
    missing = httpx.get(f"{url}/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "Not Found: GET /v1/nothing"
    method = httpx.get(f"{url}/v1/completions")
    assert method.status_code == 405
    assert method.headers["allow"] == "POST"
    assert method.json()["error"]["type"] == "invalid_request_error"


def test_a_model_without_chat_template_refuses_chat(
    url: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tokenizer), "has_chat_template", False)
    error = refusal(url, "chat/completions")
    assert error["message"] == "tiny has no chat template; use /v1/completions"


def test_only_the_right_key_opens_v1(
    serve: Callable[..., str],
    own_engine: Any,
    tokenizer: Any,
    connect: Callable[..., openai.OpenAI],
) -> None:
    url = serve(own_engine, tokenizer, api_key="s3cret-ü")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
        response = httpx.get(f"{url}/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    right = {"authorization": "Bearer s3cret-ü".encode()}
    assert httpx.get(f"{url}/v1/models", headers=right).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        connect(url, "wrong").completions.create(model="tiny", prompt="x")
    assert httpx.get(f"{url}/health").status_code == 200
