"""Goal: what another version wrote, and a job without its beginning, accuse nobody: exit code 2.

Method: honest runs are written through a real ledger; then an event gets a schema of the future or
a type that nobody knows (its hash changed to match), or the run is written without its JobOpened.
Each is judged, with faults before and after, followed, and judged group by group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.events.lease import LeaseGranted, LeaseReleased
from shiftbook.verify import grouped
from shiftbook.verify.verdict import Verdict, follow, verify
from tests.verify.honest_run import DEVICES, JOB, Entry, Run, honest_run
from tests.verify.test_commands import call
from tests.verify.test_honest_runs import told
from tests.verify.test_scan import attack, rewrite

Judge = Callable[[Run], Verdict]
FUTURE = 99


def changed(run: Run, path: Path, at: int, **fields: Any) -> str:
    """A run on disk whose event at a position has other fields of its envelope; its URL."""
    url = run.write(path)
    alter(path, at, **fields)
    return url


def alter(path: Path, at: int, **fields: Any) -> None:
    """Give an event on disk other fields, in its bytes, its hash and its columns."""
    attack(path, rewrite(lambda value: value.update(**fields), at))
    for name in sorted({"type", "schema"} & {*fields}):
        values = (fields[name], at)
        attack(
            path,
            lambda c, name=name, values=values: c.execute(  # type: ignore[misc]
                f"UPDATE events SET {name} = ? WHERE position = ?", values
            ),
        )


def later(run: Run, path: Path, name: str, number: int = 0) -> tuple[str, int]:
    """A run on disk with one event in a schema of the future; its URL and the position."""
    at = run.at(name, number)
    return changed(run, path, at, schema=FUTURE, body={"unheard": "of"}), at


@pytest.mark.parametrize(
    "name",
    ["UpdateApplied", "SamplesDrawn", "BatchConsumed", "ReallocationGranted", "AttemptStarted",
     "WeightSyncCommitted", "CheckpointSaved", "LeaseGranted", "JobOpened", "JobClosed"],
)  # fmt: skip
def test_a_newer_schema_ends_the_judgement_without_a_finding(
    name: str, run: Run, tmp_path: Path
) -> None:
    url, at = later(run, tmp_path / "ledger.db", name)
    verdict = verify(url, require_closed=True)
    assert told(verdict) == []
    assert verdict.exit_code == 2
    (reason,) = verdict.could_not
    assert reason.startswith(
        f"job {JOB} was judged up to there only: {name} at position {at} has schema {FUTURE}, "
        "which a newer version wrote (this build reads up to "
    )
    assert not verdict.open_operations
    # What is left out is seen in the table; the stored bytes were looked at to the end.
    assert all(row.status in ("partly", "not checked") for row in verdict.coverage.rows if row.job)
    assert verdict.judged_until == len(run.entries) - 1


def test_passing_over_unknown_types_does_not_pass_over_newer_schemas(
    run: Run, tmp_path: Path
) -> None:
    url, _ = later(run, tmp_path / "ledger.db", "UpdateApplied", 1)
    assert verify(url, allow_unknown=True).exit_code == 2


def test_what_was_found_before_counts_and_what_comes_after_does_not(
    run: Run, tmp_path: Path
) -> None:
    run.get("UpdateApplied", 0).change(learning_rate=9.0)
    run.get("UpdateApplied", 2).change(learning_rate=9.0)
    at = run.at("UpdateApplied", 0)
    verdict = verify(later(run, tmp_path / "ledger.db", "UpdateApplied", 1)[0])
    assert verdict.exit_code == 1
    assert [(f.invariant, f.position) for f in verdict.findings] == [("I18", at)]
    assert "was judged up to there only" in verdict.could_not[0]


def two_jobs() -> Run:
    """Another job takes the devices over after the first one."""
    run = honest_run()
    second = honest_run()
    for entry in second.entries:
        entry.job = "second"
    first = len(run.entries)
    for entry in second.entries:
        if entry.name in ("AttemptStarted", "WeightSyncStarted"):
            entry.change(epoch=entry.event.plain()["epoch"] + first)
    run.entries += second.entries
    return run


def test_another_job_is_judged_whole(tmp_path: Path) -> None:
    run = two_jobs()
    assert told(verify(run.write(tmp_path / "whole.db"))) == []
    run.get("UpdateApplied", 6).change(learning_rate=9.0)
    assert run.get("UpdateApplied", 6).job == "second"
    url, _ = later(run, tmp_path / "ledger.db", "UpdateApplied", 1)
    verdict = verify(url)
    assert {(f.invariant, f.job) for f in verdict.findings} == {("I18", "second")}
    assert [reason.split(" was")[0] for reason in verdict.could_not] == [f"job {JOB}"]
    assert verdict.coverage.row("I10", "second").status == "checked"


@pytest.mark.parametrize("alone_events", [0, 10_000])
def test_a_lease_of_a_newer_schema_leaves_the_devices_of_all_unknown(
    alone_events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of one job each, too."""
    monkeypatch.setattr(grouped, "ALONE_EVENTS", alone_events)
    monkeypatch.setattr(grouped, "GROUP_EVENTS", 1)
    run = two_jobs()
    url, at = later(run, tmp_path / "ledger.db", "LeaseReleased", -2)
    assert run.entries[at].job == JOB
    verdict = verify(url)
    assert told(verdict) == []
    assert [reason.split(" was")[0] for reason in verdict.could_not] == [f"job {JOB}", "job second"]
    assert all(f"LeaseReleased at position {at}" in reason for reason in verdict.could_not)


