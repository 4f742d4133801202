"""The charts, as Vega-Lite specifications over the named tables of `jagbench.html.datasets`.

altair is imported where it is used: it is an optional dependency, and slow to import.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MISSING = "the HTML report needs altair and vl-convert-python: pip install 'jagbench[report]'"
_REGION = "region:N"
_SHAPES = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "triangle-right",
    "triangle-left",
)  # fmt: skip
_AS_LISTED = {"field": "order", "op": "min"}
_IMPLEMENTATION = "implementation:N"
#: Axis of `Row.rate`.
_RATE = "TFLOP/s; GB/s where memory binds"


@dataclass(frozen=True)
class Look:
    """What the charts share.

    colours: implementation -> colour, in the order of the legend; measured: those with records, the
    others are known from claims alone.
    """

    colours: Mapping[str, str]
    measured: tuple[str, ...]
    cases: tuple[str, ...]
    regions: tuple[str, ...]
    grids: tuple[str, ...]
    hardware: tuple[str, ...]


def altair() -> Any:
    """The module, or an ImportError that names the extra."""
    try:
        import altair as module
        import vl_convert  # noqa: F401  (the page embeds its copy of vega)
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return module


@functools.cache
def javascript() -> str:
    """vega, vega-lite and vega-embed as one script that sets `window.vegaEmbed`."""
    version = ".".join(altair().SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    import vl_convert

    converter: Any = vl_convert
    text: str = converter.javascript_bundle(vl_version=version)
    return text


def bars(look: Look) -> dict[str, Any]:
    """Rate of every implementation, grouped by case; a tick where the roofline is."""
    alt = altair()
    axis = alt.Axis(tickCount=6)
    x = alt.X("rate:Q", title=_RATE, axis=axis)
    where = {"y": _case(alt, look), "yOffset": _lane(alt, look)}
    base = alt.Chart()
    measured = base.transform_filter("datum.rate !== null")
    bar = measured.mark_bar().encode(x=x, color=_colour(alt, look), tooltip=_tooltip(alt), **where)
    # A CPU's figure is small, and never 0.
    form = "datum.rate >= 100 ? ',.0f' : '.3~g'"
    value = measured.transform_calculate(words=f"format(datum.rate, {form})")
    value = value.mark_text(align="left", dx=3, fontSize=9)
    value = value.encode(x=x, text="words:N", **where)
    roof = measured.transform_filter("datum.roof !== null")
    tick = roof.mark_tick(color="#888888", thickness=1.5).encode(x=alt.X("roof:Q"), **where)
    reason = _reason(alt, where, "datum.rate === null")
    layers = alt.layer(bar, tick, _named(value, "value"), reason)
    return _finished(_panels(alt, _stepped(alt, layers, 12), look))


def roofline(look: Look) -> dict[str, Any]:
    """FLOP/s over arithmetic intensity, under the measured and the datasheet ceilings."""
    alt = altair()
    height = 420
    x = alt.X(
        "intensity:Q", title="arithmetic intensity, FLOP/byte (least traffic)",
        scale=alt.Scale(type="log", nice=False), axis=alt.Axis(tickCount=6, format="~s"),
    )  # fmt: skip
    y = alt.Y(
        "teraflops:Q", title="TFLOP/s",
        scale=alt.Scale(type="log", nice=False, padding=12), axis=alt.Axis(format="~g"),
    )  # fmt: skip
    kinds = ["measured ceiling", "datasheet ceiling"]
    dash = alt.StrokeDash(
        "ceiling:N", title=None, scale=alt.Scale(domain=kinds, range=[[1, 0], [5, 4]])
    )
    ceilings = alt.Chart(alt.NamedData(name="ceilings")).mark_line(color="#888888")
    ceilings = ceilings.encode(x=x, y=y, strokeDash=dash)
    base = alt.Chart()
    known = base.transform_filter("datum.intensity !== null")
    point = known.transform_filter("datum.teraflops !== null")
    point = point.mark_point(filled=True, size=55, opacity=0.9)
    both = {"color": _colour(alt, look), "shape": _shape(alt, look)}
    point = point.encode(x=x, y=y, tooltip=_tooltip(alt), **both)
    # Without a rate there is no height: a cross at the foot of the chart, its reason in the tip.
    missing = known.transform_filter("datum.teraflops === null").mark_point(
        shape="cross", angle=45, size=70, filled=True
    )
    missing = missing.encode(
        x=x, y=alt.value(height - 8), color=_colour(alt, look), tooltip=_tooltip(alt)
    )
    label = base.transform_filter("datum.label !== null").mark_text(
        angle=315, align="left", baseline="middle", fontSize=10, lineBreak="\n", lineHeight=11
    )
    label = label.encode(x=x, y=alt.value(-6), text="label:N")
    guide = known.mark_rule(strokeDash=[1, 3], color="#8888").encode(x=x)
    layers = alt.layer(guide, ceilings, _named(label, "label"), point, missing)
    layers = layers.properties(height=height, width=400)
    return _finished(_panels(alt, layers, look))


def heat_map(look: Look) -> dict[str, Any]:
    """Time over the best peer's, by length and fill; blue is faster than every peer."""
    alt = altair()
    ordered = list(look.measured)
    where = {
        "x": alt.X("length:O", title="longest sequence", axis=alt.Axis(labelAngle=0)),
        "y": alt.Y("grid:N", title=None, sort=list(look.grids), axis=alt.Axis(labelLimit=260)),
    }
    base = alt.Chart().transform_calculate(
        doublings="datum.ratio === null ? null : clamp(log(datum.ratio) / LN2, -2.5, 2.5)"
    )
    tip = _tooltip(alt)
    empty = base.transform_filter("datum.ratio === null").mark_rect(color="#9995", stroke="#8888")
    cell = base.transform_filter("datum.ratio !== null").mark_rect(stroke="#8888")
    ink = alt.condition("abs(datum.doublings) > 1.6", alt.value("white"), alt.value("#111111"))
    text = base.transform_filter("datum.ratio !== null").mark_text(fontSize=11)
    text = text.encode(text=alt.Text("ratio:Q", format=".2f"), color=ink, **where)
    short = "{'measured': 'no peer', 'unsupported': 'unsup.', 'out of memory': 'memory'}"
    why = f"{short}[datum.outcome] || datum.outcome"
    reason = base.transform_filter("datum.ratio === null").transform_calculate(why=why)
    reason = reason.mark_text(fontSize=9, fontStyle="italic").encode(text="why:N", **where)
    layers = alt.layer(
        empty.encode(tooltip=tip, **where),
        cell.encode(color=_doublings(alt), tooltip=tip, **where),
        text,
        _named(reason, "reason"),
    ).properties(width=alt.Step(46), height=alt.Step(28))
    chart = layers.facet(
        row=alt.Row(_REGION, sort=list(look.regions), title=None),
        column=alt.Column(_IMPLEMENTATION, sort=ordered, title=None),
        data=alt.NamedData(name="rows"),
        spacing=12,
    )
    return _finished(chart)


