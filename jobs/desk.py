"""The exchange of work: hands pieces to workers, takes in answers, and routes what comes next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from shiftbook.jobs.iteration import Iteration
from shiftbook.scheduler.channels import Channel, Exchange, Work, Worker
from shiftbook.scheduler.workers.component import Answer, Parcel

TOOL_LINGER_S = (0.002, 0.015)
"""How long a take of tool calls waits for more: with few episodes outstanding, and with many."""
MANY = 32
"""Episodes outstanding above which nothing is urgent."""


class Desk:
    """Where the workers of a job get work and bring answers; used from many threads.

    ``generated`` is called when the last episode of an iteration has ended, ``first_use`` when a
    worker says what its state was at its first unit of work. An engine decodes ``lanes`` turns side
    by side. In phases (``phases``) a component gets its groups when the one before it has done
    them all.
    """

    def __init__(
        self,
        ranks: VirtualRankPlan,
        *,
        lanes: int,
        phases: bool,
        generated: Callable[[Iteration], None],
        first_use: Callable[[str, Worker, dict[str, Any]], None],
    ) -> None:
        self._ranks, self._phases = ranks, phases
        self._generated, self._first_use = generated, first_use
        self.exchange = Exchange(
            [
                Channel("trainer", "rollout", lanes),
                Channel("rollout", "tool"),
                Channel("rollout", "inference"),
                Channel("inference", "trainer"),
            ]
        )
        self._arrivals = {target: threading.Condition() for target in self.exchange.by_target}
        self.iteration: Iteration | None = None
        self._begun = threading.Condition()
        self.changed = threading.Event()
        """Set when the present iteration's last group is in the update."""
        self.figures: dict[str, dict[str, Any]] = {}
        """Telemetry of each replica, as it said last."""

    # ---- what workers ask ----------------------------------------------------------------

    def take(
        self, component: str, worker: Worker, limit: int, lanes: list[int] | None, wait_s: float
    ) -> list[Work]:
        """Hand out work; holds the call open for a while when there is none."""
        deadline = time.monotonic() + wait_s
        arrival = self._arrivals[component]
        arrived = False
        while True:
            # Looked at under the condition's lock, so that no arrival is missed in between.
            with arrival:
                works = self.exchange.take(component, worker, limit, lanes)
                left_s = deadline - time.monotonic()
                if works or left_s <= 0 or self.exchange.is_held(worker[0]):
                    break
                arrived = arrival.wait(min(left_s, self.exchange.look_again_s(component)))
            if arrived and component == "tool":
                # Calls come one by one and travel together, but for the last ones.
                time.sleep(TOOL_LINGER_S[self._outstanding() > MANY])
        return works

    def deliver(self, parcel: Parcel) -> list[Work]:
        """Take in finished work, and hand out work in exchange."""
        component, worker = parcel.component, parcel.worker
        self.figures[worker[0]] = parcel.figures
        if parcel.first_use is not None:
            self._first_use(component, worker, parcel.first_use)
        for answer in parcel.answers:
            with self.exchange.lock:
                work = self.exchange.by_target[component].answer(worker, answer.key)
            if work is not None:
                self._absorb(component, worker, answer)
        works: list[Work] = []
        if parcel.limit:
            works = self.exchange.take(component, worker, parcel.limit, parcel.lanes)
        return works

    def give_back(
        self, component: str, worker: Worker, items: list[tuple[Hashable, Any]]
    ) -> list[str]:
        """Take back what a worker owes, as it stands."""
        with self.exchange.lock:
            keys = self.exchange.by_target[component].give_back(worker, items)
        self.wake()
        return [key_text(key) for key in keys]

    def hold(self, replica: str) -> None:
        """Hand a replica no more work."""
        self.exchange.hold(replica)
        self.wake()

    def feed(self, replica: str) -> None:
        """Hand a replica work again."""
        self.exchange.feed(replica)
        self.wake()

    def wake(self, component: str | None = None) -> None:
        """Let every take of a component (or of all) that is held open look again."""
        for name in self._arrivals if component is None else (component,):
            arrival = self._arrivals[name]
            with arrival:
                arrival.notify_all()

    # ---- what the training asks ----------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        """Make an iteration the present one, and put out its first turns."""
        self.changed.clear()
        with self._begun:
            self.iteration = iteration
            self._begun.notify_all()
        for work in iteration.first_turns():
            self._put("rollout", work)
        self.wake()

    def await_next(self, number: int, limit_s: float) -> None:
        """Wait until the present iteration is another one than ``number``, or for the limit."""

        def another() -> bool:
            return self.iteration is not None and self.iteration.number != number

        with self._begun:
            self._begun.wait_for(another, limit_s)

    def train_again(self) -> None:
        """The trainer stands at the last bundle: every group of the iteration is due again."""
        iteration = self.iteration
        if iteration is None:
            return
        with iteration.lock:
            with self.exchange.lock:
                self.exchange.by_target["trainer"].clear()
            iteration.trained.clear()
            if not self._phases or len(iteration.referenced) == len(iteration.draws):
                for group in sorted(iteration.referenced):
                    self._put_training(iteration, group)

    def lose(self, component: str, replica: str, successor: str | None) -> tuple[str, ...]:
        """A replica's process died: what it owed waits again; its keys. What its successor, an
        incarnation that may work already, owes stays where it is."""
        with self.exchange.lock:
            channel = self.exchange.by_target[component]
            return tuple(
                key_text(key)
                for worker in channel.workers(replica)
                if worker[1] != successor
                for key in channel.lose(worker)
            )

    def traffic(self) -> dict[str, Any]:
        """Cumulative counts and present depths of the channels, and answers by edge."""
        with self.exchange.lock:
            channels = {
                target: {
                    "depth": channel.depth,
                    "in_hand": channel.in_hand(),
                    "answered": channel.counts.answered,
                    "last_answer_s": channel.counts.last_answer_s,
                }
                for target, channel in self.exchange.by_target.items()
            }
            edges = {f"{a}>{b}": n for (a, b), n in self.exchange.edges().items()}
        return {"channels": channels, "edges": edges}

    def _outstanding(self) -> int:
        iteration = self.iteration
        return 0 if iteration is None else iteration.outstanding

    # ---- routing -------------------------------------------------------------------------

    def _put(self, component: str, work: Work) -> None:
        with self.exchange.lock:
            self.exchange.by_target[component].put(work)
        self.wake(component)

    def _absorb(self, component: str, worker: Worker, answer: Answer) -> None:
        iteration = self.iteration
        if iteration is None:
            return
        if component == "rollout":
            self._route(iteration, iteration.turn_done(answer.value, worker))
        elif component == "tool":
            self._route(iteration, iteration.tool_done(answer.key, answer.value))
        elif component == "inference":
            self._referenced(iteration, answer)
        elif component == "trainer":
            with iteration.lock:
                assert isinstance(answer.key, tuple)
                iteration.trained.add(int(answer.key[1]))
                if iteration.complete:
                    self.changed.set()

    def _route(self, iteration: Iteration, step: tuple[str, Work | int] | None) -> None:
        if step is None:
            return
        where, what = step
        if where != "group":
            assert isinstance(what, Work)
            self._put(where, what)
            return
        assert isinstance(what, int)
        if iteration.generated:
            self._generated(iteration)
        if not self._phases:
            self._put("inference", Work((iteration.number, what), iteration.batches[what]))
        elif iteration.generated:
            for group in sorted(iteration.batches):
                self._put("inference", Work((iteration.number, group), iteration.batches[group]))

    def _referenced(self, iteration: Iteration, answer: Answer) -> None:
        assert isinstance(answer.key, tuple)
        with iteration.lock:
            group = int(answer.key[1])
            iteration.referenced[group] = answer.value
            if not self._phases:
                groups = [group]
            elif len(iteration.referenced) == len(iteration.draws):
                groups = sorted(iteration.referenced)
            else:
                groups = []
            for ready in groups:
                self._put_training(iteration, ready)

    def _put_training(self, iteration: Iteration, group: int) -> None:
        self._put(
            "trainer",
            Work(
                (iteration.number, group),
                iteration.referenced[group],
                lane=self._ranks.rank_of(group),
            ),
        )


def key_text(key: Hashable) -> str:
    """``uid#turn`` of a request, ``iteration#group`` of a group."""
    return "#".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
