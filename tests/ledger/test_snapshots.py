"""Snapshots give the state that a fold over all events gives, whatever happens to their files.

Method: random histories of random events (of every type, lawful or not, since a fold takes any) go
into a real ledger on either store, with limits so small that snapshots are written and jobs are
dropped from memory all the time. Between appends the snapshot files are deleted, torn, altered,
swapped, put back from earlier or from a copy of the ledger that went another way, or said to be of
other code. After each step a handle that has lived all along, a fresh one, and a decision under the
append lock must see what the full fold sees.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shiftbook.ledger import folding, snapshots
from shiftbook.ledger.dialect import side_path
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events import job, lease, observation, reallocation, safety
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.receipt import Decision
from shiftbook.ledger.snapshots import Snapshots, fold_code
from shiftbook.ledger.state import LedgerState, fold
from shiftbook.ledger.topology import Topology
from tests.ledger.sample_ledger import write_sample
from tests.ledger.stores import copy_ledger, new_url
from tests.strategies import events

JOBS = ("a", "b", "c", "d")
DEVICES = st.lists(st.sampled_from(["n/0", "n/1", "m/0"]), min_size=1, max_size=2).map(tuple)

SHARED_EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(lease.LeaseGranted, devices=DEVICES, holder=st.sampled_from(["h", "i"])),
    st.builds(lease.LeaseReleased, devices=DEVICES, holder=st.just("h"), reason=st.just("done")),
    st.builds(lease.LeaseExpired, devices=DEVICES, holder=st.just("h"), evidence=st.just("dead")),
    st.builds(reallocation.ReallocationPoisoned, devices=DEVICES, cause=st.just("lost")),
    st.builds(safety.QuarantineLifted, devices=DEVICES, by=st.just("o"), reason=st.just("ok")),
)
DRAFTS = st.lists(
    st.builds(
        Draft,
        st.one_of(SHARED_EVENTS, events()),
        operation=st.sampled_from([None, "op-1", "op-2"]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(autouse=True)
def small_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that happens once in thousands of events happens all the time."""
    with monkeypatch.context() as patch:
        # Where the snapshots of a server's ledger lie; a machine asks for no fixture of a store.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setattr(folding, "SNAPSHOT_EVENTS", 2)
        patch.setattr(folding, "SNAPSHOT_SHARE", 1_000_000)
        patch.setattr(folding, "SHARED_EVENTS", 3)
        patch.setattr(folding, "WALK_EVENTS", 4)
        patch.setattr(folding, "KEPT_JOBS", 2)
        yield


def seen(state: LedgerState) -> dict[str, Any]:
    """A state as text; NaN equals NaN, and the order of dictionaries counts."""
    return {
        "position": state.position,
        "jobs": {name: repr(state.job(name)) for name in sorted(state.jobs)},
        "unknown": repr(state.job("never opened")),
        "leases": repr(sorted(state.leases.items())),
        "quarantine": repr(sorted(state.quarantine.items())),
    }


def folder_of(url: str) -> Path:
    """Where the snapshots of a ledger lie."""
    return side_path(url, ".snapshots")


def files(url: str) -> list[Path]:
    """Snapshot files of a ledger."""
    return sorted(folder_of(url).glob("*.snapshot"))


def prefix(ledger: Ledger, size: int) -> list[bytes]:
    """Bytes of the first events."""
    return [row.data for row in ledger.rows(until=size - 1)]


