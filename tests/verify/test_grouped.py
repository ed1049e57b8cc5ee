"""Goal: a large ledger, judged group by group from pages that others read, gets the same verdict.

Method: ledgers of four jobs are attacked by somebody who owns the file and
its folder of evidence, then verified twice: event by event in one process, and in small groups of
jobs that two processes judge, or that one judges while two others read ahead. Whole verdicts are
compared, coverage and counts included.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from shiftbook.ledger.archive import export_archive
from shiftbook.ledger.errors import UnknownJob
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.tiles import write_tiles
from shiftbook.verify import group_judge, grouped, read_ahead, scan
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.findings import MAX_FINDINGS
from shiftbook.verify.verdict import Verdict, verify
from tests.ledger.big_ledger import job_name, write_big
from tests.ledger.stores import new_url
from tests.verify.signed_run import KEY
from tests.verify.test_other_versions import two_jobs
from tests.verify.test_scan import attack, rewrite

EVENTS, JOBS = 1_400, 4

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "book.db"
    write_big(path, EVENTS, jobs=JOBS)
    return path


@pytest.fixture
def book(made: Path, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    shutil.copytree(evidence(made), evidence(tmp_path / "book.db"))
    return Path(shutil.copyfile(made, tmp_path / "book.db"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two jobs or so, and pages of a few events."""
    monkeypatch.setattr(grouped, "GROUP_EVENTS", 800)
    monkeypatch.setattr(read_ahead, "PAGE_EVENTS", 64)
    monkeypatch.setattr(scan, "BLOCK_EVENTS", 256)
    monkeypatch.setattr(scan, "ALONE_EVENTS", 0)


def evidence(path: Path) -> Path:
    return path.with_name(path.name + ".evidence")


def both(path: Path, url: str | None = None, **given: Any) -> Verdict:
    """The verdict, which is the same in groups as event by event."""
    verdicts = []
    told: list[list[str]] = []
    for alone in (EVENTS * 2, 0):
        found: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped, "ALONE_EVENTS", alone)
            verdicts.append(
                verify(
                    url or f"sqlite:///{path}",
                    on_finding=lambda f: found.append(repr(f)),  # noqa: B023
                    **given,
                )
            )
        told.append(sorted(found))
    one_by_one, in_groups = verdicts
    assert in_groups.plain() == one_by_one.plain()
    assert told[0] == told[1]
    return in_groups


def positions(path: Path, type_: str, job: str | None = None) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        return [
            row[0]
            for row in connection.execute(
                "SELECT position FROM events WHERE type = ? AND job = coalesce(?, job) "
                "ORDER BY position",
                (type_, job),
            )
        ]


