"""The time to the end of an iteration, in closed form, for many placements and draws at once.

C is the number of placements and D the number of draws; arrays of shape (C, 1) and (D,) broadcast
to (C, D). Draw 0 is the central one: choices are made by it and hold for all draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shiftbook.scheduler.errors import PlanningError

Array = NDArray[np.float64]

_TINY = 1e-9


@dataclass(frozen=True)
class Progress:
    """How far an iteration is: what the source has still to make and the followers to work off."""

    iteration: int
    elapsed_s: float
    """Since the iteration began."""
    episodes: int
    """Of the whole iteration."""
    outstanding: int
    """Episodes that have not ended, those that wait for a tool included."""
    running: int
    """Turns in lanes now."""
    waiting: int
    """Turns that wait for a lane now."""
    lanes: int
    """Lanes of one source replica."""
    turns_left: float | None = None
    """Turns until the last episode ends, where the job can say."""
    turns_done: int = 0
    """Turns finished in this iteration."""
    groups_incomplete: int = 0
    """Groups with an episode that has not ended."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Units that each follower has still to do, those of incomplete groups included."""
    update_due: bool = True
    """False once the update of this iteration is done."""
    more_iterations: bool = True
    """False in the last iteration: then nothing is expected afterwards."""

    def __post_init__(self) -> None:
        counts = (self.episodes, self.outstanding, self.running, self.waiting, self.turns_done)
        if min(*counts, self.groups_incomplete, *self.left.values(), 0) < 0 or self.lanes < 1:
            raise PlanningError(f"expected counts of at least 0 and a lane or more, found {self}")
        if self.outstanding > self.episodes:
            raise PlanningError(
                f"expected at most {self.episodes} outstanding episodes, found {self.outstanding}"
            )

    def owed(self, source: str) -> dict[str, int]:
        """Units that each component owes; the source owes episodes that wait for a tool too."""
        return {source: self.outstanding, **self.left}

    def ready(self, component: str) -> int:
        """Units of a follower whose groups are complete."""
        return max(0, self.left.get(component, 0) - self.groups_incomplete)


@dataclass(frozen=True)
class Draws:
    """Joint draws of what is uncertain, shapes (D,)."""

    turn_rate: Array
    """Turns a second of one source replica with all lanes full."""
    tail_s: Array
    """Scale of the tail: seconds until the last of n episodes ends, divided by log(1 + n)."""
    turns_left: Array
    turns_in_tail: Array
    """Turns that an episode in a lane still has, on average."""
    lane_share: Array
    """Share of an episode's unhindered life that it spends in a lane, not waiting for a tool."""
    update_s: Array


@dataclass(frozen=True)
class Station:
    """Followers that share the same devices: they take turns there and work on ready groups.

    Several stations can stand in one object, along a leading axis of length F.
    """

    replicas: Array
    """(C, 1), weighted by device speed."""
    free: Array
    """(C, 1), those of them on devices without the source."""
    work_s: Array
    """(D,), replica-seconds left."""
    ready_s: Array
    """(D,), replica-seconds left of complete groups."""
    fixed_share: Array
    """(D,), share of the work that belongs to one replica each, 0 to 1: a trainer's ranks own
    their groups, while any replica may take a group of another follower."""
    units: Array | float
    """Groups left: no more replicas than that can work at once."""


@dataclass(frozen=True)
class Moved:
    """What getting to each placement takes."""

    source_s: Array
    """(C, D), delay of the source: move duration times the share of its replicas that take part."""
    station_s: Array
    """(C, D), when the trainer's station can first work as it stands after the move."""


@dataclass(frozen=True)
class FollowUps:
    """Moves that a placement can still make at a later boundary of the iteration."""

    sizes: Sequence[float] = ()
    """Numbers of trainer replicas that it may change to when the source has ended."""
    reshard_s: Array | None = None
    """(D,), duration of that change."""
    pause_s: Array | None = None
    """(D,), duration of taking the source off devices that it shares, at the tail."""
    paused: Array | None = None
    """(C, 1), source replicas after that; 0 where it is not possible."""
    paused_free: Array | None = None
    """(C, 1), trainer replicas without the source on their device after that."""


@dataclass(frozen=True)
class Makespan:
    """Predicted seconds from now, each of shape (C, D)."""

    end_s: Array
    """The update is done."""
    source_end_s: Array
    """The last episode has ended."""
    follow_s: Array
    """From there to the end: work left for the followers, a change of size, the update."""
    tail_s: Array
    """Part of the source's time in which its lanes cannot all be full."""


def tail_time(episodes: Array | float, replicas: Array, draws: Draws) -> Array:
    """Seconds until the last of ``episodes`` episodes ends when the lanes hold them all.

    The longer of their work at full rate and their longest chain of turns; the maximum of n draws
    with an exponential tail grows like log(n).
    """
    count = np.asarray(episodes, dtype=np.float64)
    work = draws.turns_in_tail * count / (np.maximum(replicas, _TINY) * draws.turn_rate)
    return np.asarray(np.maximum(draws.tail_s * np.log1p(count), work))


