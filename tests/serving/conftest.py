"""A stub engine that speaks a script, servers on free ports, and OpenAI's own client."""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from quantforge.errors import UsageError
from quantforge.models.tokenizer import TextStream, load_tokenizer
from quantforge.runtime.request import RequestOutput, SamplingParams, TokenLogprob
from quantforge.serving.app import create_app
from quantforge.serving.server import Server, bind, url_of
from quantforge.serving.worker import JOIN_SECONDS

SCRIPT = "Grüße aus 東京 🌍, said the cat. The end."
MODEL = "tiny"


class StubEngine:
    """Answers every prompt with `script`, a token a step for each request, then the end token.

    It keeps what tests ask for: parameters, aborts, the most requests at once. `gate`, when
    cleared, holds every step back. A `broken` engine raises in its next step.
    """

    max_model_len = 128
    kv_cache = "float32"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.script = tokenizer.encode(SCRIPT)
        self.gate = threading.Event()
        self._running: dict[str, tuple[deque[int], TextStream, SamplingParams, list[int]]] = {}
        self.reset()

    def reset(self) -> None:
        """As new, for the next test; the server over it stays."""
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self.most_running = 0
        self.broken = False
        self.step_seconds = 0.001
        self.gate.set()
        assert not self._running, "a test left requests behind"

    def add_request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        if list(prompt_ids) == self.tokenizer.encode("too large for the pool"):
            raise UsageError("the prompt can never fit the KV cache")
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        left = deque(self.script * (1000 if params.ignore_eos else 1))
        self._running[request_id] = (left, TextStream(self.tokenizer), params, [])
        self.most_running = max(self.most_running, len(self._running))

    def step(self) -> list[RequestOutput]:
        self.gate.wait(5)
        if self.broken:
            raise ValueError("a defect of the engine")
        time.sleep(self.step_seconds)
        return [self._advance(request_id) for request_id in list(self._running)]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._running)

    def _advance(self, request_id: str) -> RequestOutput:
        left, stream, params, given = self._running[request_id]
        token = left.popleft() if left else self.tokenizer.eos_token_ids[0]
        text = stream.push(token)
        given.append(token)
        reason = None
        if token in self.tokenizer.eos_token_ids:
            reason, text = "stop", stream.finish()
        elif params.max_tokens is not None and len(given) >= params.max_tokens:
            reason, text = "length", text + stream.finish()
        if reason is not None:
            del self._running[request_id]
        logprob = TokenLogprob(token, -0.5, ((token, -0.5), (5, -2.0))[: params.logprobs or 0])
        return RequestOutput(
            request_id=request_id,
            token_ids=(token,),
            text=text,
            finish_reason=reason,
            logprobs=None if params.logprobs is None else (logprob,),
        )


@pytest.fixture(scope="session")
def tokenizer(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE, in which most characters beyond ASCII take several tokens."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tiny_tokenizer(folder)
    return load_tokenizer(folder)


@contextmanager
def running_server() -> Iterator[Callable[..., str]]:
    """A function that starts servers, which are stopped at the end."""
    running: list[tuple[Server, threading.Thread]] = []

    def start(engine: Any, tokenizer: Any, **options: Any) -> str:
        ready = threading.Event()
        bound = bind("127.0.0.1", 0)
        server = Server(create_app(engine, tokenizer, MODEL, **options), ready.set, drain_seconds=1)
        thread = threading.Thread(target=server.serve_on, args=(bound,))
        running.append((server, thread))
        thread.start()
        assert ready.wait(10), "the server did not start"
        return url_of(bound)

    yield start
    for server, thread in running:
        server.stop()
        thread.join(JOIN_SECONDS + 5)  # what the server itself gives the engine's last step
        if thread.is_alive():
            frames = "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))
            pytest.fail(f"the server did not stop; its thread is at\n{frames}")


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """``serve(engine, tokenizer, **options) -> url``: a server of the test's own."""
    with running_server() as start:
        yield start


@pytest.fixture
def own_engine(tokenizer: Any) -> StubEngine:
    """A stub for a server of the test's own."""
    return StubEngine(tokenizer)


@pytest.fixture(scope="session")
def _shared(tokenizer: Any) -> Iterator[tuple[StubEngine, str]]:
    engine = StubEngine(tokenizer)
    with running_server() as start:
        yield engine, start(engine, tokenizer)


@pytest.fixture
def engine(_shared: tuple[StubEngine, str], eventually: Callable[..., bool]) -> StubEngine:
    """The stub behind `url`, as new."""
    shared = _shared[0]
    assert eventually(lambda: not shared.has_work())
    shared.reset()
    return shared


@pytest.fixture
def url(_shared: tuple[StubEngine, str], engine: StubEngine) -> str:
    """The address of the server that most tests share."""
    return _shared[1]


@pytest.fixture
def connect() -> Iterator[Callable[..., openai.OpenAI]]:
    """``connect(url, api_key="unused", strict=True) -> OpenAI``.

    A strict client checks every answer against its own types. Those of streamed completions are
    wrong: they forbid the ``finish_reason: null`` that OpenAI itself sends.
    """
    clients: list[openai.OpenAI] = []

    def make(url: str, api_key: str = "unused", *, strict: bool = True) -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=api_key,
            max_retries=0,
            timeout=20,
            _strict_response_validation=strict,
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(url: str, connect: Callable[..., openai.OpenAI]) -> openai.OpenAI:
    return connect(url)


@pytest.fixture
def lenient_client(url: str, connect: Callable[..., openai.OpenAI]) -> openai.OpenAI:
    return connect(url, strict=False)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], bool]:
    """``eventually(condition)``: whether it becomes true within five seconds."""

    def wait(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.005)
        return False

    return wait
