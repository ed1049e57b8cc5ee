"""The report: one HTML page, readable offline, that shows the moves of a ledger and their worth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import TYPE_CHECKING, Any

from shiftbook.ledger.asked_file import write_asked_file
from shiftbook.ledger.cli_options import cell_text, clock_text
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.report_data import (
    READS,
    JobStory,
    Row,
    net_gain_s,
    read_stories,
    steady_median_s,
)
from shiftbook.ledger.summary import seconds_text, size_text

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.ledger.report_charts import Picture

TITLE = "Moves of"
"""What the title of every page begins with; a page is told from other files by it."""

MOST_TIMELINES = 4
"""Jobs whose timeline is drawn; those with the most moves come first."""

RIGHT_S = 0.0005
"""A prediction that is off by less counts as right."""

MOST_ROWS = 200
"""Rows of a table on the page; the ledger has them all."""

Verdict = Mapping[str, Any]
"""The JSON of `shiftbook verify`, of which the page shows ``verdict`` (clean, findings, could not
judge), ``findings`` (invariant, position, expected, found), ``coverage`` (invariant, status,
reason) and ``could_not``."""


def write_report(
    ledger: Ledger,
    output: Path,
    *,
    verdict: Verdict | None = None,
    jobs: Sequence[str] | None = None,
) -> None:
    """Write the page; raise InvalidInput where it cannot be written or another file stands there.

    ``verdict`` is the verifier's; without one the page shows what the ledger itself records.
    """
    page = render_report(ledger, verdict=verdict, jobs=jobs)
    write_asked_file(output, page.encode(), kind="a report", is_kind=_is_report)


def _is_report(head: bytes) -> bool:
    return head.startswith(b"<!doctype html>") and f"<title>{TITLE} ".encode() in head


def render_report(
    ledger: Ledger, *, verdict: Verdict | None = None, jobs: Sequence[str] | None = None
) -> str:
    """The page as text."""
    with Mirror.open(ledger, (*READS, "findings")) as mirror:
        stories = read_stories(mirror, jobs)
        recorded = verdict if verdict is not None else recorded_verdict(mirror, jobs)
        size = mirror.size
    title = f"{TITLE} " + (", ".join(story.job for story in stories) or "an empty ledger")
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{size:,} events of {escape(ledger.url)}</p>',
        _facts(stories, recorded),
        *_timelines(stories),
        *_iterations(stories),
        *_gains(stories),
        *_stalls(stories),
        *_verdict(recorded),
        *_moves_table(stories),
        *_syncs_table(stories),
    ]
    template = files("shiftbook.ledger").joinpath("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(title), body="\n".join(sections))


def read_verdict(path: Path) -> Verdict:
    """Read a verdict from a JSON file; raise InvalidInput where it holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"expected the JSON of `shiftbook verify --format json` in {path}, found none ({error})"
        ) from error
    if not isinstance(value, dict) or not isinstance(value.get("verdict"), str):
        raise InvalidInput(
            f"expected an object with a field verdict in {path}, found another; "
            "write it with `shiftbook verify --format json`"
        )
    return value


def recorded_verdict(mirror: Mirror, jobs: Sequence[str] | None) -> Verdict | None:
    """The last verdict in the ledger; None where no verification was recorded."""
    where = "" if jobs is None else "AND job IN (SELECT unnest(?))"
    parameters = [] if jobs is None else [list(jobs)]
    findings = mirror.rows(
        "SELECT job, invariant, at_position AS position, expected, found FROM findings "
        f"WHERE true {where} ORDER BY at_position",
        parameters,
    )
    passed = mirror.rows(
        "SELECT list_at(body, '$.checked') AS checked, list_at(body, '$.not_checked') AS "
        f"not_checked FROM events WHERE type = 'VerificationPassed' {where} "
        "ORDER BY position DESC LIMIT 1",
        parameters,
    )
    if not findings and not passed:
        return None
    last = passed[0] if passed else {}
    coverage = [
        {"invariant": name, "status": status}
        for field, status in (("checked", "checked"), ("not_checked", "not checked"))
        for name in last.get(field) or ()
    ]
    word = "findings" if findings else "clean"
    return {"verdict": word, "findings": findings, "coverage": coverage}


