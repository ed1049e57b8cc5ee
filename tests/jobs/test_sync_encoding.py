"""Goal: a patch brings an engine to the very bits that whole weights would, or changes nothing.

Method: the job's rollout worker takes versions as the syncer offers them, whole and as patches,
with other bases, other bits and altered bytes. Which engines are sent a patch is asked of a real
ledger whose events say what each holds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs import published as published_module
from shiftbook.jobs import sync_encoding
from shiftbook.jobs.components import RolloutWorker
from shiftbook.jobs.config import JobConfig
from shiftbook.jobs.policy_file import BASE_POLICY, load_policy
from shiftbook.jobs.published import Published
from shiftbook.jobs.serving import Taken
from shiftbook.jobs.sync_encoding import PatchOffer, PatchSource
from shiftbook.jobs.syncing import Syncer
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.sync import WeightSyncCommitted, WeightSyncDelivered
from shiftbook.ledger.gate import Gate
from shiftbook.scheduler.workers.host import HostSpec
from tests.jobs.test_right_of_way import way
from tests.ledger.gate_cases import WIDE, open_gate, running

ENGINES = tuple(replica.name for replica in WIDE.replicas("rollout"))


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would go through Ray's object store is handed on as it is."""
    for module in (sync_encoding, published_module):
        monkeypatch.setattr(module, "offer", lambda value: value)


@pytest.fixture
def worker() -> RolloutWorker:
    spec = HostSpec("rollout", "r0", None, "node", "shiftbook.jobs.components:RolloutWorker")
    return RolloutWorker(spec, {"lanes": 2})


