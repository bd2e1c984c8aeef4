"""Random histories of pool and scheduler: no page is leaked or owned twice, every request ends."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from quantforge.errors import UsageError
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.request import Request, SamplingParams
from quantforge.runtime.scheduler import Scheduler


class PoolMachine(RuleBasedStateMachine):
    """A pool beside the simplest model of one: owner -> list of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockManager(num_pages=12, page_size=3)
        self.model: dict[str, list[int]] = {}

    owners = st.sampled_from("abcdef")

    @rule(owner=owners, tokens=st.integers(1, 30), keep_free=st.integers(0, 3))
    def grow(self, owner: str, tokens: int, keep_free: int) -> None:
        before = self.model.get(owner, [])
        missing = max(0, -(-tokens // 3) - len(before))
        fits = missing == 0 or missing + keep_free <= self.free()
        assert self.pool.grow(owner, tokens, keep_free) == fits
        if fits and missing:
            pages = list(self.pool.pages(owner))
            assert pages[: len(before)] == before
            self.model[owner] = pages

    @rule(owner=owners, source=owners, count=st.integers(0, 5))
    def share(self, owner: str, source: str, count: int) -> None:
        pages = self.model.get(source, [])[:count]
        if owner not in self.model:
            self.pool.share(owner, pages)
            if pages:
                self.model[owner] = list(pages)

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        self.pool.release(owner)
        self.model.pop(owner, None)

    def free(self) -> int:
        return 12 - len({page for pages in self.model.values() for page in pages})

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.free()
        assert self.pool.owners() == set(self.model)
        for owner, pages in self.model.items():
            assert list(self.pool.pages(owner)) == pages


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps and aborts; a fake cache knows which token each slot holds."""

    requests = Bundle("requests")

    @initialize(
        pages=st.integers(1, 12),
        page_size=st.integers(1, 4),
        seqs=st.integers(1, 4),
        tokens=st.integers(1, 9),
        length=st.integers(2, 40),
    )
    def build(self, pages: int, page_size: int, seqs: int, tokens: int, length: int) -> None:
        self.pool = BlockManager(pages, page_size)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length
        )
        self.budget = tokens
        self.slots: dict[int, tuple[str, int]] = {}
        self.live: dict[str, Request] = {}
        self.count = 0

    @rule(target=requests, prompt=st.integers(1, 25), most=st.integers(0, 12))
    def add(self, prompt: int, most: int) -> Any:
        name = f"r{self.count}"
        request = Request(
            request_id=name,
            token_ids=[self.count] * prompt,
            num_prompt=prompt,
            params=SamplingParams(),
            max_tokens=most,
            seed=0,
            arrival=self.count,
        )
        self.count += 1
        fits = most <= self.scheduler.room(prompt)
        fits = fits and prompt <= self.pool.num_pages * self.pool.page_size
        fits = fits and prompt + most <= self.scheduler.max_model_len
        try:
            self.scheduler.add(request)
        except UsageError:
            assert not fits
            return multiple()
        assert fits
        self.live[name] = request
        return name

    @rule(name=requests)
    def abort(self, name: str) -> None:
        assert (self.scheduler.finish(name) is not None) == (name in self.live)
        self.live.pop(name, None)

    @rule()
    def step(self) -> None:
        schedule = self.scheduler.schedule()
        assert bool(schedule.chunks) == bool(self.live), "work is left, but nothing is planned"
        assert sum(chunk.num_tokens for chunk in schedule.chunks) <= self.budget
        for chunk in schedule.chunks:
            self.compute(chunk.request, chunk.start, chunk.num_tokens)
        for chunk in schedule.chunks:
            request = chunk.request
            if chunk.samples:
                request.token_ids.append(0)
            scored = request.max_tokens == 0 and not request.num_uncomputed
            if scored or (chunk.samples and request.finish_reason()):
                self.scheduler.finish(request.request_id)
                del self.live[request.request_id]

    def compute(self, request: Request, start: int, count: int) -> None:
        """Writes the chunk's slots, then reads the whole context as attention would."""
        pages, size = self.pool.pages(request.request_id), self.pool.page_size
        for at in range(start, start + count):
            self.slots[pages[at // size] * size + at % size] = (request.request_id, at)
        for at in range(start + count):
            held = self.slots.get(pages[at // size] * size + at % size)
            assert held == (request.request_id, at), "a key was overwritten or never computed"

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        left = sum(r.num_prompt + r.max_tokens + 2 for r in self.live.values())
        steps = 0
        while self.live:
            self.step()
            self.scheduler.check()
            steps += 1
            assert steps <= 3 * (left + 1) ** 2, "a request never ends"
        assert self.pool.num_free == self.pool.num_pages
        assert not self.scheduler.has_work


MACHINES = pytest.mark.parametrize("machine", [PoolMachine, SchedulerMachine])


def run(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@MACHINES
def test_no_page_is_leaked_or_owned_twice_and_every_request_ends(
    machine: type[RuleBasedStateMachine],
) -> None:
    run(machine, examples=150, steps=30)


@pytest.mark.slow
@MACHINES
def test_the_same_over_a_hundred_thousand_steps(machine: type[RuleBasedStateMachine]) -> None:
    run(machine, examples=1000, steps=100)
