"""Reports of an evaluation or a gate, made from its JSON document alone.

Markdown for a pull request, and one HTML page that needs neither network nor script: the plots are
inline SVG with their figures as tooltips, colours follow the reader's light or dark theme.
"""

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantforge.errors import UsageError

WIDTH, HEIGHT, MARGIN = 640, 180, 34
"""Size of a plot and of the space for its labels, in SVG units."""

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--soft:#6b7280;--line:#d7dbe0;
--bar:#3b6fb6;--good:#1a7f37;--bad:#c0342b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#15181c;--soft:#98a1ac;--line:#343a42;
--bar:#6da2e8;--good:#4cc46a;--bad:#ff7b72}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:46rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}
th{color:var(--soft);font-weight:500}td{font-variant-numeric:tabular-nums}
.pass{color:var(--good);font-weight:600}.fail{color:var(--bad);font-weight:600}
svg{width:100%;height:auto}svg rect{fill:var(--bar)}
svg text{fill:var(--soft);font-size:11px}svg line{stroke:var(--soft);stroke-dasharray:3}
""".strip()

Rows = list[tuple[str, ...]]

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
    title = html.escape(_title(document))
    body = "".join(_html_table(*section) for section in _sections(document))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n{body}{_plots(document)}</body></html>\n"
    )


def to_text(document: Mapping[str, Any]) -> str:
    """Figures, and checks and verdict of a gate, as aligned lines for a terminal."""
    parts = [_align(summary_rows(document))]
    if "gate" in document:
        parts += [_align([CHECK_COLUMNS, *check_rows(document["gate"])]), _title(document)]
    return "\n\n".join(parts)


def summary_rows(document: Mapping[str, Any]) -> Rows:
    """(figure, value, 95 % interval) of an evaluation, for tables and terminals."""
    compared = document.get("comparison") or {}
    rows: Rows = [("perplexity", _number(document["ppl"]), "")]
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
            shown = " to ".join(_number(end) for end in interval) if interval else ""
            rows.append((label, _number(compared[key]), shown))
    rows.append(("bits per weight", _number(document["bits_per_weight"]), ""))
    return rows


def check_rows(gate: Mapping[str, Any]) -> Rows:
    """(verdict, limit, value, threshold, margin) of each check of a gate."""
    return [
        (
            "pass" if check["ok"] else "FAIL",
            check["limit"],
            _number(check["value"]),
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
            described = f"{engine['device']}, {engine['dtype']}; {kernels}"
            rows.append((role.replace("_", " "), described))
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


def _html_table(heading: str, columns: Sequence[str], rows: Rows) -> str:
    def cell(text: str) -> str:
        verdict = {"pass": ' class="pass"', "FAIL": ' class="fail"'}.get(text, "")
        return f"<td{verdict}>{html.escape(text)}</td>"

    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    lines = "".join(f"<tr>{''.join(cell(c) for c in row)}</tr>\n" for row in rows)
    header = f"<tr>{head}</tr>" if any(columns) else ""
    return f"<h2>{html.escape(heading)}</h2>\n<table>{header}\n{lines}</table>\n"


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


def bar_plot(
    values: Sequence[float],
    labels: Sequence[str],
    ends: tuple[str, str],
    *,
    reference: float | None = None,
) -> str:
    """Bars from zero as inline SVG, each with its label and value as a tooltip.

    `ends` are written under the first and the last bar; `reference` draws a dashed line.
    """
    top = max([*values, reference or 0.0]) or 1.0
    step = WIDTH / len(values)
    scale = (HEIGHT - MARGIN) / top
    base = HEIGHT - MARGIN / 2
    bars = [
        f'<rect x="{i * step:.2f}" y="{base - v * scale:.2f}" width="{max(step * 0.85, 0.5):.2f}" '
        f'height="{v * scale:.2f}"><title>{html.escape(label)}: {_number(v)}</title></rect>'
        for i, (v, label) in enumerate(zip(values, labels, strict=True))
    ]
    if reference is not None:
        y = f"{base - reference * scale:.2f}"
        bars.append(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
    captions = (
        f'<text x="0" y="12">highest {_number(top)}</text>'
        f'<text x="0" y="{HEIGHT - 4}">{html.escape(ends[0])}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(ends[1])}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n' + "\n".join(bars) + captions + "</svg>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 10 else f"{value:.4g}"
