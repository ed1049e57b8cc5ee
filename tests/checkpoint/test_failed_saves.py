"""Goal: a save in the background that fails is heard of, and no ledger believes in its bundle.

Method: saves whose shelf is a file fail on the real disk, saves whose shelf is locked go on for as
long as the test likes; nobody asks for their results. Whoever comes next must be told, once: a
save of each kind, a recorder, a process that ends. A loop that saves so, killed at each moment or
not, must end with a clean verdict, its records in the order in which things happened.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shiftbook.checkpoint import recorder_book
from shiftbook.checkpoint.bundle import restore_bundle, save_bundle
from shiftbook.checkpoint.errors import BundleWriteFailed, EarlierSaveFailed, RecorderMisuse
from shiftbook.checkpoint.failed_saves import tell_failed
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.checkpoint.pending_bundle import (
    PendingBundle,
    save_bundle_async,
    save_sharded_async,
)
from shiftbook.checkpoint.recorder import Recorder, rng_parts
from shiftbook.checkpoint.sharded_bundle import save_sharded
from shiftbook.checkpoint.shelf import latest_bundle, list_bundles, shelf_lock
from shiftbook.ledger.ledger import Ledger
from tests.checkpoint.bundle_states import fields, state
from tests.checkpoint.test_recorder import ROWS, plan
from tests.checkpoint.test_recorder_saving import Killed, Loop

WAIT_S = 60.0
SAVES: tuple[Callable[..., Any], ...] = (
    save_bundle,
    save_sharded,
    save_bundle_async,
    save_sharded_async,
)


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """Where no shelf can be made."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "shelf"


def fail(shelf: Path, save: Callable[..., PendingBundle] = save_bundle_async) -> PendingBundle:
    """A save that has failed; nobody was told."""
    pending = save(shelf, fields(7), state(7))
    assert isinstance(pending.failure(WAIT_S), BundleWriteFailed)
    return pending


@pytest.mark.parametrize("first", [save_bundle_async, save_sharded_async])
@pytest.mark.parametrize("following", SAVES)
def test_the_next_save_says_that_one_failed(
    tmp_path: Path,
    blocked: Path,
    first: Callable[..., PendingBundle],
    following: Callable[..., Any],
) -> None:
    """It says it once, and has saved nothing; what is called again saves."""
    fail(blocked, first)
    good = tmp_path / "good"
    with pytest.raises(
        EarlierSaveFailed, match=r"iteration 7 into .*file/shelf.* not begun"
    ) as told:
        following(good, fields(8), state(8))
    assert isinstance(told.value.__cause__, BundleWriteFailed)
    assert str(blocked) in told.value.path
    assert not good.exists()
    made = following(good, fields(8), state(8))
    saved = made.result(WAIT_S) if isinstance(made, PendingBundle) else made
    assert latest_bundle(good) == saved


def test_who_asked_was_told(tmp_path: Path, blocked: Path) -> None:
    pending = fail(blocked)
    with pytest.raises(BundleWriteFailed):
        pending.result()
    save_bundle(tmp_path / "good", fields(8), state(8))
    tell_failed("nothing to tell")


def test_who_waited_too_short_a_time_was_not(tmp_path: Path) -> None:
    """A wait that ends before the save does tells nobody how that ended."""
    shelf = tmp_path / "shelf"
    with shelf_lock(shelf):
        pending = save_bundle_async(shelf, fields(7), state(7))
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        shelf.rename(tmp_path / "gone")
        (shelf).write_text("")
    assert pending.failure(WAIT_S) is not None
    with pytest.raises(EarlierSaveFailed, match="iteration 7"):
        tell_failed("end")


