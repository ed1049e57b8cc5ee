"""One process of the transfer tests: a trainer rank that serves, or one rank of an engine.

It takes one JSON object as its argument and JSON lines on stdin; each line of stdout is an answer.
A trainer rank publishes on `publish`; an engine rank syncs on `sync` and says what it serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shiftbook.checkpoint.errors import TransferError
from shiftbook.checkpoint.patch import Lossy
from shiftbook.checkpoint.transfer.catalogue import Catalogue, LocalCatalogue
from shiftbook.checkpoint.transfer.certificates import ServerFiles
from shiftbook.checkpoint.transfer.link import Link
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.receiver import Receiver
from shiftbook.checkpoint.transfer.source import Source
from shiftbook.checkpoint.transfer.staging import Staging
from shiftbook.checkpoint.transfer.tokens import issue_token
from shiftbook.ledger.plan import SyncPlan
from tests.checkpoint.transfer_states import SECRET, drifted, layouts, nudged, shards, state


def weights(version: int, lossy: bool = False) -> dict[str, Any]:
    """The same in every process: version 1, and small changes of it; where patches may lose
    something, changes of every element."""
    found = state(1)
    for later in range(2, version + 1):
        found = drifted(found) if lossy else nudged(found, later)
    return found


def say(value: Any) -> None:
    """One answer."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def digest(tensors: dict[str, Any]) -> str:
    """Of all bits that a rank serves."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].tobytes())
    return found.hexdigest()


def joined(how: dict[str, Any]) -> Any:
    """A mesh of two replicas of two shards over gloo, with the other trainer ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rank, world = how["rank"], how["ranks"]
    store = dist.FileStore(how["group"], world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))


