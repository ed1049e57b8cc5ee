"""The verdict on a ledger: both passes over a range, findings, and what could not be judged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shiftbook.ledger.envelope import SYSTEM_JOB
from shiftbook.ledger.errors import InvalidInput, UnknownJob, UnknownPosition
from shiftbook.verify.coverage import Coverage
from shiftbook.verify.errors import NothingToJudge
from shiftbook.verify.findings import Finding
from shiftbook.verify.grouped import judge_all
from shiftbook.verify.grouping import plain_stories
from shiftbook.verify.heads import HeadCheck, HeadReport, Outside, protection_notes
from shiftbook.verify.integrity import Integrity, IntegrityReport, check_stored, check_whole
from shiftbook.verify.invariants.base import listed
from shiftbook.verify.judge import Judge, JudgedJob, Judgement
from shiftbook.verify.patient import PatientEvents, patient_rows
from shiftbook.verify.sources import evidence_of, exported_path, first_position, open_events, shown
from shiftbook.verify.stored import DamagedPages

EXIT_CLEAN, EXIT_FINDINGS, EXIT_COULD_NOT = 0, 1, 2

POLL_S = 0.1
"""Pause between two looks at a live ledger."""

RANGE_ALONE = (
    "the archive begins at position {first}, and invariants need the events from 0 on; give "
    "--integrity-only to ask for the stored bytes alone, or export from 0"
)


@dataclass(frozen=True)
class Verdict:
    """What both passes say about the events from 0 to ``last``."""

    url: str
    jobs: tuple[str, ...]
    findings: tuple[Finding, ...]
    coverage: Coverage
    last: int
    """Last position in the range; -1 where the first event is damaged already."""
    judged_until: int
    """Last position that was judged: the one before the first damage, or ``last``."""
    head: str
    """Leaf of the event at ``judged_until``, hex; empty where none is sound."""
    could_not: tuple[str, ...] = ()
    """Why a part of the question has no answer; empty for a whole verdict."""
    notes: tuple[str, ...] = ()
    findings_left_off: int = 0
    integrity_broken: bool = False
    open_operations: dict[str, list[str]] = field(default_factory=dict)
    protected_until: int = -1
    """Last position under a fitting head from outside the database; -1 where there is none."""
    first: int = 0
    """First position in the range: 0 but for an archive of a range."""

    @property
    def exit_code(self) -> int:
        """0 clean; 1 findings; 2 could not judge. A finding counts even where more is missing."""
        if self.findings:
            return EXIT_FINDINGS
        return EXIT_COULD_NOT if self.could_not else EXIT_CLEAN

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return {EXIT_CLEAN: "clean", EXIT_FINDINGS: "findings"}.get(
            self.exit_code, "could not judge"
        )

    def plain(self) -> dict[str, Any]:
        """As plain values; the fields are the command's JSON contract."""
        return {
            "ledger": self.url,
            "verdict": self.word,
            "exit_code": self.exit_code,
            "jobs": list(self.jobs),
            "first": self.first,
            "last": self.last,
            "judged_until": self.judged_until,
            "head": self.head,
            "unprotected_after": self.protected_until,
            "unprotected": self.last - self.protected_until,
            "findings": [finding.plain() for finding in self.findings],
            "stories": plain_stories(self.findings),
            "findings_left_off": self.findings_left_off,
            "could_not": list(self.could_not),
            "open_operations": self.open_operations,
            "notes": list(self.notes),
            "coverage": [row.plain() for row in self.coverage.rows],
        }