def _facts(stories: Sequence[JobStory], verdict: Verdict | None) -> str:
    committed = [move for story in stories for move in story.committed]
    facts = [
        (f"{len(stories)}", "job" if len(stories) == 1 else "jobs"),
        (f"{sum(len(story.iterations) for story in stories)}", "iterations completed"),
        (f"{len(committed)}", "moves committed"),
        (f"{_count(stories, 'rejected')}", "moves rejected"),
        (f"{_count(stories, 'rolled_back', 'poisoned')}", "moves undone or poisoned"),
        (size_text(sum(move["moved_bytes"] or 0 for move in committed)), "moved by them"),
    ]
    cells = [f"<div><b>{escape(value)}</b><span>{name}</span></div>" for value, name in facts]
    if verdict is not None:
        mark = "good" if verdict["verdict"] == "clean" else "bad"
        said = escape(str(verdict["verdict"]))
        cells.append(f'<div><b class="{mark}">{said}</b><span>verdict</span></div>')
    return f'<div class="facts">{"".join(cells)}</div>'


def _count(stories: Sequence[JobStory], *statuses: str) -> int:
    return sum(story.statuses[status] for story in stories for status in statuses)


def _figure(title: str, picture: Picture, caption: str) -> str:
    from shiftbook.ledger.report_charts import both

    light, dark = both(picture)
    return (
        f"<figure><h2>{escape(title)}</h2><figcaption>{escape(caption)}</figcaption><picture>"
        f'<source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" alt="{escape(title)}"></picture></figure>'
    )


def _missing(title: str, reason: str) -> str:
    return f'<h2>{escape(title)}</h2><p class="note">{escape(reason)}</p>'


def _timelines(stories: Sequence[JobStory]) -> list[str]:
    from shiftbook.ledger.report_charts import timeline

    drawable = [story for story in stories if story.stays and story.devices]
    ordered = sorted(drawable, key=lambda story: -len(story.committed))
    moving = [story for story in ordered if story.committed]
    shown = moving[:MOST_TIMELINES] or ordered[:1]
    if not shown:
        return [_missing("No topology over time", "No job with devices stands in this ledger.")]
    return [
        _figure(
            timeline_title(story),
            timeline(story),
            "Above: the component on each device; dashed lines end an iteration, a triangle marks "
            "a move that was undone. "
            + (
                "Below: units that queued for each component, as the decisions saw them."
                if story.windows
                else "No telemetry windows were recorded, so there are no queues to show."
            ),
        )
        for story in shown
    ]


def timeline_title(story: JobStory) -> str:
    """What the timeline shows, counted."""
    moves, count = len(story.committed), len(story.iterations)
    ranges = {component: story.held(component) for component in story.components}
    moved = {c: held for c, held in ranges.items() if held[0] != held[1]}
    what = f"{story.job}: {moves} {_plural(moves, 'move')} in {count} {_plural(count, 'iteration')}"
    if not moved:
        return f"{what}, every component kept its devices"
    parts = [f"{c} held {low} to {high} devices" for c, (low, high) in moved.items()]
    return f"{what}; {', '.join(parts)}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else noun + "s"


def series_names(stories: Sequence[JobStory]) -> dict[str, str]:
    """Name of each job in a picture: its schedule where no other job has the same."""
    schedules = [story.schedule for story in stories]
    return {
        story.job: story.schedule if schedules.count(story.schedule) == 1 else story.job
        for story in stories
    }


def _iterations(stories: Sequence[JobStory]) -> list[str]:
    from shiftbook.ledger.report_charts import iteration_times

    measured = [story for story in stories if story.iterations]
    if not measured:
        return [_missing("No iteration times", "No iteration was completed.")]
    names = series_names(measured)
    return [
        _figure(
            iterations_title(measured, names),
            iteration_times(measured, names),
            "Wall time of each iteration. Medians leave out the first, which warms up.",
        )
    ]


