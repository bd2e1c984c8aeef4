"""Server-sent events, and noticing that a client has gone.

A stream is a run of ``data: <one JSON document>`` lines, an empty line after each, ended by
``data: [DONE]``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event that carries `document` as UTF-8 JSON."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, with `ClientGoneError`, once the client has gone.

    The request's body must have been read: what `receive` still gives is the disconnection.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnection(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` as they come; `close` is called at the end, however it comes about."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError):
                await unless_disconnected(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