def verify(
    ledger_url: str,
    job: str | None = None,
    until: int | None = None,
    *,
    outside: Outside | None = None,
    require_signed: bool = False,
    on_finding: Callable[[Finding], None] | None = None,
    on_event: Callable[[int], None] | None = None,
    evidence: str | None = None,
    integrity_only: bool = False,
    require_closed: bool = False,
    allow_unknown: bool = False,
) -> Verdict:
    """Verify a ledger or an archive, or one job of it, to its end or ``until``. Only reads.

    ``outside`` are heads from outside the database and verifier keys, to hold against it;
    ``require_signed`` makes events after the last of these heads a reason why it could not judge,
    ``require_closed`` a judged job that is not closed: what is clean so far may go wrong yet.
    Events of types that this build does not know are another such reason, unless ``allow_unknown``
    has them passed over; one of a known type in a newer schema ends the judgement of its job.
    ``integrity_only`` asks for the stored bytes and heads alone; an archive that does not begin at
    0 allows no other question, and no head. ``evidence`` is the folder of the segments or its URL
    (default: beside the ledger, or inside the archive). ``on_finding`` is called with each finding
    of the judgement as it is made, ``on_event`` with positions as they are reached. Raises
    UnreadableStore, NothingToJudge, UnknownJob, UnknownPosition, or EvidenceOutOfReach where the
    place of the evidence does not answer.
    """
    if until is not None and until < 0:
        raise InvalidInput(f"expected a position of at least 0 to verify until, found {until}")
    with open_events(ledger_url) as raw:
        rows = evidence_of(raw, evidence)
        first = first_position(raw)
        heads = HeadCheck(outside or Outside()) if not first else None
        if heads is not None:
            heads.load(raw)
        integrity = Integrity(rows, heads, first)
        judgement = Judgement()
        if integrity_only or first:
            check_stored(raw, integrity, until, on_event)
        else:
            judgement = judge_all(raw, integrity, rows, job, until, on_finding, on_event)
        report = integrity.finish()
        end = first + report.events
        if until is not None and not report.findings and not first <= until < end:
            raise UnknownPosition(until, end)
        signed = HeadReport() if heads is None else heads.finish(raw, until, integrity.tree_damage)
        key_given = heads is not None and heads.has_key
        url = shown(ledger_url)
        if integrity_only or first:
            asked = integrity_only
            return _bytes_verdict(url, report, first, asked, signed, require_signed, key_given)
        return _verdict(
            url,
            job,
            report,
            judgement,
            signed,
            require_signed,
            key_given,
            require_closed,
            allow_unknown,
        )


def follow(
    ledger_url: str,
    job: str | None = None,
    *,
    stop: threading.Event,
    poll_s: float = POLL_S,
    outside: Callable[[], Outside] = Outside,
    require_signed: bool = False,
    on_finding: Callable[[Finding], None] | None = None,
    on_event: Callable[[int], None] | None = None,
    evidence: str | None = None,
    allow_unknown: bool = False,
    on_problem: Callable[[Exception], None] | None = None,
) -> Verdict:
    """Verify a live ledger as it grows, until its jobs are settled, damage, or ``stop``.

    A job is settled when it is closed, or cannot be judged any further. The same events give the
    same verdict as ``verify``. ``outside`` is called at the end, when the last head is published.
    A server that goes away is waited for, and so is the place of the evidence; it is judged on from
    where it was, and ``on_problem`` is told the first error of each outage. Raises as ``verify``
    does, OutOfReach only where the ledger is away at the beginning, or when ``stop`` is set, then
    EvidenceOutOfReach likewise.
    """
    if exported_path(ledger_url) is not None:
        raise InvalidInput(
            "expected a ledger to follow, found an export of one, which does not grow"
        )
    with PatientEvents(ledger_url, stop, on_problem) as raw:
        rows = patient_rows(evidence_of(raw.source, evidence), stop, on_problem)
        integrity = Integrity(rows)
        judge = Judge(rows, jobs=None if job is None else (job,), on_finding=on_finding)
        after, sound = -1, True
        while sound:
            fresh = False
            try:
                for row in raw.rows(after):
                    after, fresh = row.position, True
                    stored = integrity.check(row)
                    if stored is None:
                        sound = False
                        break
                    judge.feed(stored)
                    if on_event is not None:
                        on_event(stored.position)
            except DamagedPages as damage:
                integrity.damaged(damage)
                sound = False
            if fresh and not stop.is_set():
                continue  # the end is judged at the head, not in the middle of a page
            if _all_closed(judge, job) or not sound or stop.wait(poll_s):
                break
        if sound:
            check_whole(raw, integrity, integrity.last)
        heads = HeadCheck(outside())
        signed = heads.finish(raw, None, integrity.tree_damage)
        report = integrity.finish()
        return _verdict(
            shown(ledger_url),
            job,
            report,
            judge.judgement(),
            signed,
            require_signed,
            heads.has_key,
            allow_unknown=allow_unknown,
        )


