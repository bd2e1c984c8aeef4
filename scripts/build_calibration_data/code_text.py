"""Code. Every function yields documents, in the order of its package."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from text import MAX_DOCUMENT, html_blocks


def cut_code(text: str, comment: str) -> Iterator[str]:
    """Pieces of a source file, cut where a top-level line follows a blank one."""
    text = re.sub(rf"\A(\s*({comment}).*\n)+", "", text)
    piece = ""
    for part in re.split(r"\n\n(?=\S)", text):
        piece += part.rstrip() + "\n\n"
        if len(piece) > MAX_DOCUMENT:
            yield piece.strip("\n")
            piece = ""
    if len(piece) > 400:
        yield piece.strip("\n")


def source_files(folder: Path, pattern: str, comment: str) -> Iterator[str]:
    """Code under `folder`, without the files whose header names an owner of its own."""
    for path in sorted(folder.glob(pattern)):
        text = path.read_text(encoding="utf-8", errors="strict")
        head = re.match(rf"(\s*({comment}).*\n)*", text)
        body = text[head.end() :] if head else text
        if "copyright" not in body.lower():
            yield from (d for d in cut_code(body, comment) if len(d) < 3 * MAX_DOCUMENT)


def python_library(folder_of: Callable[[str], Path]) -> Iterator[str]:
    folder = folder_of("libpython3.11-stdlib") / "usr/lib/python3.11"
    for path in python_modules(folder):
        yield from source_files(path.parent, path.name, "#")


def python_modules(folder: Path) -> list[Path]:
    """Modules of the standard library that name no copyright of their own, even in a header."""
    found = [*folder.glob("*.py"), *folder.glob("json/*.py"), *folder.glob("email/*.py")]
    found += [*folder.glob("asyncio/*.py"), *folder.glob("importlib/*.py")]
    found = [path for path in found if path.is_file()]  # one is a link into another package
    return sorted(p for p in found if "copyright" not in p.read_text(errors="ignore").lower())


def tornado(folder_of: Callable[[str], Path]) -> Iterator[str]:
    return source_files(folder_of("tornado") / "tornado", "*.py", "#")


def rxjs(folder_of: Callable[[str], Path]) -> Iterator[str]:
    return source_files(folder_of("rxjs") / "package/src/internal", "**/*.ts", "//")


def abseil(folder_of: Callable[[str], Path]) -> Iterator[str]:
    return source_files(folder_of("libabsl-dev") / "usr/include/absl", "[cstn]*/*.h", "//")


def rust_by_example(folder_of: Callable[[str], Path]) -> Iterator[str]:
    folder = folder_of("rust-doc") / "usr/share/doc/rust-doc/html/rust-by-example"
    for path in sorted(folder.glob("**/*.html")):
        if path.name not in ("print.html", "toc.html"):
            for tag, text in html_blocks(path):
                if tag == "pre" and len(text) > 300:
                    yield text
