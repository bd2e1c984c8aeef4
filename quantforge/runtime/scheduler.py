"""Which requests compute which tokens in the next step. Pure Python, no torch.

A request has tokens, of which the KV cache holds the first `num_computed`; a step computes some of
the others. So a prefill, a chunk of one, a decode and the check of several drafted tokens are one
thing, and a step mixes them under a budget of tokens:

1. running requests that decode, then those whose prefill is not done, oldest first;
2. waiting requests in order of arrival, while the budget, the sequences and the pages suffice. A
   request gets the pages of all its present tokens when it is admitted, and one page for each
   running request is left over, so that an admission does not force a preemption soon after.

A decode that finds no page preempts the youngest running request: its pages go back, it waits at
the head of the queue and later computes its tokens again. Nothing is admitted in such a step. The
oldest request is never preempted by another and fits into an empty pool, so it always ends: so does
every request.
"""

import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from quantforge.errors import UsageError
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` .. `start + num_tokens - 1` of a request, to be computed in a step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the step gives the request its next token."""

    @classmethod
    def next_of(cls, request: Request, num_tokens: int) -> "Chunk":
        """The next `num_tokens` tokens of `request` that are not computed."""
        last = num_tokens == request.num_uncomputed
        return cls(request, request.num_computed, num_tokens, last and request.max_tokens > 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The chunks of one step, those of one token first, and the requests that had to give way."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...]


class Scheduler:
    """Owns the queues; the pool owns the pages."""

    def __init__(
        self,
        pool: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # by arrival
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def room(self, num_prompt: int) -> int:
        """Most tokens that a request with `num_prompt` prompt tokens may generate."""
        capacity = self.pool.num_pages * self.pool.page_size
        return max(min(self.max_model_len, capacity + 1) - num_prompt, 0)

    def add(self, request: Request) -> None:
        """Queues `request`. Raises `UsageError` at once if it can never be served."""
        if request.request_id in self._requests:
            raise UsageError(f"request id {request.request_id!r} is in use already")
        total = request.num_prompt + request.max_tokens
        asked = f"{request.num_prompt} prompt tokens and max_tokens {request.max_tokens}"
        if total > self.max_model_len:
            raise UsageError(
                f"{asked} make {total} tokens, but max_model_len is {self.max_model_len}"
            )
        if self.pool.pages_for(request.max_cached_tokens) > self.pool.num_pages:
            raise UsageError(
                f"{asked} need {request.max_cached_tokens} tokens of KV cache, but it holds "
                f"{self.pool.num_pages * self.pool.page_size}"
            )
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self) -> Schedule:
        """Plans a step and counts its tokens as computed; empty only when there is no work."""
        chosen: dict[str, Chunk] = {}
        preempted: list[Request] = []
        budget = self._schedule_running(chosen, preempted)
        if not preempted:
            self._admit(chosen, budget)
        chunks = sorted(chosen.values(), key=lambda chunk: chunk.num_tokens > 1)
        for chunk in chunks:
            chunk.request.num_computed += chunk.num_tokens
        return Schedule(tuple(chunks), tuple(preempted))

    def finish(self, request_id: str) -> Request | None:
        """Forgets a request and frees its pages; None if there is no such request."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.pool.release(request_id)
            if request in self._running:
                self._running.remove(request)
            else:
                self._waiting.remove(request)
        return request

    def check(self) -> None:
        """Raises `AssertionError` if queues, requests and pages do not agree."""
        self.pool.check()
        queued = [request.request_id for request in (*self._running, *self._waiting)]
        assert len(queued) == len(set(queued)), "a request is queued twice"
        assert set(queued) == set(self._requests), "a request is lost"
        assert self.pool.owners() == {r.request_id for r in self._running}, "a page is leaked"
        assert _is_sorted(r.arrival for r in self._running), "running requests out of order"
        assert _is_sorted(r.arrival for r in self._waiting), "waiting requests out of order"
        assert len(self._running) <= self.max_num_seqs, "too many running requests"
        for request in self._running:
            held = len(self.pool.pages(request.request_id)) * self.pool.page_size
            assert request.num_computed <= held, f"{request.request_id} outgrew its pages"
            assert request.num_computed <= request.num_tokens, "more computed than there is"
        assert all(r.num_computed == 0 for r in self._waiting), "a waiting request is computed"

    def _schedule_running(self, chosen: dict[str, Chunk], preempted: list[Request]) -> int:
        """Fills `chosen` with running requests; gives the tokens left of the budget."""
        budget = self.max_num_batched_tokens
        for request in sorted(self._running, key=lambda r: r.num_uncomputed > 1):
            if not budget:
                break
            if request in preempted or not request.num_uncomputed:
                continue
            count = min(request.num_uncomputed, budget)
            budget -= count
            budget += self._make_room(request, count, chosen, preempted)
            if request in preempted:
                budget += count
            else:
                chosen[request.request_id] = Chunk.next_of(request, count)
        return budget

    def _make_room(
        self, request: Request, count: int, chosen: dict[str, Chunk], preempted: list[Request]
    ) -> int:
        """Preempts until `request` has pages for `count` tokens more (or is itself preempted).

        Gives the tokens that preempted requests had been scheduled for."""
        freed = 0
        while not self.pool.grow(request.request_id, request.num_computed + count):
            victim = self._running.pop()
            self.pool.release(victim.request_id)
            victim.num_computed = 0
            self._waiting.appendleft(victim)
            self.num_preemptions += 1
            preempted.append(victim)
            if victim is request:
                break
            dropped = chosen.pop(victim.request_id, None)
            freed += dropped.num_tokens if dropped else 0
        return freed

    def _admit(self, chosen: dict[str, Chunk], budget: int) -> None:
        while self._waiting and budget and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            spare = len(self._running)
            if not self.pool.grow(request.request_id, request.num_tokens, keep_free=spare):
                break
            self._waiting.popleft()
            bisect.insort(self._running, request, key=lambda r: r.arrival)
            count = min(request.num_uncomputed, budget)
            budget -= count
            chosen[request.request_id] = Chunk.next_of(request, count)


def _is_sorted(values: Iterable[int]) -> bool:
    listed = list(values)
    return listed == sorted(listed)
