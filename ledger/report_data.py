"""What the report shows, read from the mirror as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shiftbook.ledger.mirror import Mirror

Row = dict[str, Any]


def net_gain_s(move: Row) -> float:
    """Predicted gain less the predicted cost: what the realised gain, net of the real cost, meets.

    A move without a predicted cost has none.
    """
    return float(move["predicted_gain_s"]) - float(move["predicted_cost_s"] or 0.0)


@dataclass(frozen=True, slots=True)
class Stay:
    """A component on a device for a while; seconds since the job's first event."""

    device: str
    component: str
    start_s: float
    end_s: float
    low: float
    """Lower edge of its part of the device's lane, 0 to 1."""
    high: float


@dataclass
class JobStory:
    """One job: where it stood, what queued, how its iterations went, and its moves."""

    job: str
    schedule: str
    components: tuple[str, ...]
    devices: tuple[str, ...]
    start_ns: int
    end_ns: int
    outcome: str
    stays: list[Stay] = field(default_factory=list)
    windows: list[Row] = field(default_factory=list)
    iterations: list[Row] = field(default_factory=list)
    moves: list[Row] = field(default_factory=list)
    syncs: list[Row] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[str]:
        """How many moves stand in which status."""
        return Counter(move["status"] for move in self.moves)

    @property
    def committed(self) -> list[Row]:
        """Moves that were carried out."""
        return [move for move in self.moves if move["status"] == "committed"]

    def since_start_s(self, ns: int) -> float:
        """Seconds since the job's first event."""
        return (ns - self.start_ns) / 1e9

    def held(self, component: str) -> tuple[int, int]:
        """Fewest and most devices that a component stood on at one time."""
        edges = sorted({stay.start_s for stay in self.stays} | {s.end_s for s in self.stays})
        counts = [
            sum(
                1
                for stay in self.stays
                if stay.component == component and stay.start_s <= start < stay.end_s
            )
            for start in edges[:-1]
        ]
        return (min(counts), max(counts)) if counts else (0, 0)


READS = ("iterations", "windows", "reallocations", "weight_syncs")
"""Tables of the mirror that the stories are made of, besides ``events``."""


def read_stories(mirror: Mirror, jobs: Sequence[str] | None = None) -> list[JobStory]:
    """Read every job that was opened, or only the named ones, in ledger order."""
    opened = mirror.rows(
        "SELECT job, body, recorded_ns FROM events WHERE type = 'JobOpened' ORDER BY position"
    )
    return [
        _story(mirror, row["job"], row["recorded_ns"])
        for row in opened
        if jobs is None or row["job"] in jobs
    ]


def _story(mirror: Mirror, job: str, start_ns: int) -> JobStory:
    described = mirror.rows(
        "SELECT list_at(body, '$.components') AS components, "
        "list_transform(TRY_CAST(body -> '$.devices' AS STRUCT(name VARCHAR)[]), "
        "lambda device: device.name) AS devices FROM events "
        "WHERE job = ? AND type = 'JobOpened' LIMIT 1",
        [job],
    )[0]
    closed = mirror.rows(
        "SELECT max(recorded_ns) AS end_ns, any_value(body ->> '$.outcome') FILTER "
        "(WHERE type = 'JobClosed') AS outcome FROM events WHERE job = ?",
        [job],
    )[0]
    iterations = mirror.rows(
        "SELECT * FROM iterations WHERE job = ? QUALIFY row_number() OVER "
        "(PARTITION BY iteration ORDER BY position DESC) = 1 ORDER BY iteration",
        [job],
    )
    story = JobStory(
        job=job,
        schedule=next((row["schedule"] for row in iterations if row["schedule"]), job),
        components=tuple(described["components"] or ()),
        devices=tuple(described["devices"] or ()),
        start_ns=start_ns,
        end_ns=closed["end_ns"],
        outcome=closed["outcome"] or "running",
        iterations=iterations,
        windows=mirror.rows(
            "SELECT start_ns, window_s, component, queue, running, waiting FROM windows "
            "WHERE job = ? ORDER BY start_ns, position",
            [job],
        ),
        moves=mirror.rows("SELECT * FROM reallocations WHERE job = ? ORDER BY position", [job]),
        syncs=mirror.rows("SELECT * FROM weight_syncs WHERE job = ? ORDER BY position", [job]),
    )
    story.stays = _stays(story, _placements(mirror, job))
    return story


def _placements(mirror: Mirror, job: str) -> list[Row]:
    return mirror.rows(
        "SELECT recorded_ns, placement(coalesce(body -> '$.topology', body -> '$.after', "
        "body -> '$.restored')) AS placement FROM events WHERE job = ? AND type IN "
        "('JobOpened', 'AttemptStarted', 'ReallocationCommitted', 'ReallocationRolledBack') "
        "ORDER BY position",
        [job],
    )


def _stays(story: JobStory, placements: Sequence[Row]) -> list[Stay]:
    """Turn a sequence of topologies into stays; a device that is shared has a part for each."""
    stays: list[Stay] = []
    open_: dict[tuple[str, str, float, float], float] = {}
    for row in placements:
        at_s = story.since_start_s(row["recorded_ns"])
        now = set(_parts(row["placement"] or {}))
        for part in [part for part in open_ if part not in now]:
            stays.append(Stay(*part[:2], open_.pop(part), at_s, *part[2:]))
        for part in now:
            open_.setdefault(part, at_s)
    end_s = story.since_start_s(story.end_ns)
    stays += [Stay(*part[:2], start_s, end_s, *part[2:]) for part, start_s in open_.items()]
    return sorted(
        (stay for stay in stays if stay.end_s > stay.start_s),
        key=lambda stay: (stay.start_s, stay.device, stay.low),
    )


def _parts(placement: dict[str, list[str]]) -> Iterable[tuple[str, str, float, float]]:
    tenants: dict[str, list[str]] = {}
    for component in sorted(placement):
        for device in placement[component]:
            tenants.setdefault(device, []).append(component)
    for device, components in tenants.items():
        share = 1 / len(components)
        for index, component in enumerate(components):
            yield device, component, index * share, (index + 1) * share


def steady_median_s(story: JobStory) -> float | None:
    """Median wall time of an iteration, without the first, which warms up, where there are more."""
    times = [row["wall_s"] for row in story.iterations if row["wall_s"] is not None]
    return median(times[1:] or times) if times else None
