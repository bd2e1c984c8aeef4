"""What the scheduler chooses, step by step. No model: a step's tokens are appended by hand."""

import pytest

from quantforge.errors import UsageError
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.request import Request, SamplingParams
from quantforge.runtime.scheduler import Schedule, Scheduler

PAGE = 4


def scheduler(pages: int = 100, seqs: int = 8, tokens: int = 16, length: int = 400) -> Scheduler:
    return Scheduler(
        BlockManager(pages, PAGE),
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
    )


def request(name: str, num_prompt: int, max_tokens: int, arrival: int = 0) -> Request:
    return Request(
        request_id=name,
        token_ids=list(range(num_prompt)),
        num_prompt=num_prompt,
        params=SamplingParams(),
        max_tokens=max_tokens,
        seed=0,
        arrival=arrival,
    )


def add(s: Scheduler, *sizes: tuple[int, int]) -> list[Request]:
    """Requests a, b, c... of (prompt tokens, max_tokens)."""
    added = [
        request(chr(ord("a") + i), prompt, most, arrival=i)
        for i, (prompt, most) in enumerate(sizes)
    ]
    for r in added:
        s.add(r)
    return added


def run_step(s: Scheduler) -> Schedule:
    """Schedules, gives each sampling request a token, ends those that have enough."""
    schedule = s.schedule()
    for chunk in schedule.chunks:
        if chunk.samples:
            chunk.request.token_ids.append(7)
            if chunk.request.finish_reason():
                s.finish(chunk.request.request_id)
    s.check()
    return schedule


def planned(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """Request -> (first token, number of tokens)."""
    return {c.request.request_id: (c.start, c.num_tokens) for c in schedule.chunks}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    s = scheduler(tokens=16)
    add(s, (35, 2))
    assert planned(run_step(s)) == {"a": (0, 16)}
    assert planned(run_step(s)) == {"a": (16, 16)}
    assert planned(run_step(s)) == {"a": (32, 3)}
    assert planned(run_step(s)) == {"a": (35, 1)}
    assert not s.has_work


def test_only_the_last_chunk_of_a_prompt_gives_a_token() -> None:
    s = scheduler(tokens=16)
    add(s, (20, 5))
    assert not run_step(s).chunks[0].samples
    assert run_step(s).chunks[0].samples


def test_decodes_come_before_the_prefill_that_shares_their_step() -> None:
    s = scheduler(tokens=16)
    add(s, (3, 9), (40, 9), (5, 9))
    assert planned(run_step(s)) == {"a": (0, 3), "b": (0, 13)}
    second = run_step(s)
    assert planned(second) == {"a": (3, 1), "b": (13, 15)}
    assert second.chunks[0].request.request_id == "a"
    assert planned(run_step(s)) == {"a": (4, 1), "b": (28, 12), "c": (0, 3)}


def test_no_more_sequences_run_than_allowed() -> None:
    s = scheduler(seqs=2)
    add(s, (2, 3), (2, 3), (2, 3))
    assert set(planned(run_step(s))) == {"a", "b"}
    assert set(planned(run_step(s))) == {"a", "b"}
    assert set(planned(run_step(s))) == {"a", "b"}
    assert set(planned(run_step(s))) == {"c"}


def test_requests_are_admitted_in_the_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    s = scheduler(pages=6)
    add(s, (12, 4), (20, 1), (1, 1))
    assert set(planned(run_step(s))) == {"a"}
    assert s.num_waiting == 2


def test_a_decode_without_a_page_preempts_the_youngest() -> None:
    s = scheduler(pages=5)
    add(s, (8, 12), (4, 12))
    first = run_step(s)
    assert set(planned(first)) == {"a", "b"}
    preempted = [r.request_id for _ in range(5) for r in run_step(s).preempted]
    assert preempted == ["b"]
    assert s.num_preemptions == 1
    while s.has_work:
        run_step(s)


def test_a_preempted_request_computes_its_tokens_again_with_those_it_generated() -> None:
    s = scheduler(pages=5)
    a, b = add(s, (8, 8), (4, 10))
    while not (schedule := run_step(s)).preempted:
        pass
    assert schedule.preempted == (b,)
    assert b.num_computed == 0
    generated = b.num_generated
    assert generated > 0
    while a.request_id in s:
        run_step(s)
    assert planned(run_step(s)) == {"b": (0, 4 + generated)}
    while s.has_work:
        run_step(s)
    assert b.num_generated == 10


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    s = scheduler(pages=5)
    add(s, (8, 12), (4, 12), (1, 1))
    while not (schedule := run_step(s)).preempted:
        pass
    assert set(planned(schedule)) == {"a"}


def test_an_admission_leaves_a_page_for_each_running_request() -> None:
    s = scheduler(pages=4)
    add(s, (8, 9), (8, 1))
    run_step(s)
    assert s.num_running == 1


@pytest.mark.parametrize(
    ("prompt", "most", "reason"),
    [
        (300, 101, "make 401 tokens, but max_model_len is 400"),
        (200, 42, "need 241 tokens of KV cache, but it holds 240"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_reason(
    prompt: int, most: int, reason: str
) -> None:
    s = scheduler(pages=60)
    with pytest.raises(UsageError, match=reason):
        s.add(request("a", prompt, most))
    assert not s.has_work
    s.check()


def test_the_largest_request_that_fits_is_served_to_its_end() -> None:
    s = scheduler(pages=60)
    assert s.room(200) == 41
    add(s, (200, 41))
    while s.has_work:
        run_step(s)


def test_an_id_in_use_is_refused() -> None:
    s = scheduler()
    s.add(request("a", 3, 1))
    with pytest.raises(UsageError, match="'a' is in use"):
        s.add(request("a", 3, 1))


def test_finishing_frees_the_pages_of_a_running_and_of_a_waiting_request() -> None:
    s = scheduler(pages=6, seqs=1)
    add(s, (8, 4), (8, 4))
    run_step(s)
    assert s.finish("b") is not None
    assert s.finish("a") is not None
    assert s.finish("a") is None
    s.check()
    assert s.pool.num_free == 6


def test_a_text_to_be_scored_never_samples() -> None:
    s = scheduler(tokens=16)
    (a,) = add(s, (20, 0))
    schedules = [s.schedule(), s.schedule()]
    assert [c.samples for schedule in schedules for c in schedule.chunks] == [False, False]
    assert a.num_uncomputed == 0
    assert not s.schedule().chunks
