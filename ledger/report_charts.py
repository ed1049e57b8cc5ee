"""Pictures of the report: a chart for each question, drawn for a light and for a dark page."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import vl_convert

from shiftbook.ledger.report_data import JobStory, net_gain_s

WIDTH = 920
"""Width of a picture in pixels; the page scales it down on a narrow screen."""

LANE_HEIGHT = 34
"""Height of a device's lane, less where there are many."""

LARGEST_LANES = 420
"""Height of all lanes together at most."""

FEW_POINTS = 300
"""Up to so many values are drawn as points on their line."""

FONT = "system-ui, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', sans-serif"

LIGHT = {
    "ink": "#1f2328",
    "quiet": "#59636e",
    "grid": "#e3e7eb",
    "palette": ["#2f6fb2", "#d97706", "#3c8d5a", "#a855a0", "#b4483a", "#5b7083"],
    "bad": "#c0392b",
}
DARK = {
    "ink": "#e6edf3",
    "quiet": "#9aa7b4",
    "grid": "#2d343c",
    "palette": ["#6ea8e0", "#f0a94b", "#6fc08d", "#d38fcb", "#e58677", "#9db0c2"],
    "bad": "#ff7b6b",
}

Theme = dict[str, Any]
Picture = Callable[[Theme], Any]


def both(picture: Picture) -> tuple[str, str]:
    """Draw a picture for the light and for the dark page; data URLs of two SVG files.

    It is drawn once: the dark one is the light one in the other colours.
    """
    light = _svg(picture(LIGHT), LIGHT)
    colors = dict(zip(_colors(LIGHT), _colors(DARK), strict=True))
    dark = re.sub("|".join(colors), lambda found: colors[found.group()], light)
    return _data_url(light), _data_url(dark)


def _colors(theme: Theme) -> list[str]:
    return [theme["ink"], theme["quiet"], theme["grid"], theme["bad"], *theme["palette"]]


def _data_url(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _svg(chart: Any, theme: Theme) -> str:
    styled = (
        chart.configure(background="transparent", font=FONT)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=theme["quiet"],
            titleColor=theme["quiet"],
            gridColor=theme["grid"],
            domainColor=theme["grid"],
            tickColor=theme["grid"],
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
        )
        .configure_legend(
            labelColor=theme["ink"], titleColor=theme["quiet"], labelFontSize=12, orient="top"
        )
    )
    svg: str = vl_convert.vegalite_to_svg(styled.to_dict())
    return svg


def _color(theme: Theme, field: str, domain: Sequence[str], title: str | None = None) -> alt.Color:
    palette = theme["palette"]
    colors = [palette[index % len(palette)] for index in range(len(domain))]
    return alt.Color(f"{field}:N", title=title, scale=alt.Scale(domain=list(domain), range=colors))


def _rows(rows: Sequence[dict[str, Any]]) -> alt.InlineData:
    return alt.InlineData(values=list(rows))


def timeline(story: JobStory) -> Picture:
    """Which component stood on which device, over what queued for each, on one time axis."""

    def draw(theme: Theme) -> Any:
        end_s = max(story.since_start_s(story.end_ns), 1e-3)
        seconds = alt.Scale(domain=[0, end_s], nice=False)
        lanes = _lanes(story, theme, seconds)
        if not story.windows:
            return lanes
        return alt.vconcat(lanes, _queues(story, theme, seconds), spacing=12).resolve_scale(
            color="shared"
        )

    return draw


def _lanes(story: JobStory, theme: Theme, seconds: alt.Scale) -> Any:
    devices = list(story.devices)
    lane = {name: len(devices) - 1 - index for index, name in enumerate(devices)}
    rows = [
        {
            "component": stay.component,
            "start_s": stay.start_s,
            "end_s": stay.end_s,
            "low": lane[stay.device] + 0.06 + 0.88 * stay.low,
            "high": lane[stay.device] + 0.06 + 0.88 * stay.high,
        }
        for stay in story.stays
        if stay.device in lane
    ]
    labels = json.dumps(list(reversed(devices)))
    axis = alt.Axis(
        values=[index + 0.5 for index in range(len(devices))],
        labelExpr=f"{labels}[floor(datum.value)]",
        ticks=False,
        grid=False,
        domain=False,
        title="device",
    )
    height = min(LARGEST_LANES, LANE_HEIGHT * max(1, len(devices)))
    scale = alt.Scale(domain=[0, max(1, len(devices))], nice=False)
    bars = (
        alt.Chart(_rows(rows))
        .mark_rect()
        .encode(
            x=alt.X("start_s:Q", scale=seconds, title=None, axis=alt.Axis(labels=False)),
            x2="end_s:Q",
            y=alt.Y("low:Q", scale=scale, axis=axis),
            y2="high:Q",
            color=_color(theme, "component", story.components),
        )
    )
    marks = [
        {
            "at_s": story.since_start_s(move["closed_ns"]),
            "level": len(devices),
        }
        for move in story.moves
        if move["status"] in ("rolled_back", "poisoned") and move["closed_ns"] is not None
    ]
    undone = (
        alt.Chart(_rows(marks))
        .mark_point(shape="triangle-down", filled=True, size=70, color=theme["bad"], opacity=1)
        .encode(x=alt.X("at_s:Q", scale=seconds), y=alt.Y("level:Q", scale=scale))
    )
    return alt.layer(bars, _iteration_ends(story, theme, seconds), undone).properties(
        width=WIDTH, height=height
    )


