"""Reads the documents of a calibration set: the bundled text, a local file, or a Hub data set.

A document is either plain text or a chat (a list of messages), with the name of the source that
it came from. Nothing here shuffles, drops or tokenizes: `data.py` does.

========== ==================================================================================
`.txt`     the whole file is one document
`.jsonl`   one JSON value a line: an object with a `text` or `messages` column, or a string
`.json`    a list of such values
`.parquet` one row a document
a Hub id   ``owner/name`` or ``owner/name:config``, read row by row through `datasets`
========== ==================================================================================
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.errors import CalibrationError, UsageError
from quantforge.registry import did_you_mean
from quantforge.resources import resource_folder

FILE_SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One piece of text. `content` is plain text, or a chat of ``{"role", "content"}``."""

    content: str | tuple[Mapping[str, Any], ...]
    source: str

    @property
    def text(self) -> str:
        """The words alone: of a chat, what was said, joined by blank lines."""
        if isinstance(self.content, str):
            return self.content
        return "\n\n".join(str(message["content"]) for message in self.content)


def bundled_parts() -> tuple[str, ...]:
    """Names of the parts of the bundled set, as in ``bundled:prose``."""
    return tuple(sorted(path.stem for path in resource_folder("calib_data").glob("*.jsonl")))


def read_documents(
    dataset: str, *, split: str, column: str | None, max_characters: int
) -> list[Document]:
    """Documents of `dataset` in the order of their source.

    A Hub data set is read only until it has given `max_characters`; everything else is read
    whole. Raises `UsageError` for a name that means nothing, and `CalibrationError` for data that
    cannot be read, with the file and the row.
    """
    if dataset == "bundled" or dataset.startswith("bundled:"):
        return _read_bundled(dataset.partition(":")[2])
    path = Path(dataset)
    if path.is_dir():
        raise UsageError(f"calibration data {dataset} is a folder; give one file of it")
    if path.is_file():
        return list(_read_file(path, column))
    if path.suffix.lower() in FILE_SUFFIXES:
        raise UsageError(f"calibration file {dataset} does not exist")
    hub = _HUB_ID.fullmatch(dataset)
    if hub is None:
        raise UsageError(
            f"unknown calibration data {dataset!r}{did_you_mean(dataset, _known_names())}; known: "
            f"{', '.join(_known_names())}, a file ({', '.join(FILE_SUFFIXES)}), or a data set of "
            "the Hugging Face Hub as owner/name or owner/name:config"
        )
    rows = _hub_rows(hub["name"], hub["config"], split)
    return _read_up_to(rows, hub["name"], column, max_characters)


def _known_names() -> tuple[str, ...]:
    return ("bundled", *(f"bundled:{part}" for part in bundled_parts()), "self")


def _read_bundled(part: str) -> list[Document]:
    parts = bundled_parts()
    if part and part not in parts:
        raise UsageError(
            f"unknown part {part!r} of the bundled calibration set{did_you_mean(part, parts)}; "
            f"known: {', '.join(parts)}"
        )
    folder = resource_folder("calib_data")
    return [
        document
        for name in ([part] if part else parts)
        for document in _read_file(folder / f"{name}.jsonl", None)
    ]


def _read_file(path: Path, column: str | None) -> Iterator[Document]:
    """Documents of a local file. Raises `UsageError` for a kind of file that we do not read."""
    suffix = path.suffix.lower()
    if suffix not in FILE_SUFFIXES:
        raise UsageError(
            f"calibration file {path} has the suffix {suffix!r}; readable: "
            f"{', '.join(FILE_SUFFIXES)}"
        )
    if suffix == ".parquet":
        rows = _parquet_rows(path)
    elif suffix == ".txt":
        rows = iter([_read_text(path)])
        column = None
    else:
        rows = _jsonl_rows(path) if suffix == ".jsonl" else _json_rows(path)
    for number, row in enumerate(rows, start=1):
        yield _document(row, column, default_source=path.name, where=f"{path}, row {number}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"calibration file {path} is not UTF-8 text (byte {error.start})"
        ) from error
    except OSError as error:
        raise CalibrationError(f"cannot read calibration file {path}: {error.strerror}") from error


def _jsonl_rows(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise CalibrationError(f"{path}, line {number} is not JSON: {error}") from error


def _json_rows(path: Path) -> Iterator[Any]:
    try:
        rows = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise CalibrationError(
            f"{path} holds a JSON {type(rows).__name__}; expected a list of documents"
        )
    return iter(rows)


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError(f'reading {path} needs pyarrow: pip install "quantforge[eval]"') from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise CalibrationError(f"cannot read parquet file {path}: {_one_line(error)}") from error


def _hub_rows(name: str, config: str | None, split: str) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f'reading the data set {name} needs datasets: pip install "quantforge[eval]"'
        ) from error
    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise CalibrationError(
            f"cannot read split {split!r} of the data set {name}: {_one_line(error)}"
        ) from error


def _read_up_to(
    rows: Iterable[Any], name: str, column: str | None, max_characters: int
) -> list[Document]:
    documents: list[Document] = []
    characters = 0
    for number, row in enumerate(rows, start=1):
        where = f"data set {name}, row {number}"
        documents.append(_document(row, column, default_source=name, where=where))
        characters += len(documents[-1].text)
        if characters >= max_characters:
            break
    return documents


def _document(row: Any, column: str | None, *, default_source: str, where: str) -> Document:
    """The document in `row`: its `column`, else `messages`, else `text`."""
    if isinstance(row, str) and column is None:
        return Document(content=row, source=default_source)
    if not isinstance(row, Mapping):
        raise CalibrationError(f"{where}: expected an object, found {type(row).__name__}")
    source = row.get("source")
    if not isinstance(source, str):
        source = default_source
    names = ("messages", "text") if column is None else (column,)
    # Parquet gives every row every column, so an absent value is a None as often as a missing key.
    found = [name for name in names if row.get(name) is not None]
    if not found:
        wanted = " or ".join(repr(name) for name in names)
        raise CalibrationError(f"{where}: no column {wanted}; columns: {', '.join(map(str, row))}")
    return Document(content=_content(row[found[0]], f"{where}: {found[0]}"), source=source)


def _content(value: Any, where: str) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(_is_message(message) for message in value):
        return tuple(value)
    raise CalibrationError(
        f"{where} is neither text nor a list of messages with 'role' and 'content': "
        f"{_one_line(value)}"
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _one_line(value: object) -> str:
    """`value` for the end of a message: one line of at most 200 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
