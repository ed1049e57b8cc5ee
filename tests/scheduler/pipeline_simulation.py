"""A small discrete-time simulation of the reference job, for the planner's tests.

Engines with fixed lanes, tools that make episodes wait, groups that the followers take when they
are complete, virtual ranks that own their groups, devices on which the source has priority, and
moves that take time. It shares no formula with the model that it tests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shiftbook.ledger.events.observation import ComponentWindow, WindowObserved
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.layout import Roles
from shiftbook.scheduler.makespan import Progress
from shiftbook.scheduler.routing import TurnQueue
from shiftbook.scheduler.throughput import IterationMeasured

TICK_S = 0.001
LANES = 8
VIRTUAL_RANKS = 4


@dataclass(frozen=True)
class Workload:
    """Times of the reference job."""

    groups: int = 32
    group_size: int = 8
    turn_s: float = 0.045
    tool_median_s: float = 0.02
    infer_s: float = 0.010
    train_s: float = 0.031
    update_s: float = 0.04
    pause_s: float = 0.03
    grow_s: float = 0.04
    reshard_s: float = 0.06
    combined_s: float = 0.08

    def cost_s(self, kind: str) -> float:
        ending = kind.rsplit("-", 1)[-1]
        by_ending = {"shrink": self.pause_s, "grow": self.grow_s, "combined": self.combined_s}
        return by_ending.get(ending, self.reshard_s)


@dataclass
class Episode:
    key: int
    group: int
    turns: int
    done: int = 0
    left_s: float = 0.0
    wakes_s: float = -1.0


def on(*places: int) -> list[str]:
    return [f"n0/{place}" for place in places]


def topology(rollout: list[int], trainer: list[int]) -> Topology:
    return Topology.of(
        {
            "rollout": on(*rollout),
            "inference": on(*trainer),
            "trainer": on(*trainer),
            "tool": [],
        }
    )


@dataclass
class Job:
    """One job; ``step`` advances it by a tick."""

    work: Workload
    topology: Topology
    seed: int
    now_s: float = 0.0
    iteration: int = -1
    walls: list[float] = field(default_factory=list)
    measured: list[IterationMeasured] = field(default_factory=list)
    moves: list[tuple[int, float, str, Topology]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = Roles()
        self.engines: dict[str, list[Episode]] = {}
        self.jobs: dict[str, tuple[str, int, float]] = {}
        self.pending: tuple[Topology, str, float] | None = None
        self.busy = dict.fromkeys(("rollout", "inference", "trainer"), 0.0)
        self.units = dict.fromkeys(("rollout", "inference", "trainer"), 0)
        self._begin()

    def _begin(self) -> None:
        self.iteration += 1
        self.began_s = self.now_s
        self.update_left_s: float | None = None
        self.tail_s: float | None = None
        self.ended_s: float | None = None
        w, rng = self.work, random.Random(self.seed * 1000 + self.iteration)
        self.episodes = [
            Episode(k, k // w.group_size, rng.randint(3, 6)) for k in range(w.groups * w.group_size)
        ]
        self.queue: TurnQueue[int, Episode] = TurnQueue()
        for episode in self.episodes:
            self._enqueue(episode)
        self.asleep: list[Episode] = []
        self.open = [w.group_size] * w.groups
        self.to_infer: list[int] = []
        self.to_train: list[list[int]] = [[] for _ in range(VIRTUAL_RANKS)]
        self.infer_left, self.train_left = w.groups, w.groups
        self.outstanding, self.turns_done = len(self.episodes), 0

    def _enqueue(self, episode: Episode) -> None:
        if episode.left_s <= 0:
            episode.left_s = self.work.turn_s
        self.queue.put(
            episode.key,
            episode,
            tool_calls_done=episode.done,
            cached_tokens=0,
            now_s=self.now_s,
        )

    def devices(self, component: str) -> list[str]:
        return [d for replica in self.topology.replicas(component) for d in replica.devices]

    # One tick

    def step(self) -> None:
        self.now_s += TICK_S
        if self.pending is not None and self.now_s >= self.pending[2]:
            self._arrive()
        for episode in [e for e in self.asleep if e.wakes_s <= self.now_s]:
            self.asleep.remove(episode)
            self._enqueue(episode)
        active = self._roll()
        stopped = self.pending is not None and self.pending[1] in ("trainer-reshard", "combined")
        for device in self.devices("trainer"):
            if device not in active and not stopped:
                self._follow(device)
        if self.train_left == 0:
            self._update()

    def _roll(self) -> set[str]:
        active: set[str] = set()
        serving = self.devices("rollout")
        if self.pending is not None:
            # Engines that the move takes away have handed their turns over already.
            after = {d for r in self.pending[0].replicas("rollout") for d in r.devices}
            serving = [device for device in serving if device in after]
        loads = sorted(serving, key=lambda d: len(self.engines.get(d, [])))
        for device in loads:
            lanes = self.engines.setdefault(device, [])
            lanes += [e for _, e in self.queue.take(LANES - len(lanes), self.now_s)]
            if lanes:
                active.add(device)
                self.busy["rollout"] += TICK_S
            for episode in list(lanes):
                episode.left_s -= TICK_S
                if episode.left_s <= 0:
                    lanes.remove(episode)
                    self._turn_done(episode)
        return active

    def _turn_done(self, episode: Episode) -> None:
        episode.done += 1
        self.turns_done += 1
        self.units["rollout"] += 1
        if episode.done < episode.turns:
            # Keyed by episode and turn, so that every schedule meets the same tools.
            draw = random.Random(f"{self.seed}/{self.iteration}/{episode.key}/{episode.done}")
            episode.wakes_s = self.now_s + draw.lognormvariate(0, 1) * self.work.tool_median_s
            self.asleep.append(episode)
            return
        self.outstanding -= 1
        self.open[episode.group] -= 1
        if self.open[episode.group] == 0:
            self.to_infer.append(episode.group)
        if self.outstanding == LANES:
            self.tail_s = self.now_s
        if self.outstanding == 0:
            self.ended_s = self.now_s

    def _follow(self, device: str) -> None:
        kind, group, left_s = self.jobs.get(device, ("", -1, 0.0))
        if not kind:
            ranks = self.devices("trainer")
            block = VIRTUAL_RANKS // len(ranks)
            own = range(ranks.index(device) * block, (ranks.index(device) + 1) * block)
            lane = max(own, key=lambda v: len(self.to_train[v]))
            if self.to_train[lane]:
                kind, group, left_s = "trainer", self.to_train[lane].pop(0), self.work.train_s
            elif self.to_infer:
                kind, group, left_s = "inference", self.to_infer.pop(0), self.work.infer_s
            else:
                return
        self.busy[kind] += TICK_S
        left_s -= TICK_S
        if left_s > 0:
            self.jobs[device] = (kind, group, left_s)
            return
        self.jobs.pop(device, None)
        self.units[kind] += 1
        if kind == "inference":
            self.infer_left -= 1
            self.to_train[group % VIRTUAL_RANKS].append(group)
        else:
            self.train_left -= 1

    def _update(self) -> None:
        if self.update_left_s is None:
            self.update_left_s = self.work.update_s
        self.update_left_s -= TICK_S
        if self.update_left_s > 0:
            return
        assert self.tail_s is not None
        assert self.ended_s is not None
        self.measured.append(
            IterationMeasured(
                episodes=len(self.episodes),
                turns=self.turns_done,
                update_s=self.work.update_s,
                tail_s=self.ended_s - self.tail_s,
                tail_episodes=LANES,
            )
        )
        self.walls.append(self.now_s - self.began_s)
        self._begin()

    # Moves and telemetry

    def move(self, after: Topology) -> tuple[str, float]:
        kind = self.roles.kind_of_move(self.topology, after)
        assert kind is not None
        cost_s = self.work.cost_s(kind)
        gone = set(self.devices("rollout")) - {
            d for r in after.replicas("rollout") for d in r.devices
        }
        for device in gone:
            for episode in self.engines.pop(device, []):
                self._enqueue(episode)
        for device, (kind_, group, _) in list(self.jobs.items()):
            if kind in ("trainer-reshard", "combined"):
                # A group that was half done is done again: the gradient of a part is not kept.
                del self.jobs[device]
                back = self.to_infer if kind_ == "inference" else self.to_train[group % 4]
                back.insert(0, group)
        self.pending = (after, kind, self.now_s + cost_s)
        self.moves.append((self.iteration, self.now_s - self.began_s, kind, after))
        return kind, cost_s

    def _arrive(self) -> None:
        assert self.pending is not None
        self.topology, self.pending = self.pending[0], None

    def progress(self) -> Progress:
        return Progress(
            iteration=self.iteration,
            elapsed_s=self.now_s - self.began_s,
            episodes=len(self.episodes),
            outstanding=self.outstanding,
            running=sum(len(lanes) for lanes in self.engines.values()),
            waiting=len(self.queue),
            lanes=LANES,
            turns_done=self.turns_done,
            groups_incomplete=sum(1 for count in self.open if count),
            left={"inference": self.infer_left, "trainer": self.train_left},
        )

    def window(self, length_s: float) -> WindowObserved:
        components = {}
        for name in ("rollout", "inference", "trainer"):
            replicas = len(self.topology.replicas(name))
            components[name] = ComponentWindow(
                replicas=replicas,
                throughput=self.units[name] / length_s,
                queue=len(self.queue) if name == "rollout" else len(self.to_infer),
                running=sum(map(len, self.engines.values())) if name == "rollout" else 0,
                waiting=len(self.queue) if name == "rollout" else 0,
                busy_share=min(1.0, self.busy[name] / max(length_s * replicas, 1e-9)),
            )
            self.units[name], self.busy[name] = 0, 0.0
        return WindowObserved(
            attempt="a",
            iteration=self.iteration,
            start_ns=0,
            window_s=length_s,
            components=components,
        )
