"""Self-contained HTML pages: style, tables and plots that need neither network nor script.

The plots are inline SVG with their figures as tooltips; colours follow the reader's light or dark
theme.
"""

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, MARGIN = 640, 180, 34
"""Size of a plot and of the space for its labels, in SVG units."""
ROW_HEIGHT, LABEL_WIDTH = 18, 72
"""Height of a heat map's row, and the space for the row's name."""

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--soft:#6b7280;--line:#d7dbe0;
--bar:#3b6fb6;--good:#1a7f37;--bad:#c0342b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#15181c;--soft:#98a1ac;--line:#343a42;
--bar:#6da2e8;--good:#4cc46a;--bad:#ff7b72}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:46rem;
margin:2rem auto;padding:0 1rem}
.wide{max-width:84rem}.wide svg{max-width:60rem;display:block}
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

CELL_CLASSES = {"pass": ' class="pass"', "FAIL": ' class="fail"'}


def page(title: str, body: str, *, wide: bool = False) -> str:
    """A whole document around `body`; a browser is told to load and to run nothing.

    `wide` gives tables of many columns more room.
    """
    escaped = html.escape(title)
    kind = ' class="wide"' if wide else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped}</title>\n<style>{STYLE}</style></head>\n"
        f"<body{kind}><h1>{escaped}</h1>\n{body}</body></html>\n"
    )


def table(heading: str, columns: Sequence[str], rows: Rows) -> str:
    """A heading and its table; columns that are all nameless get no header row."""

    def cell(text: str) -> str:
        return f"<td{CELL_CLASSES.get(text, '')}>{html.escape(text)}</td>"

    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    lines = "".join(f"<tr>{''.join(cell(c) for c in row)}</tr>\n" for row in rows)
    header = f"<tr>{head}</tr>" if any(columns) else ""
    return f"<h2>{html.escape(heading)}</h2>\n<table>{header}\n{lines}</table>\n"


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
        f'height="{v * scale:.2f}"><title>{html.escape(label)}: {number(v)}</title></rect>'
        for i, (v, label) in enumerate(zip(values, labels, strict=True))
    ]
    if reference is not None:
        y = f"{base - reference * scale:.2f}"
        bars.append(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
    captions = (
        f'<text x="0" y="12">highest {number(top)}</text>'
        f'<text x="0" y="{HEIGHT - 4}">{html.escape(ends[0])}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(ends[1])}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n' + "\n".join(bars) + captions + "</svg>"
    )


def heat_map(
    values: Mapping[tuple[str, str], float],
    ends: tuple[str, str],
    *,
    labels: Mapping[tuple[str, str], str] | None = None,
    logarithmic: bool = True,
) -> str:
    """Cells by (row, column) as inline SVG, darker for more, each with its value as a tooltip.

    Rows and columns stand in the order in which they first occur; a missing cell stays empty.
    `labels` say more than ``row, column`` in a cell's tooltip. Negative values count as zero.
    """
    rows = list(dict.fromkeys(row for row, _ in values))
    columns = list(dict.fromkeys(column for _, column in values))
    step = (WIDTH - LABEL_WIDTH) / len(columns)
    shades = dict(zip(values, _shades(list(values.values()), logarithmic), strict=True))
    cells = []
    for (row, column), value in values.items():
        label = (labels or {}).get((row, column), f"{row}, {column}")
        cells.append(
            f'<rect x="{LABEL_WIDTH + columns.index(column) * step:.2f}" '
            f'y="{rows.index(row) * ROW_HEIGHT}" width="{max(step - 1, 0.5):.2f}" '
            f'height="{ROW_HEIGHT - 1}" fill-opacity="{shades[row, column]:.3f}">'
            f"<title>{html.escape(label)}: {number(value)}</title></rect>"
        )
    names = "".join(
        f'<text x="0" y="{(i + 0.7) * ROW_HEIGHT:.1f}">{html.escape(row)}</text>'
        for i, row in enumerate(rows)
    )
    height = len(rows) * ROW_HEIGHT + MARGIN / 2
    scale = "log scale, " if logarithmic else ""
    span = f"{scale}{number(min(values.values()))} to {number(max(values.values()))}"
    captions = (
        f'<text x="{LABEL_WIDTH}" y="{height - 4}">{html.escape(ends[0])}</text>'
        f'<text x="{(WIDTH + LABEL_WIDTH) / 2}" y="{height - 4}" text-anchor="middle">{span}</text>'
        f'<text x="{WIDTH}" y="{height - 4}" text-anchor="end">{html.escape(ends[1])}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img">\n'
        + "\n".join(cells)
        + f"{names}{captions}</svg>"
    )


def _shades(values: Sequence[float], logarithmic: bool) -> list[float]:
    """Opacities from 0.08 (the least value; on a linear scale, zero) to 1 for the largest."""
    placed = [max(v, 0.0) for v in values]
    low = 0.0
    if logarithmic:
        least = min((v for v in placed if v > 0), default=1.0)
        placed = [math.log(max(v, least)) for v in placed]
        low = min(placed)
    span = max(placed) - low
    return [0.08 + 0.92 * ((v - low) / span if span else 0.5) for v in placed]


def number(value: float) -> str:
    """A figure in four digits; large whole numbers in full."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 10 else f"{value:.4g}"
