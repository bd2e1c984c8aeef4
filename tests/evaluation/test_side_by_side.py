"""The stream of an engine's logits: forwards, one block at a time, errors carried over."""

import threading
import weakref
from typing import Any

import pytest
import torch

from quantforge.evaluation.side_by_side import THREAD_NAME, LogitsStream


def scoring_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == THREAD_NAME]


def test_a_stream_gives_every_row_in_order(fake_engine: Any, token_ids: list[int]) -> None:
    engine = fake_engine(block=7)
    rows = []
    with LogitsStream(engine, token_ids) as stream:
        position = 0
        while position < len(token_ids):
            block = stream.at(position)
            rows.append(block.clone())
            position += len(block)
    torch.testing.assert_close(torch.cat(rows), engine.logits(token_ids), rtol=0, atol=0)
    assert engine.unwound == 0


def test_the_engine_works_only_when_its_next_block_is_wanted(
    fake_engine: Any, token_ids: list[int]
) -> None:
    engine = fake_engine(block=10)
    with LogitsStream(engine, token_ids) as stream:
        assert engine.calls == []
        stream.at(0)
        stream.at(9)
        assert engine.calls == [0]
        stream.at(10)
        assert engine.calls == [0, 10]


def test_one_block_is_held_at_most(fake_engine: Any, token_ids: list[int]) -> None:
    class Watched(fake_engine):  # type: ignore[misc]
        blocks: list[weakref.ref[torch.Tensor]]

        def score(self, windows: Any, consume: Any, progress: Any = None) -> None:
            self.blocks = []
            rows = self.logits(windows[0])
            for start in range(0, len(rows), 10):
                block = rows[start : start + 10].clone()
                self.blocks.append(weakref.ref(block))
                consume(0, start, block)
                del block
                assert sum(b() is not None for b in self.blocks) <= 1

    with LogitsStream(Watched(), token_ids) as stream:
        for position in range(0, 200, 10):
            stream.at(position)


def test_a_stream_read_in_part_lets_the_engine_finish(
    fake_engine: Any, token_ids: list[int]
) -> None:
    engine = fake_engine(block=10)
    with LogitsStream(engine, token_ids) as stream:
        stream.at(0)
    assert engine.unwound == 0
    assert len(engine.calls) == 20


def test_a_stream_that_is_never_read_ends(fake_engine: Any, token_ids: list[int]) -> None:
    with LogitsStream(fake_engine(), token_ids):
        pass
    assert not scoring_threads()


def test_an_error_of_the_engine_reaches_the_reader(fake_engine: Any, token_ids: list[int]) -> None:
    class Failing(fake_engine):  # type: ignore[misc]
        def score(self, windows: Any, consume: Any, progress: Any = None) -> None:
            consume(0, 0, self.logits(windows[0])[:4])
            raise MemoryError("no pages")

    def read_two_blocks() -> None:
        with LogitsStream(Failing(), token_ids) as stream:
            stream.at(0)
            stream.at(4)

    with pytest.raises(MemoryError, match="no pages"):
        read_two_blocks()
    assert not scoring_threads()


def test_an_error_of_the_engine_after_the_last_read_is_not_lost(
    fake_engine: Any, token_ids: list[int]
) -> None:
    class Failing(fake_engine):  # type: ignore[misc]
        def score(self, windows: Any, consume: Any, progress: Any = None) -> None:
            consume(0, 0, self.logits(windows[0])[:4])
            raise MemoryError("no pages")

    with (
        pytest.raises(MemoryError, match="no pages"),
        LogitsStream(Failing(), token_ids) as stream,
    ):
        stream.at(0)


def test_a_failing_reader_unwinds_the_engine(fake_engine: Any, token_ids: list[int]) -> None:
    engine = fake_engine(block=10)

    def read_and_fail() -> None:
        with LogitsStream(engine, token_ids) as stream:
            stream.at(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read_and_fail()
    assert engine.unwound == 1
    assert engine.calls == [0]
    assert not scoring_threads()