def source_time(turns: Array, episodes: float, replicas: Array, lanes: int, draws: Draws) -> Array:
    """Seconds until the last of ``episodes`` episodes (``turns`` in all) ends on ``replicas``.

    While more episodes are outstanding than the lanes can hold, turns leave at full rate; then
    comes the tail. One more replica is never a loss, because it may stand idle: the best number up
    to ``replicas`` counts.
    """
    if episodes <= 0:
        return np.zeros(np.broadcast_shapes(np.shape(turns), np.shape(replicas)))
    reach = lanes / draws.lane_share
    per_episode = np.minimum(turns / episodes, draws.turns_in_tail)

    def on(count: Array) -> Array:
        fits = np.minimum(episodes, count * reach)
        in_tail = per_episode * fits
        rate = np.maximum(count, _TINY) * draws.turn_rate
        chain = draws.tail_s * np.log1p(fits)
        return np.asarray(
            np.maximum(turns - in_tail, 0.0) / rate + np.maximum(chain, in_tail / rate)
        )

    # The time falls with the number of replicas up to where the longer tail outweighs the higher
    # rate: the root of the derivative, or where the chain begins to exceed the work in the tail.
    scale = np.maximum(draws.tail_s * reach * draws.turn_rate, _TINY)
    root = (turns * reach + np.sqrt((turns * reach) ** 2 + 4 * turns * scale)) / (2 * scale)
    exponent = per_episode * reach / (draws.turn_rate * np.maximum(draws.tail_s, _TINY))
    crossing = np.expm1(np.minimum(exponent, 50.0)) / reach
    best = np.minimum(np.maximum(root, crossing), episodes / reach)
    return np.minimum(on(replicas), on(np.minimum(replicas, best)))


def makespan(
    progress: Progress,
    draws: Draws,
    source: Array,
    moved: Moved,
    trainer: Station,
    others: Station | None,
    follow: FollowUps,
) -> Makespan:
    """Time to the end of the iteration.

    ``source`` has shape (C, 1); ``others`` holds the stations of all other followers. Stations
    work in parallel on different groups, so the slowest counts. Follow-ups happen only at
    boundaries still ahead: a move that is due now is a placement of its own.
    """
    episodes = float(progress.outstanding)
    source_end = source_time(draws.turns_left, episodes, source, progress.lanes, draws)
    tail = np.minimum(tail_time(episodes, source, draws), source_end)
    if episodes > 0:
        source_end = source_end + moved.source_s
    else:
        source_end = np.zeros_like(moved.source_s)
    stations = (trainer, others)
    follow_s = _follow(progress, draws, source_end, moved.station_s, stations, trainer.free, follow)
    possible = follow.paused is not None and follow.paused_free is not None and episodes > 0
    if possible and follow.pause_s is not None:
        assert follow.paused is not None
        assert follow.paused_free is not None
        fits = follow.paused * (progress.lanes / draws.lane_share)
        begins = np.maximum(source_end - tail_time(fits, source, draws), 0.0)
        share = 1.0 - follow.paused / np.maximum(source, _TINY)
        stops = begins + tail_time(fits, follow.paused, draws) + follow.pause_s * share
        freed = np.maximum(begins + follow.pause_s, moved.station_s)
        later = _follow(progress, draws, stops, freed, stations, follow.paused_free, follow)
        better = (stops + later < source_end + follow_s) & (episodes > fits) & (follow.paused > 0)
        take = better[:, :1]
        follow_s = np.where(take, later, follow_s)
        source_end = np.where(take, stops, source_end)
    return Makespan(source_end + follow_s, source_end, follow_s, tail)


def _follow(
    progress: Progress,
    draws: Draws,
    source_end: Array,
    station_from: Array,
    stations: tuple[Station, Station | None],
    trainer_free: Array,
    follow: FollowUps,
) -> Array:
    """Seconds from the source's end to the end of the iteration."""
    reach = progress.lanes / draws.lane_share
    # Groups in the tail close during it: half of their work arrives in time on average.
    in_time = 1.0 - 0.5 * np.minimum(1.0, reach / max(progress.outstanding, 1))
    trainer, others = stations
    longest = np.zeros_like(source_end)
    if others is not None:
        own, _ = _left(others, source_end, longest, others.free, in_time)
        longest = own.max(axis=0)
    own, left = _left(trainer, source_end, station_from, trainer_free, in_time)
    wait = np.maximum(station_from - source_end, 0.0)
    best = wait + own
    if follow.reshard_s is not None and len(follow.sizes) and progress.outstanding > 0:
        sizes = np.asarray(follow.sizes, dtype=np.float64)[:, None, None]
        resized = wait + follow.reshard_s + _shared_out(trainer, left, sizes)
        # The size that there is already costs more here than above, so it is never taken.
        central = resized[:, :, 0].argmin(axis=0)
        fastest = np.take_along_axis(resized, central[None, :, None], axis=0)[0]
        best = np.where((fastest < best)[:, :1], fastest, best)
    update = draws.update_s if progress.update_due else np.zeros_like(draws.update_s)
    return np.asarray(np.maximum(longest, best) + update)


def _left(
    station: Station, source_end: Array, begin: Array, free: Array, in_time: Array
) -> tuple[Array, Array]:
    """(seconds, replica-seconds) that a station still works when the source has ended.

    Before that only replicas on devices without the source work, on complete groups, and of the
    fixed work only on their own share; so a replica that waits for the source keeps its whole
    share for afterwards, however much the others have done.
    """
    replicas = np.maximum(station.replicas, _TINY)
    share = free / replicas
    reachable = 1.0 - station.fixed_share * (1.0 - share)
    arriving = np.maximum(station.work_s - station.ready_s, 0.0)
    span = np.maximum(source_end - begin, 0.0)
    done = np.minimum(free * span, reachable * (station.ready_s + arriving * in_time))
    left = np.maximum(station.work_s - np.where(free > 0, done, 0.0), 0.0)
    waiting = np.where(free < station.replicas - _TINY, station.fixed_share * station.work_s, 0.0)
    own = np.maximum(_shared_out(station, left, replicas), waiting / replicas)
    return np.asarray(own), np.asarray(left)


def _shared_out(station: Station, left: Array, replicas: Array | float) -> Array:
    """Seconds for ``left`` replica-seconds on so many replicas; a group is not divided."""
    return np.asarray(left / np.maximum(np.minimum(replicas, station.units), _TINY))