class SnapshotMachine(RuleBasedStateMachine):
    """A ledger, its snapshots, and somebody who is rough with them."""

    store = "sqlite"

    @initialize()
    def begin(self) -> None:
        memory = Path("/dev/shm")
        self.folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.url = new_url(self.store, Path(self.folder.name))
        self.ledger = Ledger.open(self.url)
        self.earlier: dict[str, bytes] = {}

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.folder.cleanup()

    @rule(job=st.sampled_from(JOBS), drafts=DRAFTS)
    def append(self, job: str, drafts: list[Draft]) -> None:
        self.ledger.append(job, drafts)

    @rule(job=st.sampled_from(JOBS), drafts=DRAFTS)
    def append_by_another(self, job: str, drafts: list[Draft]) -> None:
        with Ledger.open(self.url) as other:
            other.append(job, drafts)

    @rule(job=st.sampled_from(JOBS), drafts=DRAFTS)
    def decide(self, job: str, drafts: list[Draft]) -> None:
        full = fold(self.ledger.read())

        def fn(state: LedgerState) -> Decision:
            assert seen(state) == seen(full)
            return Decision(job, tuple(drafts))

        self.ledger.decide(fn)

    @rule(
        how=st.sampled_from(["delete", "cut", "flip", "swap", "empty", "all"]),
        number=st.integers(0, 99),
        place=st.integers(0, 10**6),
    )
    def damage(self, how: str, number: int, place: int) -> None:
        # What is drawn depends on no file: their sizes change with the time of day.
        found = files(self.url)
        if not found:
            return
        path = found[number % len(found)]
        whole = path.read_bytes()
        at = place % max(1, len(whole))
        if how == "delete":
            path.unlink()
        elif how == "cut":
            path.write_bytes(whole[:at])
        elif how == "flip" and whole:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        elif how == "swap":
            path.write_bytes(found[place % len(found)].read_bytes())
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "all":
            shutil.rmtree(path.parent)

    @rule()
    def remember_files(self) -> None:
        self.earlier = {path.name: path.read_bytes() for path in files(self.url)}

    @rule()
    def put_back_earlier_files(self) -> None:
        folder = folder_of(self.url)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.earlier.items():
            (folder / name).write_bytes(content)

    @rule(job=st.sampled_from(JOBS), ours=DRAFTS, theirs=DRAFTS)
    def snapshots_of_a_fork(self, job: str, ours: list[Draft], theirs: list[Draft]) -> None:
        fork = new_url(self.store, Path(self.folder.name), "fork")
        self.ledger.close()  # the whole log is in the file
        copy_ledger(self.url, fork)
        self.ledger = Ledger.open(self.url)
        self.ledger.append(job, ours)
        with Ledger.open(fork) as other:
            assert prefix(other, other.head().size) == prefix(self.ledger, other.head().size)
            for _ in range(3):
                other.append(job, theirs)
            seen(other.state())
        folder_of(self.url).mkdir(parents=True, exist_ok=True)
        for path in files(fork):
            shutil.copyfile(path, folder_of(self.url) / path.name)
        shutil.rmtree(folder_of(fork), ignore_errors=True)

    @invariant()
    def all_see_the_full_fold(self) -> None:
        if not hasattr(self, "ledger"):
            return
        full = seen(fold(self.ledger.read()))
        assert seen(self.ledger.state()) == full
        with Ledger.open(self.url, read_only=True) as fresh:
            assert seen(fresh.state()) == full


class PostgresSnapshotMachine(SnapshotMachine):
    """The same beside a server, where only the folder of the snapshots is on this machine."""

    store = "postgresql"


