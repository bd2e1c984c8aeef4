"""Writes the README and the licence notices of `calib_data/`."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from packages import Package

TEXT = """# Text for calibration and for a quick evaluation

Small, general and free to ship: what `quantforge quantize` reads when no data is named
(`bundled`, or one part as `bundled:prose`, `bundled:code`, `bundled:chat`), and what
`quantforge eval ppl --data bundled` scores (`held_out.txt`). The held-out text shares no country,
speech, chapter or page with the prose, nor a run of 13 words with any of it.

Every line of a `.jsonl` file is one document of at most a few kilobytes, an object with `text` or
`messages`, and `source`, the package that it came from.

| file | documents | bytes | sha256 |
|---|---|---|---|
{files}

## Sources and licences

| source | version | from | licence | what | documents |
|---|---|---|---|---|---|
{sources}

`NOTICE.txt` and `LICENSE-PSF-2.0.txt` hold the notices; Apache-2.0 itself is the `LICENSE` of this
project. Texts were cut into pieces and stripped of markup, tables and file headers: they are
excerpts, not the works. Facts in them are as old as their editions and are no statement of ours.

## How it is built

`python scripts/build_calibration_data WORK` fetches the packages above by name and version into
the folder WORK and writes this folder; the result depends on the packages alone.
"""

NOTICE = """code.jsonl, chat.jsonl, prose.jsonl and held_out.txt hold excerpts of these works.

Licensed under the Apache License, Version 2.0 (see LICENSE of this project):

  The Rust Programming Language; Rust by Example (rust-doc {rust-doc})
    Copyright the Rust Project Developers. Dual-licensed MIT or Apache-2.0; used under Apache-2.0.
  RxJS (rxjs {rxjs})
    Copyright (c) 2015-2018 Google, Inc., Netflix, Inc., Microsoft Corp. and contributors
  Tornado (tornado {tornado})
    Copyright 2009 Facebook and the Tornado contributors
  Abseil (libabsl-dev {libabsl-dev})
    Copyright 2000-2017 Google Inc.; 2017-2021 The Abseil Authors

Licensed under the Python Software Foundation License Version 2 (see LICENSE-PSF-2.0.txt):

  Python documentation and standard library ({python3.11-doc})
    Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved

In the public domain: the CIA World Factbook and the State of the Union addresses (works of the
United States government), Moby-Dick, the novels of Jane Austen, the documentation of SQLite.

All excerpts were changed: cut into pieces, and stripped of markup, tables and file headers.
"""


def write_readme(
    output: Path, packages: dict[str, Package], folder_of: Callable[[str], Path]
) -> None:
    """README.md, NOTICE.txt and LICENSE-PSF-2.0.txt for the files that `output` holds."""
    counts: Counter[tuple[str, str]] = Counter()
    files = []
    for path in (*sorted(output.glob("*.jsonl")), output / "held_out.txt"):
        data = path.read_bytes()
        lines = data.decode().splitlines() if path.suffix == ".jsonl" else []
        counts.update((json.loads(line)["source"], path.stem) for line in lines)
        digest = hashlib.sha256(data).hexdigest()
        files.append(f"| `{path.name}` | {len(lines) or '-'} | {len(data):,} | `{digest}` |")
    sources = [
        f"| {name} | {p.version} | {p.origin} | {p.licence} | {p.what} | {_where(name, counts)} |"
        for name, p in packages.items()
    ]
    written = "scripts/build_calibration_data | Apache-2.0, written for QuantForge"
    what = "conversations, and word problems made from templates"
    sources.append(f"| written | - | {written} | {what} | {_where('written', counts)} |")
    text = TEXT.format(files="\n".join(files), sources="\n".join(sources))
    (output / "README.md").write_text(text)

    notice = NOTICE
    for name, package in packages.items():
        notice = notice.replace("{" + name + "}", package.version)
    (output / "NOTICE.txt").write_text(notice)
    licences = folder_of("python3.11-doc") / "usr/share/doc/python3.11-doc/copyright"
    found = re.search(
        r"PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n.*?(?=\n\nBEOPEN)",
        licences.read_text(),
        flags=re.DOTALL,
    )
    assert found, "the package python3.11-doc no longer holds the PSF licence where it was"
    (output / "LICENSE-PSF-2.0.txt").write_text(found[0].strip() + "\n")


def _where(source: str, counts: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{n} {part}" for (name, part), n in sorted(counts.items()) if name == source)
