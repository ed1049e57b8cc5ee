"""Goal: a recorded ledger is run again by what it names, and two ledgers are compared event by
event.

Method: the synthetic honest run is written as it is and with one change of its training record;
the job that its JobOpened names shows the honest record.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.errors import ShiftbookError
from shiftbook.ledger.events.base import parse
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.replay.outcome import replay
from shiftbook.verify.replay.running import Asked
from shiftbook.verify.replay.story import outcome_lines
from tests.verify.honest_run import Run, honest_run, policy
from tests.verify.test_replay import call

REPLAY = "tests.verify.replay_jobs:as_honest_run"
WITH_LEDGER = "tests.verify.replay_jobs:with_a_ledger"


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
        at = [e.position for e in ledger.read() if e.type == "SamplesRewarded"][1]
    for outcome, both in (
        (replay(str(path), Asked(steps=2)), (at, None)),
        (replay(str(path), Asked(steps=2), code=WITH_LEDGER), (at, at)),
        (compared(tmp_path, path), (at, at)),
    ):
        assert outcome.exit_code == 1
        assert outcome.divergence.uid == uid
        assert outcome.divergence.what == "reward"
        assert outcome.divergence.step == 1
        assert outcome.divergence.events == both
        told = "\n".join(outcome_lines(outcome))
        assert told.count(f"(event at position {at})") == (1 if both[1] is None else 2)
        assert told.count("(of a run that writes no ledger)") == (1 if both[1] is None else 0)


def test_what_is_no_reward_is_named_by_its_own_event(tmp_path: Path) -> None:
    """Tokens by SamplesGenerated, numbers by UpdateApplied, on both sides."""
    for name, change in (
        ("SamplesGenerated", lambda e: e.rows["logp_digest"].__setitem__(2, "0" * 32)),
        ("UpdateApplied", lambda e: e.change(loss=e.event.loss + 1.0)),
    ):
        run = honest_run()
        change(run.get(name, 1))
        path = written(tmp_path / f"{name}.db", run)
        outcome = replay(str(path), Asked(steps=2), code=WITH_LEDGER)
        assert outcome.divergence is not None
        assert outcome.divergence.events == (run.at(name, 1),) * 2


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


def test_evidence_of_two_ledgers_may_lie_in_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segments are named by their content, so ledgers can share a folder of them."""
    paths = [written(tmp_path / f"{n}.db", honest_run(), target=None) for n in ("one", "two")]
    words = [str(paths[0]), "--against", str(paths[1])]
    place = tmp_path / "both"
    for path in paths:
        folder = path.with_name(f"{path.name}.evidence")
        shutil.copytree(folder, place, dirs_exist_ok=True)
        shutil.rmtree(folder)
    assert call(capsys, *words)[0] == 2
    code, out, err = call(capsys, *words, "--evidence", str(place))
    assert code == 0, out + err


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
