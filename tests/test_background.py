"""Work behind the main thread: in order, bounded, and with its errors where they are seen."""

import threading
from functools import partial

import pytest

from quantforge.background import Background


def test_work_is_done_in_order_and_the_context_waits_for_it() -> None:
    done: list[int] = []
    with Background() as background:
        for index in range(20):
            background.submit(partial(done.append, index))
    assert done == list(range(20))


def test_no_more_than_the_depth_is_held() -> None:
    gate = threading.Event()
    started: list[int] = []

    def hold(index: int) -> None:
        started.append(index)
        gate.wait(10)

    with Background(depth=2) as background:
        background.submit(lambda: hold(0))
        background.submit(lambda: hold(1))
        third = threading.Thread(target=lambda: background.submit(lambda: hold(2)))
        third.start()
        third.join(0.2)
        assert third.is_alive(), "the third waits for room"
        gate.set()
        third.join(10)
    assert started == [0, 1, 2]


def test_an_error_is_raised_by_the_next_call_and_nothing_runs_behind_it() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError("disk")

    def run() -> None:
        with Background() as background:
            background.submit(fail)
            background.submit(lambda: done.append("behind"))
            background.wait()

    with pytest.raises(ValueError, match="disk"):
        run()
    assert done == []


def test_an_error_of_the_main_thread_goes_before_and_the_work_is_finished() -> None:
    done: list[str] = []

    def run() -> None:
        with Background() as background:
            background.submit(lambda: done.append("kept"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["kept"]