def iterations_title(stories: Sequence[JobStory], names: Mapping[str, str]) -> str:
    """Median times, fastest first, and how much slower the others are."""
    medians = sorted(
        (value, names[story.job])
        for story in stories
        if (value := steady_median_s(story)) is not None
    )
    if not medians:
        return "Iteration times"
    fastest_s, fastest = medians[0]
    if len(medians) == 1:
        return f"An iteration of {fastest} takes {fastest_s:.2f} s in the median"
    others = ", ".join(
        f"{name} {value:.2f} s ({value / fastest_s:.2f} ×)" for value, name in medians[1:]
    )
    return f"{fastest} is fastest: {fastest_s:.2f} s an iteration; {others}"


def _gains(stories: Sequence[JobStory]) -> list[str]:
    from shiftbook.ledger.report_charts import gains

    known = [
        move
        for story in stories
        for move in story.committed
        if move["realised_gain_s"] is not None and move["predicted_gain_s"] is not None
    ]
    if not known:
        return [_missing("No realised gains", "No committed move has a recorded gain yet.")]
    return [
        _figure(
            gains_title(known),
            gains(known),
            "Each point is a move, its line the interval of the realised gain. Both gains are net "
            "of the move's cost, the predicted and the real one. On the dashed line the prediction "
            "was right; below it the move brought less than promised.",
        )
    ]


def gains_title(moves: Sequence[Row]) -> str:
    """How wrong the predictor was, in which direction, and how many moves lost."""
    errors = [move["realised_gain_s"] - net_gain_s(move) for move in moves]
    middle = median(errors)
    lost = sum(1 for move in moves if move["realised_gain_s"] < 0)
    losers = "none lost time" if lost == 0 else f"{lost} lost time"
    brought = "as much as predicted"
    if abs(middle) >= RIGHT_S:
        brought = f"{seconds_text(abs(middle))} {'less' if middle < 0 else 'more'} than predicted"
    middle_of = " in the median" if len(moves) > 1 else ""
    return f"{len(moves)} {_plural(len(moves), 'move')} brought {brought}{middle_of}; {losers}"


def _stalls(stories: Sequence[JobStory]) -> list[str]:
    from shiftbook.ledger.report_charts import stalls

    known = [m for story in stories for m in story.committed if m["stall_s"] is not None]
    if not known:
        return [_missing("No stalls", "No move was committed.")]
    return [
        _figure(
            stalls_title(known),
            stalls(known),
            "Stall: from a component's last unit of work before a move to its first one after it.",
        )
    ]


def stalls_title(moves: Sequence[Row]) -> str:
    """Sum and longest stall, and the strategy that stalls most in the median."""
    total = sum(move["stall_s"] for move in moves)
    if len(moves) == 1:
        return f"1 move stalled {seconds_text(total)} ({moves[0]['strategy']})"
    longest = max(moves, key=lambda move: move["stall_s"])
    by: dict[str, list[float]] = {}
    for move in moves:
        by.setdefault(move["strategy"], []).append(move["stall_s"])
    medians = ", ".join(f"{name} {seconds_text(median(by[name]))}" for name in sorted(by))
    return (
        f"{len(moves)} {_plural(len(moves), 'move')} stalled {seconds_text(total)} in all, the "
        f"longest {seconds_text(longest['stall_s'])} ({longest['strategy']}); median {medians}"
    )


