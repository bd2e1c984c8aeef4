"""Evaluation texts: the bundled held-out prose, WikiText-2, or a file of the user's own.

A text is one string. Where a source has documents, they are joined by blank lines, which is how the
published WikiText-2 perplexities of GPTQ and AWQ are made. The sha256 of the string is part of
every result, so that two numbers can be known to come from the same text.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.errors import EvaluationError, UsageError
from quantforge.registry import did_you_mean
from quantforge.resources import resource_folder

NAMES = ("bundled", "wikitext2")
JOINER = "\n\n"
BUNDLED_FILE = "held_out.txt"
TABLE_SUFFIXES = (".parquet", ".json", ".csv", ".arrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalText:
    """A text to score. `sha256` is that of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def load_text(name: str) -> EvalText:
    """The text called `name`: ``bundled``, ``wikitext2``, or the path of a UTF-8 or JSONL file.

    Raises `UsageError` for an unknown name and `EvaluationError` for a text that cannot be read.
    """
    if name == "bundled":
        text = _read(resource_folder("calib_data") / BUNDLED_FILE)
    elif name == "wikitext2":
        text = _wikitext2()
    else:
        text = _local(name)
    if not text.strip():
        raise EvaluationError(f"evaluation text {name} is empty")
    return EvalText(name=name, text=text, sha256=hashlib.sha256(text.encode()).hexdigest())


def _local(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"unknown evaluation text {name!r}{did_you_mean(name, NAMES)}; "
            f"use {', '.join(NAMES)}, or the path of a text file"
        )
    if path.suffix in TABLE_SUFFIXES:
        raise UsageError(
            f"evaluation text {name} is a {path.suffix} file; give plain UTF-8 text, or .jsonl "
            "with a string 'text' in each line"
        )
    content = _read(path)
    return _join_jsonl(content, path) if path.suffix == ".jsonl" else content


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise EvaluationError(
            f"evaluation text {path} is missing from this installation"
        ) from error
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"evaluation text {path} is not UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _join_jsonl(content: str, path: Path) -> str:
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvaluationError(f"{path}, line {number}: not JSON ({error.msg})") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise EvaluationError(f"{path}, line {number}: expected an object with a string 'text'")
        documents.append(row["text"])
    return JOINER.join(documents)


def _wikitext2() -> str:
    """The raw test split of WikiText-2 through `datasets`, which keeps it in its own cache."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            "evaluation text 'wikitext2' needs the datasets package: "
            'pip install "quantforge[eval]"; or give a local text file'
        ) from error
    try:
        rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise EvaluationError(
            f"wikitext2 could not be fetched ({reason}); give a local copy as a text file"
        ) from error
    return JOINER.join(rows["text"])
