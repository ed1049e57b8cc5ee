"""Goal: one trainer of 4 ranks feeds 8 receivers of engines of 1, 2 and 4, whatever dies there.

Method: every rank is a process of its own. What each engine rank serves is compared, by SHA-256 of
its bits, with what its layout cuts from the trainer's version in this process. Processes are killed
with SIGKILL and stopped with SIGSTOP while others sync.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shiftbook.checkpoint.patch import Lossy
from shiftbook.checkpoint.transfer.boxes import Box, whole
from shiftbook.checkpoint.transfer.catalogue import join_catalogues
from shiftbook.checkpoint.transfer.certificates import make_certificates
from shiftbook.checkpoint.transfer.offers import Offers
from tests.checkpoint.transfer_process import digest, local, weights
from tests.checkpoint.transfer_states import layouts, shards

ROOT = Path(__file__).parents[2]
EIGHT = {"a": 1, "b": 1, "c": 2, "d": 4}
"""Engines by their ranks: eight receivers."""


def expected(version: int, rank: int, ranks: int, new: Mapping[str, Any] | None = None) -> str:
    """The digest of what a rank has to serve, of `new` where that is not the trainer's version."""
    found = {}
    new = weights(version) if new is None else new
    for name, stored in layouts(rank, ranks).items():
        array = np.zeros(stored.layout.stored, dtype=stored.dtype)
        for piece in stored.layout.pieces:
            if piece.logical is not None:
                box, at = Box(piece.offset, piece.size), Box(piece.at, piece.size)
                source = new[piece.logical]
                array[at.window(whole(array.shape))] = source[box.window(whole(source.shape))]
        found[name] = array
    return digest(found)


