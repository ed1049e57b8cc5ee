"""Goal: a loop that is killed within a save or an outage, and goes on, is accused of nothing.

Method: the process is ended where it stands (its recorder is left as it is, nothing is flushed or
closed) before, within and after a save, with the ledger in reach and away; the next attempt goes on
from the file that is there. The verdict must be clean: nothing of the lineage may be unknown.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from shiftbook.checkpoint.recorder import Recorder, data_digests, rng_parts
from shiftbook.checkpoint.recorder_samples import Consumed
from shiftbook.checkpoint.recorder_state import uid
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import Verdict, verify
from tests.checkpoint.test_recorder import DATA, RATE, ROWS, plan

STEPS, SAVED = 4, 2
REQUIRED = ("I1", "I1b", "I2", "I3", "I9b", "I10", "I10b", "I17", "I17.bundles", "I19")


class Killed(BaseException):
    """Ends a life as ``kill -9`` does: nobody catches it, and nothing is closed."""


class Loop:
    """A loop whose whole state is a few numbers, with one generator; it saves after two steps."""

    def __init__(self, folder: Path, name: str = "ledger", at: str = "") -> None:
        self.url, self.file = f"sqlite:///{folder}/{name}.db", folder / f"{name}.json"
        self.at, self.weights, self.step, self.stream = at, 0.0, 0, 0
        self.record: Recorder | None = None

    def here(self, moment: str) -> None:
        if moment == self.at:
            raise Killed(moment)

    def state(self) -> dict[str, Any]:
        weights = {"w": self.weights}
        return {"model": weights, "masters": weights, "optimizer": {"step": self.step}}

    def all(self) -> dict[str, Any]:
        return {**self.state(), **rng_parts({"mask": self.stream})}

    def load(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def live(self) -> Verdict:
        held = self.load()
        made = plan(required_invariants=REQUIRED)
        record = self.record = Recorder.open(
            self.url,
            "job",
            made,
            policy={"w": held.get("w", self.weights)},
            version=held.get("step", 0),
            iteration=held.get("step", 0),
            bundle=held.get("bundle"),
        )
        record.data(data_digests(DATA), tokenizer="t")
        if held:
            self.weights, self.step, self.stream = held["w"], held["step"], held["stream"]
            loaded = self.all()
            record.restored(
                held["bundle"],
                loaded,
                iteration=self.step,
                version=self.step,
                cursor=self.step * ROWS,
                file_state=loaded,
            )
        while self.step < STEPS:
            self.train(record)
            if self.step == SAVED:
                self.save(record)
        record.finish(iterations=STEPS, version=self.step, policy={"w": self.weights})
        record.close()
        return verify(self.url)

    def train(self, record: Recorder) -> None:
        step, start = self.step, self.step * ROWS
        with record.iteration(step):
            indices = [(start + n) % len(DATA) for n in range(ROWS)]
            rows = [DATA[i] for i in indices]
            record.drawn(step, start=start, indices=indices, epoch=start // 6, prompts=rows)
            used = [Consumed(uid(start + n), row) for n, row in enumerate(rows)]
            record.random_states(step, "before", {"mask": self.stream})
            record.consumed(step, used, version=step)
            with record.update(step, self.state) as update:
                self.weights, self.step, self.stream = self.weights + RATE, step + 1, step + 7
                groups = [sample.uid[:6] for sample in used]
                update.micro_batch(tokens=9, samples=ROWS, divisor=9, groups=groups)
                update.applied(
                    version=step + 1,
                    optimizer_step=step + 1,
                    learning_rate=RATE,
                    loss=0.0,
                    grad_norm=1.0,
                )
            record.random_states(step, "after", {"mask": self.stream})
        self.here(f"step {step}")

    def save(self, record: Recorder) -> None:
        self.here("before")
        with record.checkpoint(
            self.file,
            self.all(),
            iteration=self.step,
            version=self.step,
            cursor=self.step * ROWS,
            read_back=self.all,
        ) as bundle:
            self.here("begun")
            held = {"bundle": bundle, "w": self.weights, "step": self.step, "stream": self.stream}
            self.file.write_text(json.dumps(held))
            self.here("written")
        self.here("recorded")


@pytest.mark.parametrize(
    "at", ["step 0", "step 1", "before", "begun", "written", "recorded", "step 2", "step 3"]
)
def test_a_loop_that_is_killed_at_any_moment_goes_on_and_is_clean(tmp_path: Path, at: str) -> None:
    first = Loop(tmp_path, at=at)
    with pytest.raises(Killed):
        first.live()
    verdict = Loop(tmp_path).live()
    assert verdict.word == "clean", (verdict.findings, verdict.could_not)
    assert not list(tmp_path.rglob("*.saving"))
    assert first.record is not None


def spools(folder: Path) -> list[Path]:
    """Files of spools; a ledger's folder of them is named alike."""
    return [path for path in folder.rglob("*.spool") if path.is_file()]


def test_what_a_killed_loop_had_spooled_is_appended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of one ledger alone: another one in the same folder is left as it is."""
    away, append = [False], Ledger.append

    def refuse(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        if away[0]:
            raise LedgerUnreachable("expected a ledger, found none")
        return append(self, *args, **kwargs)

    monkeypatch.setattr(Ledger, "append", refuse)
    lives = [Loop(tmp_path, name) for name in ("one", "two")]
    for loop in lives:
        monkeypatch.setattr(loop, "here", lambda moment: away.__setitem__(0, moment >= "step 0"))
        loop.at = "step 2"
        train, here = loop.train, loop.here

        def leave(
            record: Recorder, train: Any = train, loop: Loop = loop, here: Any = here
        ) -> None:
            train(record)
            if loop.step == 3:
                raise Killed
            here("step 0")

        monkeypatch.setattr(loop, "train", leave)
        with pytest.raises(Killed):
            loop.live()
        away[0] = False
    for loop in lives:  # their processes are gone, and with them the locks on the spools
        assert loop.record is not None
        loop.record._writer.close()
        loop.record = None
    gc.collect()
    assert len(spools(tmp_path)) == 2
    for name, left in (("one", 1), ("two", 0)):
        verdict = Loop(tmp_path, name).live()
        assert verdict.word == "clean", (verdict.findings, verdict.could_not)
        assert len(spools(tmp_path)) == left


def test_a_bundle_that_nobody_recorded_is_unknown_and_no_fault(tmp_path: Path) -> None:
    """The note of a save that is lost too: what cannot be compared is said, nobody is accused."""
    with pytest.raises(Killed):
        Loop(tmp_path, at="written").live()
    for note in tmp_path.rglob("*.saving"):
        note.write_bytes(b"torn")
    verdict = Loop(tmp_path).live()
    assert verdict.findings == ()
    assert verdict.word == "could not judge"
