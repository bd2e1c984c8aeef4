"""`EngineWorker`: the engine on a thread of its own, behind asyncio.

The thread alone touches the engine. Others hand it commands; it carries them out between steps,
steps while there is work, and posts what came out to the event loop, once a step::

    event loop                         engine thread
    submit(jobs)   -- command -->      engine.add_request(...)
    async for ...  <-- outputs --      engine.step()
    close()        -- command -->      engine.abort(...)

An exception out of the engine ends all requests and fails every later one: its state is unknown.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from quantforge.errors import QuantForgeError
from quantforge.runtime.request import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

JOIN_SECONDS = 30.0


class ServedEngine(Protocol):
    """What serving needs of an engine; `quantforge.runtime.engine.Engine` has it."""

    @property
    def max_model_len(self) -> int: ...

    def add_request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request_id: str) -> object: ...

    def has_work(self) -> bool: ...


class EngineStoppedError(Exception):
    """The engine failed, or the server is shutting down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One sequence to generate; `request_id` is unique."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams


Arrival = tuple[int, RequestOutput] | EngineStoppedError
Command = Callable[[], None]


class Generation:
    """The outputs of one client request: several jobs, each with its index, as they arrive."""

    def __init__(self, worker: "EngineWorker", jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._worker = worker
        self._unfinished = {job.request_id for job in self.jobs}

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the job, output) until each is finished. Raises `EngineStoppedError`."""
        while self._unfinished:
            arrival = await self.arrivals.get()
            if isinstance(arrival, EngineStoppedError):
                raise arrival
            index, output = arrival
            if output.finish_reason is not None:
                self._unfinished.discard(self.jobs[index].request_id)
            yield index, output

    def close(self) -> None:
        """Frees what is still running, when the client has gone. Harmless when all is done."""
        if self._unfinished:
            self._worker.abort(tuple(self._unfinished))
            self._unfinished.clear()


class EngineWorker:
    """Runs `engine` between `start` and `stop`; `on_failure` is called if the engine breaks."""

    def __init__(self, engine: ServedEngine, on_failure: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self.failure: Exception | None = None
        self._on_failure = on_failure
        self._refusal: EngineStoppedError | None = None
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._open: dict[str, tuple[Generation, int]] = {}
        self._thread = threading.Thread(target=self._run, name="quantforge-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Aborts what is running and ends the thread."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        if self._thread.is_alive():
            logger.error("the engine did not finish its step within %g s", JOIN_SECONDS)

    async def submit(self, jobs: Sequence[Job]) -> Generation:
        """Admits all of `jobs`, or none.

        Raises the engine's `QuantForgeError` when it refuses one, and `EngineStoppedError`.
        """
        generation = Generation(self, jobs)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commands.put(partial(self._admit, generation, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            generation.close()
            raise
        return generation

    def abort(self, request_ids: Sequence[str]) -> None:
        """Frees the requests before the next step; ids that are not running are left alone."""
        self._commands.put(partial(self._abort, tuple(request_ids)))

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        running = True
        while running:
            try:
                running = self._carry_out_commands()
                if not self._is_idle():
                    self._deliver(self.engine.step())
            except Exception as error:  # noqa: BLE001 - whatever it is, requests must hear of it
                self._fail(error)
        self._refuse_all(EngineStoppedError("the server is shutting down"))
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()

    def _is_idle(self) -> bool:
        return self._refusal is not None or not self.engine.has_work()

    def _carry_out_commands(self) -> bool:
        """False once told to stop. Waits for a command only while there is nothing to compute."""
        while True:
            try:
                command = self._commands.get(block=self._is_idle())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _admit(self, generation: Generation, admitted: "asyncio.Future[None]") -> None:
        refusal: Exception | None = self._refusal
        for index, job in enumerate(generation.jobs if refusal is None else ()):
            try:
                self.engine.add_request(job.request_id, job.prompt_ids, job.params)
            except QuantForgeError as error:
                refusal = error
                self._abort(tuple(j.request_id for j in generation.jobs[:index]))
                break
            except Exception as error:  # noqa: BLE001 - as in _run, and someone awaits the answer
                self._fail(error)
                refusal = self._refusal
                break
            self._open[job.request_id] = (generation, index)
        self._post(partial(_resolve, admitted, refusal))

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._open.pop(request_id, None) is not None and self._refusal is None:
                self.engine.abort(request_id)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        arrivals: list[tuple[Generation, Arrival]] = []
        for output in outputs:
            found = self._open.get(output.request_id)
            if found is None:
                continue  # aborted meanwhile
            generation, index = found
            arrivals.append((generation, (index, output)))
            if output.finish_reason is not None:
                del self._open[output.request_id]
        if arrivals:
            self._post(partial(_put, arrivals))

    def _fail(self, error: Exception) -> None:
        logger.error("the engine failed; no request can be served any more", exc_info=error)
        self.failure = error
        self._refusal = EngineStoppedError("the engine has failed")
        self._refuse_all(self._refusal)
        if self._on_failure is not None:
            self._post(self._on_failure)

    def _refuse_all(self, reason: EngineStoppedError) -> None:
        """Ends every running request with `reason`, and any that comes later."""
        generations = dict.fromkeys(generation for generation, _ in self._open.values())
        self._abort(tuple(self._open))
        self._refusal = reason
        if generations:
            self._post(partial(_put, [(generation, reason) for generation in generations]))

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None, "the worker was not started"
        self._loop.call_soon_threadsafe(callback)


def _put(arrivals: Sequence[tuple[Generation, Arrival]]) -> None:
    for generation, arrival in arrivals:
        generation.arrivals.put_nowait(arrival)


def _resolve(future: "asyncio.Future[None]", refusal: Exception | None) -> None:
    if future.done():
        return
    if refusal is None:
        future.set_result(None)
    else:
        future.set_exception(refusal)
