"""Stop strings on a growing text. A stand-in tokenizer maps each id to a piece of text."""

from collections.abc import Sequence
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quantforge.runtime.text import OutputText


class Pieces:
    """Token i is the i-th piece."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def is_byte(self, token_id: int) -> bool:
        return False


def shown(pieces: Sequence[str], stop: Sequence[str]) -> tuple[list[str], str, bool]:
    """(text of each push until a stop, text of the end, stopped)"""
    text = OutputText(cast(Any, Pieces(pieces)), stop)
    pushed = []
    for token in range(len(pieces)):
        pushed.append(text.push(token))
        if text.stopped:
            break
    return pushed, text.finish(), text.stopped


def test_a_stop_string_across_token_borders_ends_the_text_before_it() -> None:
    assert shown(["one E", "N", "D two"], ["END"]) == (["one ", "", ""], "", True)


def test_what_only_began_like_a_stop_string_is_shown_after_all() -> None:
    assert shown(["one E", "N", "x"], ["END"]) == (["one ", "", "ENx"], "", False)
    assert shown(["one E"], ["END"]) == (["one "], "E", False)


def test_the_first_stop_string_in_the_text_wins() -> None:
    assert shown(["a bc d"], ["d", "bc"]) == (["a "], "", True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert shown(["a", "b"], []) == (["a", "b"], "", False)


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_the_text_is_cut_at_the_first_stop_string_however_it_is_cut_into_tokens(
    pieces: list[str], stop: list[str]
) -> None:
    whole = "".join(pieces)
    ends = [at + len(s) for s in stop if (at := whole.find(s)) >= 0]
    pushed, rest, stopped = shown(pieces, stop)
    assert stopped == bool(ends)
    text = "".join(pushed) + rest
    if not ends:
        assert text == whole
    else:
        assert whole.startswith(text)
        assert any(whole[len(text) :].startswith(s) for s in stop)
        assert not any(s in text for s in stop)


@pytest.mark.parametrize("stop", ["aab", "abab"])
def test_a_stop_string_that_overlaps_itself_is_found(stop: str) -> None:
    assert shown([*"aababab"], [stop])[2]
