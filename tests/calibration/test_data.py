"""The calibration protocol on small files, and the promises of the bundled set."""

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.calibration.data import load_calibration, overlap
from quantforge.errors import CalibrationError, UsageError
from quantforge.recipe import CalibrationSection


class ByteTokenizer:
    """One token a byte. Chats are written between marks, if it has a template at all."""

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.calls: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.calls.append(len(text))
        return list(text.encode())

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        turns = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return turns + "<assistant>" * add_generation_prompt


TEXTS = [f"Document number {i} tells of {i * i} things." for i in range(40)]


def section(dataset: object, samples: int = 4, length: int = 32, **more: Any) -> CalibrationSection:
    return CalibrationSection(
        dataset=str(dataset), num_samples=samples, sequence_length=length, **more
    )


def jsonl(folder: Path, rows: Sequence[Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def decode(token_ids: torch.Tensor) -> str:
    return bytes(token_ids.flatten().tolist()).decode()


# --- the protocol ---------------------------------------------------------------------------------


def test_rows_are_the_shuffled_texts_joined_by_blank_lines_and_cut_in_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": text} for text in TEXTS])
    found = load_calibration(section(path, samples=5, length=100, seed=3), ByteTokenizer())

    shuffled = list(TEXTS)
    random.Random(3).shuffle(shuffled)
    expected = "\n\n".join(shuffled).encode()[:500]
    assert found.token_ids.dtype == torch.int64
    assert found.token_ids.shape == (5, 100)
    assert found.token_ids.flatten().tolist() == list(expected)
    assert found.sources == {"data.jsonl": 40}


def test_the_result_is_the_same_each_time_and_differs_between_seeds(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": text} for text in TEXTS])
    once, again = (load_calibration(section(path), ByteTokenizer()) for _ in range(2))
    other = load_calibration(section(path, seed=1), ByteTokenizer())
    assert torch.equal(once.token_ids, again.token_ids)
    assert once.sha256 == again.sha256 != other.sha256
    assert once.id != other.id


def test_the_hash_is_of_the_token_ids(tmp_path: Path) -> None:
    found = load_calibration(section(jsonl(tmp_path, TEXTS)), ByteTokenizer())
    ids = b"".join(i.to_bytes(8, "little") for i in found.token_ids.flatten().tolist())
    assert found.sha256 == hashlib.sha256(ids).hexdigest()


def test_repeats_and_empty_texts_are_dropped(tmp_path: Path) -> None:
    rows = [*TEXTS, *TEXTS, "", "  \n", *(f"  {text.replace(' ', '   ')}\n" for text in TEXTS)]
    once = load_calibration(section(jsonl(tmp_path, TEXTS, "a.jsonl"), length=64), ByteTokenizer())
    both = load_calibration(section(jsonl(tmp_path, rows, "b.jsonl"), length=64), ByteTokenizer())
    assert torch.equal(once.token_ids, both.token_ids)
    assert both.sources == {"b.jsonl": len(TEXTS)}


def test_only_as_much_text_is_tokenized_as_the_rows_need(tmp_path: Path) -> None:
    rows = [f"{i} " + "word " * 200 for i in range(500)]
    path = jsonl(tmp_path, rows)
    tokenizer = ByteTokenizer()
    found = load_calibration(section(path, samples=2, length=16), tokenizer)
    assert sum(tokenizer.calls) < 3000
    random.Random(0).shuffle(rows)
    assert decode(found.token_ids) == "\n\n".join(rows)[:32]


def test_a_tokenizer_with_long_tokens_still_gets_all_the_rows(tmp_path: Path) -> None:
    class TwentyCharacters(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [int(digit) for digit in re.findall(r"(7)[a-s]{19}", text)]

    path = jsonl(tmp_path, [{"text": f"{'7abcdefghijklmnopqrs' * 20} {i}"} for i in range(40)])
    found = load_calibration(section(path, samples=5, length=100), TwentyCharacters())
    assert found.token_ids.shape == (5, 100)
    assert found.token_ids.eq(7).all()


# --- too little, and too similar ------------------------------------------------------------------


def test_too_little_text_gives_whole_samples_and_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 250)
    found = load_calibration(section(path, samples=10, length=100), ByteTokenizer())
    assert found.token_ids.shape == (2, 100)
    assert any("gives 2 samples" in warning and "10" in warning for warning in found.warnings)


@pytest.mark.parametrize(("length", "warned"), [(8191, True), (8192, False)])
def test_a_set_below_8192_tokens_is_called_small(tmp_path: Path, length: int, warned: bool) -> None:
    path = tmp_path / "text.txt"
    path.write_text("y" * length)
    found = load_calibration(section(path, samples=1, length=length), ByteTokenizer())
    assert any("few" in warning for warning in found.warnings) is warned


@pytest.mark.parametrize("rows", [[], [{"text": ""}], [{"text": "too short"}]])
def test_less_than_one_sample_is_refused(tmp_path: Path, rows: list[Any]) -> None:
    with pytest.raises(CalibrationError, match=r"one sample needs sequence_length 32"):
        load_calibration(section(jsonl(tmp_path, rows)), ByteTokenizer())


@pytest.mark.parametrize("bad", [{"samples": 0}, {"length": 0}, {"samples": -1}])
def test_a_section_without_tokens_is_refused(tmp_path: Path, bad: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        load_calibration(section(jsonl(tmp_path, TEXTS), **bad), ByteTokenizer())


def test_overlap_is_the_share_of_the_evaluation_runs_that_were_read() -> None:
    words = [f"w{i}" for i in range(112)]
    evaluation = " ".join(words)  # 100 runs of 13 words
    assert overlap(evaluation, evaluation.upper().replace(" ", ", ")) == 1.0
    assert overlap(evaluation, " ".join(words[:37])) == pytest.approx(25 / 100)
    assert overlap(evaluation, " ".join(reversed(words))) == 0.0
    assert overlap("too short", evaluation) == 0.0


def test_text_that_will_be_evaluated_is_warned_about(tmp_path: Path) -> None:
    text = " ".join(f"word{i}" for i in range(500))
    path = jsonl(tmp_path, [text])
    same = load_calibration(section(path), ByteTokenizer(), evaluation_text=text)
    other = load_calibration(section(path), ByteTokenizer(), evaluation_text=text[::-1])
    assert any("100.0% of the evaluation text" in warning for warning in same.warnings)
    assert not any("evaluation" in warning for warning in other.warnings)


# --- chats ----------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]


def test_chats_go_through_the_template_without_a_generation_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"messages": CHAT}])
    found = load_calibration(section(path, samples=1, length=30), ByteTokenizer())
    assert decode(found.token_ids) == "<user>Hello?</><assistant>Good day.</>"[:30]


def test_without_a_template_chats_are_plain_text_and_a_warning_says_so(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"messages": CHAT}])
    found = load_calibration(section(path, samples=1, length=17), ByteTokenizer(False))
    assert decode(found.token_ids) == "Hello?\n\nGood day."
    assert any("no chat template" in warning for warning in found.warnings)


# --- text from the model itself -------------------------------------------------------------------


def test_self_calls_the_generator_with_number_length_and_seed() -> None:
    def generate(num_samples: int, length: int, seed: int) -> list[list[int]]:
        return [[seed + i] * length for i in range(num_samples)]

    found = load_calibration(section("self", 3, 8, seed=5), ByteTokenizer(), generate=generate)
    assert found.token_ids.tolist() == [[5] * 8, [6] * 8, [7] * 8]
    assert found.sources == {"self": 3}


def test_short_generations_are_joined_and_cut_into_whole_samples() -> None:
    found = load_calibration(
        section("self", 2, 4), ByteTokenizer(), generate=lambda *_: [[1, 2, 3], [4, 5, 6, 7, 8]]
    )
    assert found.token_ids.tolist() == [[1, 2, 3, 4]]


def test_self_without_a_generator_is_refused() -> None:
    with pytest.raises(UsageError, match="sampled from the model"):
        load_calibration(section("self"), ByteTokenizer())
