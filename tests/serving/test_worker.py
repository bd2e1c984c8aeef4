"""One engine behind many clients: together, leaving early, and when the engine breaks."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

ENDLESS = {"model": "tiny", "prompt": "The mill", "max_tokens": 100, "ignore_eos": True}


def test_requests_run_together_and_get_their_own_answers(
    client: openai.OpenAI, engine: Any, tokenizer: Any, eventually: Callable[..., bool]
) -> None:
    engine.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(client.completions.create, model="tiny", prompt="x", max_tokens=n + 1)
            for n in range(8)
        ]
        assert eventually(lambda: bool(engine.prompts))
        engine.gate.set()
        answers = [future.result() for future in futures]
    for n, answer in enumerate(answers):
        assert answer.choices[0].text == tokenizer.decode(engine.script[: n + 1])
    assert engine.most_running > 1


@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_leaves_a_stream_frees_its_requests(
    url: str, engine: Any, eventually: Callable[..., bool], choices: int
) -> None:
    body = {**ENDLESS, "stream": True, "n": choices}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        next(response.iter_lines())
        engine.gate.clear()  # the answer cannot end before the client has left
    engine.gate.set()
    assert eventually(lambda: len(engine.aborted) == choices)
    assert not engine.has_work()


def test_a_client_that_leaves_before_the_answer_frees_its_request(
    url: str, engine: Any, eventually: Callable[..., bool]
) -> None:
    engine.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=httpx.Timeout(5, read=0.3))
    engine.gate.set()
    assert eventually(lambda: len(engine.aborted) == 1)
    assert not engine.has_work()


def test_a_finished_request_is_not_aborted(client: openai.OpenAI, engine: Any) -> None:
    client.completions.create(model="tiny", prompt="x")
    list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
        )
    )
    assert engine.aborted == []


def test_an_engine_that_breaks_ends_every_request_and_health(
    serve: Callable[..., str], own_engine: Any, tokenizer: Any, eventually: Callable[..., bool]
) -> None:
    failures: list[str] = []
    url = serve(own_engine, tokenizer, on_engine_failure=lambda: failures.append("told"))
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    own_engine.step_seconds = 0.1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=ENDLESS, timeout=20)
        assert eventually(lambda: len(own_engine.prompts) == 1)
        body = {**ENDLESS, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
            own_engine.broken = True
            lines = [line for line in response.iter_lines() if line]
        whole = waiting.result()
    error = {
        "message": "the engine has failed",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert json.loads(lines[-2].removeprefix("data: ")) == {"error": error}
    assert lines[-1] == "data: [DONE]"
    assert whole.status_code == 503
    assert whole.json() == {"error": error}
    assert httpx.post(f"{url}/v1/completions", json=ENDLESS).status_code == 503
    assert httpx.get(f"{url}/health").status_code == 503
    assert failures == ["told"]


def test_the_client_sees_an_error_in_the_middle_of_a_stream(
    serve: Callable[..., str],
    own_engine: Any,
    tokenizer: Any,
    connect: Callable[..., openai.OpenAI],
) -> None:
    client = connect(serve(own_engine, tokenizer), strict=False)
    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    next(stream)
    own_engine.broken = True
    with pytest.raises(openai.APIError, match="the engine has failed"):
        list(stream)


def test_a_request_that_the_engine_gives_up_is_a_server_error(
    client: openai.OpenAI, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantforge.runtime.request import RequestOutput

    def give_up(request_id: str) -> RequestOutput:
        engine._running.pop(request_id)
        return RequestOutput(
            request_id=request_id, finish_reason="error", error="the model's scores hold NaN"
        )

    monkeypatch.setattr(engine, "_advance", give_up)
    with pytest.raises(openai.InternalServerError, match="the model's scores hold NaN"):
        client.completions.create(model="tiny", prompt="x")


def test_stopping_the_server_ends_streams_with_an_error(own_engine: Any, tokenizer: Any) -> None:
    import asyncio

    from quantforge.runtime.request import SamplingParams
    from quantforge.serving.worker import EngineStoppedError, EngineWorker, Job

    async def stop_midway() -> None:
        worker = EngineWorker(own_engine)
        worker.start()
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        generation = await worker.submit([Job(request_id="a", prompt_ids=[1], params=params)])
        outputs = generation.outputs()
        await anext(outputs)
        await worker.stop()
        with pytest.raises(EngineStoppedError, match="shutting down"):
            async for _ in outputs:
                pass

    asyncio.run(stop_midway())
    assert own_engine.aborted == ["a"]