def _doublings(alt: Any) -> Any:
    legend = alt.Legend(
        values=[-2, -1, 0, 1, 2], labelExpr="format(pow(2, datum.value), '~r') + ' ×'",
        gradientLength=240,
    )  # fmt: skip
    scale = alt.Scale(scheme="blueorange", domain=[-2.5, 2.5])
    return alt.Color("doublings:Q", title="time / best peer", scale=scale, legend=legend)


def generations(look: Look) -> dict[str, Any]:
    """TFLOP/s by device; filled marks were measured, hollow ones are published claims."""
    alt = altair()
    x = alt.X(
        "hardware:N", title=None, sort=list(look.hardware), scale=alt.Scale(padding=0.6),
        axis=alt.Axis(labelAngle=0, labelExpr="replace(datum.label, 'NVIDIA ', '')"),
    )  # fmt: skip
    y = alt.Y("rate:Q", title=_RATE, axis=alt.Axis(tickCount=4, labelFlush=True))
    base = alt.Chart().transform_filter("datum.rate !== null")
    tip = ["hardware:N", _IMPLEMENTATION, "kind:N", "panel:N", "rate:Q", "note:N"]
    is_measured = "datum.kind === 'measured'"
    names = list(look.colours)
    # Filters here would leave panels without any mark of a layer, of which vega warns.
    shown = alt.condition(is_measured, alt.value(0.5), alt.value(0))
    line = base.mark_line().encode(
        x=x, y=y, color=_colour(alt, look, names), detail="kind:N", strokeOpacity=shown
    )
    shape = alt.Shape(
        "kind:N", title=None,
        scale=alt.Scale(domain=["measured", "claim"], range=["circle", "diamond"]),
        legend=alt.Legend(symbolFillColor="transparent", symbolStrokeColor="#888888"),
    )  # fmt: skip
    point = base.mark_point(size=60, strokeWidth=1.8).encode(
        x=x, y=y, color=_colour(alt, look, names), fill=_colour(alt, look, names, "Fill"),
        fillOpacity=alt.condition(is_measured, alt.value(1), alt.value(0)), shape=shape,
        tooltip=tip,
    )  # fmt: skip
    claim = base.transform_calculate(word="datum.kind === 'claim' ? 'claim' : ''")
    word = claim.mark_text(align="left", dx=7, fontSize=9).encode(x=x, y=y, text="word:N")
    layers = alt.layer(line, point, _named(word, "word")).properties(width=190, height=150)
    header = alt.Header(labelExpr="split(datum.label, ' · ')", labelFontSize=11)
    panel = alt.Facet("panel:N", title=None, sort=_AS_LISTED, header=header)
    space = {"row": 70, "column": 65}
    data = alt.NamedData(name="generations")
    chart = layers.facet(facet=panel, columns=4, data=data, bounds="flush", spacing=space)
    chart = chart.resolve_scale(y="independent").resolve_axis(x="independent")
    return _finished(chart)


