"""Goal: retention never deletes a bundle that the ledger's lineage or a golden trace needs.

Method: six bundles of a job whose second attempt began from one, while a fork restored another; a
golden trace names a third. The oldest alone is needed by nobody, others become so one by one.
Traces that a replay writes name the bundle that their job's configuration names. Savers, retention
and readers of one shelf race in real processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.checkpoint.commands import checkpoint
from shiftbook.checkpoint.errors import BundleError, ManifestInvalid
from shiftbook.checkpoint.manifest import being_read
from shiftbook.checkpoint.restore import restore_bundle
from shiftbook.checkpoint.retention import needed_bundles, retain_needed
from shiftbook.checkpoint.shelf import SavedBundle, latest_bundle, list_bundles, retain
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.events.state import CheckpointRestored
from shiftbook.ledger.topology import Topology
from shiftbook.verify.replay.golden import FAMILY
from shiftbook.verify.replay.outcome import replay
from shiftbook.verify.replay.protocol import Conditions, Job, Numbers, Step
from tests.checkpoint.bundle_states import fields, state
from tests.ledger.gate_cases import FINGERPRINT, HALF, bundle, open_gate, opened, start

JOB = "arithmetic"
OTHER = Topology.of({"rollout": ["m/0"], "trainer": ["m/1"], "tool": []})


@pytest.fixture
def shelf(tmp_path: Path) -> list[SavedBundle]:
    return [save_bundle(tmp_path / "shelf", fields(k), state(k)) for k in range(6)]


def left(shelf: list[SavedBundle]) -> set[int]:
    there = {one.bundle_id for one in list_bundles(shelf[0].path.parent)}
    return {k for k, one in enumerate(shelf) if one.bundle_id in there}


def restart(gate: object, job: str, attempt: str, parent: str, from_: str) -> None:
    gate.start_attempt(  # type: ignore[attr-defined]
        job,
        attempt,
        parent=parent,
        bundle=from_,
        iteration=1,
        topology=HALF,
        policy_version=0,
        policy_fingerprint=FINGERPRINT,
        pid=2,
    )


def test_what_lineage_and_traces_need_stays(tmp_path: Path, shelf: list[SavedBundle]) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    folder = shelf[0].path.parent
    gate = open_gate(url)
    ledger = gate.ledger
    gate.open_job(JOB, opened())
    start(gate, JOB, "a0")
    for k in range(4):
        ledger.append(JOB, [bundle("a0", 0, shelf[k].bundle_id)])
    restart(gate, JOB, "a1", "a0", shelf[1].bundle_id)
    ledger.append(JOB, [bundle("a1", 0, shelf[4].bundle_id)])
    gate.open_job("fork", opened(("m/0", "m/1"), OTHER))
    start(gate, "fork", "f0", OTHER)
    ledger.append(
        "fork",
        [
            CheckpointRestored(
                attempt="f0",
                bundle=shelf[2].bundle_id,
                kind="transfer",
                iteration=0,
                policy_version=0,
                parts={"model": FINGERPRINT},
                cursor=0,
                restore_s=0.1,
            )
        ],
    )
    assert needed_bundles(ledger) == {shelf[k].bundle_id for k in (1, 2, 4)}

    trace = tmp_path / "small.golden"
    trace.write_text(f"{FAMILY}1\nbase {shelf[3].bundle_id[:12]}\n")
    command = ["retain", str(folder), "--keep", "1", "--ledger", url]
    done = CliRunner().invoke(checkpoint, [*command, "--golden", str(trace)])
    assert done.exit_code == 0, done.output
    assert done.output.split() == [str(shelf[0].path)]
    assert left(shelf) == {1, 2, 3, 4, 5}
    for name, other in (("empty", b""), ("text", b"small.golden\n"), ("bytes", b"\xff\x00")):
        (tmp_path / name).write_bytes(other)
        with pytest.raises(BundleError, match=r"golden trace.*nothing was deleted"):
            retain_needed(folder, 1, ledger, golden=[trace, tmp_path / name])
    assert left(shelf) == {1, 2, 3, 4, 5}
    assert retain_needed(folder, 1, ledger) == [shelf[3].path]
    with pytest.raises(BundleError, match="nothing was deleted"):
        retain_needed(folder, 1, ledger, golden=[tmp_path / "nowhere"])

    ledger.append(
        JOB,
        [
            JobClosed(
                outcome="finished", iterations=1, policy_version=0, policy_fingerprint=FINGERPRINT
            )
        ],
    )
    assert retain_needed(folder, 1, ledger) == [shelf[4].path]
    assert left(shelf) == {1, 2, 5}
    ledger.close()


def test_the_command_asks_for_golden_traces_or_for_a_word_that_there_are_none(
    tmp_path: Path, shelf: list[SavedBundle]
) -> None:
    """Who forgets the traces is told so, and nothing is deleted."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    gate = open_gate(url)
    gate.open_job(JOB, opened())
    start(gate, JOB, "a0")
    gate.ledger.append(JOB, [bundle("a0", 0, one.bundle_id) for one in shelf])
    gate.ledger.close()
    trace = tmp_path / "small.golden"
    trace.write_text(f"{FAMILY}1\nbase {shelf[3].bundle_id}\n")
    command = ["retain", str(shelf[0].path.parent), "--keep", "2", "--ledger", url]
    for words, found in (((), "neither"), (("--golden", str(trace), "--no-golden"), "both")):
        refused = CliRunner().invoke(checkpoint, [*command, *words])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"found {found}" in refused.stderr
        assert left(shelf) == set(range(6))
    assert CliRunner().invoke(checkpoint, [*command, "--golden", str(trace)]).exit_code == 0
    assert left(shelf) == {3, 4, 5}
    assert CliRunner().invoke(checkpoint, [*command, "--no-golden"]).exit_code == 0
    assert left(shelf) == {4, 5}


