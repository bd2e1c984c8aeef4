"""Reads an engine's logits like a stream, so that two engines can be compared row by row.

An engine pushes logits into a callback. To meet another engine's rows without keeping a window's
logits (2,048 rows of a 150,000 vocabulary are 1.2 GB), one engine runs in a thread of its own that
works only while the reader waits for its next block: never both at once, one block held.
"""

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from quantforge.evaluation.perplexity import Scorer

THREAD_NAME = "quantforge-logits-stream"


class _AbandonedError(Exception):
    """Unwinds the engine's scoring when the reader has failed."""


class LogitsStream:
    """The logits of one window, read forwards by position; a context manager."""

    def __init__(self, engine: Scorer, token_ids: Sequence[int]) -> None:
        self._engine = engine
        self._token_ids = token_ids
        self._wanted = threading.Semaphore(0)
        self._ready = threading.Semaphore(0)
        self._closed = False
        self._abandoned = False
        self._start = 0
        self._block: Tensor | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        self._abandoned = error is not None
        self._block = None
        self._wanted.release()
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def at(self, position: int) -> Tensor:
        """Logits [T, V] of the rows from `position` to the end of the engine's block.

        Positions must not fall between calls. Raises whatever the engine raised.
        """
        while self._block is None or position >= self._start + len(self._block):
            self._next()
        assert position >= self._start, "a stream of logits is read forwards"
        return self._block[position - self._start :]

    def _next(self) -> None:
        self._block = None
        self._wanted.release()
        self._ready.acquire()
        if self._error is not None:
            raise self._error
        assert self._block is not None, "the engine did not score every position"

    def _work(self) -> None:
        self._wanted.acquire()
        if self._abandoned:
            return
        device = self._engine.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device:
                self._engine.score([self._token_ids], self._push)
        except _AbandonedError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            self._error = error
        self._block = None
        self._ready.release()

    def _push(self, window: int, start: int, logits_TV: Tensor) -> None:
        if not self._closed:
            self._start, self._block = start, logits_TV
            self._ready.release()
            self._wanted.acquire()
        if self._abandoned:
            raise _AbandonedError
