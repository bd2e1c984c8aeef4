"""Work that goes on beside the main thread, in the order in which it was handed over."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

Work = Callable[[], None]


class Background:
    """Runs what is submitted one after another in a thread of its own; a context manager.

    At most `depth` pieces wait or run; `submit` waits for room, which bounds the memory that they
    hold. After one has raised, the rest is not run, and the next `submit` or `wait` raises the
    error. Leaving the context waits for what was submitted, also after an error of the main one.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._pending: deque[Future[None]] = deque()
        self._failed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._pool.shutdown(wait=True)

    def submit(self, work: Work) -> None:
        """Hands over `work`; raises what earlier work raised."""
        while len(self._pending) >= self._depth:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._run, work))

    def wait(self) -> None:
        """Returns when everything is done; raises what it raised."""
        while self._pending:
            self._pending.popleft().result()

    def _run(self, work: Work) -> None:
        if self._failed:
            return
        try:
            work()
        except BaseException:
            self._failed = True
            raise
