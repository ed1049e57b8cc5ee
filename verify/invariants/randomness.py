"""Random streams: I9, pairwise distinct over their owners; I9b, each goes on where it stood."""

from __future__ import annotations

from collections import deque
from itertools import accumulate, islice

from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.probes import RandomStatesRecorded
from shiftbook.ledger.events.state import CheckpointRestored
from shiftbook.ledger.events.training import SamplesGenerated
from shiftbook.verify.invariants.base import End, Invariant, Step, listed, short
from shiftbook.verify.invariants.restore import owner_matches
from shiftbook.verify.lineage import WINDOW

MOST_STREAMS = 64 * WINDOW
"""Streams of samples that are remembered back in time."""

RNG = "rng:"
"""Before the owner's name in the parts of a bundle."""


class DistinctStreams(Invariant):
    """I9: no two owners have the same random state, and no two samples the same randomness.

    Ranks that are meant to draw alike (of one tensor-parallel group) are declared in the plan's
    ``data.shared_streams``.
    """

    id = "I9"
    title = "random streams pairwise distinct"
    needs = "RandomStatesRecorded by owner; stream in the rows of SamplesGenerated"
    sees = (
        RandomStatesRecorded,
        SamplesGenerated,
    )

    def begin(self) -> None:
        self._streams: dict[str, str] = {}
        """Streams, oldest first, with the first sample that had each."""
        self._events: deque[tuple[int, int]] = deque()
        """Position of each event that gave some of them, with their number."""
        self._recorded = False

    def feed(self, step: Step) -> None:
        if isinstance(step.event, RandomStatesRecorded):
            self._recorded = True
            self._states(step, step.event)
        elif isinstance(step.event, SamplesGenerated):
            self._samples(step)

    def _states(self, step: Step, event: RandomStatesRecorded) -> None:
        shared = step.plan.data.shared_streams if step.plan else ()
        group = {owner: number for number, owners in enumerate(shared) for owner in owners}
        seen: dict[str, str] = {}
        for owner, state in event.states.items():
            other = seen.setdefault(state, owner)
            declared = owner in group and group[owner] == group.get(other)
            self.expect(
                other == owner or declared,
                step.at,
                expected=f"a random state of its own for {owner}",
                found=f"{owner} and {other} both {short(state)}",
                cause="all were seeded alike, or one's state was restored to all",
                action="Seed and restore by owner; declare streams that are shared on purpose.",
            )

    def _samples(self, step: Step) -> None:
        if step.rows is None or step.rows.problem:
            self.missing("rows of SamplesGenerated cannot be read")
            return
        streams = step.rows.get("stream")
        if streams is None:
            self.missing("generated rows carry no name of their randomness")
            return
        twice = []
        before = len(self._streams)
        named = [(u, s) for u, s in zip(step.rows["uid"], streams, strict=True) if s is not None]
        if len(named) < len(streams):
            self.missing("some generated rows carry no name of their randomness")
        for uid, stream in named:
            other = self._streams.setdefault(stream, uid)
            if other != uid:
                twice.append((uid, other, stream))
        if len(self._streams) > before:
            self._events.append((step.at, len(self._streams) - before))
        at = self._position(twice[0][2]) if twice else None
        self._forget()
        self.passed(len(named))
        if twice:
            uid, other, _ = twice[0]
            self.flag(
                step.at,
                expected=f"{uid} drawn with randomness of its own",
                found=f"the same as {other} ({len(twice)} samples)",
                cause="engines share a seed, or requests are seeded by batch and not by uid",
                action="Key the randomness by job seed, uid, turn and token.",
                others=(at,),
            )

    def close(self, end: End) -> None:
        if self._streams and not self._recorded:
            self.missing("no random states by owner were recorded")

    def _position(self, stream: str) -> int:
        """Position of the event that gave a stream; asked once for a finding, so it may count."""
        place = next(i for i, known in enumerate(self._streams) if known == stream)
        ends = accumulate(count for _, count in self._events)
        return next(at for (at, _), end in zip(self._events, ends, strict=True) if place < end)

    def _forget(self) -> None:
        """Let the oldest streams go where there are too many."""
        for stream in list(islice(self._streams, max(0, len(self._streams) - MOST_STREAMS))):
            del self._streams[stream]
            at, count = self._events.popleft()
            if count > 1:
                self._events.appendleft((at, count - 1))