def test_damaged_bundles_push_out_no_good_ones(tmp_path: Path, shelf: list[SavedBundle]) -> None:
    """One bit of the newest is flipped: it stays, and so do as many good ones as were asked for."""
    for damaged in (5, 3):
        file = shelf[damaged].path / "state" / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    folder = shelf[0].path.parent
    assert retain(folder, 5) == []
    url = f"sqlite:///{tmp_path}/ledger.db"
    gate = open_gate(url)
    gate.open_job(JOB, opened())
    start(gate, JOB, "a0")
    gate.ledger.append(JOB, [bundle("a0", 0, shelf[k].bundle_id) for k in range(6)])
    gate.ledger.close()
    command = ["retain", str(folder), "--keep", "2", "--ledger", url, "--no-golden"]
    done = CliRunner().invoke(checkpoint, command)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(shelf[0].path), str(shelf[1].path)]
    for damaged in (5, 3):
        assert f"kept, not counted: {shelf[damaged].path}: part" in done.stderr
    assert left(shelf) == {2, 3, 4, 5}
    assert retain(folder, 1) == [shelf[2].path, shelf[3].path]  # 4 is good


def test_a_trace_names_the_bundle_that_its_job_begins_with(
    tmp_path: Path, shelf: list[SavedBundle]
) -> None:
    """A golden trace holds its job's configuration, and with it the path of a bundle, or its id."""

    def run(conditions: Conditions) -> Iterator[Step]:
        yield Step(0, [Numbers("trainer", {"loss": 0.5})])

    traces = []
    for name, begins_with in (("path", str(shelf[1].path)), ("id", shelf[3].bundle_id)):
        job = Job(run, steps=1, config={"begins_with": begins_with})
        traces.append(tmp_path / f"{name}.golden")
        assert replay(job, golden=traces[-1], update_golden=True).exit_code == 0
    gate = open_gate(f"sqlite:///{tmp_path}/ledger.db")
    gate.open_job(JOB, opened())
    start(gate, JOB, "a0")
    gate.ledger.append(JOB, [bundle("a0", 0, one.bundle_id) for one in shelf])
    retain_needed(shelf[0].path.parent, 1, gate.ledger, golden=traces)
    assert left(shelf) == {1, 3, 5}
    gate.ledger.close()


def test_bundles_of_unknown_jobs_stay(tmp_path: Path, shelf: list[SavedBundle]) -> None:
    """Another ledger than theirs has nothing to say about them."""
    gate = open_gate(f"sqlite:///{tmp_path}/ledger.db")
    gate.open_job("another", opened())
    assert retain_needed(shelf[0].path.parent, 1, gate.ledger) == []
    assert left(shelf) == set(range(6))
    gate.ledger.close()


def read_until_told(folder: str, ended: str, answers: Any) -> None:
    """In another process: find and restore the newest bundle again and again."""
    torch.set_num_threads(1)
    failed, read = [], 0
    while not Path(ended).exists():
        try:
            newest = latest_bundle(folder)
            listed = list_bundles(folder)
            if newest is None or not listed:
                failed.append("found none")
                continue
            restore_bundle(newest.path)
            read += 1
        except ManifestInvalid as error:
            # It went before the first byte was read; that is said, and there is a newer one.
            if newest.path.exists() or "retention may have taken it" not in str(error):
                failed.append(str(error))
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
        if failed or read == 1:
            answers.put(failed[:3])
    answers.put([*failed[:3], read] if failed else read)


@pytest.mark.slow
def test_retention_takes_nothing_away_from_a_reader(tmp_path: Path) -> None:
    """One bundle is kept and a newer one comes all the time: a reader always finds one, and once
    it began to read one has it to the end."""
    folder, ended = tmp_path / "shelf", tmp_path / "ended"
    save_bundle(folder, fields(0), state(0))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = (str(folder), str(ended), answers)
    reader = context.Process(target=read_until_told, args=arguments)
    reader.start()
    try:
        assert answers.get(timeout=60) == []
        deleted = 0
        for iteration in range(1, 30):
            save_bundle(folder, fields(iteration), state(iteration))
            deleted += len(retain(folder, 1))
        ended.touch()
        read = answers.get(timeout=60)
    finally:
        ended.touch()
        reader.join(60)
    assert isinstance(read, int), read
    assert read > 1
    assert deleted > 10


def test_a_bundle_that_is_read_goes_with_the_next_retention(
    tmp_path: Path, shelf: list[SavedBundle]
) -> None:
    folder = tmp_path / "shelf"
    with being_read(shelf[1].path):
        assert retain(folder, 2) == [shelf[k].path for k in (0, 2, 3)]
        assert left(shelf) == {1, 4, 5}
        restore_bundle(shelf[1].path)
    assert retain(folder, 2) == [shelf[1].path]


def test_a_name_that_leads_nowhere_holds_up_no_reader(
    tmp_path: Path, shelf: list[SavedBundle]
) -> None:
    """A link to a bundle on a disk that is not mounted."""
    (tmp_path / "shelf" / "bundle-00000099-000000000000").symlink_to(tmp_path / "away")
    newest = latest_bundle(tmp_path / "shelf")
    assert newest is not None
    assert newest.bundle_id == shelf[-1].bundle_id
    assert left(shelf) == set(range(6))
