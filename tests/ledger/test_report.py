"""The report: one page that needs nothing else, drawn for light and dark, true to the ledger.

Method: pages of several ledgers (full, of one job, without moves, empty) are parsed; every picture
is taken out and read as SVG; titles are compared with figures counted from the ledger itself.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest

from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.report import (
    MOST_ROWS,
    gains_title,
    iterations_title,
    read_verdict,
    render_report,
    series_names,
    stalls_title,
    timeline_title,
    write_report,
)
from shiftbook.ledger.report_data import net_gain_s, read_stories
from shiftbook.ledger.summary import seconds_text
from tests.ledger.sample_ledger import (
    SPLIT,
    Clock,
    Writer,
    open_sample,
    write_every_status,
    write_sample,
)

PREFIX = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """Tags with their attributes, headings, and whatever refers to something outside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self._in_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("h1", "h2"):
            self._in_heading = True
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_heading = self._in_heading and tag not in ("h1", "h2")

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings[-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def svg_of(url: str | None) -> str:
    assert url is not None
    assert url.startswith(PREFIX)
    return base64.b64decode(url.removeprefix(PREFIX)).decode()


def assert_self_contained(text: str) -> Page:
    """No script, no style sheet, no address outside the page, in the page or in its pictures."""
    page = Page(text)
    assert not page.named("script")
    assert not page.named("link")
    assert not page.named("iframe")
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "poster", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), (tag, name, value)
    assert "@import" not in text
    assert not re.search(r"url\s*\(", text)
    assert "http://" not in text
    assert "https://" not in text
    for url in re.findall(re.escape(PREFIX) + r"[A-Za-z0-9+/=]+", text):
        svg = svg_of(url)
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        for element in root.iter():
            assert not element.tag.endswith(("script", "foreignObject"))
            for name, value in element.attrib.items():
                assert "http" not in value, (name, value)
    return page


@pytest.fixture
def page_of(tmp_path: Path) -> Callable[[Ledger], str]:
    def render(ledger: Ledger) -> str:
        target = tmp_path / "report.html"
        write_report(ledger, target)
        return target.read_text(encoding="utf-8")

    return render


def test_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    with write_sample(tmp_path / "ledger.db") as ledger:
        text = render_report(ledger)
    page = assert_self_contained(text)
    assert len(page.named("picture")) == 4
    assert len(text) < 400_000


def test_a_picture_for_the_light_and_one_for_the_dark_page(tmp_path: Path) -> None:
    with write_sample(tmp_path / "ledger.db", schedules=("dynamic",)) as ledger:
        text = render_report(ledger)
    page = Page(text)
    assert "prefers-color-scheme: dark" in text.split("</style>")[0]
    sources, images = page.named("source"), page.named("img")
    assert len(sources) == len(images) == 4
    for source, image in zip(sources, images, strict=True):
        assert source["media"] == "(prefers-color-scheme: dark)"
        assert image["alt"]
        dark, light = svg_of(source["srcset"]), svg_of(image["src"])
        assert "#9aa7b4" in dark, "labels are bright on the dark page"
        assert "#59636e" in light, "labels are dark on the light page"
        assert "#9aa7b4" not in light
        assert "#59636e" not in dark


def test_titles_say_what_the_ledger_says(tmp_path: Path) -> None:
    with write_sample(tmp_path / "ledger.db") as ledger:
        with Mirror.open(ledger) as mirror:
            stories = read_stories(mirror)
        closing = list(ledger.read(job="demo-static", types={"IterationCompleted"}))
        gained = list(ledger.read(types={"GainRealized"}))
        commits = list(ledger.read(types={"ReallocationCommitted"}))
        text = render_report(ledger)
    names = series_names(stories)
    static_s = median(event.body["wall_s"] for event in closing[1:])
    title = iterations_title(stories, names)
    assert title.startswith("dynamic is fastest: ")
    assert f"static {static_s:.2f} s" in title
    errors = {e.operation: e.body["adjusted_gain_s"] - e.body["predicted_gain_s"] for e in gained}
    moves = [m for m in stories[0].committed if m["realised_gain_s"] is not None]
    assert abs(median(errors.values())) < 0.0005
    assert "as much as predicted in the median" in gains_title(moves)
    assert sum(abs(error) >= 0.0005 for error in errors.values()) >= 4
    for move in moves:
        error = errors[move["operation"]]
        if abs(error) >= 0.0005:
            direction = "less" if error < 0 else "more"
            assert f"{abs(error) * 1000:.0f} ms {direction} than predicted" in gains_title([move])
    total_s = sum(event.body["stall_s"] for event in commits)
    assert f"{len(commits)} moves stalled {total_s:.2f} s in all" in stalls_title(
        stories[0].committed
    )
    assert timeline_title(stories[0]).startswith("demo-dynamic: 15 moves in 5 iterations; ")
    assert "rollout held 0 to 2 devices" in timeline_title(stories[0])
    headings = Page(text).headings
    for expected in (title, gains_title(moves), timeline_title(stories[0])):
        assert expected in headings


