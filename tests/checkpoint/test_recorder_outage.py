"""Goal: a loop whose evidence lies on an object store goes on while that store is away.

Method: a real server of the S3 protocol is stopped under a recorder and started again: within the
run, after it, and after the process was killed; what stands in the ledger is judged.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shiftbook.checkpoint.recorder import Consumed, Recorder, data_digests, dataset_digest, uid
from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import EvidenceOutOfReach, LedgerUnreachable
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, UpdatePlan
from shiftbook.verify.verdict import verify
from tests.s3_server import DOWN, S3Server, running_s3

DATA = [[n] for n in range(4)]
POLICY = "0" * 32
PLAN = Plan(
    seed=1,
    iterations=9,
    objective="sft",
    data=DataPlan(
        dataset_digest=dataset_digest(data_digests(DATA)),
        tokenizer_digest="t",
        dataset_size=len(DATA),
        sampler_rule="sequential-v1",
        seed=1,
        epochs=9,
    ),
    sampling=SamplingPlan(),
    update=UpdatePlan(prompts_per_update=4, group_size=1, virtual_ranks=1, learning_rate=0.1),
    required_invariants=("I2", "I3", "I4", "I10"),
)
DEADLINE_S = 120.0


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, running_s3(patch) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    """URLs of a ledger and of its evidence."""
    return f"sqlite:///{tmp_path}/ledger.db", f"s3://book/{tmp_path.name}"


def begun(place: tuple[str, str], **more: Any) -> Recorder:
    url, evidence = place
    return Recorder.open(url, "sft", PLAN, policy=POLICY, evidence=evidence, **more)


def step(record: Recorder, number: int) -> bool:
    """Draw and use the whole data set once; True where the ledger has it."""
    start = number * len(DATA)
    record.drawn(number, start=start, epoch=number, indices=range(len(DATA)), prompts=DATA)
    rows = [Consumed(uid(start + n), row, 0.0, 0.0) for n, row in enumerate(DATA)]
    record.consumed(number, rows, version=0)
    return record.flush()


def types(place: tuple[str, str]) -> list[str]:
    with Ledger.open(place[0], read_only=True) as ledger:
        return [event.type for event in ledger.read()]


def judge(place: tuple[str, str]) -> None:
    """Everything stands, in order, with its evidence."""
    verdict = verify(place[0], evidence=place[1])
    assert (verdict.findings, verdict.could_not) == ((), ())
    for invariant in ("I2", "I3", "I4", "I10"):
        assert verdict.coverage.row(invariant).status == "checked", invariant


def test_a_loop_goes_on_and_its_record_is_clean(s3: S3Server, place: tuple[str, str]) -> None:
    record = begun(place)
    record.data(data_digests(DATA), tokenizer="t")
    assert step(record, 0)
    s3.close()
    try:
        assert not step(record, 1)
        assert not step(record, 2)
        for act in (
            lambda: record.finish(iterations=3, version=0, policy=POLICY),
            lambda: record.amend("update.learning_rate", 0.2, "slower"),
        ):
            with pytest.raises(LedgerUnreachable, match=r"records.*wait.*evidence at s3://book"):
                act()
        assert types(place).count("BatchConsumed") == 1, "no event before its segment"
    finally:
        s3.start()
    record.finish(iterations=3, version=0, policy=POLICY)
    record.close()
    found = types(place)
    assert found.count("BatchConsumed") == 3
    assert found.count("LedgerUnreachable") == found.count("LedgerRestored") == 1
    assert found.index("JobClosed") > found.index("LedgerRestored")
    judge(place)


KILLED = """
import os, signal, sys
import s3fs
s3fs.S3FileSystem.retries = 1
from tests.checkpoint.test_recorder_outage import DATA, begun, data_digests, step

record = begun(tuple(sys.argv[1:3]))
record.data(data_digests(DATA), tokenizer="t")
assert step(record, 0)
os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
s3fs.S3FileSystem.clear_instance_cache()
record._writer.segments._place._objects._fs = s3fs.S3FileSystem(skip_instance_cache=True)
assert not step(record, 1)
assert not step(record, 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(place: tuple[str, str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *place],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "AWS_MAX_ATTEMPTS": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list((folder / "ledger.db.spool").glob("*.spool"))) == 1
    assert types(place).count("BatchConsumed") == 1


def test_the_next_attempt_takes_up_what_a_killed_one_left(
    s3: S3Server, place: tuple[str, str], tmp_path: Path
) -> None:
    killed(place, tmp_path)
    s3.fault = DOWN
    with pytest.raises(LedgerUnreachable, match=r"before a new attempt, found 2 records.*to wait"):
        begun(place)
    assert types(place).count("AttemptStarted") == 1
    s3.fault = None
    with begun(place) as record:
        found = types(place)
        assert found.count("BatchConsumed") == 3
        assert found[-2:] == ["LeaseGranted", "AttemptStarted"], "after the records before it"
        assert step(record, 3)
    assert list((tmp_path / "ledger.db.spool").iterdir()) == []
    with Ledger.open(place[0]) as ledger:
        assert ledger.state().job("sft").status == "open"


def test_recover_brings_what_a_killed_process_left(
    s3: S3Server, place: tuple[str, str], tmp_path: Path
) -> None:
    killed(place, tmp_path)
    words = ["recover", "--ledger", place[0]]
    run = CliRunner()
    s3.fault = DOWN
    done = run.invoke(main, [*words, "--evidence", place[1]])
    assert done.exit_code == 2
    assert "records have to wait: expected to" in done.stderr
    s3.fault = None
    done = run.invoke(main, words)
    assert done.exit_code == 2, "not into the folder beside the ledger, where nobody would look"
    assert "name it (--evidence" in done.stderr
    assert not (tmp_path / "ledger.db.evidence").exists()
    done = run.invoke(main, [*words, "--evidence", place[1]])
    assert done.exit_code == 0, done.output
    assert "2 spooled records appended" in done.stderr
    assert types(place)[-1] == "LedgerRestored"
    assert types(place).count("BatchConsumed") == 3
    assert list((tmp_path / "ledger.db.spool").iterdir()) == []
    judge(place)
    done = run.invoke(main, [*words, "--evidence", place[1]])
    assert (done.exit_code, "appended" in done.stderr) == (0, False)


def test_a_wrong_bucket_is_said_at_once(s3: S3Server, place: tuple[str, str]) -> None:
    with pytest.raises(EvidenceOutOfReach, match="no bucket bok"):
        begun((place[0], "s3://bok/evidence"))
    s3.fault = DOWN
    with begun(place) as record:
        record.data(data_digests(DATA), tokenizer="t")
        assert not step(record, 0), "an outage at the beginning is one like another"
        s3.fault = None
    judge(place)
