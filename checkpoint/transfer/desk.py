"""The desk beside one source: hears what receivers found, and says who may serve a version.

The ranks of a target hand in partial fingerprints of what they gathered. Only when all of a
target's ranks did, and their sums are the fingerprints of the catalogue, tensor for tensor, does
the desk say `commit`; and only when all of them confirmed does the target serve. Each target is
judged by itself: one that dies, stalls or is wrong holds up no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import FingerprintError, TransferDamaged, TransferRefused
from shiftbook.checkpoint.fingerprint import Fingerprint
from shiftbook.checkpoint.layouts import join_parts
from shiftbook.checkpoint.transfer.catalogue import Catalogue, Message
from shiftbook.ledger.events.base import Count

MOST_EARLY = 4096
Sums = tuple[str, str, str]
"""Both sums and the cover of a partial fingerprint, as hex."""


class Report(Message):
    """What one rank of a target gathered, and what it took."""

    target: str
    rank: Count
    ranks: Count
    incarnation: str
    version: Count
    parts: dict[str, dict[str, Sums]]
    """By copy (`0` is the first) and by name."""
    encoding: Literal["whole", "patch"]
    transport: str
    moved_bytes: Count
    full_bytes: Count
    sync_s: float
    again: Count = 0
    resumed: bool = False
    loaded: bool = False
    """True when the tensors go into an engine that keeps them in another form."""


class Outcome(Message):
    """How a version ended for one target."""

    target: str
    version: Count
    outcome: Literal["serving", "failed", "lost"]
    reason: str | None = None
    incarnation: str | None = None
    root: str | None = None
    differing: tuple[str, ...] = ()
    encoding: Literal["whole", "patch"] | None = None
    transport: str | None = None
    moved_bytes: Count = 0
    full_bytes: Count = 0
    sync_s: float = 0.0
    loaded: bool = False
    """The fingerprints are of what was handed to the engine, and not read back from it."""


@dataclass
class _Target:
    ranks: int
    reports: dict[int, Report] = field(default_factory=dict)
    verdict: Literal["commit", "refuse"] | None = None
    reason: str = ""
    confirmed: set[int] = field(default_factory=set)
    resident: set[int] = field(default_factory=set)
    """Ranks that read the version back from their engine."""
    root: str | None = None
    differing: tuple[str, ...] = ()
    outcome: Outcome | None = None


class Desk:
    """Judges the deliveries of one version at a time; any thread may call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._catalogue: Catalogue | None = None
        self._targets: dict[str, _Target] = {}
        self._deadline = 0.0
        self._early: dict[tuple[str, int], str] = {}
        """Failures of versions that are offered and not yet opened here."""

    def open(self, catalogue: Catalogue, targets: Mapping[str, int], *, limit_s: float) -> None:
        """Expect a version at targets with so many ranks each, within a time limit."""
        if not targets or min(targets.values()) < 1:
            raise TransferRefused(
                f"expected targets with one rank or more, found {dict(targets)}; name who should "
                "take the version"
            )
        with self._changed:
            self._close_open("the next version came")
            self._catalogue = catalogue
            self._targets = {name: _Target(ranks) for name, ranks in targets.items()}
            self._deadline = time.monotonic() + limit_s
            for (target, version), reason in self._early.items():
                if version == catalogue.version and target in self._targets:
                    self._end(target, self._targets[target], "failed", reason)
            self._early.clear()
            self._changed.notify_all()

    def each(self) -> Iterator[Outcome]:
        """Each target's outcome as soon as it is known, until all have one or the limit is over;
        those that have none by then are `lost`, and get no verdict any more."""
        told: set[str] = set()
        while True:
            with self._changed:
                targets = self._targets
                new = [
                    one.outcome
                    for target, one in sorted(targets.items())
                    if one.outcome is not None and target not in told
                ]
                if not new and len(told) < len(targets):
                    left_s = self._deadline - time.monotonic()
                    if left_s <= 0:
                        self._close_open("it did not end within the time limit")
                    else:
                        self._changed.wait(left_s)
                    continue
            if not new:
                return
            told.update(one.target for one in new)
            yield from new

    def outcomes(self) -> tuple[Outcome, ...]:
        """`each`, waited for, by target."""
        return tuple(sorted(self.each(), key=lambda one: one.target))

    def lose(self, target: str, reason: str) -> None:
        """A target's process is known to be dead; nobody waits for it."""
        with self._changed:
            one = self._targets.get(target)
            if one is not None:
                self._end(target, one, "lost", reason)

    def report(self, body: Mapping[str, Any], *, peer: str, wait_s: float) -> dict[str, Any]:
        """A rank gathered the version; the answer is `commit`, `refuse` or, for now, `wait`."""
        found = _valid(Report, body)
        with self._changed:
            # A version is offered before its sync begins; who is quick waits for the sync.
            if not self._changed.wait_for(lambda: not self._ahead(found.version), timeout=wait_s):
                return {"verdict": "wait", "reason": "its sync has not begun"}
            one = self._known(found.target, found.version, peer)
            if found.ranks != one.ranks or found.rank >= one.ranks:
                raise TransferRefused(
                    f"{found.target}: expected one of {one.ranks} ranks, found rank {found.rank} "
                    f"of {found.ranks}; start it with the layout that was declared",
                    where=found.target,
                )
            if one.verdict is None:
                one.reports[found.rank] = found  # of a rank that was started again, its last
            if one.verdict is None and len(one.reports) == one.ranks:
                self._judge(found.target, one)
                self._changed.notify_all()
            deadline = min(time.monotonic() + wait_s, self._deadline)
            while one.verdict is None and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if one.verdict is None and time.monotonic() >= self._deadline:
                self._close_open("it did not end within the time limit")
            return {"verdict": one.verdict or "wait", "reason": one.reason}

    def confirm(self, body: Mapping[str, Any], *, peer: str, wait_s: float) -> dict[str, Any]:
        """A rank has loaded what it was told to commit; `confirmed` once all its target's have.

        Only then may it serve, so that no target serves with some of its ranks.
        """
        target, rank, version = _names(body)
        with self._changed:
            one = self._known(target, version, peer)
            reported = one.reports.get(rank)
            same = reported is not None and reported.incarnation == body.get("incarnation")
            if one.verdict != "commit" or not same:
                raise TransferRefused(
                    f"{target}: expected the process that was told to commit version {version}, "
                    f"found rank {rank} with verdict {one.verdict} in another life; it may not "
                    "serve",
                    where=target,
                )
            one.confirmed.add(rank)
            if body.get("resident") is True:
                one.resident.add(rank)
            if len(one.confirmed) == one.ranks:
                self._end(target, one, "serving", None)
            deadline = min(time.monotonic() + wait_s, self._deadline)
            while one.outcome is None and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if one.outcome is not None and one.outcome.outcome != "serving":
                self._known(target, version, peer)  # raises, and says why
            return {"confirmed": one.outcome is not None}

    def failed(self, body: Mapping[str, Any], *, peer: str) -> dict[str, Any]:
        """A rank could not gather or could not take the version; its target does not serve it."""
        target, _, version = _names(body)
        reason = str(body.get("reason", "no reason given"))[:500]
        with self._changed:
            if target == peer and self._ahead(version) and len(self._early) < MOST_EARLY:
                self._early[target, version] = reason
                return {"noted": True}
            one = self._known(target, version, peer)
            self._end(target, one, "failed", reason)
            return {"noted": True}

    def _ahead(self, version: int) -> bool:
        return self._catalogue is None or version > self._catalogue.version

    def _known(self, target: str, version: int, peer: str) -> _Target:
        if target != peer:
            raise TransferRefused(
                f"expected {peer} to speak for itself, found it speaking for {target}; each "
                "receiver has a token of its own",
                where=target,
            )
        if time.monotonic() >= self._deadline:
            self._close_open("it did not end within the time limit")
        opened = self._catalogue.version if self._catalogue else None
        one = self._targets.get(target)
        if one is None or version != opened:
            raise TransferRefused(
                f"expected version {opened} at {sorted(self._targets)}, found {target} with "
                f"version {version}; it is no target of this sync: wait for the next",
                where=target,
            )
        if one.outcome is not None and one.outcome.outcome != "serving":
            raise TransferRefused(
                f"{target}: version {version} ended for it ({one.outcome.reason}); it must not "
                "serve it: sync again",
                where=target,
            )
        return one

    def _judge(self, target: str, one: _Target) -> None:
        assert self._catalogue is not None
        found, problem = joined_prints(self._catalogue, one.reports.values())
        expected = self._catalogue.fingerprints
        names = sorted(found.keys() | expected.keys())
        one.differing = tuple(n for n in names if found.get(n) != expected.get(n))
        one.root = root(found) if found else None
        if problem is None and one.differing:
            problem = f"{len(one.differing)} tensors differ, {one.differing[0]} first"
        if problem is None:
            one.verdict = "commit"
            return
        one.verdict, one.reason = "refuse", problem
        self._end(target, one, "failed", problem)

    def _end(
        self,
        target: str,
        one: _Target,
        outcome: Literal["serving", "failed", "lost"],
        reason: str | None,
    ) -> None:
        if one.outcome is not None or self._catalogue is None:
            return
        if outcome != "serving":
            one.verdict, one.reason = "refuse", reason or ""
        first = min(one.reports.values(), key=lambda r: r.rank, default=None)
        encodings = {report.encoding for report in one.reports.values()}
        one.outcome = Outcome(
            target=target,
            version=self._catalogue.version,
            outcome=outcome,
            reason=reason,
            incarnation=first.incarnation if first else None,
            root=one.root,
            differing=one.differing,
            encoding="patch" if encodings == {"patch"} else "whole" if encodings else None,
            transport=first.transport if first else None,
            moved_bytes=sum(report.moved_bytes for report in one.reports.values()),
            full_bytes=sum(report.full_bytes for report in one.reports.values()),
            sync_s=max((report.sync_s for report in one.reports.values()), default=0.0),
            loaded=any(r.loaded and r.rank not in one.resident for r in one.reports.values()),
        )
        self._changed.notify_all()

    def _close_open(self, reason: str) -> None:
        for target, one in self._targets.items():
            silent = one.ranks - len(one.reports)
            said = f"{reason}; {silent} of {one.ranks} ranks kept silent" if silent else reason
            self._end(target, one, "lost", said)


