"""Turns pages and fields into paragraphs, and paragraphs into documents of a few kilobytes."""

import hashlib
import html
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

MAX_DOCUMENT = 3000
"""Characters. Short documents keep a calibration of a few thousand tokens varied."""
PROSE_TAGS = ("p", "li")


class Blocks(HTMLParser):
    """Blocks of text of an HTML page, as (tag, text): headings, paragraphs, items, code."""

    kept = ("p", "li", "h1", "h2", "h3", "h4", "pre")
    skipped = ("script", "style", "nav", "table", "svg", "head", "footer", "form", "sup")

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[str, str]] = []
        self._tag = ""
        self._text = ""
        self._skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._skipped += [tag] * (tag == self._skipped[0])
        elif tag in self.skipped or "sphinxsidebar" in str(dict(attrs).get("class")):
            self.flush("")
            self._skipped = [tag]
        elif tag in (*self.kept, "div", "ul", "ol", "dl", "dt", "dd", "blockquote", "hr"):
            self.flush(tag if tag in self.kept else "")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag == self._skipped[0]:
                self._skipped.pop()
        elif tag in (*self.kept, "div", "ul", "ol", "dd", "dt"):
            self.flush("")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._text += data

    def flush(self, tag: str) -> None:
        text = self._text.rstrip() if self._tag == "pre" else " ".join(self._text.split())
        if text and self._tag:
            self.blocks.append((self._tag, text.strip("\n").rstrip("¶")))
        self._tag, self._text = tag, ""


def html_blocks(path: Path) -> list[tuple[str, str]]:
    parser = Blocks()
    parser.feed(path.read_text(encoding="utf-8", errors="strict"))
    parser.flush("")
    return parser.blocks


def page_paragraphs(path: Path) -> list[str]:
    """Sentences in paragraphs, and headings; no code, tables or menus."""
    return [
        text
        for tag, text in html_blocks(path)
        if tag.startswith("h") or (tag in PROSE_TAGS and len(text) > 80 and text[-1] in ".!?")
    ]


def plain(text: str) -> list[str]:
    """Paragraphs of a Factbook field: no markup, one line each."""
    text = re.sub(r"<br\s*/?>|</p>|</li>|\+\+", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text)).replace("\xa0", " ")
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


def cut(paragraphs: Iterable[str], limit: int = MAX_DOCUMENT) -> Iterator[str]:
    """Documents of whole paragraphs, each of at most about `limit` characters."""
    held: list[str] = []
    for paragraph in paragraphs:
        held.append(paragraph)
        if sum(map(len, held)) > limit:
            yield "\n\n".join(held)
            held = []
    if sum(map(len, held)) > 400:
        yield "\n\n".join(held)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_held_out(work: str) -> bool:
    """Whether a whole work (a country, a speech, a chapter, a page) is kept for evaluation."""
    return int(digest(work)[:8], 16) % 8 == 0


def word_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Runs of 13 words, without case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[start:] for start in range(13)), strict=False)
