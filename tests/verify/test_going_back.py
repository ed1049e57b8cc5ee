"""Goal: a loop may go back to any of its bundles, wherever it saved them, and no other way.

Method: supervised fine-tuning, one update or three in an iteration, saves after each update and
goes back: within its attempt, as after a loss spike, or in a new one; to the last bundle, an older
one, or one that lies within an iteration. It is clean where all goes back together. Where one thing
stays ahead, or nobody says that it went back, it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from shiftbook.checkpoint.recorder import Consumed, Recorder, data_digests, uid
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import Verdict, verify
from tests.checkpoint.test_recorder import DATA, RATE, plan

ROWS, UPDATES = 1, 6
ROOM = {"iterations": UPDATES, "required_invariants": ("I1", "I2", "I10", "I15", "I17", "I19")}


@dataclass
class Held:
    """What the loop holds; its arithmetic is that of whole numbers."""

    weight: float = 0.0
    moment: float = 0.0
    updates: int = 0
    cursor: int = 0
    bundle: str = ""

    def state(self) -> dict[str, Any]:
        weights = {"w": self.weight}
        optimizer = {"m": self.moment, "step": self.updates}
        return {"model": weights, "masters": weights, "optimizer": optimizer}


@dataclass
class Loop:
    """The loop, its bundles by the number of updates, and what of it does not go back."""

    record: Recorder
    per_iteration: int
    held: Held = field(default_factory=Held)
    saved: dict[int, Held] = field(default_factory=dict)

    @property
    def iteration(self) -> int:
        return self.held.updates // self.per_iteration

    def until(self, updates: int, folder: Path) -> None:
        while self.held.updates < updates:
            with self.record.iteration(self.iteration):
                while True:
                    self.update()
                    whole = self.held.updates % self.per_iteration == 0
                    if not whole:
                        self.save(folder)
                    if self.held.updates == updates and not whole:
                        self.record.flush()
                        return  # the process is killed within the iteration
                    if whole:
                        break
            self.save(folder)

    def update(self) -> None:
        held, iteration = self.held, self.iteration
        place, (epoch, index) = held.cursor, divmod(held.cursor, len(DATA))
        row = DATA[index]
        self.record.drawn(iteration, start=place, indices=[index], epoch=epoch, prompts=[row])
        self.record.consumed(iteration, [Consumed(uid(place), row)], version=held.updates)
        with self.record.update(iteration, lambda: held.state()) as update:
            held.moment = held.moment / 2 + sum(row)
            held.weight += held.moment
            held.updates, held.cursor = held.updates + 1, held.cursor + 1
            update.micro_batch(tokens=len(row), samples=1, divisor=len(row))
            update.applied(
                version=held.updates,
                optimizer_step=held.updates,
                learning_rate=RATE,
                loss=0.0,
                grad_norm=1.0,
            )

    def save(self, folder: Path) -> None:
        held, file = self.held, folder / f"bundle-{self.held.updates}"
        place = {"iteration": self.iteration, "version": held.updates, "cursor": held.cursor}
        with self.record.checkpoint(file, held.state(), **place) as bundle:  # type: ignore[arg-type]
            file.write_text(bundle)
        self.saved[held.updates] = replace(held, bundle=bundle)

    def back(self, to: int, ahead: str = "", *, said: bool = True) -> None:
        """Load a bundle, but for the field ``ahead``."""
        kept = {ahead: getattr(self.held, ahead)} if ahead else {}
        self.held = replace(self.saved[to], **kept)
        if said:
            place = {"iteration": to // self.per_iteration, "version": self.held.updates}
            self.record.restored(
                self.held.bundle,
                self.held.state(),
                cursor=self.held.cursor,
                **place,
            )


def run(
    folder: Path,
    *,
    stop: int,
    to: int,
    per_iteration: int = 1,
    anew: bool = False,
    ahead: str = "",
    said: bool = True,
) -> Verdict:
    """Go on to ``stop`` updates, back to ``to``, and on to the end; ``anew``: in a new attempt."""
    url = f"sqlite:///{folder}/l.db"
    made = plan(**ROOM | {"iterations": UPDATES // per_iteration})

    def opened(held: Held | None) -> Recorder:
        began = held or Held()
        record = Recorder.open(
            url,
            "job",
            made,
            policy={"w": began.weight},
            version=began.updates,
            iteration=began.updates // per_iteration,
            bundle=None if held is None else held.bundle,
        )
        record.data(data_digests(DATA), tokenizer="t")
        return record

    loop = Loop(opened(None), per_iteration)
    loop.until(stop, folder)
    if anew:
        loop.record.close()
        loop.record = opened(loop.saved[to])
    loop.back(to, ahead, said=said)
    loop.until(UPDATES, folder)
    loop.record.finish(
        iterations=made.iterations, version=loop.held.updates, policy={"w": loop.held.weight}
    )
    loop.record.close()
    return verify(url)


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(
    ("per_iteration", "stop", "to"), [(1, 3, 3), (1, 4, 2), (3, 5, 4), (3, 5, 5), (3, 6, 1)]
)
def test_going_back_to_a_bundle_is_clean(
    per_iteration: int, stop: int, to: int, anew: bool, tmp_path: Path
) -> None:
    verdict = run(tmp_path, stop=stop, to=to, per_iteration=per_iteration, anew=anew)
    assert not verdict.findings, [f"{f.invariant}: {f.found}" for f in verdict.findings]
    assert verdict.could_not == ()


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(
    ("ahead", "invariant"),
    [("weight", "I1"), ("moment", "I1"), ("cursor", "I2"), ("updates", "I15")],
)
@pytest.mark.parametrize(("per_iteration", "stop", "to"), [(1, 4, 2), (3, 5, 4)])
def test_what_stays_ahead_is_found(
    per_iteration: int, stop: int, to: int, ahead: str, invariant: str, anew: bool, tmp_path: Path
) -> None:
    verdict = run(tmp_path, stop=stop, to=to, per_iteration=per_iteration, anew=anew, ahead=ahead)
    assert invariant in {finding.invariant for finding in verdict.findings}


def test_going_back_without_a_word_is_found(tmp_path: Path) -> None:
    verdict = run(tmp_path, stop=4, to=2, said=False)
    assert {"I2", "I15", "I17"} <= {finding.invariant for finding in verdict.findings}


def test_the_state_of_the_job_goes_back_too(tmp_path: Path) -> None:
    """Commands and moves go by the policy that the loop holds, not by the one it left."""
    url = f"sqlite:///{tmp_path}/l.db"
    made = plan(**ROOM)
    with Recorder.open(url, "job", made, policy={"w": 0.0}) as record, Ledger.open(url) as ledger:
        record.data(data_digests(DATA), tokenizer="t")
        loop = Loop(record, 1)
        loop.until(2, tmp_path)
        second = ledger.state().job("job")
        kept = (second.policy_version, second.iteration, second.policy_fingerprint)
        loop.until(4, tmp_path)
        assert ledger.state().job("job").policy_version == 4
        loop.back(2)
        record.flush()
        after = ledger.state().job("job")
        assert (after.policy_version, after.iteration, after.policy_fingerprint) == kept
