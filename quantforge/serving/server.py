"""Runs the application on a socket until a signal, or a failed engine, ends it.

The socket is bound before a model is loaded, so that a port in use is noticed at once. SIGTERM and
SIGINT stop new connections, let running requests finish for a while, and return normally.
"""

import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from quantforge.errors import UsageError

DRAIN_SECONDS = 30


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free one). Raises `UsageError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot serve on host {host!r}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot serve on {host} port {port}: {error.strerror or error}; "
            "choose another with --port (0 takes any free one)"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """``http://host:port`` of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which tells `on_ready` when it answers and exits without re-raising."""

    def __init__(
        self, app: FastAPI, on_ready: Callable[[], None], drain_seconds: int = DRAIN_SECONDS
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=drain_seconds,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def stop(self) -> None:
        """Begins the shutdown; safe from any thread."""
        self.should_exit = True

    def serve_on(self, bound: socket.socket) -> None:
        """Blocks until stopped by `stop` or a signal."""
        with self._own_signals():
            self.run(sockets=[bound])

    @contextmanager
    def _own_signals(self) -> Iterator[None]:
        """Once drained, uvicorn raises the signal again; this turns that into a plain return."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