def errors(look: Look) -> dict[str, Any]:
    """Error over what is allowed, by output and gradient."""
    alt = altair()
    x = alt.X(
        "drawn:Q", title="error / allowed",
        scale=alt.Scale(type="log", nice=False, padding=10),
        axis=alt.Axis(tickCount=5, format="~g"),
    )  # fmt: skip
    where = {"y": _case(alt, look), "yOffset": _lane(alt, look)}
    tip = [
        "case:N", _IMPLEMENTATION, "tensor:N", "outcome:N", "note:N",
        alt.Tooltip("ratio:Q", title="error / allowed"), "error:Q", "allowed:Q",
    ]  # fmt: skip
    base = alt.Chart()
    known = base.transform_filter("datum.drawn !== null")
    point = known.mark_point(filled=True, size=34, opacity=1)
    both = {"color": _colour(alt, look), "shape": _shape(alt, look)}
    point = point.encode(x=x, tooltip=tip, **both, **where)
    limit = base.mark_rule(strokeDash=[4, 3], color="#888888").encode(x=alt.datum(1))
    layers = alt.layer(limit, point, _reason(alt, where, "datum.drawn === null"))
    stepped = _stepped(alt, layers, 9)
    chart = stepped.facet(
        facet=alt.Facet("tensor:N", title=None, sort=_AS_LISTED), columns=2,
        data=alt.NamedData(name="errors"),
    )  # fmt: skip
    return _finished(chart)


def samples(look: Look) -> dict[str, Any]:
    """Samples around their median: 20 to 80 % as a bar, least to most as a line."""
    alt = altair()
    where = {"y": _case(alt, look), "yOffset": _lane(alt, look)}
    title = "sample against its median, %"
    base = alt.Chart()
    colour = _colour(alt, look, symbolType="square", symbolStrokeWidth=0)
    measured = base.transform_filter("datum.low !== null")
    line = measured.mark_rule(opacity=0.6).encode(
        x=alt.X("least:Q", title=title), x2="most:Q", color=colour, **where
    )
    bar = measured.mark_bar(height=6).encode(
        x=alt.X("low:Q", title=title), x2="high:Q", color=colour,
        tooltip=_tooltip(alt), **where,
    )  # fmt: skip
    middle = base.mark_rule(color="#888888").encode(x=alt.datum(0))
    layers = alt.layer(middle, line, bar, _reason(alt, where, "datum.low === null"))
    return _finished(_panels(alt, _stepped(alt, layers, 9), look))


