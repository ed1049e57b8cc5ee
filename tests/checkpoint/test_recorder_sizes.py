"""Goal: a call of any size is recorded, and an append that fails loses and doubles nothing.

Method: draws, drops, bundles in flight, micro batches and generators of many sizes, those around
the limit of an event among them, are recorded into real ledgers, read back and judged; appends and
segments are made to fail once, before and after they took effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shiftbook.checkpoint import recorder_book
from shiftbook.checkpoint.recorder import Recorder, uid
from shiftbook.checkpoint.recorder_data import MOST_DRAWN
from shiftbook.ledger.errors import EvidenceError, InvalidEvent
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.events.state import CheckpointSaved
from shiftbook.ledger.events.training import SamplesDrawn, SamplesDropped
from shiftbook.ledger.evidence import read_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.long_fields import MAX_BODY_BYTES, body_bytes, brought_back, set_apart
from shiftbook.verify.verdict import verify
from tests.checkpoint.test_recorder import plan

STATE = {"model": {"w": 1.0}, "masters": {"w": 1.0}, "optimizer": {"step": 0}}
SIZES = st.one_of(
    st.sampled_from([0, 1, 2, MOST_DRAWN - 1, MOST_DRAWN, MOST_DRAWN + 1, 2 * MOST_DRAWN]),
    st.integers(0, 9_000),
)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder = tmp_path_factory.mktemp("sizes")
    with Ledger.open(f"sqlite:///{folder}/l.db") as made:
        yield made


def opened(ledger: Ledger, job: str = "job", size: int = 1 << 40) -> Recorder:
    made = plan()
    data = made.data.model_copy(update={"dataset_size": size})
    return Recorder.open(ledger, job, made.model_copy(update={"data": data}), policy="0" * 32)


def written(ledger: Ledger, after: int) -> list[Event]:
    """Events from a position on, whole; each of them fits into a ledger."""
    out = []
    for stored in ledger.read(after=after):
        event = stored.parsed()
        segment = getattr(event, "segment", None)
        if segment is not None:
            event = brought_back(event, read_segment(ledger, segment).to_pydict())
        out.append(event)
    return out


# -- sizes ---------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(count=SIZES, start=st.integers(0, 2**62), seed=st.integers(0, 2**31))
@example(count=2_048, start=0, seed=1)
@example(count=100_000, start=2**62, seed=2)
def test_draws_of_any_size(ledger: Ledger, count: int, start: int, seed: int) -> None:
    """One event after the other gives the draw, whatever its size."""
    indices = [(seed + 7 * n) % (1 << 40) for n in range(count)]
    with opened(ledger) as record:
        last = ledger.head().size - 1
        record.drawn(
            3, start=start, indices=indices, epoch=5, prompts=[[seed, n] for n in range(count)]
        )
        record.flush()
    events = [e for e in written(ledger, last) if isinstance(e, SamplesDrawn)]
    assert [e.start for e in events] == [start + i * MOST_DRAWN for i in range(len(events))]
    assert list(chain.from_iterable(e.indices for e in events)) == indices
    digests = list(chain.from_iterable(e.prompt_digests or () for e in events))
    assert len(digests) == len(set(digests)) == count


@settings(max_examples=15, deadline=None)
@given(count=SIZES, wide=st.booleans())
@example(count=6_000, wide=False)
@example(count=100_000, wide=True)
def test_drops_of_any_size(ledger: Ledger, count: int, wide: bool) -> None:
    """Uids are texts of the loop's own, of letters that take several bytes too."""
    uids = [f"größe-{n}\n" if wide else uid(n, 0) for n in range(count)]
    with opened(ledger) as record:
        last = ledger.head().size - 1
        record.dropped(3, uids, "length: too long")
        record.flush()
    events = [e for e in written(ledger, last) if isinstance(e, SamplesDropped)]
    assert list(chain.from_iterable(e.uids for e in events)) == uids
    assert {e.reason for e in events} == {"length: too long"}


@settings(max_examples=15, deadline=None)
@given(count=SIZES)
@example(count=8_192)
@example(count=100_000)
def test_bundles_with_any_number_in_flight(ledger: Ledger, count: int) -> None:
    uids = [uid(n, n % 8) for n in range(count)]
    with opened(ledger) as record:
        last = ledger.head().size - 1
        with record.checkpoint("c", STATE, iteration=1, version=1, cursor=9, in_flight=uids):
            pass
    (saved,) = (e for e in written(ledger, last) if isinstance(e, CheckpointSaved))
    assert list(saved.in_flight or ()) == uids


