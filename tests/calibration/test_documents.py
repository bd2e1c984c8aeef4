"""Local files and Hub data sets become documents, or errors that name the place."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.calibration.data import load_calibration
from quantforge.errors import CalibrationError, UsageError
from quantforge.recipe import CalibrationSection


class ByteTokenizer:
    """One token a byte; chats are joined as they are."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages)


CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]
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


def test_each_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [{"text": text, "other": "no"} for text in TEXTS]
    json_path = tmp_path / "data.json"
    json_path.write_text(json.dumps(rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    paths = [jsonl(tmp_path, rows), json_path, tmp_path / "data.parquet"]
    found = [load_calibration(section(path), ByteTokenizer()) for path in paths]
    assert len({item.sha256 for item in found}) == 1
    assert [list(item.sources) for item in found] == [[path.name] for path in paths]


def test_parquet_rows_may_hold_text_or_messages(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [{"text": "plain " * 20, "messages": None}, {"text": None, "messages": CHAT}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    found = load_calibration(section(tmp_path / "data.parquet", 1, 150), ByteTokenizer())
    assert "plain plain" in decode(found.token_ids)
    assert "<user>Hello?</>" in decode(found.token_ids)


def test_a_text_file_is_one_document_in_its_own_order(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(TEXTS))
    found = load_calibration(section(path, samples=2, length=100), ByteTokenizer())
    assert decode(found.token_ids) == "\n\n".join(TEXTS)[:200]


def test_the_column_of_the_recipe_is_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": "wrong " * 50, "body": "right " * 50}])
    found = load_calibration(section(path, column="body"), ByteTokenizer())
    assert decode(found.token_ids).startswith("right right")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"row 1: no column 'messages' or 'text'.*body"),
        ("a.jsonl", b"[1, 2]\n", "row 1: expected an object, found list"),
        ("a.jsonl", b'{"text": 5}\n', "row 1: text is neither text nor a list of messages"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "'role' and 'content'"),
        ("a.json", b'{"text": "x"}', "holds a JSON dict; expected a list"),
        ("a.json", b"[", "is not JSON"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.parquet", b"PAR0" * 20, "cannot read parquet file"),
    ],
)
def test_unreadable_files_are_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        load_calibration(section(tmp_path / name), ByteTokenizer())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("bundeld", r"did you mean 'bundled'"),
        ("bundled:poetry", r"known: chat, code, prose"),
        ("no/such/file.jsonl", "does not exist"),
        ("not a name", "unknown calibration data"),
    ],
)
def test_names_that_mean_nothing_are_refused_with_what_is_known(dataset: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_calibration(section(dataset), ByteTokenizer())


def test_a_folder_and_an_unknown_kind_of_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("text\nx\n")
    with pytest.raises(UsageError, match=r"'\.csv'; readable: \.txt"):
        load_calibration(section(tmp_path / "data.csv"), ByteTokenizer())
    with pytest.raises(UsageError, match="is a folder"):
        load_calibration(section(tmp_path), ByteTokenizer())


def test_a_hub_data_set_is_read_by_split_and_column_and_no_further_than_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []
    read = 0

    def rows() -> Any:
        nonlocal read
        for text in TEXTS * 1000:
            read += 1
            yield {"line": f"{read} {text}"}

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, config, split, streaming))
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_calibration(
        section("owner/name:small", split="validation", column="line"), ByteTokenizer()
    )
    assert calls == [("owner/name", "small", "validation", True)]
    assert found.token_ids.shape == (4, 32)
    assert read < 1000
    assert found.sources == {"owner/name": read}


def test_a_hub_data_set_that_cannot_be_had_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("offline\nmode")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(CalibrationError, match="'train' of the data set owner/name: offline mode"):
        load_calibration(section("owner/name"), ByteTokenizer())