def run_machine(machine: type[SnapshotMachine], examples: int, steps: int) -> None:
    """Run a machine; the fixture's limits hold for all of its runs."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.parametrize(
    ("machine", "examples"),
    [(SnapshotMachine, 12), (PostgresSnapshotMachine, 6)],
    ids=["sqlite", "postgresql"],
)
def test_states_equal_the_full_fold(machine: type[SnapshotMachine], examples: int) -> None:
    run_machine(machine, examples=examples, steps=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "examples"),
    [(SnapshotMachine, 150), (PostgresSnapshotMachine, 50)],
    ids=["sqlite", "postgresql"],
)
def test_states_equal_the_full_fold_over_many_histories(
    machine: type[SnapshotMachine], examples: int
) -> None:
    run_machine(machine, examples=examples, steps=30)


def test_a_second_handle_starts_from_the_snapshots(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with write_sample(store_url) as ledger:
        whole = seen(ledger.state())
        name = next(iter(ledger.jobs()))
    assert files(store_url)
    taken: list[int] = []
    take = folding._take
    monkeypatch.setattr(folding, "_take", lambda known, row: (taken.append(1), take(known, row)))
    with Ledger.open(store_url, read_only=True) as ledger:
        ledger.state().job(name)
        assert len(taken) <= folding.SNAPSHOT_EVENTS
        assert seen(ledger.state()) == whole


def test_of_other_code_is_not_used(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with write_sample(store_url) as ledger:
        seen(ledger.state())
        name = next(iter(ledger.jobs()))
    ours = Snapshots(folder_of(store_url))
    assert ours.job(name) is not None
    assert ours.shared() is not None
    monkeypatch.setattr(snapshots, "fold_code", lambda: "f" * 64)
    assert ours.job(name) is None
    assert ours.shared() is None


def test_the_code_is_told_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = snapshots._sources()
    names = {source.name for source in real}
    assert {"state.py", "plan.py", "topology.py", "reallocation.py", "base.py"} <= names
    before = fold_code()
    changed = tmp_path / "state.py"
    changed.write_bytes(real[0].read_bytes() + b"# one more line\n")
    monkeypatch.setattr(snapshots, "_sources", lambda: [changed, *real[1:]])
    fold_code.cache_clear()
    try:
        assert fold_code() != before
    finally:
        fold_code.cache_clear()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_finite_come_back(store_url: str, value: str) -> None:
    with write_sample(store_url) as ledger:
        proposed = next(ledger.read(types=["ReallocationProposed"]))
        body = dict(proposed.body, predicted_gain_s=value)
        event = reallocation.ReallocationProposed.model_validate(body)
        opened = next(ledger.read(types=["JobOpened"], job=proposed.job)).body
        opened["plan"]["update"]["clip_norm"] = value
        again = job.JobOpened.model_validate(opened)
        for _ in range(3):
            ledger.append(proposed.job, again)
            ledger.append(proposed.job, event, operation="odd")
        full = seen(fold(ledger.read()))
        assert seen(ledger.state()) == full
    with Ledger.open(store_url) as ledger:
        assert Snapshots(folder_of(store_url)).job(proposed.job) is not None
        assert seen(ledger.state()) == full


def test_where_nothing_can_be_written_all_is_folded(store_url: str) -> None:
    with write_sample(store_url) as ledger:
        # A file where the folder would be: as good as a disk without room, for any user.
        folder_of(store_url).parent.mkdir(parents=True, exist_ok=True)
        folder_of(store_url).write_text("not a folder")
        assert seen(ledger.state()) == seen(fold(ledger.read()))
    with Ledger.open(store_url, read_only=True) as ledger:
        assert seen(ledger.state()) == seen(fold(ledger.read()))


def test_a_state_is_not_to_be_changed(store_url: str) -> None:
    with write_sample(store_url) as ledger:
        jobs = ledger.state().jobs
        with pytest.raises(TypeError, match="copy it first"):
            jobs["x"] = JobState("x")
        with pytest.raises(TypeError, match="copy it first"):
            del jobs[next(iter(jobs))]


def test_events_of_unknown_type_move_a_job_on(store_url: str) -> None:
    with Ledger.open(store_url) as ledger:
        event = observation.PipelineObserved(
            components=("a",), edges=(), found_by="t", matches_declared=True
        )
        ledger.append("j", [event] * 5)
        assert ledger.state().job("j").version == 4
        assert seen(ledger.state()) == seen(fold(ledger.read()))


LOOK_ALIKE = '"recorded_ns":1,"schema":1,"sequence":1,"type":"Nothing","version":1,"writer":"w"}'
"""The end of an event that would change nothing."""


def test_an_event_that_names_the_end_of_another_is_folded_as_what_it_is(store_url: str) -> None:
    """Types that change nothing are told by the end of the bytes, which a text may imitate."""
    with Ledger.open(store_url, writer=LOOK_ALIKE) as ledger:
        event = safety.SafeModeEntered(reason=LOOK_ALIKE, by=LOOK_ALIKE, topology=Topology())
        ledger.append("a", event)
        assert ledger.state().job("a").safe_mode == LOOK_ALIKE
        (row,) = ledger.rows()
    # Another program's order of fields, with the body last.
    fields = {**orjson.loads(row.data), "writer": "w"}
    body = {**fields.pop("body"), **orjson.loads("{" + LOOK_ALIKE)}
    data = orjson.dumps({**fields, "body": body})
    assert data.endswith(LOOK_ALIKE.encode() + b"}")
    known = folding._Known(JobState("a"), -1, b"")
    with pytest.raises(InvalidEvent, match="recorded_ns"):
        folding._take(known, row._replace(data=data))