@pytest.mark.parametrize("count", [1, 500, 20_000])
def test_updates_of_any_number_of_micro_batches(ledger: Ledger, count: int) -> None:
    """Ranks and micro batches with digests of masks, of which a large run has thousands."""
    with opened(ledger) as record:
        last = ledger.head().size - 1
        with record.update(0, STATE) as update:
            for n in range(count):
                update.micro_batch(
                    tokens=n,
                    samples=1,
                    divisor=float("nan") if n == 3 else 1.0,
                    rank=n,
                    first_mask=f"{n:032x}",
                )
                update.rank(n, f"{n:032x}")
            update.applied(
                version=1, optimizer_step=1, learning_rate=1e-3, loss=float("inf"), grad_norm=1.0
            )
        record.random_states(0, "after", {f"rank/{n}": n for n in range(count)})
        record.flush()
    found = [e for e in written(ledger, last) if e.type_() == "UpdateApplied"]
    assert [m.tokens for m in found[0].micro_batches or ()] == list(range(count))  # type: ignore[attr-defined]
    assert [r.rank for r in found[0].ranks or ()] == list(range(count))  # type: ignore[attr-defined]
    assert len(found[0].virtual_ranks) == count  # type: ignore[attr-defined]
    (states,) = (e for e in written(ledger, last) if e.type_() == "RandomStatesRecorded")
    assert len(states.states) == count  # type: ignore[attr-defined]


@pytest.mark.parametrize(("count", "length"), [(400, 20), (400, 200), (3_000, 900)])
def test_syncs_of_any_number_of_names(ledger: Ledger, count: int, length: int) -> None:
    """Names stand in the events as far as there is room; the roots are of all of them."""
    names = [f"{n:0{length}d}" for n in range(count)]
    with opened(ledger) as record:
        last = ledger.head().size - 1
        with record.sync(1, dict.fromkeys(names, 1.0), ["e"]) as sync:
            sync.delivered("e", "e#1", dict.fromkeys(names, 2.0))
        record.flush()
    started, delivered, _ = written(ledger, last)
    assert len(started.source) == (400 if length == 20 else 0)  # type: ignore[attr-defined]
    assert 0 < len(delivered.differing) <= 400  # type: ignore[attr-defined]
    assert started.source_root != delivered.root  # type: ignore[attr-defined]


def test_what_is_set_apart_comes_back() -> None:
    event = CheckpointSaved(
        attempt="a",
        bundle="0" * 64,
        path="p",
        iteration=0,
        policy_version=0,
        parts={"model": "0" * 32},
        cursor=0,
        bytes=0,
        save_s=0.0,
        in_flight=tuple(uid(n) for n in range(10_000)),
    )
    short, rows = set_apart(event)
    assert rows is not None
    assert short.in_flight is None
    assert body_bytes(short) < MAX_BODY_BYTES
    assert brought_back(short, rows) == event
    for field, value in (("parts", "{}"), ("in_flight", "{"), ("in_flight", "7")):
        assert brought_back(short, {"field": [field], "value": [value]}) == short
    assert brought_back(short, {}) == short


def test_what_no_ledger_takes_is_refused_at_its_call(ledger: Ledger) -> None:
    """Held back, it would stop every later append of the run."""
    with opened(ledger) as record:
        last = ledger.head().size - 1
        with pytest.raises(InvalidEvent, match="roots instead of many parts"):
            record.first_use(
                "rollout",
                "e",
                "e#1",
                {f"part {n}": "0" * 32 for n in range(2_000)},
                version=0,
                use="g",
            )
        with pytest.raises(InvalidEvent):
            record.drawn(0, start=0, indices=[1], epoch=0, seed=2**70)
        record.dropped(0, ["000000/0"], "length")
        assert record.flush()
    assert [type(e) for e in written(ledger, last)] == [SamplesDropped]


def test_a_run_with_large_calls_is_clean(tmp_path: Path) -> None:
    """2,048 prompts a step over the ends of epochs, 6,000 dropped, 8,000 in flight, one judge."""
    prompts, dataset, steps = 2_048, 3_000, 3
    data = [[n, n % 7] for n in range(dataset)]
    made = plan()
    made = large_plan(made, data, prompts)
    url = f"sqlite:///{tmp_path}/large.db"
    layer = torch.nn.Linear(2, 1)
    names = dict(layer.named_parameters())
    large_run(url, made, names, data, prompts, steps)
    verdict = verify(url)
    assert verdict.word == "clean", (verdict.findings, verdict.could_not)


def large_plan(base: Any, data: list[list[int]], prompts: int) -> Any:
    from shiftbook.checkpoint.recorder import data_digests, dataset_digest

    declared = {"dataset_digest": dataset_digest(data_digests(data)), "dataset_size": len(data)}
    update = base.update.model_copy(update={"prompts_per_update": prompts})
    return base.model_copy(
        update={
            "data": base.data.model_copy(update=declared),
            "update": update,
            "drop_rules": ("length",),
            "sampling": base.sampling.model_copy(update={"staleness_bound": 4}),
        }
    )


