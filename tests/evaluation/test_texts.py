"""Named and local evaluation texts."""

import hashlib
import json
import sys
import types
from pathlib import Path

import pytest

from quantforge.errors import EvaluationError, UsageError
from quantforge.evaluation.texts import load_text
from quantforge.recipe import load_recipe


def test_a_local_file_is_taken_byte_for_byte(tmp_path: Path) -> None:
    content = "Füße\r\nand more\n\n = Title = \n".encode()
    path = tmp_path / "text.raw"
    path.write_bytes(content)
    text = load_text(str(path))
    assert text.text.encode() == content
    assert text.sha256 == hashlib.sha256(content).hexdigest()


def test_the_bundled_text_is_long_enough_for_the_shipped_gate() -> None:
    section = load_recipe("ci_gate").gate
    assert section is not None
    assert section.max_tokens is not None
    words = load_text(section.dataset).text.split()
    assert len(words) > section.max_tokens, "a word is at least one token"


def test_jsonl_documents_are_joined_by_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "one\u2028still one"}, {"text": "two", "source": "x"}]
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n", "utf-8")
    assert load_text(str(path)).text == "one\u2028still one\n\ntwo"


@pytest.mark.parametrize(
    ("line", "reason"),
    [("{", "line 2: not JSON"), ('{"messages": []}', "line 2: expected"), ("3", "line 2")],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(EvaluationError, match=reason):
        load_text(str(path))


def test_an_empty_text_gives_no_number(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(" \n\n")
    with pytest.raises(EvaluationError, match="is empty"):
        load_text(str(path))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(EvaluationError, match=r"not UTF-8.*byte 3"):
        load_text(str(path))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'wikitext2'.*bundled"):
        load_text("wikitext-2")


def test_a_table_file_is_refused_rather_than_scored_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="jsonl"):
        load_text(str(path))


def test_wikitext2_is_the_raw_test_split_joined_by_blank_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def load_dataset(*names: str, split: str) -> dict[str, list[str]]:
        asked.extend([*names, split])
        return {"text": ["", " = Title = \n", " words \n"]}

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert load_text("wikitext2").text == "\n\n = Title = \n\n\n words \n"
    assert asked == ["Salesforce/wikitext", "wikitext-2-raw-v1", "test"]


def test_wikitext2_without_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"quantforge\[eval\]"):
        load_text("wikitext2")


def test_wikitext2_that_cannot_be_fetched_asks_for_a_local_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_dataset(*names: str, split: str) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(EvaluationError, match=r"no route to host.*local copy"):
        load_text("wikitext2")
