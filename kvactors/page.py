"""A page of a report: one HTML file with its charts inside, which needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from kvactors.charts import Chart, svg_of
from kvactors.report import write_output

STYLE = """
:root { color-scheme: light; --line: #d8dee4; --ink: #1f2328; --dim: #59636e; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 2rem auto;
  max-width: 74rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { color: var(--dim); margin: .2rem 0 .8rem; max-width: 60rem; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr)); }
figure { margin: 0; max-width: 46rem; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
figure svg { width: 100%; height: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .9rem; }
.tile b { display: block; font-size: 1.3rem; } .tile span { color: var(--dim); }
.tile.bad b { color: #b42318; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; }
th:first-child, td:first-child, .text td { text-align: left; white-space: pre-line; }
pre { background: #f6f8fa; border-radius: 6px; overflow: auto; padding: .8rem; }
@media print { figure { break-inside: avoid; } }
"""


class Tile(NamedTuple):
    """One figure at the top of a page. bad: whether it is drawn as a failure."""

    name: str
    value: str
    bad: bool = False


class Section(NamedTuple):
    """A part of a page.

    Attributes:
        heading: of the part.
        text: a remark below the heading, empty for none.
        charts: drawn beside each other.
        columns: headings of the table, empty without one.
        rows: cells of the table.
        text_cells: whether the cells are text, which is aligned to the left.
        code: shown as it is, in a fixed width, empty for none.
    """

    heading: str
    text: str = ""
    charts: Sequence[Chart] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text_cells: bool = False
    code: str = ""


def make_page(title: str, text: str, tiles: Iterable[Tile], sections: Iterable[Section]) -> str:
    """The page as HTML.

    Args:
        title: of the page.
        text: a remark below it.
        tiles: figures at the top.
        sections: the parts in their order.
    """
    shown = "".join(
        f'<div class="tile{" bad" if tile.bad else ""}"><b>{escape(tile.value)}</b>'
        f"<span>{escape(tile.name)}</span></div>"
        for tile in tiles
    )
    parts = "".join(_section(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>"
        f'<p>{escape(text)}</p><div class="tiles">{shown}</div>{parts}</body></html>\n'
    )


def write_page(page: str, path: str | Path) -> None:
    """Write a page, to standard output if the path is `-`."""
    write_output(page.encode(errors="replace"), path)


def _section(section: Section) -> str:
    parts = [f"<section><h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.charts:
        figures = "".join(f"<figure>{svg_of(chart)}</figure>" for chart in section.charts)
        parts.append(f'<div class="charts">{figures}</div>')
    if section.rows:
        parts.append(_table(section))
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>")
    return "".join([*parts, "</section>"])


def _table(section: Section) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows
    )
    kind = ' class="text"' if section.text_cells else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