class RandomLineage(Invariant):
    """I9b: a stream's state before a unit of work is the one that the last unit left.

    After a restore it is the bundle's; an owner that is new (after a resize) begins anew, and so do
    those that the plan names (``data.remapped_owners``) where a resize is recorded. A life without
    a bundle begins with the states that the plan declares, where it declares them.
    """

    id = "I9b"
    title = "random states continue at first use"
    needs = "RandomStatesRecorded before and after what draws; parts rng:OWNER of bundles"
    sees = (
        AttemptStarted,
        CheckpointRestored,
        RandomStatesRecorded,
    )

    def begin(self) -> None:
        self._known: dict[str, tuple[str, int]] = {}
        self._first: dict[str, tuple[str, int]] = {}
        self._without = False
        """Whether an attempt said that it has no generator."""
        self._held = False
        """Whether owners go on from a bundle; after a resize they may begin anew."""

    def feed(self, step: Step) -> None:
        event = step.event
        if isinstance(event, AttemptStarted):
            # The streams of a life begin as its bundle holds them, or as those of the first life.
            mark = step.track.find_mark(event.bundle) if event.bundle else None
            # Of a bundle that nobody recorded nothing is known: it may be of any moment.
            fresh = event.bundle is None or event.bundle in step.track.registered
            self._known = dict(self._first) if fresh else {}
            if event.bundle is None and step.plan is not None:
                declared = step.plan.data.first_streams
                self._known |= {owner: (state, step.at) for owner, state in declared.items()}
            self._held = not fresh
            if mark is not None:
                self._from_parts(mark.saved.parts, mark.position)
        elif isinstance(event, CheckpointRestored):
            mark = step.track.find_mark(event.bundle)
            if mark is not None and event.kind == "resume":
                self._held = True
                self._from_parts(mark.saved.parts, mark.position)
        elif isinstance(event, RandomStatesRecorded):
            self._recorded(step, event)

    def _from_parts(self, parts: dict[str, str], at: int) -> None:
        for name, value in parts.items():
            if name.startswith(RNG):
                self._known[name[len(RNG) :]] = (value, at)

    def _resized(self, step: Step) -> None:
        """Generators were made anew: all, or those alone whose owners the plan names."""
        declared = step.plan is not None and step.plan.data.remapped_owners
        for owner in list(self._known):
            if not declared or owner_matches(step.plan, owner):
                del self._known[owner]
        self._held = False

    def _recorded(self, step: Step, event: RandomStatesRecorded) -> None:
        from shiftbook.checkpoint.compare import root

        self._without = self._without or (event.moment == "start" and not event.states)
        if event.moment == "resized":
            self._resized(step)
        wrong = []
        for owner, state in event.states.items():
            known = self._known.get(owner)
            if known is None and owner in self._first and self._held:
                self.missing("a bundle holds no random state of an owner that draws")
            if known is not None and event.moment != "after":
                self.passed()
                # In a bundle the state stands as the root of a part with one value.
                if known[0] not in (state, root({"state": state})):
                    wrong.append((owner, known, state))
            self._first.setdefault(owner, (state, step.at))
            self._known[owner] = (state, step.at)
        if wrong:
            owner, known, state = wrong[0]
            self.flag(
                step.at,
                expected=f"stream {owner} at {short(known[0])}, as it was left",
                found=f"{short(state)} (differing: {listed(name for name, _, _ in wrong)})",
                cause="reseeded by a late initialisation, not restored, or drawn from elsewhere",
                action="Restore generators last; give logging and evaluation their own streams.",
                others=(known[1],),
            )

    def idle_because(self, end: End) -> str | None:
        return "no draw goes on from a random state: each is keyed" if self._without else None
