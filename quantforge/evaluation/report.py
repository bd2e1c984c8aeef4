"""Reports of an evaluation or a gate, made from its JSON document alone.

Markdown for a pull request, and one HTML page that needs neither network nor script.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.errors import UsageError
from quantforge.page import Rows, bar_plot, number, page, table

CHECK_COLUMNS = ("", "limit", "value", "threshold", "margin")


def write_report(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` as HTML or Markdown, by the suffix of `path`. Raises `UsageError`."""
    check_report_path(path)
    render = to_html if path.suffix == ".html" else to_markdown
    path.write_text(render(document), encoding="utf-8")


def check_report_path(path: Path) -> None:
    """Raises `UsageError` if no report can be written to `path`: called before any work."""
    if path.suffix not in (".html", ".md"):
        raise UsageError(f"report {path} has suffix {path.suffix!r}; use .html or .md")
    if not path.parent.is_dir():
        raise UsageError(f"report {path}: folder {path.parent} does not exist")


def to_markdown(document: Mapping[str, Any]) -> str:
    """The verdict and the tables in GitHub's Markdown."""
    parts = [f"# {_title(document)}"]
    for heading, columns, rows in _sections(document):
        cells = [[_markdown_cell(c) for c in row] for row in [columns, *rows]]
        rule = ["---"] * len(columns)
        lines = [f"| {' | '.join(row)} |" for row in [cells[0], rule, *cells[1:]]]
        parts += [f"## {heading}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def to_html(document: Mapping[str, Any]) -> str:
    """A whole page: verdict, tables and plots."""
    body = "".join(table(*section) for section in _sections(document))
    return page(_title(document), body + _plots(document))


def to_text(document: Mapping[str, Any]) -> str:
    """Figures, and checks and verdict of a gate, as aligned lines for a terminal."""
    parts = [_align(summary_rows(document))]
    if "gate" in document:
        parts += [_align([CHECK_COLUMNS, *check_rows(document["gate"])]), _title(document)]
    return "\n\n".join(parts)


def summary_rows(document: Mapping[str, Any]) -> Rows:
    """(figure, value, 95 % interval) of an evaluation, for tables and terminals."""
    compared = document.get("comparison") or {}
    rows: Rows = [("perplexity", number(document["ppl"]), "")]
    names = (
        ("ppl_baseline", "perplexity of the baseline"),
        ("ppl_ratio", "perplexity ratio"),
        ("mean_kl", "mean KL divergence (nats)"),
        ("median_kl", "median KL divergence"),
        ("p99_kl", "99 % KL divergence"),
        ("max_kl", "largest KL divergence"),
        ("top1", "top-1 agreement"),
    )
    for key, label in names:
        if key in compared:
            interval = compared.get(f"{key}_interval")
            shown = " to ".join(number(end) for end in interval) if interval else ""
            rows.append((label, number(compared[key]), shown))
    rows.append(("bits per weight", number(document["bits_per_weight"]), ""))
    return rows


def check_rows(gate: Mapping[str, Any]) -> Rows:
    """(verdict, limit, value, threshold, margin) of each check of a gate."""
    return [
        (
            "pass" if check["ok"] else "FAIL",
            check["limit"],
            number(check["value"]),
            f"{check['threshold']:g}",
            f"{check['margin']:+.4g}",
        )
        for check in gate["checks"]
    ]


def _title(document: Mapping[str, Any]) -> str:
    gate = document.get("gate")
    if gate is None:
        return f"Evaluation of {document['model']}"
    return f"Gate {'passed' if gate['passed'] else 'FAILED'}: {document['model']}"


def _sections(document: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], Rows]]:
    sections: list[tuple[str, tuple[str, ...], Rows]] = []
    if "gate" in document:
        sections.append(("Checks", CHECK_COLUMNS, check_rows(document["gate"])))
    sections.append(("Figures", ("figure", "value", "95 % interval"), summary_rows(document)))
    sections.append(("How it was measured", ("", ""), _conditions(document)))
    return sections


def _conditions(document: Mapping[str, Any]) -> Rows:
    text = document["text"]
    rows: Rows = [("model", str(document["model"]))]
    if document["baseline"] is not None:
        rows.append(("baseline", str(document["baseline"])))
    rows.append(("text", f"{text['name']} (sha256 {text['sha256'][:16]}...)"))
    rows += [(key.replace("_", " "), str(value)) for key, value in document["protocol"].items()]
    for role in ("engine", "baseline_engine"):
        engine = document[role]
        if engine:
            kernels = ", ".join(f"{op}: {kernel}" for op, kernel in engine["kernels"].items())
            place = f"{engine['device']}, {engine['dtype']}, KV cache {engine['kv_cache']}"
            rows.append((role.replace("_", " "), f"{place}; {kernels}"))
    return rows


def _align(rows: Rows) -> str:
    """`rows` as lines of equally wide columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _plots(document: Mapping[str, Any]) -> str:
    histogram, sums = document.get("kl_histogram"), document.get("windows")
    parts = []
    if histogram:
        edges = histogram["edges"]
        labels = [f"{low:.1e} to {high:.1e} nats" for low, high in itertools.pairwise(edges)]
        ends = (f"{edges[0]:.0e}", f"{edges[-1]:.2g} nats (log scale)")
        plot = bar_plot(histogram["counts"], labels, ends)
        parts.append(f"<h2>Positions by KL divergence</h2>\n{plot}")
    if sums and "baseline_nll" in sums:
        ratios = [
            math.exp((ours - theirs) / count)
            for ours, theirs, count in zip(
                sums["nll"], sums["baseline_nll"], sums["count"], strict=True
            )
        ]
        labels = [f"window {i}" for i in range(len(ratios))]
        plot = bar_plot(ratios, labels, ("first window", "last"), reference=1.0)
        parts.append(f"<h2>Perplexity ratio of each window</h2>\n{plot}")
    return "\n".join(parts)
