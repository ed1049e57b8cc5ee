"""Goal: a channel hands out every piece until it is answered, and counts one answer for each.

Method: random histories of putting, taking, answering, giving back and dying workers, drawn by
hypothesis; then the orders of events that a loss can come in are played one by one.
"""

from __future__ import annotations

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

    def __init__(self) -> None:
        self.channel = Channel("rollout", "tool")
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
            self.workers[number] = (worker[0], f"life-{number}.{self.lives}")
            self.hands[self.workers[number]] = []

    def finish(self) -> None:
        for number, worker in enumerate(self.workers):
            while self.hands[worker] or self.channel.depth:
                self.act("take", number)
                self.act("answer", number)


@given(ACTS)
@settings(max_examples=200, deadline=None)
def test_every_piece_is_answered_once(acts: list[tuple[str, int]]) -> None:
    history = History()
    for kind, number in acts:
        history.act(kind, number)
    history.finish()
    assert sorted(history.answered) == list(range(history.next_key))
    assert history.channel.in_hand() == 0


def test_a_late_notice_of_a_death_leaves_the_successor_its_work() -> None:
    """The successor may be brought up by the repair after another loss, before the notice."""
    from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
    from shiftbook.jobs.desk import Desk

    desk = Desk(
        VirtualRankPlan(1, 1),
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