def test_a_followed_run_ends_where_it_cannot_be_judged_on(run: Run, tmp_path: Path) -> None:
    url, at = later(run, tmp_path / "ledger.db", "UpdateApplied", 1)
    verdict = follow(url, stop=threading.Event(), poll_s=0.01)
    assert verdict.exit_code == 2
    assert f"position {at}" in verdict.could_not[0]
    assert told(verdict) == []


def unknown(run: Run, path: Path) -> tuple[str, int]:
    """A run on disk in which some events have a type that nobody knows: its URL, the first."""
    url = run.write(path)
    at = run.at("IterationCompleted", 0)
    alter(path, at, type="Unheard", body={"any": 1})
    return url, at


def test_unknown_types_are_a_reason_why_it_could_not_judge(run: Run, tmp_path: Path) -> None:
    url, at = unknown(run, tmp_path / "ledger.db")
    verdict = verify(url)
    assert verdict.exit_code == 2
    assert (
        f"job {JOB} has events of types that this build does not know (Unheard (schema 1) 1 "
        f"times), the first at position {at}; verify it with the version that wrote them, or pass "
        "over them with --allow-unknown"
    ) in verdict.could_not
    assert follow(url, stop=threading.Event()).plain() == verdict.plain()


def test_the_command_passes_over_unknown_types_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = honest_run()
    path = tmp_path / "ledger.db"
    run.entries.append(Entry(run.get("IterationCompleted", 0).event))
    url = changed(run, path, len(run.entries) - 1, type="Unheard", body={"any": 1})
    code, out, _ = call(capsys, url)
    assert code == 2
    assert "could not judge: job demo has events of types that this build does not know" in out
    for words in (("--allow-unknown",), ("--allow-unknown", "--follow")):
        code, out, _ = call(capsys, url, *words)
        assert code == 0, out
        assert "kept and passed over, as --allow-unknown asked" in out


def test_findings_count_where_types_are_unknown_too(run: Run, tmp_path: Path) -> None:
    run.get("UpdateApplied", 1).change(learning_rate=9.0)
    verdict = verify(unknown(run, tmp_path / "ledger.db")[0])
    assert verdict.exit_code == 1
    assert "I18" in {f.invariant for f in verdict.findings}
    assert any("does not know" in reason for reason in verdict.could_not)


def without_opening(run: Run) -> Run:
    del run.entries[run.at("JobOpened")]
    return run


def test_a_job_without_its_beginning_is_one_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.get("UpdateApplied", 1).change(learning_rate=9.0)
    events = len(run.entries) - 1
    path = tmp_path / "ledger.db"
    verdict = verify(without_opening(run).write(path), require_closed=True)
    assert told(verdict) == []
    assert verdict.could_not == (
        f"job {JOB} declared no plan: begin it with JobOpened, which carries one; without it none "
        f"of its {events} events, the first at position 0, can be judged",
    )
    assert {row.status for row in verdict.coverage.rows if row.job} == {"not checked"}
    code, out, _ = call(capsys, str(path))
    assert code == 2
    assert out.count("could not judge") == 2  # the reason, and the closing line


def test_damage_is_found_where_a_job_has_no_beginning(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    url = without_opening(run).write(path)
    attack(path, lambda connection: connection.execute("DELETE FROM events WHERE position = 20"))
    verdict = verify(url)
    assert verdict.exit_code == 1
    assert {f.invariant for f in verdict.findings} == {"integrity"}
    assert "declared no plan" in verdict.could_not[0]


def test_a_job_that_is_opened_late_is_judged_from_its_first_event(judge: Judge) -> None:
    run = honest_run()
    opened = run.entries.pop(run.at("JobOpened"))
    run.entries.insert(run.at("SamplesDrawn") + 1, opened)
    verdict = judge(run)
    assert verdict.exit_code == 1
    first = verdict.findings[0]
    assert first.invariant == "legality"
    assert first.position < run.at("JobOpened")


def test_a_job_without_its_beginning_takes_no_device_of_another(judge: Judge) -> None:
    run = honest_run()
    at = run.at("SamplesDrawn", 1)
    taken = Entry(LeaseGranted(devices=DEVICES[:1], holder="b"), job="thief")
    given = Entry(LeaseReleased(devices=DEVICES[:1], holder="b", reason="done"), job="thief")
    run.entries[at:at] = [taken, given]
    verdict = judge(run)
    assert verdict.exit_code == 1
    assert ("lease", "thief", at) in {(f.invariant, f.job, f.position) for f in verdict.findings}


def test_an_unreadable_beginning_is_said(run: Run, tmp_path: Path) -> None:
    url = changed(run, tmp_path / "ledger.db", run.at("JobOpened"), body={"plan": 5})
    verdict = verify(url)
    assert [(f.invariant, f.position) for f in verdict.findings] == [
        ("legality", run.at("JobOpened"))
    ]