def _verdict(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return [
            _missing("No verdict", "No verification is recorded; run `shiftbook verify --record`.")
        ]
    findings = list(verdict.get("findings") or ())
    coverage = list(verdict.get("coverage") or ())
    counts = Counter(str(row.get("status")) for row in coverage)
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    title = (
        f"Verdict: {verdict['verdict']}, {len(findings)} {_plural(len(findings), 'finding')}; "
        f"invariants: {statuses or 'none recorded'}"
    )
    parts = [f"<h2>{escape(title)}</h2>"]
    for reason in verdict.get("could_not") or ():
        parts.append(f'<p class="note bad">{escape(str(reason))}</p>')
    for rows, columns in (
        (findings, ("job", "invariant", "position", "expected", "found")),
        (coverage, ("job", "invariant", "title", "status", "required", "checks", "reason")),
    ):
        shown = [name for name in columns if any(row.get(name) not in (None, "") for row in rows)]
        if rows:
            cells = [[row.get(name) for name in shown] for row in rows[:MOST_ROWS]]
            parts.append(_table(shown, cells))
        if len(rows) > MOST_ROWS:
            left = len(rows) - MOST_ROWS
            parts.append(f'<p class="note">{left} more rows: run `shiftbook verify`.</p>')
    return parts


def _moves_table(stories: Sequence[JobStory]) -> list[str]:
    moves = [(story, move) for story in stories for move in story.moves]
    if not moves:
        return [_missing("No moves", "No move was proposed.")]
    rows = [
        [
            move["operation"],
            clock_text(move["proposed_ns"])[11:],
            move["status"],
            move["strategy"],
            _changes(move["before_placement"] or {}, move["after_placement"] or {}),
            None if move["predicted_gain_s"] is None else seconds_text(net_gain_s(move)),
            _seconds(move["realised_gain_s"]),
            None if move["moved_bytes"] is None else size_text(move["moved_bytes"]),
            _seconds(move["stall_s"]),
            ": ".join(text for text in (move["rule"], move["reason"]) if text),
        ]
        for _, move in moves[-MOST_ROWS:]
    ]
    columns = (
        "operation",
        "proposed (UTC)",
        "status",
        "strategy",
        "change",
        "predicted, net",
        "realised, net",
        "moved",
        "stall",
        "because",
    )
    return [f"<h2>{_shown(len(moves), 'move')}</h2>", _table(columns, rows, numbers={5, 6, 7, 8})]


def _changes(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> str:
    """Components whose devices change: ``rollout n/0 → n/0 n/1``."""
    changed = [c for c in {**before, **after} if before.get(c, []) != after.get(c, [])]
    return "; ".join(
        f"{c} {' '.join(before.get(c, [])) or 'none'} → {' '.join(after.get(c, [])) or 'none'}"
        for c in changed
    )


def _syncs_table(stories: Sequence[JobStory]) -> list[str]:
    syncs = [(story, sync) for story in stories for sync in story.syncs]
    if not syncs:
        return [_missing("No weight syncs", "No weight sync was started.")]
    rows = [
        [
            sync["operation"],
            sync["status"],
            sync["version"],
            sync["encoding"],
            " ".join(sync["targets"] or ()),
            f"{sync['serving'] or 0} of {len(sync['targets'] or ())}",
            None if sync["moved_bytes"] is None else size_text(sync["moved_bytes"]),
            None if sync["full_bytes"] is None else size_text(sync["full_bytes"]),
            _seconds(sync["stall_s"]),
            f"{sync['differing']} differ" if sync["differing"] else sync["reason"],
        ]
        for _, sync in syncs[-MOST_ROWS:]
    ]
    columns = (
        "operation",
        "status",
        "version",
        "encoding",
        "targets",
        "serving",
        "moved",
        "full",
        "stall",
        "because",
    )
    numbers = {2, 5, 6, 7, 8}
    return [f"<h2>{_shown(len(syncs), 'weight sync')}</h2>", _table(columns, rows, numbers=numbers)]


def _shown(count: int, noun: str) -> str:
    what = f"{count} {_plural(count, noun)}"
    return what if count <= MOST_ROWS else f"{what}, the last {MOST_ROWS} of them"


def _seconds(value: float | None) -> str | None:
    return None if value is None else seconds_text(value)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], numbers: set[int] | None = None
) -> str:
    numbers = numbers or set()

    def cell(tag: str, index: int, value: Any) -> str:
        kind = ' class="number"' if index in numbers else ' class="name"' if index == 0 else ""
        return f"<{tag}{kind}>{escape(cell_text(value))}</{tag}>"

    head = "".join(cell("th", index, name) for index, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(cell("td", index, value) for index, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