def _all_closed(judge: Judge, job: str | None) -> bool:
    if job is not None and job not in judge.benches:
        raise UnknownJob(job, [name for name in judge.state.jobs if name != SYSTEM_JOB])
    return bool(judge.benches) and all(judge.settled(name) for name in judge.benches)


def _bytes_verdict(
    url: str,
    report: IntegrityReport,
    first: int,
    asked: bool,
    signed: HeadReport,
    require_signed: bool,
    key_given: bool,
) -> Verdict:
    """The verdict of the first pass alone."""
    broken = any(f.invariant == "integrity" for f in report.findings) or signed.sound is not None
    if report.events == 0 and not broken:
        raise NothingToJudge("expected a ledger with events, found an empty one; run a job first")
    notes = list(protection_notes(signed, first + report.events, key_given))
    if asked:
        notes.append("stored bytes and evidence alone were checked, as --integrity-only asked")
    could_not = [] if asked else [RANGE_ALONE.format(first=first)]
    events = max(first + report.events, report.sound_until + 1)
    _end_at_the_last_fitting_head(report, signed)
    if require_signed and events > signed.protected:
        could_not.insert(0, _unsigned(events, signed.protected))
    findings = [*report.findings, *signed.findings]
    return Verdict(
        url=url,
        jobs=(),
        findings=tuple(sorted(findings, key=lambda f: (f.position, f.invariant, f.expected))),
        coverage=Coverage([*report.rows, *signed.rows]),
        last=max(first + report.events - 1, report.sound_until),
        judged_until=report.sound_until,
        head=report.head.hex() if report.head else "",
        could_not=tuple(could_not),
        notes=tuple(notes),
        findings_left_off=report.findings.left_off,
        integrity_broken=broken,
        first=first,
        protected_until=signed.protected - 1,
    )


def _verdict(
    url: str,
    job: str | None,
    report: IntegrityReport,
    judgement: Judgement,
    signed: HeadReport,
    require_signed: bool,
    key_given: bool,
    require_closed: bool = False,
    allow_unknown: bool = False,
) -> Verdict:
    broken = any(f.invariant == "integrity" for f in report.findings) or signed.sound is not None
    _end_at_the_last_fitting_head(report, signed)
    if not broken:
        _refuse_nothing(report, judgement, job)
    required = frozenset[str]().union(*(judged.required for judged in judgement.jobs.values()))
    coverage = Coverage([*report.rows, *signed.rows])
    for row in coverage.rows:
        row.required = row.invariant in required
    for judged in judgement.jobs.values():
        coverage.rows += judged.rows
    could_not = _could_not(judgement, coverage)
    events = max(report.events, report.sound_until + 1)
    if require_signed and events > signed.protected:
        could_not.insert(0, _unsigned(events, signed.protected))
    notes = list(protection_notes(signed, events, key_given))
    if broken:
        notes.append(
            f"judged to position {report.sound_until} only: what follows the first damage proves "
            "nothing"
        )
    for name, judged in judgement.jobs.items():
        unknown = _unknown(name, judged)
        if unknown and not allow_unknown:
            could_not.append(
                f"{unknown}; verify it with the version that wrote them, or pass over them with "
                "--allow-unknown"
            )
        elif unknown:
            notes.append(f"{unknown}: kept and passed over, as --allow-unknown asked")
        if judged.halted or (judged.begun and not judged.planned):
            continue  # told by ``_could_not``
        if not judged.closed and require_closed:
            could_not.append(
                f"expected a job that has ended, found that {name} is not closed at position "
                f"{report.sound_until}; it is running, or it died: --so-far judges it as far as it "
                "is recorded, --follow to its end"
            )
        elif not judged.closed:
            notes.append(
                f"{name} is not closed at position {report.sound_until}: it was judged as far as "
                "it is recorded; --follow judges it to its end"
            )
    findings = [*report.findings, *signed.findings, *judgement.findings]
    return Verdict(
        url=url,
        jobs=tuple(judgement.jobs),
        findings=tuple(sorted(findings, key=lambda f: (f.position, f.invariant, f.expected))),
        coverage=coverage,
        last=report.events - 1 if not broken else max(report.events - 1, report.sound_until),
        judged_until=report.sound_until,
        head=report.head.hex() if report.head else "",
        could_not=tuple(could_not),
        notes=tuple(notes),
        findings_left_off=report.findings.left_off + judgement.findings.left_off,
        integrity_broken=broken,
        open_operations=judgement.open_operations,
        protected_until=signed.protected - 1,
    )


