"""Goal: a channel hands out every piece until it is answered, and counts one answer for each.

Method: random histories of putting, taking, answering, giving back and dying workers, drawn by
hypothesis; then the orders of events that a loss can come in are played one by one.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.scheduler.channels import Channel, Exchange, Work, Worker

ACTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "take", "answer", "twice", "back", "die"]), st.integers(0, 3)
    ),
    max_size=80,
)


class History:
    """A channel, its living workers, and what each has in hand."""

    def __init__(self, width: int | None) -> None:
        self.channel = Channel("rollout", "tool", width)
        self.workers: list[Worker] = [(f"tool-{n}", f"life-{n}.0") for n in range(4)]
        self.hands: dict[Worker, list[int]] = {worker: [] for worker in self.workers}
        self.lives = 0
        self.next_key = 0
        self.answered: list[int] = []

    def act(self, kind: str, number: int) -> None:
        worker = self.workers[number]
        hand = self.hands[worker]
        if kind == "put":
            self.channel.put(Work(self.next_key, f"item {self.next_key}"))
            self.next_key += 1
        elif kind == "take":
            hand += [int(str(w.key)) for w in self.channel.take(worker, number + 1)]
        elif kind in ("answer", "twice") and hand:
            key = hand.pop(0)
            counted = self.channel.answer(worker, key)
            assert counted is not None
            self.answered.append(key)
            if kind == "twice":
                assert self.channel.answer(worker, key) is None
        elif kind == "back":
            self.channel.give_back(worker, [(key, f"item {key}") for key in hand])
            hand.clear()
        elif kind == "die":
            self.lives += 1
            lost = self.channel.lose(worker)
            assert sorted(map(str, lost)) == sorted(map(str, hand))
            assert self.channel.take(worker, 9) == [], "a take of the dead that was held open"
            self.hands.pop(worker)
            self.workers[number] = (worker[0], f"life-{number}.{self.lives}")
            self.hands[self.workers[number]] = []

    def finish(self) -> None:
        while self.channel.depth or any(self.hands.values()):
            for number, worker in enumerate(self.workers):
                self.act("take", number)
                if self.hands[worker]:
                    self.act("answer", number)


@given(ACTS, st.sampled_from([None, 1, 2, 4]))
@settings(max_examples=200, deadline=None)
def test_every_piece_is_answered_once(acts: list[tuple[str, int]], width: int | None) -> None:
    history = History(width)
    for kind, number in acts:
        history.act(kind, number)
    history.finish()
    assert sorted(history.answered) == list(range(history.next_key))
    assert history.channel.in_hand() == 0


ENGINES: list[Worker] = [(f"rollout-{n}", "life") for n in range(3)]


def engines_with(in_hand: list[int], waiting: int, width: int = 4) -> Channel:
    """A channel to engines of some lanes, each with some turns in hand, and turns that wait."""
    channel = Channel("trainer", "rollout", width)
    for engine, count in zip(ENGINES, in_hand, strict=False):
        channel.take(engine, 0)
        for key in range(count):
            channel.put(Work(f"{engine}/{key}", ""))
            taken = channel.take(engine, 1, held=[e[0] for e in ENGINES if e != engine])
            assert len(taken) == 1
    for key in range(waiting):
        channel.put(Work(key, ""))
    return channel


@pytest.mark.parametrize(
    ("in_hand", "waiting", "asks", "gets"),
    [
        ([3, 1], 1, 1, 0),  # the fuller one has room for it
        ([3, 1], 1, 0, 1),
        ([3, 1], 2, 1, 1),  # and for one only
        ([4, 1], 2, 1, 2),
        ([4, 0, 0], 3, 2, 3),  # nobody keeps it for the emptier
        ([4, 1], 3, 0, 0),  # they would wait behind its own, while another could begin
        ([4, 1], 5, 0, 2),
        ([4, 4], 5, 0, 5),  # nobody has room
        ([0, 0], 20, 0, 16),  # enough for the lanes of both
        ([6, 0], 1, 0, 0),
    ],
)
def test_few_turns_go_to_few_engines(
    in_hand: list[int], waiting: int, asks: int, gets: int
) -> None:
    channel = engines_with(in_hand, waiting)
    assert len(channel.take(ENGINES[asks], 20)) == gets


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 30), st.data())
@settings(deadline=None)
def test_all_lanes_are_filled_where_there_is_enough(
    in_hand: list[int], waiting: int, data: st.DataObject
) -> None:
    """Whoever asks in whatever order: no turn waits while a lane is free, and no more engines are
    at work than were before or are needed."""
    channel = engines_with(in_hand, waiting)
    engines = ENGINES[: len(in_hand)]
    order = data.draw(st.permutations(engines))
    for engine in [*order, *order, *order]:
        channel.take(engine, 20)
    hands = [len(channel.owed(engine)) for engine in engines]
    if channel.depth:
        assert min(hands) >= 4
    total = sum(in_hand) + waiting
    before = sum(count > 0 for count in in_hand)
    surplus = sum(max(0, count - 4) for count in in_hand)
    assert sum(hand > 0 for hand in hands) <= max(before, -(-(total - surplus) // 4))


def test_what_is_kept_for_an_engine_that_is_stuck_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = engines_with([3, 1], 2)
    assert len(channel.take(ENGINES[1], 20)) == 1
    assert channel.take(ENGINES[1], 20) == []
    monkeypatch.setattr("shiftbook.scheduler.channels.RESERVE_S", 0.0)
    assert len(channel.take(ENGINES[1], 20)) == 1


def test_a_late_notice_of_a_death_leaves_the_successor_its_work() -> None:
    """The successor may be brought up by the repair after another loss, before the notice."""
    from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
    from shiftbook.jobs.desk import Desk

    desk = Desk(
        VirtualRankPlan(1, 1),
        lanes=4,
        phases=False,
        generated=lambda iteration: None,
        first_use=lambda component, worker, use: None,
    )
    channel = desk.exchange.by_target["tool"]
    for key in range(4):
        channel.put(Work(key, "1+1"))
    old, new = ("tool-0", "old"), ("tool-0", "new")
    assert len(desk.take("tool", old, 2, None, 0.0)) == 2
    assert len(desk.take("tool", new, 1, None, 0.0)) == 1
    assert sorted(desk.lose("tool", "tool-0", "new")) == ["0", "1"]
    assert desk.take("tool", old, 9, None, 0.0) == []
    assert len(desk.take("tool", new, 9, None, 0.0)) == 3


def test_held_replicas_get_nothing() -> None:
    exchange = Exchange([Channel("rollout", "tool")])
    exchange.by_target["tool"].put(Work("a", 1))
    exchange.hold("tool-0")
    assert exchange.take("tool", ("tool-0", "x"), 1, None) == []
    exchange.feed("tool-0")
    assert [w.key for w in exchange.take("tool", ("tool-0", "x"), 1, None)] == ["a"]
