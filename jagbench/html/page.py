"""Puts the sections, the charts, their data and the scripts into one page."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jagbench.html import charts, tables
from jagbench.html.datasets import VIEW, datasets, embedded
from jagbench.html.ladder import ladder
from jagbench.html.markup import details, escaped, listing
from jagbench.html.palette import colours
from jagbench.html.provenance import provenance
from jagbench.html.rows import Contents, generation, natural
from jagbench.html.summary import summary, view_name

#: Vega's own configuration; colours of text and lines are the style sheet's.
_CONFIG = {
    "font": "system-ui, sans-serif",
    "background": "transparent",
    "axis": {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"},
    "header": {"labelFontSize": 13, "labelFontWeight": "bold"},
    "legend": {"labelFontSize": 12, "orient": "top", "symbolSize": 90},
    "view": {"stroke": "#88888877"},
}


@dataclass(frozen=True)
class Figure:
    """A chart, what to say of it, and its table.

    tables: named tables it draws, its own first. open: view fields it does not filter by.
    panel: field its panels are made of; None if there are none or they are not the page's concern.
    columns: most panels beside each other. fixed: pixels of a panel that does not stretch.
    labels: whether case names stand at its left. needs: field that its rows must have.
    """

    id: str
    heading: str
    caption: str
    spec: Callable[[charts.Look], dict[str, Any]]
    table: Callable[[Contents], str]
    tables: tuple[str, ...] = ("rows",)
    open: tuple[str, ...] = ()
    panel: str | None = "region"
    columns: int = 2
    fixed: int = 0
    labels: bool = True
    needs: str | None = None


FIGURES = (
    Figure(
        "bars", "Throughput beside the peers",
        "Useful jagged work only: padding does not count, a backward counts as 2.5 forwards; "
        "operators that memory binds are shown by GB/s of the least traffic instead. The "
        "grey tick is what the roofline of the ceilings allows. A case without a time says why.",
        charts.bars, tables.bars,
    ),
    Figure(
        "heat", "Time against the best peer, by length and fill",
        "Time over that of the fastest other implementation: below 1 (blue) nobody is faster.",
        charts.heat_map, tables.heat_map, panel=None, needs="grid",
    ),
    Figure(
        "roofline", "Roofline",
        "FLOP and bytes are the least the case needs. The solid line is the measured ceiling "
        "(large matrix product, copy), the dashed one the datasheet's. A cross at the foot is a "
        "case without a time.",
        charts.roofline, tables.roofline, ("rows", "ceilings"), labels=False,
    ),
    Figure(
        "generations", "Hardware generations",
        "Filled circles were measured by this project; hollow diamonds are published claims. Each "
        "panel has its own scale.",
        charts.generations, tables.generations, ("generations",), ("hardware",), "panel", fixed=260,
    ),
    Figure(
        "errors", "Error against its budget",
        "Norm of the error against float64, over what is allowed; right of the line at 1 is wrong. "
        "Errors below 1/1000 of the budget are drawn at 1/1000, over 100 times at 100.",
        charts.errors, tables.errors, ("errors",), panel="tensor", columns=4,
    ),
    Figure(
        "samples", "Distribution of the samples",
        "Bar: 20 to 80 % quantile; line: least to most; 0 is the median.",
        charts.samples, tables.samples,
    ),
)  # fmt: skip

COMPARISON = Figure(
    "comparison", "Comparison",
    "Ratio of the times with its interval, and the verdict; left of 1 the candidate is faster.",
    lambda look: charts.comparison(), tables.comparison, ("comparison",), panel=None,
)  # fmt: skip


def page(contents: Contents, title: str) -> str:
    """The whole HTML file."""
    shown = dict(colours(contents.implementations))
    look = charts.Look(
        colours=shown,
        measured=contents.measured,
        cases=contents.cases,
        regions=contents.regions,
        grids=tuple(sorted({row.grid for row in contents.rows if row.grid}, key=natural)),
        hardware=_generation_order(contents),
    )
    figures = [figure for figure in FIGURES if _applies(figure, contents)]
    if contents.comparison is not None:
        figures.insert(0, COMPARISON)
    body = "".join(_section(figure, contents) for figure in figures)
    resources = files("jagbench.html")
    script = embedded(_data(contents, figures, look))
    bundle = base64.b64encode(gzip.compress(charts.javascript().encode(), 9, mtime=0)).decode()
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<link rel=icon href="data:,">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{resources.joinpath('page.css').read_text()}"
        f"</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>\n{_controls(contents)}"
        f"<h2>Summary</h2>\n{summary(contents, shown)}{_ladder(contents)}{body}"
        f"<section><h2>Provenance</h2>\n{provenance(contents)}</section>\n"
        f'<script type="application/json" id=report-data>{script}</script>\n'
        f'<script type="text/plain" id=vega-bundle>{bundle}</script>\n'
        f"<script>\n{resources.joinpath('page.js').read_text()}</script>\n</body>\n</html>\n"
    )


def _ladder(contents: Contents) -> str:
    """The section of the ladder, where there are records of it."""
    tables = ladder(contents)
    if not tables:
        return ""
    words = (
        "The same sequences through full attention, a sliding window, blocks, and blocks with the "
        "rotation fused in. Floor: the least bytes at the measured rate of a copy."
    )
    return f"<section><h2>Ladder</h2>\n<p>{escaped(words)}</p>\n{tables}</section>\n"


def _data(contents: Contents, figures: list[Figure], look: charts.Look) -> dict[str, Any]:
    return {
        "view": VIEW,
        "views": contents.views,
        "tables": datasets(contents),
        "config": _CONFIG,
        "charts": [
            {
                "id": figure.id, "spec": figure.spec(look), "tables": figure.tables,
                "open": figure.open, "panel": figure.panel, "columns": figure.columns,
                "fixed": figure.fixed, "labels": figure.labels, "needs": figure.needs,
            }
            for figure in figures
        ],
    }  # fmt: skip


def _section(figure: Figure, contents: Contents) -> str:
    beneath = _outside_grid(contents) if figure.id == "heat" else ""
    return (
        f"<section><h2>{escaped(figure.heading)}</h2>\n<figure id={figure.id}>"
        f"<figcaption>{escaped(figure.caption)}</figcaption>\n"
        "<div class=chart></div><p class=note></p></figure>\n"
        f"{beneath}{details('Data of this chart', figure.table(contents))}</section>\n"
    )


def _outside_grid(contents: Contents) -> str:
    """Which cases the heat map cannot place."""
    left = sorted({row.case for row in contents.rows if row.family is None}, key=natural)
    if not left:
        return ""
    words = f"{len(left)} cases are not here, their names carry no length or no fill"
    return details(words, listing(left))


def _controls(contents: Contents) -> str:
    """One choice for every field of a view that has more than one value."""
    parts = []
    for place, field in enumerate(VIEW):
        values = sorted({view[place] for view in contents.views})
        if len(values) > 1:
            options = "".join(f"<option>{escaped(value)}</option>" for value in values)
            parts.append(f"<label>{field} <select data-field={field}>{options}</select></label>")
    fixed = ""
    if contents.views and not parts:
        fixed = f"<p class=soft>{escaped(view_name(contents.views[0]))}</p>\n"
    lead = "<span class=soft>Charts show</span>"
    noscript = (
        "<noscript><p class=problem>Charts need JavaScript; every number is in the tables."
        "</p></noscript>\n"
    )
    return f"{noscript}{fixed}<nav hidden>{lead}{''.join(parts)}</nav>\n"


def _applies(figure: Figure, contents: Contents) -> bool:
    """Whether there is anything it could show."""
    if not contents.rows:
        return figure.id == "generations" and bool(contents.claims)
    return figure.id != "heat" or any(row.family for row in contents.rows)


def _generation_order(contents: Contents) -> tuple[str, ...]:
    named = {*contents.hardware, *map(contents.shown_hardware, contents.claims)}
    return tuple(sorted(named, key=generation))