def comparison() -> dict[str, Any]:
    """Ratios with their intervals, the slowest first."""
    alt = altair()
    y = alt.Y("case:N", title=None, sort={"field": "ratio", "order": "descending"})
    y.axis = alt.Axis(labelLimit=420)
    verdicts = ["faster", "slower", "same", "undecided"]
    colour = alt.Color(
        "verdict:N", title=None,
        scale=alt.Scale(domain=verdicts, range=["#0072b2", "#d55e00", "#009e73", "#8a8a8a"]),
    )  # fmt: skip
    scale = alt.Scale(type="log", nice=False, padding=20)
    title = "seconds of the candidate / seconds of the baseline"
    base = alt.Chart(alt.NamedData(name="comparison"))
    tip = ["case:N", "ratio:Q", "low:Q", "high:Q", "verdict:N"]
    known = base.transform_filter("datum.low !== null && datum.high !== null")
    interval = known.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", title=title, scale=scale), x2="high:Q", y=y, color=colour
    )
    point = base.mark_point(filled=True, size=70).encode(
        x=alt.X("ratio:Q", title=title, scale=scale), y=y, color=colour, tooltip=tip
    )
    limit = base.mark_rule(strokeDash=[4, 3], color="#888888").encode(x=alt.datum(1))
    chart = alt.layer(limit, interval, point).properties(height=alt.Step(20), width=600)
    return _finished(chart)


def _colour(
    alt: Any, look: Look, names: Sequence[str] | None = None, channel: str = "Color", **legend: Any
) -> Any:
    """Colour (or Fill) by implementation, with a legend of the names given."""
    names = look.measured if names is None else names
    scale = alt.Scale(domain=list(names), range=[look.colours[name] for name in names])
    signs = alt.Legend(columns=6, labelLimit=0, **legend)
    return getattr(alt, channel)(_IMPLEMENTATION, title=None, scale=scale, legend=signs)


def _shape(alt: Any, look: Look) -> Any:
    """A second sign of the implementation, for eyes that see few colours."""
    names = list(look.measured)
    scale = alt.Scale(domain=names, range=[_SHAPES[i % len(_SHAPES)] for i in range(len(names))])
    return alt.Shape(_IMPLEMENTATION, title=None, scale=scale)


def _case(alt: Any, look: Look) -> Any:
    axis = alt.Axis(labelLimit=280, ticks=False, domain=False)
    return alt.Y("case:N", title=None, sort=list(look.cases), axis=axis)


def _lane(alt: Any, look: Look) -> Any:
    return alt.YOffset(_IMPLEMENTATION, sort=list(look.measured))


def _stepped(alt: Any, layers: Any, step: int) -> Any:
    """Height by the number of lanes; the page sets the width to what it has."""
    return layers.properties(width=400, height=alt.Step(step, **{"for": "offset"}))


def _reason(alt: Any, where: Mapping[str, Any], condition: str) -> Any:
    """The outcome in words where a number is missing."""
    mark = alt.Chart().transform_filter(condition)
    mark = mark.mark_text(align="left", dx=3, fontSize=9, fontStyle="italic")
    mark = mark.encode(x=alt.value(0), text="outcome:N", tooltip=["note:N"], **where)
    return _named(mark, "reason")


def _named(mark: Any, name: str) -> Any:
    """Text in the colour of the page: the style sheet finds it by this name."""
    return mark.properties(name=f"ink_{name}")


def _panels(alt: Any, layers: Any, look: Look) -> Any:
    return layers.facet(
        facet=alt.Facet(_REGION, sort=list(look.regions), title=None),
        columns=2,
        data=alt.NamedData(name="rows"),
    )


def _tooltip(alt: Any) -> list[Any]:
    def shown(field: str, title: str, form: str = ".4~g") -> Any:
        return alt.Tooltip(f"{field}:Q", title=title, format=form)

    return [
        "case:N", "region:N", _IMPLEMENTATION, "outcome:N", "note:N",
        shown("milliseconds", "time, ms"), shown("teraflops", "TFLOP/s"),
        shown("gigabytes", "GB/s"), shown("intensity", "FLOP/byte"),
        shown("attainable", "attainable TFLOP/s"),
        shown("share", "% of measured ceiling", ".1f"), shown("ratio", "time / best peer"),
        shown("low", "20 % quantile, % off", "+.2f"),
        shown("high", "80 % quantile, % off", "+.2f"), shown("samples", "samples", "d"),
    ]  # fmt: skip


def _finished(chart: Any) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    # The page brings its own look; the schema's address would be the only one in the file.
    del spec["$schema"], spec["config"]
    return spec