@dataclass
class Process:
    """A child, and the lines to and from it."""

    child: subprocess.Popen[str]

    @classmethod
    def start(cls, **how: Any) -> Process:
        return cls(
            subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoint.transfer_process", json.dumps(how)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"},
            )
        )

    def tell(self, **what: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(what) + "\n")
        self.child.stdin.flush()

    def hear(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def kill(self) -> None:
        self.child.kill()
        self.child.communicate()


@dataclass
class World:
    """A trainer and its engines, each rank a process."""

    transport: str
    folder: Path
    engines: Mapping[str, int]
    trainer_ranks: int = 4
    stall_s: float = 20.0
    verdict_s: float = 90.0
    max_error: float | None = None
    """Of lossy patches; the engine `strict` does not declare them."""
    loads: bool = False
    """The engines keep what they take in a form of their own."""
    grouped: bool = False
    """The trainer ranks stand in one process group and publish DTensors together."""
    trainers: list[Process] = field(default_factory=list)
    receivers: dict[tuple[str, int], Process] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stack = ExitStack()
        self.how = {
            "transport": self.transport,
            "stall_s": self.stall_s,
            "verdict_s": self.verdict_s,
            "ranks_of_trainer": self.trainer_ranks,
        }
        if self.transport == "flight":
            self.how["tls"] = str(self.folder / "tls")
            make_certificates(self.folder / "tls", ["127.0.0.1"])
        else:
            from shiftbook.checkpoint.transfer.cluster import serve_store

            self.store = serve_store()
            self.how["store"] = self.store.port
        self.how["loads"] = self.loads
        if self.max_error is not None:
            self.how["max_error"] = self.max_error
        if self.grouped:
            self.how["group"] = str(self.folder / "group")
        for rank in range(self.trainer_ranks):
            self.trainers.append(
                Process.start(role="trainer", rank=rank, ranks=self.trainer_ranks, **self.how)
            )
        self.how["ports"] = [process.hear()["port"] for process in self.trainers]
        for target, ranks in self.engines.items():
            for rank in range(ranks):
                self.receivers[target, rank] = self.receiver(target, rank)
        for process in self.receivers.values():
            process.hear()

    def receiver(self, target: str, rank: int, **more: Any) -> Process:
        ranks = self.engines[target]
        if self.max_error is not None and target != "strict":
            more["syncs"] = {"encoding": "int8-difference", "max_error": self.max_error}
        return Process.start(
            role="receiver", target=target, rank=rank, ranks=ranks, **self.how, **more
        )

    def publish(self, version: int, *, limit_s: float = 90.0, targets: Any = None) -> None:
        for process in self.trainers:
            process.tell(do="stage", version=version)
        parts = [local(process.hear()) for process in self.trainers]
        catalogue = join_catalogues(parts)
        if version > 1:
            catalogue = catalogue.model_copy(
                update={"base_version": version - 1, "base_root": self.root}
            )
        self.root = catalogue.root
        for process in self.trainers:
            process.tell(
                do="open",
                catalogue=catalogue.model_dump(mode="json"),
                targets=dict(targets or self.engines),
                limit_s=limit_s,
            )
        for process in self.trainers:
            process.hear()

    def publish_together(self, version: int) -> None:
        for process in self.trainers:
            process.tell(do="publish", version=version, targets=dict(self.engines), limit_s=90.0)
        answers = [process.hear() for process in self.trainers]
        assert answers == [{"version": version, "root": answers[0]["root"]}] * len(answers)

    def sync(self, *targets: str) -> dict[tuple[str, int], Any]:
        chosen = {k: p for k, p in self.receivers.items() if not targets or k[0] in targets}
        for process in chosen.values():
            process.tell(wait_s=30)
        return {key: process.hear() for key, process in chosen.items()}

    def outcomes(self) -> dict[str, Any]:
        self.trainers[0].tell(do="outcomes")
        return {one["target"]: one for one in self.trainers[0].hear()}

    def close(self) -> None:
        for process in [*self.trainers, *self.receivers.values()]:
            process.child.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(transport: str, engines: Mapping[str, int], **how: Any) -> World:
            world = World(transport, tmp_path, engines, **how)
            stack.callback(world.close)
            return world

        yield make


def check_all(world: World, answers: Mapping[tuple[str, int], Any], version: int, how: str) -> None:
    for (target, rank), answer in answers.items():
        assert "error" not in answer, (target, rank, answer)
        assert (answer["version"], answer["encoding"]) == (version, how), (target, rank)
        wanted = expected(version, rank, world.engines[target])
        assert answer["digest"] == wanted, (target, rank)
        assert answer["loaded"] in (None, wanted), (target, rank)


def test_two_trainer_ranks_and_an_engine_of_two(worlds: Any) -> None:
    """The small case: over Flight, whole weights and then a difference."""
    world = worlds("flight", {"e": 2}, trainer_ranks=2)
    for version, how in ((1, "whole"), (2, "patch")):
        world.publish(version)
        check_all(world, world.sync(), version, how)
        assert world.outcomes()["e"]["outcome"] == "serving"


def served_with_a_loss(versions: int, max_error: float) -> list[dict[str, Any]]:
    """What two trainer ranks serve of each version, as their own offers in this process make it."""
    offers = [Offers(rank, lossy=Lossy(max_error=max_error)) for rank in range(2)]
    found = []
    for version in range(1, versions + 1):
        new = weights(version, lossy=True)
        catalogue = join_catalogues([o.stage(version, shards(new, o.rank, 2)) for o in offers])
        served = {name: array.copy() for name, array in new.items()}
        for one in offers:
            one.open(catalogue)
            for name, every in one._versions[version].boxes.items():
                for held in every:
                    window = held.box.window(whole(held.shape))
                    served[name][window] = held.bits.view(served[name].dtype)
        found.append(served)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["flight", "cluster"])
