"""Goal: a recorded ledger is run again by what it names, and two ledgers are compared event by
event.

Method: the synthetic honest run is written as it is and with one change of its training record;
the job that its JobOpened names shows the honest record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import ShiftbookError
from shiftbook.ledger.events.base import parse
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.replay.outcome import replay
from shiftbook.verify.replay.running import Asked
from tests.verify.honest_run import Run, honest_run, policy
from tests.verify.test_replay import call

REPLAY = "tests.verify.replay_jobs:as_honest_run"


def written(path: Path, run: Run, *, target: str | None = REPLAY) -> Path:
    if target is not None:
        run.get("JobOpened").change(replay=target, config={"of": "honest"})
    run.write(path)
    return path


def test_the_job_of_a_ledger_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "honest.db", honest_run())
    code, out, err = call(capsys, str(path), "--moves", "none")
    assert code == 0, out + err
    assert "same: tests.verify.replay_jobs:as_honest_run" in out
    assert "not compared, since the job does not show it: trainer root model" in out


def test_a_reward_that_differs_from_the_record_is_named_with_its_event(tmp_path: Path) -> None:
    run = honest_run()
    entry = run.get("SamplesRewarded", 1)
    uid = entry.rows["uid"][2]
    entry.rows["reward"][2] = 7.5
    path = written(tmp_path / "changed.db", run)
    with Ledger.open(f"sqlite:///{path}", create=False, read_only=True) as ledger:
        generated = [e.position for e in ledger.read() if e.type == "SamplesGenerated"]
    for outcome in (replay(str(path), Asked(steps=2)), compared(tmp_path, path)):
        assert outcome.exit_code == 1
        assert outcome.divergence.uid == uid
        assert outcome.divergence.what == "reward"
        assert outcome.divergence.step == 1
        assert generated[1] in outcome.divergence.events


def compared(tmp_path: Path, path: Path) -> Any:
    from shiftbook.verify.replay.outcome import compare_ledgers

    honest = written(tmp_path / "other.db", honest_run())
    return compare_ledgers(f"sqlite:///{honest}", f"sqlite:///{path}")


def test_two_ledgers_are_compared_without_running_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written(tmp_path / "one.db", honest_run(), target=None)
    two = written(tmp_path / "two.db", honest_run(), target=None)
    assert call(capsys, str(one), "--against", str(two))[0] == 0
    run = honest_run()
    entry = run.get("UpdateApplied", 2)
    entry.change(params_after=policy(9), loss=entry.event.loss + 0.5)
    three = written(tmp_path / "three.db", run, target=None)
    code, out, _ = call(capsys, str(one), "--against", str(three))
    assert code == 1
    assert "component trainer: number loss: its value came out otherwise" in out
    assert out.count("(event at position") == 2
    assert "trainer root model in the same step" in out


def test_ledgers_that_cannot_be_replayed_are_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = written(tmp_path / "none.db", honest_run(), target=None)
    empty = tmp_path / "empty.db"
    Ledger.open(f"sqlite:///{empty}").close()
    early = honest_run()
    del early.entries[early.at("UpdateApplied") :]
    untrained = tmp_path / "untrained.db"
    written(untrained, early)
    torn = tmp_path / "torn.db"
    torn.write_bytes(none.read_bytes()[: 3 << 12])
    for path, says in (
        (none, "--code package.module:attribute"),
        (empty, "found none; run a job first"),
        (untrained, "iterations that ended with an update"),
        (torn, "torn.db"),
        (tmp_path / "absent.db", "absent.db"),
    ):
        code, out, err = call(capsys, str(path))
        assert (code, out) == (2, ""), (path, out)
        assert err.count("\n") == 1, err
        assert says in err
    code, _, err = call(capsys, str(none), "--code", REPLAY, "--steps", "9")
    assert code == 2
    assert "at most the 4 iterations" in err
    code, _, err = call(capsys, str(none), "--golden", "x")
    assert code == 2


def test_an_event_without_the_new_field_is_read_as_before() -> None:
    run = honest_run()
    body = run.get("JobOpened").event.plain()
    assert "replay" not in body
    opened = parse("JobOpened", 1, body)
    assert getattr(opened, "replay", "absent") is None


def test_errors_are_ours() -> None:
    with pytest.raises(ShiftbookError):
        replay("no/such/ledger.db")
