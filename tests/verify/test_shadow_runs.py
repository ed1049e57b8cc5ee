"""Goal: each window of a plan is compared once with what its record holds, and told as it came out.

Method: a small job's record is written iteration by iteration, honest, altered, begun again after
a crash, amended and damaged; its shadow runs in processes of their own, while the job runs and
afterwards, by the command and by the class behind it.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.cli import LazyCommands
from shiftbook.ledger.errors import InvalidInput, UnknownJob
from shiftbook.ledger.events.job import PlanAmended
from shiftbook.ledger.events.training import SamplesDropped
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import ShadowPlan
from shiftbook.verify.shadow_commands import shadow as shadow_command
from shiftbook.verify.shadowing import Outcome, Shadow, exit_code
from shiftbook.verify.verdict import verify
from tests.verify.shadow_run import BITS, JOB, NOISE, Live

DEADLINE_S = 120.0


class Root(LazyCommands):
    """The root of the command line with this one command, whatever is installed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["shadow"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return shadow_command if cmd_name == "shadow" else None


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        Root(name="shiftbook").main(["shadow", *arguments], prog_name="shiftbook")
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def compare(live: Live, **how: Any) -> list[Outcome]:
    with Shadow(live.ledger, JOB) as shadow:
        return shadow.run(**how)


def words(outcomes: list[Outcome]) -> list[tuple[int, str]]:
    return [(one.window[0], one.word) for one in outcomes]


def row(live: Live) -> Any:
    return verify(f"sqlite:///{live.path}").coverage.row("shadow")


def recorded(live: Live) -> list[dict[str, Any]]:
    return [event.body for event in live.ledger.read(types={"ShadowCompared"})]


def test_an_honest_run_agrees_and_no_window_is_compared_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = Live(tmp_path, BITS, iterations=3)
    live.train(3)
    live.close()
    assert row(live).reason.endswith("was not compared by a shadow (2 times)")
    assert "job small requires shadow" in verify(f"sqlite:///{live.path}").could_not[0]
    code, out, err = call(capsys, "--ledger", live.path, "--once")
    assert (code, err) == (0, "")
    assert "agreed: iteration 0 from bundle " in out
    assert f"{64 + 3} observations" in out
    assert out.endswith("small: 1 windows: 1 agreed\n")
    assert row(live).status == "partly"
    code, out, _ = call(capsys, JOB, "--ledger", live.path, "--format", "json")
    document = json.loads(out)
    assert code == document["exit_code"] == 0
    assert [(w["iteration"], w["before"]) for w in document["windows"]] == [(0, True), (2, False)]
    assert set(document["windows"][0]) == {
        "job", "iteration", "iterations", "outcome", "method", "observations", "bundle", "wall_s",
        "position", "before", "difference", "log_evidence", "could_not",
    }  # fmt: skip
    assert len(recorded(live)) == 2
    assert row(live).status == "checked"
    assert verify(f"sqlite:///{live.path}").could_not == ()
    code, out, _ = call(capsys, JOB, "--ledger", live.path, "--format", "csv")
    assert code == 0
    assert len(out.splitlines()) == 3


def test_what_the_live_run_did_otherwise_is_named_and_its_job_frozen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counter is changed between a checkpoint and what follows it."""
    live = Live(tmp_path, BITS)
    live.train(2)
    live.counter += 1
    live.train(1)
    code, out, _ = call(capsys, "--ledger", live.path)
    assert code == 1
    assert "agreed: iteration 0" in out
    assert "disagreed: iteration 2" in out
    assert "first difference: iteration 2, component rollout: sample 000002/00: tokens" in out
    assert "2 windows: 1 agreed, 1 disagreed" in out
    assert live.ledger.state().job(JOB).safe_mode == (
        "shadow: iteration 2, component rollout: sample 000002/00: tokens"
    )
    verdict = verify(f"sqlite:///{live.path}")
    found = next(f for f in verdict.findings if f.invariant == "shadow")
    assert (found.severity, row(live).status) == ("stop", "broken")
    assert "sample 000002/00" in found.found
    # Once somebody has looked and thawed the job, what follows is compared again.
    Gate(live.ledger).thaw(JOB, by="operator", reason="a known change")
    live.train(2)
    assert call(capsys, "--ledger", live.path)[0] == 1
    assert live.ledger.state().job(JOB).safe_mode is None


def test_a_difference_of_a_closed_job_is_recorded_and_freezes_nothing(tmp_path: Path) -> None:
    live = Live(tmp_path, BITS)
    live.counter += 1
    live.train(1)
    live.close()
    outcomes = compare(live)
    assert words(outcomes) == [(0, "disagreed")]
    assert [event.type for event in live.ledger.read()][-1] == "ShadowCompared"


def test_a_shadow_follows_a_job_to_its_end(tmp_path: Path) -> None:
    """The last window is cut where the job ends early, and the one before it begins is not due."""
    live = Live(tmp_path, BITS, shadow=ShadowPlan(every_iterations=2, iterations=2), iterations=9)
    outcomes: list[Outcome] = []
    with Ledger.open(f"sqlite:///{live.path}") as ledger, Shadow(ledger, JOB) as shadow:

        def follow() -> None:
            outcomes.extend(shadow.run(follow=True))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        for _ in range(3):
            live.train(1)
        live.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert shadow._runs == 2  # each once, however often the record was looked at
    assert words(outcomes) == [(0, "agreed"), (2, "agreed")]
    assert [len(one.window) for one in outcomes] == [2, 1]
    assert row(live).status == "checked"


def test_iterations_that_are_computed_again_are_compared_again(tmp_path: Path) -> None:
    live = Live(tmp_path, BITS, shadow=ShadowPlan(every_iterations=2, iterations=2))
    live.train(2)
    assert words(compare(live)) == [(0, "agreed")]
    live.restore(1)
    assert words(compare(live)) == []
    live.train(1)
    live.attempt()
    live.train(2)
    live.close()
    assert row(live).reason.endswith("(2 times)")
    outcomes = compare(live)
    assert words(outcomes) == [(0, "agreed"), (2, "agreed")]
    assert not any(one.before for one in outcomes)
    assert row(live).status == "checked"


def test_what_a_shadow_cannot_repeat_is_told(tmp_path: Path) -> None:
    live = Live(tmp_path, BITS, iterations=8)
    live.train(1)
    live.ledger.append(
        JOB, SamplesDropped(attempt="a0", iteration=2, uids=("000002/64",), reason="timeout")
    )
    live.train(3)
    live.ledger.append(
        JOB, PlanAmended(field="moves.cooldown_s", before=0.0, after=1.0, reason="calm")
    )
    live.train(2)
    live.ledger.append(
        JOB,
        PlanAmended(field="update.learning_rate", before=1e-3, after=2e-3, reason="too slow"),
    )
    live.train(2)
    live.close()
    outcomes = compare(live)
    assert words(outcomes) == [
        (0, "agreed"), (2, "could not tell"), (4, "agreed"), (6, "could not tell"),
    ]  # fmt: skip
    assert "samples of iteration 2 were dropped (timeout)" in outcomes[1].could_not
    assert "the plan's update.learning_rate was amended at position" in outcomes[3].could_not
    assert exit_code(outcomes) == 2
    assert row(live).status == "partly"


def test_checkpoints_that_are_not_there_or_overwritten_are_told(tmp_path: Path) -> None:
    live = Live(tmp_path, BITS)
    live.train(1)
    live.train(3, place="latest.json")
    (tmp_path / "at-0.json").unlink()
    outcomes = compare(live)
    assert words(outcomes) == [(0, "could not tell"), (2, "could not tell")]
    assert "found nothing; keep bundles" in outcomes[0].could_not
    assert "save each bundle to a place of its own" in outcomes[1].could_not


def test_a_window_without_a_bundle_is_told_but_not_before_the_first(tmp_path: Path) -> None:
    live = Live(tmp_path, BITS, shadow=ShadowPlan(every_iterations=1))
    events = [e for e in live.ledger.read() if e.type != "CheckpointSaved"]
    other = tmp_path / "other"
    other.mkdir()
    with Ledger.open(f"sqlite:///{other / 'live.db'}") as ledger:
        for event in events:
            ledger.append(JOB, event.parsed())
        live.ledger.close()
        live.ledger, live.folder = ledger, other
        live.train(1)
        saves = live.save
        live.save = lambda place=None: None  # type: ignore[method-assign, assignment, return-value]
        live.train(1)
        live.save = saves  # type: ignore[method-assign]
        live.train(1)
        live.close()
        outcomes = compare(live)
        assert words(outcomes) == [(1, "agreed"), (2, "could not tell")]
        assert "no bundle was saved at iteration 2" in outcomes[1].could_not
        assert row(live).status == "partly"


def test_lost_evidence_is_no_disagreement(tmp_path: Path) -> None:
    live = Live(tmp_path, BITS)
    live.train(1)
    (generated,) = live.ledger.read(types={"SamplesGenerated"})
    lost = tmp_path / "live.db.evidence" / f"{generated.body['segment']['sha256']}.parquet"
    shutil.move(lost, tmp_path / "aside")
    (outcome,) = compare(live)
    assert outcome.word == "could not tell"
    assert "evidence cannot be read: SamplesGenerated at position" in outcome.could_not
    shutil.move(tmp_path / "aside", lost)
    assert words(compare(live)) == [(0, "agreed")]


def test_bad_input_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def made(name: str, **values: Any) -> Live:
        folder = tmp_path / name
        folder.mkdir()
        live = Live(folder, values.pop("config", BITS), **values)
        live.train(1)
        return live

    for live, says in (
        (made("stranger", replay=None), "its program is mine:main"),
        (made("no-plan", shadow=None), '"shadow": {"every_iterations": N'),
        (made("no-module", replay="nowhere.at_all:job"), "expected a module nowhere.at_all"),
    ):
        code, out, err = call(capsys, JOB, "--ledger", live.path)
        assert (code, out) == (2, ""), (out, err)
        assert err.count("\n") == 1, err
        assert says in err
        assert recorded(live) == []
    for live, says in (
        (made("rigid", config={**BITS, "restorable": False}), "restorable=True"),
        (made("fails", config={**BITS, "fails": True}), "ZeroDivisionError"),
        (made("numbers", config={**BITS, "numbers": "from 0"}), "number steps on from"),
    ):
        if says.startswith("number"):
            live.train(2)
        code, out, _ = call(capsys, JOB, "--ledger", live.path)
        assert code == 2
        assert says in out
    code, _, err = call(capsys, "nobody", "--ledger", live.path)
    assert code == 2
    assert "nobody" in err
    with pytest.raises(UnknownJob), Shadow(live.ledger, "nobody"):
        pass
    with pytest.raises(InvalidInput), Shadow(made("none", shadow=None).ledger, JOB):
        pass
    with pytest.raises(ValueError, match="must end before the next begins"):
        ShadowPlan(every_iterations=1, iterations=2)
    # A stranger's job is compared with a program that its owner gives.
    stranger = str(tmp_path / "stranger" / "live.db")
    code = call(capsys, JOB, "--ledger", stranger, "--code", "tests.verify.shadow_run:as_declared")
    assert code[0] == 0


def test_jobs_without_bits_go_into_one_test_over_all_windows(tmp_path: Path) -> None:
    """Rewards of 0.75 against 0.5, 64 samples a window: found after some, by as many processes."""
    live = Live(tmp_path, NOISE, law=0.75, shadow=ShadowPlan(every_iterations=1), iterations=6)
    seen: list[str] = []
    while "disagreed" not in seen and len(seen) < 6:
        live.train(1)
        outcomes = compare(live)
        assert [one.before for one in outcomes] == [True] * len(seen) + [False]
        seen.append(outcomes[-1].word)
    evidence = [event["log_evidence"]["sample reward"] for event in recorded(live)]
    print("log evidence by window", evidence)
    assert seen[-1] == "disagreed"
    assert len(seen) > 1
    assert evidence[0] < math.log(4 / 0.01) <= evidence[-1]
    last = recorded(live)[-1]
    assert last["method"] == "test"
    assert last["difference"]["kind"] == "test"
    assert last["difference"]["name"] in ("sample reward", "reward")
    assert live.ledger.state().job(JOB).safe_mode is not None


def test_jobs_without_bits_agree_under_one_law(tmp_path: Path) -> None:
    live = Live(tmp_path, NOISE, shadow=ShadowPlan(every_iterations=1), iterations=3)
    live.train(3)
    live.close()
    assert words(compare(live)) == [(0, "agreed"), (1, "agreed"), (2, "agreed")]
    last = recorded(live)[-1]
    assert set(last["measures"]) == {"loss", "reward", "kl", "logp_gap"}
    assert last["alpha"] == 0.01
    assert verify(f"sqlite:///{live.path}").coverage.row("evidence").status == "checked"
    assert row(live).status == "checked"


def test_the_gap_is_compared_where_the_live_run_records_it(tmp_path: Path) -> None:
    live = Live(tmp_path, NOISE, gap_factor=None, shadow=ShadowPlan(every_iterations=1))
    live.train(1)
    assert words(compare(live)) == [(0, "agreed")]
    assert set(recorded(live)[-1]["measures"]) == {"loss", "reward", "kl"}
    # What the test began with it goes on with: a measure that comes later is not mixed in.
    live.gap_factor = 50.0
    live.train(1)
    assert words(compare(live)) == [(0, "agreed"), (1, "agreed")]
    assert set(recorded(live)[-1]["measures"]) == {"loss", "reward", "kl"}


def test_bits_hold_the_gap_too(tmp_path: Path) -> None:
    """Nothing but the gap is another number: samples, loss and KL are those of the shadow."""
    live = Live(tmp_path, BITS)
    live.train(2)
    live.gap_factor = 50.0
    live.train(1)
    assert words(compare(live)) == [(0, "agreed"), (2, "disagreed")]
    difference = recorded(live)[-1]["difference"]
    assert (difference["iteration"], difference["name"]) == (2, "logp_gap")
    assert (difference["component"], difference["kind"]) == ("trainer", "number")
    assert float(difference["live"]) == pytest.approx(50.0 * float(difference["shadow"]))
    at = recorded(live)[-1]["difference"]["position"]
    assert next(e.type for e in live.ledger.read() if e.position == at) == "UpdateApplied"
    assert live.ledger.state().job(JOB).safe_mode is not None


@pytest.mark.slow
def test_an_engine_that_reports_otherwise_is_found_by_the_gap_alone(tmp_path: Path) -> None:
    """Rewards, losses and KL are of one law on both sides; each window has one gap to tell."""
    live = Live(
        tmp_path, NOISE, gap_factor=50.0, shadow=ShadowPlan(every_iterations=1), iterations=20
    )
    live.train(20)
    outcomes = words(compare(live))
    first = [word for _, word in outcomes].index("disagreed")
    print("found in window", first + 1, [e["log_evidence"] for e in recorded(live)][first])
    assert first < 16
    difference = recorded(live)[first]["difference"]
    assert (difference["name"], difference["kind"]) == ("logp_gap", "test")
    assert difference["component"] == "trainer"
    assert live.ledger.state().job(JOB).safe_mode is not None