def _iteration_ends(story: JobStory, theme: Theme, seconds: alt.Scale) -> Any:
    """A thin line where an iteration ended."""
    rows = [
        {"at_s": story.since_start_s(row["ended_ns"])}
        for row in story.iterations
        if row["ended_ns"] is not None
    ]
    return (
        alt.Chart(_rows(rows))
        .mark_rule(color=theme["ink"], strokeWidth=1, strokeDash=[2, 3], opacity=0.7)
        .encode(x=alt.X("at_s:Q", scale=seconds))
    )


def _queues(story: JobStory, theme: Theme, seconds: alt.Scale) -> Any:
    rows = [
        {
            "at_s": story.since_start_s(row["start_ns"] + int((row["window_s"] or 0) * 1e9)),
            "component": row["component"],
            "queue": row["queue"],
        }
        for row in story.windows
        if row["queue"] is not None and row["start_ns"] is not None
    ]
    lines = (
        alt.Chart(_rows(rows))
        .mark_line(
            interpolate="step-before",
            strokeWidth=1.6,
            # A single window makes no line, so few windows are points as well.
            point=alt.OverlayMarkDef(size=22) if len(rows) <= FEW_POINTS else False,
        )
        .encode(
            x=alt.X("at_s:Q", scale=seconds, title="seconds since the job was opened"),
            y=alt.Y("queue:Q", title="queue (units)"),
            color=_color(theme, "component", story.components),
        )
    )
    return alt.layer(lines, _iteration_ends(story, theme, seconds)).properties(
        width=WIDTH, height=130
    )


def iteration_times(stories: Sequence[JobStory], names: dict[str, str]) -> Picture:
    """Wall time of every iteration, a line for each job."""
    rows = [
        {"iteration": row["iteration"], "wall_s": row["wall_s"], "series": names[story.job]}
        for story in stories
        for row in story.iterations
        if row["wall_s"] is not None
    ]
    last = max((row["iteration"] for row in rows), default=0)

    def draw(theme: Theme) -> Any:
        return (
            alt.Chart(_rows(rows))
            .mark_line(point=alt.OverlayMarkDef(size=36), strokeWidth=2)
            .encode(
                x=alt.X(
                    "iteration:Q",
                    scale=alt.Scale(domain=[0, max(1, last)], nice=False),
                    axis=alt.Axis(format="d", tickMinStep=1, grid=False),
                ),
                y=alt.Y("wall_s:Q", title="seconds", scale=alt.Scale(zero=True)),
                color=_color(theme, "series", list(names.values())),
            )
            .properties(width=WIDTH, height=220)
        )

    return draw


def gains(moves: Sequence[dict[str, Any]]) -> Picture:
    """Predicted against realised gain, net of costs, a point with its interval for each move."""
    rows = [
        {
            "predicted_s": net_gain_s(move),
            "realised_s": move["realised_gain_s"],
            "low_s": move["realised_gain_low_s"],
            "high_s": move["realised_gain_high_s"],
            "strategy": move["strategy"],
        }
        for move in moves
    ]
    values = [row[name] for row in rows for name in ("predicted_s", "realised_s")]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = max(0.05 * (high - low), 1e-3)
    ends = [low - margin, high + margin]
    strategies = sorted({row["strategy"] for row in rows})

    def draw(theme: Theme) -> Any:
        # As strong in the legend as the points are, not as the lines.
        color = _color(theme, "strategy", strategies).legend(symbolOpacity=1)
        # The same range on both axes, so that the line of right predictions is the diagonal; an
        # interval may be far wider and is cut at the edge.
        scale = alt.Scale(domain=ends, nice=False, clamp=True)
        x = alt.X(
            "predicted_s:Q", title="predicted net gain (s)", scale=scale, axis=alt.Axis(tickCount=6)
        )
        base = alt.Chart(_rows(rows))
        even = (
            alt.Chart(_rows([{"predicted_s": end, "realised_s": end} for end in ends]))
            .mark_line(strokeDash=[4, 4], color=theme["quiet"], strokeWidth=1)
            .encode(x=x, y=alt.Y("realised_s:Q", title="realised net gain (s)", scale=scale))
        )
        spans = base.mark_rule(opacity=0.45).encode(
            x=x, y=alt.Y("low_s:Q", scale=scale), y2="high_s:Q", color=color
        )
        points = base.mark_point(filled=True, size=60, opacity=0.9).encode(
            x=x, y=alt.Y("realised_s:Q", scale=scale), color=color
        )
        return alt.layer(even, spans, points).properties(width=420, height=320)

    return draw


def stalls(moves: Sequence[dict[str, Any]]) -> Picture:
    """Stall of every committed move, in order."""
    rows = [
        {
            "number": number,
            "stall_ms": 1000 * move["stall_s"],
            "strategy": move["strategy"],
        }
        for number, move in enumerate(moves, start=1)
    ]
    strategies = sorted({row["strategy"] for row in rows})
    values = [row["number"] for row in rows] if len(rows) <= 40 else alt.Undefined

    def draw(theme: Theme) -> Any:
        return (
            alt.Chart(_rows(rows))
            .mark_bar(size=min(34.0, 0.8 * WIDTH / max(1, len(rows))))
            .encode(
                x=alt.X(
                    "number:O",
                    title="committed move, in order",
                    axis=alt.Axis(labelAngle=0, values=values, labelOverlap=True),
                ),
                y=alt.Y("stall_ms:Q", title="stall (ms)"),
                color=_color(theme, "strategy", strategies),
            )
            .properties(width=WIDTH, height=170)
        )

    return draw