def test_lossy_versions_reach_who_declared_them(worlds: Any, transport: str) -> None:
    """Two trainer ranks, engines of one and two, and one that did not declare a loss: that one is
    refused its second version and serves nothing, the others hold one policy within the bound."""
    bound = 1e-4
    engines = {"one": 1, "two": 2, "strict": 1}
    world = worlds(transport, engines, trainer_ranks=2, max_error=bound)
    for version, served in enumerate(served_with_a_loss(3, bound), 1):
        world.publish(version)
        answers = world.sync()
        for (target, rank), answer in answers.items():
            if target == "strict" and version > 1:
                assert "the plan does not declare" in answer["error"]
                assert not answer["serving"]
                continue
            assert answer["encoding"] == ("whole" if version == 1 else "patch"), answer
            assert answer["digest"] == expected(version, rank, engines[target], served), target
        outcomes = {target: one["outcome"] for target, one in world.outcomes().items()}
        strict = "serving" if version == 1 else "failed"
        assert outcomes == {"one": "serving", "two": "serving", "strict": strict}
        away = [
            np.abs(served[name].astype("f8") - exact.astype("f8")).max(initial=0)
            for name, exact in weights(version, lossy=True).items()
            if exact.dtype.kind == "f"
        ]
        assert max(away) <= bound
        assert (max(away) > 0) == (version > 1)


@pytest.mark.slow
def test_ranks_of_one_process_group_publish_their_shards(worlds: Any) -> None:
    """Four ranks over gloo, two replicas of two shards as DTensors; the catalogue goes round the
    group, and an engine of two pulls from all four."""
    world = worlds("flight", {"e": 2}, grouped=True)
    for version, how in ((1, "whole"), (2, "patch")):
        world.publish_together(version)
        check_all(world, world.sync(), version, how)
        assert world.outcomes()["e"]["outcome"] == "serving"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["flight", "cluster"])
def test_four_trainer_ranks_and_eight_receivers(worlds: Any, transport: str) -> None:
    world = worlds(transport, EIGHT)
    for version, how in ((1, "whole"), (2, "patch")):
        world.publish(version)
        check_all(world, world.sync(), version, how)
        outcomes = world.outcomes()
        assert {t: o["outcome"] for t, o in outcomes.items()} == dict.fromkeys(EIGHT, "serving")
        assert all(o["transport"] == transport for o in outcomes.values())
        if how == "patch":
            assert all(o["moved_bytes"] < o["full_bytes"] / 2 for o in outcomes.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["breaks", "dies"])
def test_all_ranks_of_an_engine_load_a_version_or_none(worlds: Any, fault: str) -> None:
    """An engine of two ranks, each with its own slices, that keeps them in a form of its own.

    Rank 1 breaks half-way through loading version 2, or is killed there, after both ranks were told
    to commit: rank 0 loads version 1 again, though its own load went well, and neither serves. What
    counts as delivered is the merged fingerprint of what was handed to both.
    """
    world = worlds("flight", {"pair": 2}, trainer_ranks=2, verdict_s=15.0, loads=True)
    world.publish(1)
    check_all(world, world.sync(), 1, "whole")
    first = world.outcomes()["pair"]
    assert (first["outcome"], first["root"], first["loaded"]) == ("serving", world.root, True)

    world.publish(2, limit_s=20.0)
    world.receivers["pair", 0].tell(wait_s=30)
    world.receivers["pair", 1].tell(wait_s=30, fault=fault)
    answers = {0: world.receivers["pair", 0].hear()}
    if fault == "dies":
        assert world.receivers["pair", 1].child.wait(60) == -signal.SIGKILL
        world.receivers["pair", 1].kill()  # closes its pipes
    else:
        answers[1] = world.receivers["pair", 1].hear()
        assert "half of it was written" in answers[1]["error"]
    for rank, answer in answers.items():
        assert (answer["version"], answer["serving"]) == (1, False), answer
        assert answer["loaded"] == expected(1, rank, 2)
    assert answers[0]["loads"] == 3  # version 1, version 2, and back
    outcome = world.outcomes()["pair"]
    assert outcome["outcome"] == ("failed" if fault == "breaks" else "lost")

    if fault == "dies":
        world.receivers["pair", 1] = world.receiver("pair", 1)
        world.receivers["pair", 1].hear()
    world.publish(3)
    check_all(world, world.sync(), 3, "whole")
    last = world.outcomes()["pair"]
    assert (last["outcome"], last["root"], last["loaded"]) == ("serving", world.root, True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["flight", "cluster"])