def test_all_that_failed_are_told_together(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    with shelf_lock(shelf):  # both go on until it is gone
        pending = [save_bundle_async(shelf, fields(n), state(n)) for n in (5, 6)]
        shelf.rename(tmp_path / "gone")
        shelf.write_text("")
    assert all(save.failure(WAIT_S) is not None for save in pending)
    with pytest.raises(
        EarlierSaveFailed, match=r"iteration 5.*iteration 6|iteration 6.*iteration 5"
    ):
        tell_failed("end")
    tell_failed("each was told once")


def test_a_failed_save_keeps_no_copy_of_the_state(
    blocked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error may be kept for long, but the copies that its frames held are let go."""
    from shiftbook.checkpoint import pending_bundle

    copies: list[weakref.ref[torch.Tensor]] = []
    copied = pending_bundle._copied

    def watched(members: Any) -> Any:
        made = copied(members)
        copies.extend(weakref.ref(tensor) for tensor in made.values())
        return made

    monkeypatch.setattr(pending_bundle, "_copied", watched)
    kept = [fail(blocked, save_bundle_async)]
    with pytest.raises(EarlierSaveFailed):
        save_bundle(blocked, fields(1), state(1))
    kept.append(fail(blocked, save_sharded_async))
    gc.collect()
    assert copies
    assert [ref for ref in copies if ref() is not None] == []
    with pytest.raises(EarlierSaveFailed):
        tell_failed("end")


END = """
import sys, torch
from shiftbook.checkpoint.pending_bundle import save_bundle_async, save_sharded_async
fields = {"job": "j", "attempt": "a", "iteration": 7, "policy_version": 7}
pending = globals()[sys.argv[2]](sys.argv[1], fields, {"model": {"w": torch.ones(4)}})
if sys.argv[3:]:
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("save", "good", "ends"),
    [
        ("save_bundle_async", False, ()),
        ("save_sharded_async", False, ("early",)),
        ("save_bundle_async", True, ()),
        ("save_sharded_async", True, ()),
    ],
)
def test_a_process_that_ends_says_it(
    tmp_path: Path, blocked: Path, save: str, good: bool, ends: tuple[str, ...]
) -> None:
    """A save that goes on as the program ends is waited for; only one that fails is spoken of."""
    shelf = tmp_path / "good" if good else blocked
    done = subprocess.run(
        [sys.executable, "-c", END, str(shelf), save, *ends],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == (3 if ends else 0)
    assert ("EarlierSaveFailed: expected the save of iteration 7" in done.stderr) is not good
    assert (latest_bundle(shelf) is not None) is good, done.stderr


def opened(folder: Path) -> Recorder:
    """A recorder of an attempt that saves."""
    url = f"sqlite:///{folder}/ledger.db"
    return Recorder.open(url, "job", plan(), policy={"w": torch.zeros(1)}, attempt="a0")


def kinds(folder: Path) -> list[str]:
    """What the ledger has, in its order."""
    with Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger:
        return [stored.type for stored in ledger.read()]


def parts(value: float) -> dict[str, dict[str, torch.Tensor]]:
    """A state of one number."""
    return {"model": {"w": torch.tensor([value])}}


MINE = {"job": "job", "attempt": "a0", "iteration": 1, "policy_version": 1}


def test_a_recorder_that_is_closed_says_it_and_records_no_bundle(
    tmp_path: Path, blocked: Path
) -> None:
    record = opened(tmp_path)
    pending = save_bundle_async(blocked, MINE, parts(1.0))
    record.checkpoint_in_background(pending, parts(1.0), cursor=4)
    record.fork("other", "to see that it is recorded")
    with pytest.raises(EarlierSaveFailed, match="no record of that bundle"):
        record.close()
    assert "CheckpointSaved" not in kinds(tmp_path)
    assert "ExperimentForked" in kinds(tmp_path)
    assert not list(tmp_path.rglob("*.saving"))


def test_what_broke_the_block_of_a_recorder_is_what_is_raised(
    tmp_path: Path, blocked: Path
) -> None:
    def broken() -> None:
        with opened(tmp_path) as record:
            pending = save_bundle_async(blocked, MINE, parts(1.0))
            record.checkpoint_in_background(pending, parts(1.0), cursor=4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    with pytest.raises(EarlierSaveFailed):  # and is told by what comes next
        tell_failed("end")


def test_the_next_save_of_any_kind_is_told_by_the_recorder(tmp_path: Path, blocked: Path) -> None:
    """A loop that writes its own files hears of a bundle that failed before it writes one."""
    with opened(tmp_path) as record:
        pending = save_bundle_async(blocked, MINE, parts(1.0))
        record.checkpoint_in_background(pending, parts(1.0), cursor=4)
        assert pending.failure(WAIT_S) is not None
        save = record.checkpoint("file", parts(2.0), iteration=2, version=2, cursor=8)
        with pytest.raises(EarlierSaveFailed, match="not begun"), save:
            pytest.fail("it began")


def hasty(record: Recorder, shelf: Path, *, wait: bool) -> None:
    """Takes `checkpoint` to be around a save in the background, and asks for no result."""
    with record.checkpoint(shelf, parts(1.0), iteration=1, version=1, cursor=4):
        pending = save_bundle_async(shelf, MINE, parts(1.0))
        if wait:
            assert pending.failure(WAIT_S) is not None


@pytest.mark.parametrize("ends", ["goes on", "failed"])
def test_a_block_that_ends_before_its_save_records_nothing(
    tmp_path: Path, blocked: Path, ends: str
) -> None:
    """`checkpoint` is around a save: as its block ends, the bundle must be there."""
    shelf = tmp_path / "shelf" if ends == "goes on" else blocked
    record = opened(tmp_path)
    refusal = RecorderMisuse if ends == "goes on" else EarlierSaveFailed
    with shelf_lock(tmp_path / "shelf"), pytest.raises(refusal):
        hasty(record, shelf, wait=ends == "failed")
    record.close()
    assert "CheckpointSaved" not in kinds(tmp_path)


def test_a_save_of_another_job_or_attempt_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as record:
        for other in ({"job": "x"}, {"attempt": "a1"}):
            pending = save_bundle_async(tmp_path / "shelf", MINE | other, parts(1.0))
            with pytest.raises(RecorderMisuse, match="give its fields those of the recorder"):
                record.checkpoint_in_background(pending, parts(1.0), cursor=4)
            pending.result(WAIT_S)


def test_what_happens_during_a_save_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is in the ledger as soon as it is there; what may be held back is bounded."""
    monkeypatch.setattr(recorder_book, "MAX_BUFFERED", 3)
    record = opened(tmp_path)
    shelf = tmp_path / "shelf"
    with shelf_lock(shelf):
        pending = save_bundle_async(shelf, MINE, parts(1.0))
        record.checkpoint_in_background(pending, parts(1.0), cursor=4)
        for number in range(2):
            record.fork(f"other-{number}", "during the save")
        assert record.flush() is False
        assert "ExperimentForked" not in kinds(tmp_path)
    for number in range(2, 5):  # more than may be held back: the call waits for the save
        record.fork(f"other-{number}", "perhaps during the save")
    assert pending.done
    assert record.flush() is True
    assert [k for k in kinds(tmp_path) if k in ("CheckpointSaved", "ExperimentForked")] == [
        "CheckpointSaved",
        *["ExperimentForked"] * 5,
    ]
    saved = record.ledger.state().job("job").last_bundle
    (bundle,) = list_bundles(shelf)
    assert saved is not None
    assert (saved.bundle, saved.path) == (bundle.bundle_id, str(bundle.path))
    assert saved.parts == bundle.manifest.part_roots
    assert saved.bytes == bundle.manifest.bytes
    record.close()


def read_back(bundle: Path) -> dict[str, Any]:
    """What the bundle has of the loop's state."""
    stream = int(load_manifest(bundle).rng["mask"], 16)
    return {**restore_bundle(bundle), **rng_parts({"mask": stream})}


class BackgroundLoop(Loop):
    """The loop of `test_recorder_saving`, which saves bundles and trains meanwhile."""

    weights: Any

    def __init__(self, folder: Path, at: str = "") -> None:
        super().__init__(folder, at=at)
        self.shelf, self.weights = folder / "shelf", torch.zeros(1, dtype=torch.float64)
        self.pending: PendingBundle | None = None

    def state(self) -> dict[str, Any]:
        weights = {"w": self.weights}
        return {
            "model": weights,
            "masters": weights,
            "optimizer": {"step": torch.tensor(self.step)},
        }

    def load(self) -> dict[str, Any]:
        found = latest_bundle(self.shelf)
        if found is None:
            return {}
        held = restore_bundle(found.path)
        return {
            "bundle": found.bundle_id,
            "w": held["model"]["w"],
            "step": int(held["optimizer"]["step"]),
            "stream": int(found.manifest.rng["mask"], 16),
        }

    def save(self, record: Recorder) -> None:
        self.here("before")
        about = {
            "job": "job",
            "attempt": record.attempt,
            "iteration": self.step,
            "policy_version": self.step,
            "in_flight_uids": [],
            "rng": {"mask": f"{self.stream:04x}"},
        }
        with shelf_lock(self.shelf):
            self.pending = save_bundle_async(self.shelf, about, self.state())
            record.checkpoint_in_background(
                self.pending, self.all(), cursor=self.step * ROWS, read_back=read_back
            )
            self.here("begun")
            self.train(record)
            self.here("trained")
        self.pending.failure(WAIT_S)
        self.here("written")


@pytest.mark.parametrize("at", ["", "step 1", "before", "begun", "step 2", "written", "step 3"])
def test_a_loop_that_saves_in_the_background_is_clean(tmp_path: Path, at: str) -> None:
    """Killed while the save goes on, the next attempt goes on from its bundle: it came to be."""
    loop = BackgroundLoop(tmp_path, at=at)
    if at:
        with pytest.raises(Killed):
            loop.live()
        if loop.pending is not None:
            assert loop.pending.failure(WAIT_S) is None
        loop = BackgroundLoop(tmp_path)
    verdict = loop.live()
    assert verdict.word == "clean", (verdict.findings, verdict.could_not)
    assert not list(tmp_path.rglob("*.saving"))
    with Ledger.open(loop.url) as ledger:
        known = ledger.state().job("job").bundles
    found = {bundle.bundle_id for bundle in list_bundles(loop.shelf)}
    assert set(known) == found
    assert found