def _unknown(name: str, judged: JudgedJob) -> str:
    """What there is of unknown types in a job, in words; empty where there is nothing."""
    if not judged.unknown:
        return ""
    kinds = [f"{kind} {found.count} times" for kind, found in judged.unknown.items()]
    first = min(found.first for found in judged.unknown.values())
    return (
        f"job {name} has events of types that this build does not know ({listed(kinds)}), the "
        f"first at position {first}"
    )


def _end_at_the_last_fitting_head(report: IntegrityReport, signed: HeadReport) -> None:
    """Call no event sound that stands after the last head that fits, where a later one does not."""
    if signed.sound is not None and signed.sound <= report.sound_until:
        report.sound_until, report.head = signed.sound - 1, None


def _unsigned(events: int, protected: int) -> str:
    return (
        f"{events - protected} events from position {protected} on stand under no head outside the "
        "database; run `shiftbook sign`, and give --heads and --key"
    )


def _refuse_nothing(report: IntegrityReport, judgement: Judgement, job: str | None) -> None:
    """Raise NothingToJudge or UnknownJob where no job was judged."""
    if report.events == 0:
        raise NothingToJudge("expected a ledger with events, found an empty one; run a job first")
    if job is not None and job not in judgement.jobs:
        raise UnknownJob(job, judgement.seen)
    if not judgement.jobs:
        raise NothingToJudge(
            "expected events of a job, found none but the ledger's own; run a job first"
        )


def _could_not(judgement: Judgement, coverage: Coverage) -> list[str]:
    reasons = []
    if not any(judged.begun for judged in judgement.jobs.values()):
        reasons.append("no job has begun, bundles were registered and nothing else; run one first")
    for name, judged in judgement.jobs.items():
        if judged.halted:
            reasons.append(
                f"job {name} was judged up to there only: {judged.halted}; verify it with that "
                "version"
            )
            continue
        if not judged.begun:
            continue
        if not judged.planned:
            reasons.append(
                f"job {name} declared no plan: begin it with JobOpened, which carries one; without "
                f"it none of its {judged.events} events, the first at position {judged.first}, can "
                "be judged"
            )
        elif not judged.active:
            reasons.append(f"job {name} recorded neither a training step nor an operation")
    verdict_jobs = ", ".join(judgement.jobs)
    for row in coverage.unchecked_required():
        if row.job and judgement.jobs[row.job].halted:
            continue  # all of them, for the one reason that was given
        reasons.append(
            f"job {row.job or verdict_jobs} requires {row.invariant}, which was {row.status}: "
            f"{row.reason}"
        )
    return reasons