def joined_prints(
    catalogue: Catalogue, reports: Iterable[Report]
) -> tuple[dict[str, str], str | None]:
    """Whole fingerprints from the parts of all ranks, and what is wrong with them if something is.

    Further copies of a box must add up to the same as the first ones do.
    """
    copies: dict[str, list[dict[str, Fingerprint]]] = {}
    for report in reports:
        for copy, parts in report.parts.items():
            known = {}
            for name, (low, high, cover) in parts.items():
                entry = catalogue.tensors.get(name)
                if entry is None:
                    return {}, f"it holds {name}, which version {catalogue.version} has not"
                try:
                    sums = (int(low, 16), int(high, 16))
                    known[name] = Fingerprint(entry.dtype, entry.shape, sums, int(cover, 16))
                except ValueError:
                    return {}, f"{name}: its partial fingerprint is no number"
            copies.setdefault(copy, []).append(known)
    found: dict[str, str] = {}
    problem = None
    for copy in sorted(copies, key=lambda c: (len(c), c)):
        for name, value in join_parts(copies[copy]).items():
            try:
                whole = value.hex
            except FingerprintError:
                problem = problem or (
                    f"{name}: its ranks do not hold each element once (copy {copy})"
                )
                continue
            if found.setdefault(name, whole) != whole:
                problem = problem or f"{name}: copy {copy} differs from the first"
    empty = {n: e.fingerprint for n, e in catalogue.tensors.items() if 0 in e.shape}
    return empty | found, problem


def _names(body: Mapping[str, Any]) -> tuple[str, int, int]:
    try:
        return str(body["target"]), int(body["rank"]), int(body["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransferDamaged(
            f"expected target, rank and version, found {sorted(map(str, body))} ({error})"
        ) from error


def _valid(model: type[Report], body: Mapping[str, Any]) -> Report:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise TransferDamaged(
            f"expected a report, found {first['msg']} at {'.'.join(map(str, first['loc']))}"
        ) from error
