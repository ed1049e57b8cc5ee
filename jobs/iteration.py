"""One iteration's samples: where each episode stands, which groups are complete, what is next."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shiftbook.checkpoint.sampler import Draw
from shiftbook.jobs.engine_types import TurnRequest, TurnResult
from shiftbook.jobs.grpo import GroupBatch, make_group_batch
from shiftbook.jobs.keyed_rng import format_uid, parse_uid
from shiftbook.jobs.task import EpisodeState, new_episode
from shiftbook.scheduler.channels import Work, Worker


@dataclass
class Sample:
    """An episode and who made its last turn."""

    episode: EpisodeState
    worker: Worker = ("", "")
    expected_turns: float = 3.0


@dataclass
class Iteration:
    """The samples of one iteration; safe to use from several threads under its lock.

    A group is numbered by its place in the draw (0 to ``len(draws)`` - 1), which is also the order
    in which virtual ranks own groups. ``version`` is the policy version that generates all of it;
    None leaves that to the engines.
    """

    number: int
    seed: int
    draws: list[Draw]
    group_size: int
    version: int | None = None
    samples: dict[str, Sample] = field(default_factory=dict)
    batches: dict[int, GroupBatch] = field(default_factory=dict)
    """Complete groups."""
    referenced: dict[int, GroupBatch] = field(default_factory=dict)
    """Complete groups with reference log-probabilities."""
    trained: set[int] = field(default_factory=set)
    """Groups whose gradient is in the update."""
    turns_done: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._first = self.draws[0].ordinal
        self._open_in_group = dict.fromkeys(range(len(self.draws)), self.group_size)
        for draw in self.draws:
            for member in range(self.group_size):
                uid = format_uid(draw.ordinal, member)
                self.samples[uid] = Sample(new_episode(self.seed, uid, draw.index))

    def group_of(self, uid: str) -> int:
        """Place of a sample's group in the draw."""
        return parse_uid(uid)[0] - self._first

    def prompt(self, group: int) -> list[int]:
        """Tokens of a group's question, as its episodes begin with them."""
        uid = format_uid(self.draws[group].ordinal, 0)
        episode = self.samples[uid].episode
        return episode.tokens[: len(episode.question.tokens)]

    def first_turns(self) -> list[Work]:
        """The first turn of every episode, in group order so that groups complete early."""
        return [self._turn(sample.episode, "trainer") for sample in self.samples.values()]

    def _turn(self, episode: EpisodeState, source: str) -> Work:
        request = episode.next_request()
        request.version = self.version
        return Work(request.key, request, tool_calls_done=episode.calls, source=source)

    def turn_done(self, result: TurnResult, worker: Worker) -> tuple[str, Work | int] | None:
        """Take in a turn: ``("tool", call)``, ``("group", index)`` when it completed a group, or
        None when the episode ended and its group is not complete yet."""
        with self.lock:
            sample = self.samples[result.uid]
            episode = sample.episode
            episode.absorb_turn(result)
            sample.worker = worker
            self.turns_done += 1
            if episode.pending_call is not None:
                return "tool", Work((episode.uid, episode.turn), episode.pending_call)
            return self._ended(result.uid)

    def tool_done(self, key: Hashable, tokens: list[int]) -> tuple[str, Work | int] | None:
        """Take in a tool's result: ``("rollout", next turn)`` or as ``turn_done`` at the end."""
        with self.lock:
            assert isinstance(key, tuple)
            uid = str(key[0])
            episode = self.samples[uid].episode
            episode.absorb_tool(tokens)
            if episode.done:
                return self._ended(uid)
            return "rollout", self._turn(episode, "tool")

    def _ended(self, uid: str) -> tuple[str, Work | int] | None:
        group = self.group_of(uid)
        self._open_in_group[group] -= 1
        if self._open_in_group[group]:
            return None
        self.batches[group] = make_group_batch(self.episodes(group))
        return "group", group

    def episodes(self, group: int) -> list[EpisodeState]:
        """Episodes of a group, in member order."""
        ordinal = self.draws[group].ordinal
        return [
            self.samples[format_uid(ordinal, member)].episode for member in range(self.group_size)
        ]

    @property
    def outstanding(self) -> int:
        """Episodes that have not ended."""
        return sum(self._open_in_group.values())

    @property
    def generated(self) -> bool:
        """True when every episode has ended."""
        return len(self.batches) == len(self.draws)

    @property
    def complete(self) -> bool:
        """True when every group is in the update."""
        return len(self.trained) == len(self.draws)

    def progress(self) -> dict[str, int]:
        """How far the iteration is, in groups, episodes and turns."""
        with self.lock:
            return {
                "groups": len(self.draws),
                "outstanding": self.outstanding,
                "turns_done": self.turns_done,
                "completed": len(self.batches),
                "referenced": len(self.referenced),
                "trained": len(self.trained),
                "samples": len(self.samples),
            }

    def rows(self) -> Iterable[tuple[str, Sample]]:
        """(uid, sample) in uid order."""
        return sorted(self.samples.items())

    def reward_mean(self) -> float:
        """Mean reward of all samples."""
        rewards = [sample.episode.reward for sample in self.samples.values()]
        return sum(rewards) / len(rewards)


def partial_turns(items: Iterable[tuple[Hashable, Any]]) -> int:
    """Tokens sampled in turns that have not ended."""
    return sum(len(item.partial) for _, item in items if isinstance(item, TurnRequest))