def large_run(
    url: str, made: Any, names: dict[str, Any], data: list[list[int]], prompts: int, steps: int
) -> None:
    """Draws that run ahead by four batches: of each, half are dropped and half are trained."""
    from shiftbook.checkpoint.recorder import Consumed, data_digests

    state = {"model": names, "masters": names, "optimizer": {"step": torch.zeros(1)}}
    with Recorder.open(url, "large", made, policy=names) as record:
        record.data(data_digests(data), tokenizer="t")
        drawn: list[int] = []
        for batch in range(steps + 4):
            ordinals = list(range(batch * prompts, (batch + 1) * prompts))
            record.drawn(
                min(batch, steps - 1),
                start=ordinals[0],
                indices=[n % len(data) for n in ordinals],
                epoch=ordinals[0] // len(data),
                prompts=[data[n % len(data)] for n in ordinals],
            )
            drawn += ordinals
        for step in range(steps):
            used, drawn = drawn[:prompts], drawn[prompts:]
            with record.iteration(step):
                record.consumed(
                    step, [Consumed(uid(n), data[n % len(data)]) for n in used], version=step
                )
                with record.update(step, state) as update:
                    for value in names.values():
                        value.data += 1.0
                    state["optimizer"]["step"] += 1
                    for n in used:
                        update.micro_batch(
                            tokens=2, samples=1, divisor=2.0 * prompts, groups=[uid(n)]
                        )
                    update.applied(
                        version=step + 1,
                        optimizer_step=step + 1,
                        learning_rate=0.01,
                        loss=0.0,
                        grad_norm=1.0,
                    )
            held = [uid(n) for n in drawn]
            with record.checkpoint(
                "none",
                state,
                iteration=step + 1,
                version=step + 1,
                cursor=(steps + 4) * prompts,
                in_flight=held,
            ):
                pass
        record.dropped(steps - 1, [uid(n) for n in drawn], "length: the run has ended")
        record.finish(iterations=steps, version=steps, policy=names)


# -- failures ------------------------------------------------------------------------------------


class Full(Exception):
    """Stands for whatever a ledger, a disk or a library raises."""


Failing = Callable[[pytest.MonkeyPatch], Callable[[], None]]
"""Puts a failure in; what it gives lets it happen, once."""


def _append_fails(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return _fails_once(patch, Ledger, "append", Full("no"), done=False)


def _append_fails_when_it_is_done(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The events stand in the ledger, and nobody was told."""
    return _fails_once(patch, Ledger, "append", Full("no answer"), done=True)


def _segments_fail(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return _fails_once(patch, recorder_book, "write_segments", EvidenceError("full"), done=False)


def _fails_once(
    patch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, *, done: bool
) -> Callable[[], None]:
    original, due = getattr(owner, name), [False]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not due[0]:
            return original(*args, **kwargs)
        due[0] = False
        if done:
            original(*args, **kwargs)
        raise error

    patch.setattr(owner, name, failing)
    return lambda: due.__setitem__(0, True)


@pytest.mark.parametrize("fail", [_append_fails, _append_fails_when_it_is_done, _segments_fail])
@pytest.mark.parametrize("more", [False, True])
def test_a_flush_that_fails_once_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Failing, more: bool
) -> None:
    """The second try comes right after, or after more has been recorded."""
    expected = ["SamplesDrawn", "RewardsRescored", "BatchConsumed", "StateFirstUsed"]
    expected += ["UpdateApplied"]
    now = fail(monkeypatch)
    with Ledger.open(f"sqlite:///{tmp_path}/l.db") as ledger, opened(ledger) as record:
        last = ledger.head().size - 1
        record.drawn(0, start=0, indices=[0], epoch=0)
        record.rescored(0, {}, {})
        record.consumed(0, [], version=0)
        with record.update(0, STATE) as update:
            update.applied(
                version=1,
                optimizer_step=1,
                learning_rate=1e-3,
                loss=0.0,
                grad_norm=1.0,
                tokens=1,
                divisor=1.0,
            )
        now()
        with pytest.raises((Full, EvidenceError)):
            record.flush()
        if more:
            record.random_states(0, "after", {"rank/0": 1})
            expected.append("RandomStatesRecorded")
        assert record.flush()
        assert record.flush()
        assert [event.type_() for event in written(ledger, last)] == expected


def test_a_call_that_was_refused_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made before a call's records are taken: what raises has recorded nothing."""
    now = _append_fails(monkeypatch)
    with Ledger.open(f"sqlite:///{tmp_path}/l.db") as ledger, opened(ledger) as record:
        last = ledger.head().size - 1
        for n in range(recorder_book.MAX_BUFFERED):
            record.dropped(0, [uid(n)], "length")
        now()
        with pytest.raises(Full):
            record.dropped(0, [uid(10**6)], "length")
        record.dropped(0, [uid(10**6)], "length")
        record.flush()
        found = [e.uids[0] for e in written(ledger, last) if isinstance(e, SamplesDropped)]
    assert found == [*(uid(n) for n in range(recorder_book.MAX_BUFFERED)), uid(10**6)]