def as_dtensors(held: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Sharded over rows within a replica as FSDP2 leaves parameters, scalars on every rank."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found = {}
    for name, array in held.items():
        tensor = torch.from_numpy(array.copy() if array.shape else array.reshape(1).copy()[0:1])
        tensor = tensor.reshape(array.shape)
        placements = [Replicate(), Shard(0) if array.shape else Replicate()]
        size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        mine = tensor[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
        found[name] = DTensor.from_local(
            mine.clone(),
            mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return found


def trainer(how: dict[str, Any]) -> None:
    """Serve one rank's shards; the desk is rank 0's, and it is told what to do by lines."""
    mesh = joined(how) if how.get("group") else None
    from shiftbook.checkpoint.transfer.desk import Desk

    rank, ranks = how["rank"], how["ranks"]
    bound = how.get("max_error")
    lossy = None if bound is None else Lossy(max_error=bound)
    offers, desk = Offers(rank, lossy=lossy), Desk() if rank == 0 else None
    served: Any
    if how["transport"] == "flight":
        from shiftbook.checkpoint.transfer.flight import FlightSource

        files = ServerFiles.within(Path(how["tls"]))
        served = FlightSource(Source(offers, desk), files, SECRET, port=how.get("port", 0))
        say({"port": served.port})
    else:
        from shiftbook.checkpoint.transfer.cluster import ClusterSource

        served = ClusterSource(Source(offers, desk), "127.0.0.1", how["store"])
        say({"port": 0})
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["do"]:
            case "publish":
                from shiftbook.checkpoint.transfer.cluster import over_group

                tensors = as_dtensors(weights(asked["version"]), mesh)
                catalogue = offers.publish(asked["version"], tensors, exchange=over_group())
                if desk is not None:
                    desk.open(catalogue, asked["targets"], limit_s=asked["limit_s"])
                say({"version": catalogue.version, "root": catalogue.root})
            case "stage":
                version = asked["version"]
                mine = shards(weights(version, lossy is not None), rank, ranks)
                local = offers.stage(version, mine)
                say(local.model_dump(mode="json"))
            case "open":
                catalogue = Catalogue.model_validate(asked["catalogue"])
                offers.open(catalogue)
                if desk is not None:
                    desk.open(catalogue, asked["targets"], limit_s=asked["limit_s"])
                say({"version": catalogue.version})
            case "outcomes":
                assert desk is not None
                say([one.model_dump(mode="json") for one in desk.outcomes()])


def links_of(how: dict[str, Any], target: str) -> list[Link]:
    """To every trainer rank."""
    if how["transport"] == "flight":
        from shiftbook.checkpoint.transfer.flight import FlightLink

        return [
            FlightLink(
                rank,
                "127.0.0.1",
                port,
                authority=ServerFiles.within(Path(how["tls"])).authority,
                token=issue_token(SECRET, target, 600),
                stall_s=how["stall_s"],
            )
            for rank, port in enumerate(how["ports"])
        ]
    from shiftbook.checkpoint.transfer.cluster import ClusterLink

    return [
        ClusterLink(rank, "127.0.0.1", how["store"], name=target, stall_s=how["stall_s"])
        for rank in range(how["ranks_of_trainer"])
    ]


def die_after(parcels: int) -> None:
    """Kill this process when so many parcels stand in its second copy."""
    finished = Staging.finished

    def last(staging: Staging, order: Any) -> None:
        finished(staging, order)
        if len(staging.done) == parcels:
            os.kill(os.getpid(), signal.SIGKILL)

    Staging.finished = last  # type: ignore[method-assign]


class Loaded:
    """One rank of an engine that keeps its slices in a form of its own: every array turned around.

    `fault` is what happens at the next load: it breaks half-way, or the process is killed.
    """

    def __init__(self) -> None:
        self.fault = ""
        self.loads = 0
        self._packed: dict[str, Any] = {}

    def install(self, arrays: Mapping[str, Any]) -> None:
        """Load; what the receiver hands over is not kept."""
        fault, self.fault = self.fault, ""
        for number, (name, array) in enumerate(arrays.items()):
            self._packed[name] = np.ascontiguousarray(array.T)
            if fault and number == len(arrays) // 2:
                if fault == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("half of it was written")
        self.loads += 1

    def digest(self) -> str:
        """Of what it would compute with, in the receiver's form."""
        return digest({name: np.ascontiguousarray(a.T) for name, a in self._packed.items()})


def receiver(how: dict[str, Any]) -> None:
    """One rank of an engine."""
    target, rank, ranks = how["target"], how["rank"], how["ranks"]
    if how.get("dies_after"):
        die_after(how["dies_after"])
    mine = Receiver(
        target,
        links_of(how, target),
        layouts(rank, ranks),
        rank=rank,
        ranks=ranks,
        syncs=SyncPlan.model_validate(how.get("syncs", {})),
        limit_bytes=8 << 20,
        verdict_s=how["verdict_s"],
        spool=Path(how["spool"]) if how.get("spool") else None,
    )
    loaded = Loaded() if how.get("loads") else None
    install = None if loaded is None else loaded.install
    say({"ready": target})
    for line in sys.stdin:
        asked = json.loads(line)
        if loaded is not None:
            loaded.fault = asked.get("fault", "")
        try:
            done = mine.sync(wait_s=asked["wait_s"], install=install)
        except TransferError as error:
            said = {"error": f"{type(error).__name__}: {error}", "serving": mine.serving}
            if loaded is not None:
                said |= {"version": mine.version, "loaded": loaded.digest(), "loads": loaded.loads}
            say(said)
            continue
        say(
            {
                "version": done.version,
                "encoding": done.encoding,
                "moved_bytes": done.moved_bytes,
                "resumed": done.resumed,
                "digest": digest(dict(mine.tensors)),
                "loaded": None if loaded is None else loaded.digest(),
            }
        )


def local(value: Any) -> LocalCatalogue:
    """What a trainer rank said that it holds."""
    return LocalCatalogue.model_validate(value)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    (trainer if given["role"] == "trainer" else receiver)(given)
