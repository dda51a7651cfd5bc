"""Line charts of reports, as SVG for pages and as PNG for documents. Needs matplotlib, extra
`[report]`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvactors.errors import ConfigError
from kvactors.report import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (7.2, 3.2)
"""Width and height of a chart."""

COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
"""Of the lines in their order: distinguishable in grey and with the common colour blindnesses."""

STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: a page can be searched
    "svg.hashsalt": "kvactors",  # equal reports are equal files
}


class Chart(NamedTuple):
    """Lines over one axis.

    Attributes:
        title: of the chart.
        x_label: with its unit.
        y_label: with its unit.
        lines: by name, the x and the y values of each point.
        log_x: whether the x axis is logarithmic.
        log_y: whether the y axis is logarithmic.
        stacked: whether the lines are drawn as areas on top of each other. All lines then have the
            same x values.
        steps: whether a value holds from its point to the next.
        top: the end of the y axis, None for one that fits.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False
    stacked: bool = False
    steps: bool = False
    top: float | None = None


def check_charts() -> None:
    """Raise ConfigError if charts cannot be drawn here."""
    try:
        import matplotlib.figure  # noqa: F401  (whether it is there)
    except ImportError as error:
        raise ConfigError(
            "a report with charts needs matplotlib: pip install 'kvactors[report]'"
        ) from error


def svg_of(chart: Chart) -> str:
    """The chart as an `<svg>` element."""
    text = _drawn(chart, "svg").decode()
    return text[text.index("<svg") :]


def write_png(chart: Chart, path: str | Path) -> None:
    """Write the chart as a PNG, to standard output if the path is `-`."""
    write_output(_drawn(chart, "png"), path)


def _drawn(chart: Chart, form: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        _draw(chart, figure.subplots())
        return _saved(figure, form)


def _saved(figure: Figure, form: str) -> bytes:
    found = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(found, format=form, dpi=150, metadata=metadata)
    return found.getvalue()


def _draw(chart: Chart, axes: Axes) -> None:
    if chart.stacked:
        x = next(iter(chart.lines.values()))[0] if chart.lines else ()
        heights = [y for _, y in chart.lines.values()]
        axes.stackplot(x, *heights, labels=list(chart.lines), colors=COLORS, alpha=0.8)
    else:
        style = "steps-post" if chart.steps else "default"
        for position, (name, (x, y)) in enumerate(chart.lines.items()):
            color = COLORS[position % len(COLORS)]
            axes.plot(x, y, label=name, color=color, linewidth=1.5, drawstyle=style)
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, chart.top)
    if len(chart.lines) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