def test_engines_that_die_or_stall_stop_nobody(worlds: Any, transport: str) -> None:
    """One rank of `pair` is killed and `still` is stopped when version 2 comes; `well` takes it.

    When `still` goes on it is late, and does not serve.
    """
    world = worlds(transport, {"pair": 2, "still": 1, "well": 2}, trainer_ranks=2, verdict_s=15.0)
    world.publish(1)
    check_all(world, world.sync(), 1, "whole")
    world.receivers["pair", 1].kill()
    still = world.receivers["still", 0]
    still.child.send_signal(signal.SIGSTOP)
    still.tell(wait_s=5)
    world.publish(2, limit_s=20.0)
    world.receivers["pair", 0].tell(wait_s=5)
    check_all(world, world.sync("well"), 2, "patch")
    left = world.receivers["pair", 0].hear()
    assert "error" in left
    assert not left["serving"]
    outcomes = world.outcomes()
    assert outcomes["well"]["outcome"] == "serving"
    assert outcomes["pair"]["outcome"] in ("lost", "failed")
    assert outcomes["still"]["outcome"] == "lost"
    still.child.send_signal(signal.SIGCONT)
    late = still.hear()
    assert "ended for it" in late["error"], late
    assert not late["serving"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["flight", "cluster"])
def test_a_killed_receiver_goes_on_where_it_was(
    worlds: Any, transport: str, tmp_path: Path
) -> None:
    """Killed with SIGKILL in the middle of a pull, with a spool in a file: its successor asks only
    for what is not there yet."""
    spool = tmp_path / "spool"
    spool.mkdir()
    world = worlds(transport, {"e": 1}, trainer_ranks=2, stall_s=4.0)
    world.publish(1)
    world.receivers["e", 0].kill()
    first = world.receiver("e", 0, spool=str(spool), dies_after=2)
    first.hear()
    first.tell(wait_s=30)
    assert first.child.wait(60) == -signal.SIGKILL
    first.kill()  # closes its pipes
    again = world.receiver("e", 0, spool=str(spool))
    again.hear()
    again.tell(wait_s=30)
    answer = again.hear()
    again.kill()
    assert answer["resumed"], answer
    assert answer["digest"] == expected(1, 0, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["flight", "cluster"])
def test_a_killed_sender_is_named_and_its_successor_serves(worlds: Any, transport: str) -> None:
    """Rank 1 is killed before version 2 is pulled: nobody serves it. Started again under its rank
    and port it publishes version 3, which all take."""
    world = worlds(transport, {"a": 1, "b": 2}, trainer_ranks=2, stall_s=4.0, verdict_s=30.0)
    world.publish(1)
    check_all(world, world.sync(), 1, "whole")
    world.publish(2, limit_s=45.0)
    world.trainers[1].kill()
    for answer in world.sync().values():
        assert "SourceLost" in answer["error"]
        assert "ranks [1]" in answer["error"]
        assert not answer["serving"]

    port = world.how["ports"][1]
    again = Process.start(role="trainer", rank=1, ranks=2, port=port, **world.how)
    world.trainers[1] = again
    again.hear()
    # The successor has no version 2 to make differences from: the catalogue has no base.
    for process in world.trainers:
        process.tell(do="stage", version=3)
    catalogue = join_catalogues([local(process.hear()) for process in world.trainers])
    for process in world.trainers:
        process.tell(
            do="open",
            catalogue=catalogue.model_dump(mode="json"),
            targets={"a": 1, "b": 2},
            limit_s=60,
        )
        process.hear()
    check_all(world, world.sync(), 3, "whole")