def body(**changed: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["body"].update(changed)


def test_an_honest_ledger(book: Path) -> None:
    verdict = both(book)
    assert not verdict.findings
    assert verdict.jobs == tuple(map(job_name, range(JOBS)))


def test_it_was_judged_in_groups(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processes: each group in turn, and now and then how far it is."""
    said: list[object] = []
    real = grouped.shared

    def shared(orders: Any, processes: int, *kinds: Any) -> Any:
        assert processes == 2
        for what in real(orders, processes, *kinds):
            said.append(what)
            yield what

    monkeypatch.setattr(grouped, "ALONE_EVENTS", 0)
    monkeypatch.setattr(grouped, "shared", shared)
    monkeypatch.setattr(grouped.os, "sched_getaffinity", lambda process: {0, 1})
    reached: list[int] = []
    verify(f"sqlite:///{book}", on_event=reached.append)
    groups = [set(what.judgement.jobs) for what in said if isinstance(what, grouped.Judged)]
    assert len(groups) >= 2
    assert set.union(*groups) == set(map(job_name, range(JOBS)))
    assert sum(map(len, groups)) == JOBS
    assert reached == sorted(reached)
    assert reached[-1] == EVENTS - 1


def test_one_core_judges_group_by_group(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    real = group_judge.Judge

    def judge(rows: Any, *, jobs: frozenset[str], on_finding: Any) -> Any:
        seen.append(set(jobs))
        return real(rows, jobs=jobs, on_finding=on_finding)

    monkeypatch.setattr(grouped, "ALONE_EVENTS", 0)
    monkeypatch.setattr(grouped, "MOST_PROCESSES", 1)
    monkeypatch.setattr(group_judge, "Judge", judge)
    reached: list[int] = []
    verify(f"sqlite:///{book}", on_event=reached.append)
    assert len(seen) >= 2
    assert set.union(*seen) == set(map(job_name, range(JOBS)))
    assert sum(map(len, seen)) == JOBS
    assert reached == list(range(EVENTS))


def _a_segment_gone(path: Path) -> None:
    next(iter(sorted(evidence(path).iterdir()))).unlink()


def _a_segment_altered(path: Path) -> None:
    file = sorted(evidence(path).iterdir())[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _segments_exchanged(path: Path) -> None:
    one, other, *_ = sorted(evidence(path).iterdir())
    one.write_bytes(other.read_bytes())


def _no_evidence(path: Path) -> None:
    shutil.rmtree(evidence(path))


@pytest.mark.parametrize(
    "change", [_a_segment_gone, _a_segment_altered, _segments_exchanged, _no_evidence]
)
def test_evidence_under_attack(change: Change, book: Path) -> None:
    change(book)
    verdict = both(book)
    assert any(finding.invariant == "evidence" for finding in verdict.findings)
    assert verdict.findings_left_off == 0 or change is _no_evidence


def test_of_too_many_findings_the_first_are_kept(book: Path) -> None:
    _no_evidence(book)
    verdict = both(book)
    kept = [f.position for f in verdict.findings if f.invariant == "evidence"]
    named = [
        position
        for type_ in ("DataBuilt", "SamplesGenerated", "SamplesRewarded", "BatchConsumed")
        for position in positions(book, type_)
    ]
    assert len(named) > MAX_FINDINGS
    assert kept == sorted(named)[:MAX_FINDINGS]


def test_evidence_that_the_event_binds_wrongly(book: Path) -> None:
    def binds(**changed: Any) -> Callable[[dict[str, Any]], object]:
        return lambda value: value["body"]["segment"].update(changed)

    first, second, third, *_ = positions(book, "BatchConsumed")
    attack(book, rewrite(binds(rows=3), first), rewrite(binds(columns=["x"]), second))
    attack(book, rewrite(binds(sha256="no hash"), third))
    assert {f.position for f in both(book).findings} >= {first, second, third}


def test_training_under_attack(book: Path) -> None:
    last = positions(book, "UpdateApplied", job_name(3))[-1]
    early = positions(book, "UpdateApplied", job_name(0))[1]
    draw = positions(book, "SamplesDrawn", job_name(2))[2]
    attack(
        book,
        rewrite(body(learning_rate=0.5), last),
        rewrite(body(policy_version=9), early),
        rewrite(lambda value: value["body"]["indices"].reverse(), draw),
    )
    verdict = both(book)
    assert {f.job for f in verdict.findings} >= {job_name(0), job_name(2), job_name(3)}


def test_what_jobs_share_under_attack(book: Path) -> None:
    """A job of the last group is given a device of one of the first."""
    theirs = positions(book, "LeaseGranted", job_name(0))[0]
    ours = positions(book, "LeaseGranted", job_name(3))[0]
    assert theirs < ours
    with closing(sqlite3.connect(book)) as connection:
        (data,) = connection.execute(
            "SELECT data FROM events WHERE position = ?", (theirs,)
        ).fetchone()
    attack(book, rewrite(body(devices=orjson.loads(data)["body"]["devices"]), ours))
    verdict = both(book)
    assert {(f.invariant, f.job) for f in verdict.findings} >= {("lease", job_name(3))}


def test_devices_that_go_from_job_to_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jobs of other groups only the events that change what jobs share are read."""
    monkeypatch.setattr(grouped, "GROUP_EVENTS", 1)
    path = tmp_path / "book.db"
    run = two_jobs()
    run.write(path)
    assert [entry.name for entry in run.entries].count("LeaseGranted") == 4
    verdict = both(path)
    assert (verdict.exit_code, len(verdict.jobs)) == (0, 2)


def test_bytes_under_attack(book: Path) -> None:
    at = positions(book, "UpdateApplied", job_name(1))[-1]
    attack(book, lambda c: c.execute("UPDATE events SET leaf = x'00' WHERE position = ?", (at,)))
    verdict = both(book)
    assert verdict.integrity_broken
    assert verdict.judged_until == at - 1


def test_a_row_cut_out_and_one_repeated(book: Path) -> None:
    attack(book, lambda c: c.execute("DELETE FROM events WHERE position = 700"))
    assert both(book).judged_until == 699


@pytest.mark.parametrize("until", [0, 5, 900])
def test_a_prefix(until: int, book: Path) -> None:
    assert both(book, until=until).last == until


@pytest.mark.parametrize("number", [0, 3])
def test_one_job(number: int, book: Path) -> None:
    _a_segment_gone(book)
    verdict = both(book, job=job_name(number))
    assert verdict.jobs == (job_name(number),)
    assert any(finding.invariant == "evidence" for finding in verdict.findings)


def test_a_job_that_is_none(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "ALONE_EVENTS", 0)
    with pytest.raises(UnknownJob, match=job_name(2)):
        verify(f"sqlite:///{book}", job="nobody")


@pytest.mark.parametrize(
    "work",
    [
        "raise SystemExit(1)",
        "import sys; sys.stdout.buffer.write(b'\\x80\\x04\\x95')",  # a pickle that ends too early
        "import sys; sys.stdout.buffer.write(b'\\x80\\x04X\\x02\\0\\0\\0\\x80\\x80.')",  # no text
        "import sys; sys.stdout.buffer.write(b'cnowhere\\nnobody\\n.')",  # no such class
    ],
)
def test_processes_that_cannot_work_cost_only_time(
    work: str, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _a_segment_altered(book)
    monkeypatch.setattr(scan, "_WORK", work)
    assert both(book).findings


def test_evidence_that_only_this_process_reaches(book: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    files = MemoryFileSystem()
    folder = f"/evidence-{book.parent.name}"
    files.makedirs(folder)
    for file in sorted(evidence(book).iterdir())[1:]:
        files.pipe_file(f"{folder}/{file.name}", file.read_bytes())
    verdict = both(book, evidence=f"memory:/{folder}")
    assert {f.invariant for f in verdict.findings} >= {"evidence"}


def test_a_file_that_changes_meanwhile_is_said(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found sound and is another afterwards is neither judged nor called clean."""
    monkeypatch.setattr(grouped, "ALONE_EVENTS", 0)
    at = positions(book, "UpdateApplied", job_name(2))[0]
    real = grouped.check_rows

    def then(change: Change) -> None:
        def check(*given: Any) -> None:
            real(*given)
            change(book)

        monkeypatch.setattr(grouped, "check_rows", check)
        with pytest.raises(UnreadableStore, match="changed the file meanwhile"):
            verify(f"sqlite:///{book}")

    then(
        lambda path: attack(
            path, lambda c: c.execute("DELETE FROM events WHERE position = ?", (at,))
        )
    )
    then(
        lambda path: attack(
            path, lambda c: c.execute("UPDATE events SET data = x'7b7d' WHERE position = 3")
        )
    )


def elsewhere(book: Path, store: str) -> str:
    """The ledger as an archive, as tiles, or in a server, with its evidence."""
    with Ledger.open(f"sqlite:///{book}") as ledger:
        if store == "archive":
            export_archive(ledger, book.with_name("book.tar"))
            return str(book.with_name("book.tar"))
        if store == "tiles":
            HeadSigner(ledger, KEY).sign()
            write_tiles(ledger, book.with_name("tiles"))
            return str(book.with_name("tiles"))
        url = new_url(store, book.parent)
        with Ledger.open(url) as served:
            rows = [row.event() for row in ledger.rows()]
            for start in range(0, len(rows), 200):
                served.restore(rows[start : start + 200])
        return url


@pytest.mark.parametrize("store", ["archive", "tiles", "postgresql"])
def test_what_is_no_file_of_a_ledger(
    book: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream of events, or a server, is judged in groups as well, in bounded memory."""
    monkeypatch.setenv("PGUSER", "postgres")
    update = positions(book, "UpdateApplied", job_name(1))[1]
    attack(book, rewrite(body(learning_rate=0.5), update))
    url = elsewhere(book, store)
    groups = []
    real = group_judge.Judge

    def judge(*given: Any, **named: Any) -> Any:
        groups.append(named["jobs"])
        return real(*given, **named)

    monkeypatch.setattr(group_judge, "Judge", judge)
    monkeypatch.setattr(grouped, "PAGE_EVENTS", 64)
    verdict = both(book, url=url, evidence=None if store == "archive" else str(evidence(book)))
    assert [(f.invariant, f.position) for f in verdict.findings if f.invariant == "I18"] == [
        ("I18", update)
    ]
    assert verdict.last == EVENTS - 1
    assert len([jobs for jobs in groups if jobs]) >= 2


@pytest.mark.parametrize("store", ["archive", "tiles", "postgresql"])
def test_evidence_gone_from_there(book: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGUSER", "postgres")
    _a_segment_gone(book)
    url = elsewhere(book, store)
    verdict = both(book, url=url, evidence=None if store == "archive" else str(evidence(book)))
    assert {f.invariant for f in verdict.findings} >= {"evidence"}
    one = both(book, url=url, job=job_name(3),
               evidence=None if store == "archive" else str(evidence(book)))  # fmt: skip
    assert one.jobs == (job_name(3),)
