"""Goal: the command says what it found, exits with the right code, and writes only when asked.

Method: the real root of the command line is called on written runs, honest and faulty, in every
format; the JSON fields are held against the contract; a live ledger is followed while another
thread writes it, and a separate process is interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.cli import LazyCommands
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.commands import verify as verify_command
from shiftbook.verify.guard import Guard
from shiftbook.verify.verdict import Verdict, follow, verify
from tests.verify.honest_run import JOB, Run, honest_run, policy

DEADLINE_S = 60.0


class Root(LazyCommands):
    """The root of the command line with this one command, whatever is installed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["verify"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return verify_command if cmd_name == "verify" else None


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        Root(name="shiftbook").main(["verify", *arguments], prog_name="shiftbook")
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    path = tmp_path / "honest.db"
    honest_run().write(path)
    return path


@pytest.fixture
def faulty(run: Run, tmp_path: Path) -> Path:
    run.get("UpdateApplied", 1).change(learning_rate=9.0)
    run.get("WeightSyncDelivered", 2).change(root=policy(9), differing=("lm_head",))
    path = tmp_path / "faulty.db"
    run.write(path)
    return path


def test_a_clean_verdict_is_a_table_of_what_was_checked(
    honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = honest.read_bytes()
    code, out, err = call(capsys, str(honest))
    assert code == 0
    assert err == ""
    assert "clean: 0 findings in demo, positions 0 to 118" in out
    assert "I16" in out
    assert "heads of this ledger are not signed yet" in out
    assert honest.read_bytes() == before


def test_a_job_that_is_not_closed_is_no_clean_run(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is running, or died, ends with 2 unless it is asked how it stands, or is found
    wrong already."""
    del run.entries[run.at("JobClosed", 0) :]
    url = str(tmp_path / "running.db")
    run.write(Path(url))
    code, out, err = call(capsys, url)
    assert (code, err) == (2, "")
    assert "could not judge" in out
    assert "expected a job that has ended, found that demo is not closed at position" in out
    assert "--so-far judges it as far as it is recorded" in out
    code, out, _ = call(capsys, url, "--so-far")
    assert code == 0
    assert "note: demo is not closed at position" in out
    assert call(capsys, url, "--until", "60")[0] == 0
    assert call(capsys, url, "--integrity-only")[0] == 0
    run.get("UpdateApplied", 1).change(learning_rate=9.0)
    url = str(tmp_path / "wrong.db")
    run.write(Path(url))
    assert call(capsys, url)[0] == 1


def test_findings_are_told_as_a_story(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--ledger", str(faulty), "--job", JOB)
    assert code == 1
    order = [
        "1. I6  at position 31",
        "expected:",
        "differing: lm_head",
        "proved by:    positions",
        "likely cause: a tensor was not sent",
        "do:           Take the engine out of service",
        "2. I6",
        "3. I18",
        "learning rate 0.001",
        "learning rate follows the declared schedule",
        "findings: 3 findings in demo",
    ]
    at = -1
    for words in order:
        found = out.find(words, at + 1)
        assert found > at, (words, out)
        at = found


def test_json_is_a_contract(
    faulty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHIFTBOOK_LEDGER", str(faulty))
    code, out, _ = call(capsys, "--format", "json")
    document = json.loads(out)
    assert code == document["exit_code"] == 1
    assert set(document) == {
        "ledger", "verdict", "exit_code", "jobs", "first", "last", "judged_until", "head",
        "unprotected_after", "unprotected", "findings", "stories", "findings_left_off", "could_not",
        "open_operations", "notes", "coverage",
    }  # fmt: skip
    assert set(document["findings"][0]) == {
        "invariant", "severity", "job", "position", "positions", "expected", "found", "cause",
        "action", "found_at", "latency_events",
    }  # fmt: skip
    stories = document["stories"]
    assert set(stories[0]) == {
        "job", "position", "severity", "invariants", "findings", "latency_events",
    }  # fmt: skip
    assert sorted(n for story in stories for n in story["findings"]) == [0, 1, 2]
    assert (stories[0]["invariants"], stories[0]["position"]) == (["I6"], 31)
    assert set(document["coverage"][0]) == {
        "job", "invariant", "title", "status", "required", "checks", "findings", "reason",
    }  # fmt: skip
    code, out, _ = call(capsys, "--format", "jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    kinds = [line["kind"] for line in lines]
    assert code == 1
    assert kinds.count("finding") == len(document["findings"])
    assert kinds.count("coverage") == len(document["coverage"])
    assert kinds[-1] == "verdict"


def test_until_judges_a_prefix(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, str(faulty), "--until", "25", "--format", "json")
    document = json.loads(out)
    assert document["last"] == 25
    assert document["findings"] == []
    assert code == 2  # nothing was replayed yet, but a bundle and its invariants are still due
    assert document["could_not"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/none.db"], "found nothing; check the path"),
        (["--ledger", "mysql://user:secret@h/d"], "this build knows"),
        (["HONEST", "--job", "other"], "no job 'other' in this ledger; jobs here: demo"),
        (["HONEST", "--until", "-5"], "at least 0"),
        (["HONEST", "--until", "many"], "not a valid integer"),
        (["HONEST", "--until", "5000"], "no event at position 5000"),
        (["HONEST", "--follow", "--until", "3"], "leave --until away"),
        (["HONEST", "--follow", "--job", "other"], "no job 'other'"),
        (["HONEST", "--freeze"], "--freeze goes with --follow"),
        (["HONEST", "--format", "yaml"], "'yaml' is not one of"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    honest: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    given = [str(honest) if a == "HONEST" else a for a in arguments]
    code, out, err = call(capsys, *given)
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
    assert "secret" not in err
    assert "Traceback" not in err


def events_of(path: Path, name: str) -> list[Any]:
    with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
        return list(ledger.read(types=[name]))


def test_record_writes_a_clean_verdict_once(
    honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, str(honest), "--record")
    assert code == 0
    assert "recorded as 1 events" in err
    (passed,) = events_of(honest, "VerificationPassed")
    event = passed.parsed()
    assert (event.first, event.last) == (0, 118)
    with Ledger.open(f"sqlite:///{honest}", read_only=True) as ledger:
        assert event.head == ledger.event(118).leaf.hex()
    assert "I10" in event.checked
    assert event.not_checked == ("I12.rescored",)  # no reward of the run was scored again
    assert verify(f"sqlite:///{honest}").exit_code == 0


def test_record_writes_findings(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = call(capsys, str(faulty), "--record")
    assert code == 1
    flagged = [stored.parsed() for stored in events_of(faulty, "DivergenceFlagged")]
    assert [(f.invariant, f.at) for f in flagged] == [("I6", 31), ("I6", 38), ("I18", 54)]
    assert events_of(faulty, "VerificationPassed") == []


def test_the_same_verdict_is_recorded_once(faulty: Path) -> None:
    from shiftbook.verify.recorded import record

    verdict = verify(f"sqlite:///{faulty}")
    with Ledger.open(f"sqlite:///{faulty}") as ledger:
        assert record(ledger, verdict) == 3
        size = ledger.head().size
        assert record(ledger, verdict) == 3
        assert ledger.head().size == size


def test_record_refuses_what_was_not_judged(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.db"
    Run(run.entries[:3]).write(path)
    code, _, err = call(capsys, str(path), "--record")
    assert code == 2
    assert "could not be reached" in err
    assert events_of(path, "VerificationPassed") == []


def fill(path: Path, run: Run, first: int, started: threading.Event | None = None) -> None:
    """Write the rest of a run, batch after batch."""
    from tests.verify.honest_run import _final

    with Ledger.open(f"sqlite:///{path}", writer="writer-2", actor="tester") as ledger:
        for at in range(first, len(run.entries), 4):
            batch = run.entries[at : at + 4]
            ledger.append(JOB, [Draft(_final(e, ledger), e.operation) for e in batch])
            if started is not None:
                started.set()


@pytest.mark.parametrize("fault", [False, True])
def test_follow_judges_a_ledger_that_is_being_written(
    run: Run, tmp_path: Path, fault: bool
) -> None:
    if fault:
        run.get("UpdateApplied", 1).change(learning_rate=9.0)
    path = tmp_path / "live.db"
    # JobClosed and what comes with it stand in the last batch of four, which is followed whole.
    begun = len(run.entries) % 4 + 8
    Run(run.entries[:begun]).write(path)
    made: list[str] = []
    seen: list[int] = []
    verdicts: list[Verdict] = []

    def watch() -> None:
        verdicts.append(
            follow(
                f"sqlite:///{path}",
                stop=threading.Event(),
                poll_s=0.01,
                on_finding=lambda f: made.append(f.invariant),
                on_event=seen.append,
            )
        )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    fill(path, run, begun)
    watcher.join(DEADLINE_S)
    assert not watcher.is_alive()
    assert seen == list(range(len(run.entries)))
    once = verify(f"sqlite:///{path}")
    assert verdicts[0].plain() == once.plain()
    assert made == (["I18"] if fault else [])


def test_a_followed_job_is_frozen_at_its_first_grave_finding(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that has closed by then is only told of."""
    run.get("UpdateApplied", 1).change(learning_rate=9.0)
    closing = next(n for n, e in enumerate(run.entries) if e.name == "JobClosed")
    for name, entries in (("live", run.entries[:closing]), ("closed", run.entries)):
        path = tmp_path / f"{name}.db"
        Run(entries).write(path)
        url = f"sqlite:///{path}"
        with Ledger.open(url, create=False) as ledger:
            guard = Guard(ledger)
            ended = threading.Event()
            if name == "live":
                ended.set()  # judged to its head, as by Ctrl-C
            verdict = follow(url, stop=ended, poll_s=0.01, on_finding=guard.on_finding)
            assert verdict.exit_code == 1
            events = [event for event in ledger.read() if event.position >= len(entries)]
        types = [event.type for event in events]
        assert types == ["DivergenceFlagged", "SafeModeEntered"][: 2 if name == "live" else 1]
        assert events[0].body["invariant"] == "I18"
        if name == "live":
            assert (events[1].body["by"], JOB) == ("verifier", events[1].job)
    path = tmp_path / "command.db"
    Run(run.entries).write(path)
    code, _, _ = call(capsys, str(path), "--follow", "--freeze")
    assert code == 1
    with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
        assert [e.type for e in ledger.read()][len(run.entries) :] == ["DivergenceFlagged"]


def test_follow_of_a_damaged_ledger_ends(run: Run, tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "live.db"
    Run(run.entries[:40]).write(path)
    with sqlite3.connect(path) as connection:
        connection.execute("drop trigger events_update")
        connection.execute("update events set leaf = x'00' where position = 20")
    verdict = follow(f"sqlite:///{path}", stop=threading.Event(), poll_s=0.01)
    assert verdict.exit_code == 1
    assert verdict.findings[0].position == 20


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_following_with_a_verdict(
    run: Run, tmp_path: Path, sent: signal.Signals
) -> None:
    path = tmp_path / "live.db"
    Run(run.entries[:32]).write(path)
    code = (
        "import sys; from shiftbook.verify.commands import verify;"
        "sys.exit(verify.main([sys.argv[1], '--follow', '--format', 'jsonl'],"
        " standalone_mode=False))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not _follows(process.pid):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)
        process.send_signal(sent)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
    assert err == ""
    last = json.loads(out.splitlines()[-1])
    assert last["kind"] == "verdict"
    assert last["last"] == 31
    assert process.returncode == last["exit_code"]


def _follows(pid: int) -> bool:
    """True once the process has the ledger open, which it does after its handler is set."""
    try:
        opened = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(name.endswith("live.db") for name in opened)