@pytest.fixture(scope="module")
def versions() -> list[dict[str, Tensor]]:
    """Four versions of the policy: a few elements change from each to the next."""
    generator = torch.Generator().manual_seed(4)
    made = [load_policy(BASE_POLICY)]
    for _ in range(3):
        following = {name: tensor.clone() for name, tensor in made[-1].items()}
        for tensor in following.values():
            flat = tensor.view(-1)
            some = torch.randint(flat.numel(), (max(1, flat.numel() // 300),), generator=generator)
            flat[some] *= 1.01
        made.append(following)
    return made


def published(versions: list[dict[str, Tensor]], source: PatchSource | None) -> list[Published]:
    return [Published.of(weights, n, patches=source) for n, weights in enumerate(versions)]


def sync(worker: RolloutWorker, version: Published, encoding: Any = "full") -> Taken:
    taken: Taken = worker.call("sync", version.offered(encoding))
    return taken


def prints(worker: RolloutWorker) -> dict[str, str]:
    resident = worker._serving.engine.resident()
    assert resident is not None
    return fingerprint_tensors(resident)


def test_patches_give_the_bits_of_whole_weights_in_fewer_bytes(
    worker: RolloutWorker, versions: list[dict[str, Tensor]]
) -> None:
    before = [fingerprint_tensors(v) for v in versions]
    for version in published(versions, PatchSource(16)):
        encoding = "full" if version.patch is None else "patch"
        taken = sync(worker, version, encoding)
        assert (taken.failure, taken.base_refused) == (None, None)
        assert prints(worker) == version.prints == taken.fingerprints
        if version.version:
            assert version.patch is not None
            assert (taken.encoding, taken.moved_bytes) == ("patch", version.patch.bytes)
            assert taken.moved_bytes < 0.05 * version.bytes
            assert version.patch.base_version == version.version - 1
        else:
            assert (taken.encoding, taken.moved_bytes) == ("whole", version.bytes)
    # What the engine held, and what the sender keeps, was copied and not written over.
    assert [fingerprint_tensors(v) for v in versions] == before


def test_another_base_is_refused_and_the_engine_stays_as_it_is(
    worker: RolloutWorker, versions: list[dict[str, Tensor]]
) -> None:
    sent = published(versions, PatchSource(16))
    nothing = sync(worker, sent[1], "patch")
    assert "found one without a version" in str(nothing.base_refused)
    assert worker._serving.version == -1

    assert sync(worker, sent[0]).failure is None
    late = sync(worker, sent[2], "patch")
    assert "expected version 1" in str(late.base_refused)
    assert sync(worker, Published.of(versions[3], 1)).failure is None
    held = prints(worker)
    same_number = sync(worker, sent[2], "patch")
    assert "found other contents" in str(same_number.base_refused)
    assert (worker._serving.version, prints(worker)) == (1, held)

    patch = sent[2].patch
    assert patch is not None
    spoilt = patch.reference[:-40] + bytes([patch.reference[-40] ^ 4]) + patch.reference[-39:]
    damaged = sent[2].offered("patch") | {
        "patch": PatchOffer(1, patch.base_root, spoilt, patch.bytes)
    }
    assert sync(worker, sent[1]).failure is None
    taken = worker.call("sync", damaged)
    assert taken.base_refused is not None
    assert prints(worker) == sent[1].prints
    whole = sync(worker, sent[2])
    assert (whole.failure, whole.encoding) == (None, "whole")
    assert prints(worker) == sent[2].prints


def test_a_patch_that_leads_elsewhere_is_rolled_back_by_the_fingerprints(
    worker: RolloutWorker, versions: list[dict[str, Tensor]]
) -> None:
    sent = published(versions, PatchSource(16))
    assert sync(worker, sent[0]).failure is None
    # The patch to version 1 under the name and the fingerprints of version 2.
    lied = sent[2].offered("patch") | {"patch": sent[1].patch}
    taken = worker.call("sync", lied)
    assert "differing" in str(taken.failure)
    assert taken.rolled_back_to == 0
    assert prints(worker) == sent[0].prints


def test_when_the_weights_go_whole(versions: list[dict[str, Tensor]]) -> None:
    every_second = published(versions, PatchSource(2))
    assert [v.patch is not None for v in every_second] == [False, True, False, True]
    assert all(v.patch is None for v in published(versions, PatchSource(1)))
    assert all(v.patch is None for v in published(versions, None))
    source = PatchSource(16)
    noise = [
        {"w": torch.randn(4000, generator=torch.Generator().manual_seed(n)).bfloat16()}
        for n in range(2)
    ]
    sized = [source.next(v, n, fingerprint_tensors(v)) for n, v in enumerate(noise)]
    assert sized[1] is None or sized[1].bytes < 8000
    wrong = {name: tensor.clone() for name, tensor in versions[1].items()}
    next(iter(wrong.values())).view(-1)[3] = torch.nan
    source = PatchSource(16)
    source.next(versions[0], 0, fingerprint_tensors(versions[0]))
    assert source.next(wrong, 1, fingerprint_tensors(wrong)) is None


def test_the_configuration_says_which() -> None:
    values = {"job": "j", "bundles": "b", "base_policy": "p", "ledger_url": "sqlite:///l.db"}
    assert PatchSource.declared(JobConfig(**values)) is None
    assert PatchSource.declared(JobConfig(**values, sync_encoding="patch")) is not None
    with pytest.raises(ValueError, match="sync_encoding"):
        JobConfig(**values, sync_encoding="delta")
    with pytest.raises(ValueError, match="anchor_every"):
        JobConfig(**values, anchor_every=0)


def test_a_rollout_process_is_ready_for_vllm_when_it_has_imported_its_worker() -> None:
    """vLLM does not start where the compiler of fingerprints and patches was imported before."""
    code = "import sys, shiftbook.jobs.components; sys.exit('llvmlite' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = open_gate(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield made
    made.ledger.close()


class _Fleet:
    """Engines that keep what they were sent, and say that they took it."""

    def __init__(self, refuses: set[str]) -> None:
        self.sent: list[tuple[str, str]] = []
        self._refuses = refuses

    def send(self, replica: str, method: str, grant: Any, what: str, offered: dict) -> Taken:
        encoding = "patch" if "patch" in offered else "whole"
        self.sent.append((replica, encoding))
        if encoding == "patch" and replica in self._refuses:
            return Taken(offered["version"], {}, base_refused="expected version 0, found 9")
        names = {k.removeprefix("model/"): v for k, v in offered["fingerprints"].items()}
        return Taken(
            offered["version"], names, caches_flushed=("kv",), moved_bytes=7, encoding=encoding
        )

    def gather(self, futures: dict[str, Taken], *, gone: set[str]) -> dict[str, Taken]:
        return futures

    def each(self, replicas: list[str], method: str) -> dict[str, dict[str, str]]:
        return {replica: {"incarnation": f"{replica}#1"} for replica in replicas}


def synced(
    gate: Gate, versions: list[dict[str, Tensor]], refuses: set[str], known: dict[str, str]
) -> tuple[_Fleet, list[WeightSyncDelivered], WeightSyncCommitted]:
    """Sync version 1 where the ledger says that ``known`` engines hold these roots of version 0."""
    standing = running(gate)
    zero, one = published(versions[:2], PatchSource(16))

    def now(drafts: list[Any], key: str) -> None:
        gate.ledger.append("j", drafts, key=key)

    fleet: Any = _Fleet(refuses)
    recording: Any = SimpleNamespace(flush=lambda: None, spooling=False, now=now)
    syncer = Syncer(gate, recording, fleet, "j", standing, way())
    operation = syncer.begin(zero, ENGINES, None)
    drafts = [
        Draft(
            WeightSyncDelivered(
                target=target, incarnation=f"{target}#1", version=0, root=at,
                fingerprint_of="resident", differing=() if at == zero.root else ("head",),
                moved_bytes=9, full_bytes=9, sync_s=0.1,
            ),
            operation=operation,
        )
        for target, at in known.items()
    ]  # fmt: skip
    ended = WeightSyncCommitted(version=0, outcomes=(), stall_s=0.0, caches_flushed=("kv",))
    now([*drafts, Draft(ended, operation=operation)], "zero")
    outcomes = syncer._deliver(one, lambda: (None, ENGINES), 0, "patch")
    assert [o.outcome for o in outcomes] == ["serving", "serving"]
    parsed = [s.parsed() for s in gate.ledger.read(types={"WeightSyncDelivered"})]
    made = [e for e in parsed if isinstance(e, WeightSyncDelivered) and e.version == 1]
    last = list(gate.ledger.read(types={"WeightSyncCommitted"}))[-1].parsed()
    assert isinstance(last, WeightSyncCommitted)
    return fleet, made, last


def test_engines_that_the_ledger_has_on_the_base_get_the_patch(
    gate: Gate, versions: list[dict[str, Tensor]]
) -> None:
    root = published(versions[:1], None)[0].root
    fleet, made, _ = synced(gate, versions, set(), {ENGINES[0]: root, ENGINES[1]: "0" * 32})
    assert fleet.sent == [(ENGINES[0], "patch"), (ENGINES[1], "whole")]
    assert [(e.target, e.encoding, e.transport) for e in made] == [
        (ENGINES[0], "patch", "ray"),
        (ENGINES[1], "whole", "ray"),
    ]
    started = [s.body["encoding"] for s in gate.ledger.read(types={"WeightSyncStarted"})]
    assert started == ["full", "patch"]


def test_a_refused_patch_is_followed_by_the_whole_weights_in_the_same_sync(
    gate: Gate, versions: list[dict[str, Tensor]]
) -> None:
    root = published(versions[:1], None)[0].root
    fleet, made, ended = synced(gate, versions, {ENGINES[1]}, dict.fromkeys(ENGINES, root))
    assert fleet.sent == [(ENGINES[0], "patch"), (ENGINES[1], "patch"), (ENGINES[1], "whole")]
    assert [e.encoding for e in made] == ["patch", "whole"]
    assert [o.reason for o in ended.outcomes] == [
        None,
        "the patch was refused, the whole weights sent: expected version 0, found 9",
    ]


def test_in_an_outage_the_weights_go_whole(
    gate: Gate, versions: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = published(versions[:2], PatchSource(16))[1]
    recording: Any = None
    syncer = Syncer(gate, recording, None, "j", running(gate), way())  # type: ignore[arg-type]

    def away() -> Any:
        raise LedgerUnreachable("expected the ledger, found it away")

    monkeypatch.setattr(gate.ledger, "state", away)
    assert syncer._on_base(one) == frozenset()