def test_stays_tile_the_lanes_of_the_devices(tmp_path: Path) -> None:
    """At any moment the components on a device fill its lane, and only once."""
    with write_sample(tmp_path / "ledger.db", schedules=("dynamic",)) as ledger:
        with Mirror.open(ledger) as mirror:
            story = read_stories(mirror)[0]
        final = ledger.state().job("demo-dynamic").topology
    end_s = story.since_start_s(story.end_ns)
    for device in story.devices:
        edges = sorted({s.start_s for s in story.stays} | {end_s})
        for start, stop in pairwise(edges):
            middle = (start + stop) / 2
            here = [
                (s.low, s.high)
                for s in story.stays
                if s.device == device and s.start_s <= middle < s.end_s
            ]
            assert sum(high - low for low, high in here) == pytest.approx(1.0)
    last = {(s.component, s.device) for s in story.stays if s.end_s == end_s}
    assert last == {(c, d) for c, devices in final.placement().items() for d in devices}


def test_without_moves(tmp_path: Path, page_of: Callable[[Ledger], str]) -> None:
    with write_sample(tmp_path / "ledger.db", schedules=("static",)) as ledger:
        page = assert_self_contained(page_of(ledger))
    assert "demo-static: 0 moves in 5 iterations, every component kept its devices" in page.headings
    assert "No realised gains" in page.headings
    assert "No moves" in page.headings
    assert any(text.startswith("An iteration of static takes ") for text in page.headings)
    assert len(page.named("picture")) == 2


def test_an_empty_ledger(tmp_path: Path, page_of: Callable[[Ledger], str]) -> None:
    with open_sample(tmp_path / "ledger.db") as ledger:
        page = assert_self_contained(page_of(ledger))
    assert page.headings[0] == "Moves of an empty ledger"
    assert not page.named("picture")


def test_a_job_that_has_just_been_opened(tmp_path: Path, page_of: Callable[[Ledger], str]) -> None:
    clock = Clock()
    with open_sample(tmp_path / "ledger.db", clock) as ledger:
        Writer(ledger, clock, "young", "dynamic", random.Random(1)).open()
        page = assert_self_contained(page_of(ledger))
    assert "No iteration times" in page.headings


def test_moves_in_every_status(tmp_path: Path, page_of: Callable[[Ledger], str]) -> None:
    with write_every_status(tmp_path / "ledger.db") as ledger:
        text = page_of(ledger)
    page = assert_self_contained(text)
    assert "10 moves" in page.headings
    assert "cooldown: moved 1.5 s ago" in text
    assert "Verdict: findings, 1 finding; invariants: none recorded" in page.headings


def test_names_from_the_ledger_are_never_markup(
    tmp_path: Path, page_of: Callable[[Ledger], str]
) -> None:
    clock = Clock()
    evil = "<script>alert(1)</script>"
    with open_sample(tmp_path / "ledger.db", clock) as ledger:
        writer = Writer(ledger, clock, evil, evil, random.Random(1), topology=SPLIT)
        writer.open()
        writer.iteration(0, 1.0)
        text = page_of(ledger)
    assert_self_contained(text)
    assert evil not in text


def test_predicted_and_realised_gains_are_both_net(
    tmp_path: Path, page_of: Callable[[Ledger], str]
) -> None:
    """What the page and the table of moves compare is what GainRealized compares."""
    with write_sample(tmp_path / "ledger.db", schedules=("dynamic",)) as ledger:
        with Mirror.open(ledger) as mirror:
            moves = {move["operation"]: move for move in mirror.rows("FROM reallocations")}
        gained = list(ledger.read(types={"GainRealized"}))
        text = page_of(ledger)
    assert gained
    for event in gained:
        assert event.operation is not None
        net_s = net_gain_s(moves[event.operation])
        assert net_s == pytest.approx(event.body["predicted_gain_s"])
        assert f'<td class="number">{seconds_text(net_s)}</td>' in text


def test_only_the_named_job(tmp_path: Path) -> None:
    with write_sample(tmp_path / "ledger.db") as ledger:
        page = Page(render_report(ledger, jobs=["demo-static"]))
    assert page.headings[0] == "Moves of demo-static"


def test_the_verdict_that_is_given_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    verdict = {
        "verdict": "clean",
        "findings": [],
        "could_not": [],
        "coverage": [
            {"job": "", "invariant": "leases", "status": "checked", "required": True, "reason": ""},
            {"invariant": "masters", "status": "not checked", "reason": "not recorded"},
        ],
    }
    path.write_text(json.dumps(verdict), encoding="utf-8")
    with write_sample(tmp_path / "ledger.db", schedules=("static",), iterations=1) as ledger:
        text = render_report(ledger, verdict=read_verdict(path))
    assert "Verdict: clean, 0 findings; invariants: 1 checked, 1 not checked" in Page(text).headings
    assert "not recorded" in text
    assert '<th class="name">job' not in text, "no row names a job"
    verdict["coverage"] = [
        {"job": f"job-{number}", "invariant": "leases", "status": "checked"}
        for number in range(MOST_ROWS + 3)
    ]
    path.write_text(json.dumps(verdict), encoding="utf-8")
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", create=False, read_only=True) as ledger:
        text = render_report(ledger, verdict=read_verdict(path))
    assert f'<td class="name">job-{MOST_ROWS - 1}</td>' in text
    assert f"job-{MOST_ROWS}" not in text
    assert "3 more rows" in text
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(InvalidInput, match="field verdict"):
        read_verdict(path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        open_sample(tmp_path / "ledger.db") as ledger,
        pytest.raises(InvalidInput, match="expected to write"),
    ):
        write_report(ledger, tmp_path / "missing" / "report.html")
