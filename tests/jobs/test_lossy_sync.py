"""Goal: what engines hold under lossy syncs follows from the versions alone, within the bound.

Method: the base policy takes steps in one direction; a source codes them, is started anew from what
a bundle would hold, and is asked again, and each time what engines hold is the same bits. The job's
rollout worker takes versions whole and as patches, and refuses patches without a declaration. The
replay of a small job runs under two schedules with moves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs import published as published_module
from shiftbook.jobs import sync_encoding
from shiftbook.jobs.components import RolloutWorker
from shiftbook.jobs.config import JobConfig, plan_of
from shiftbook.jobs.errors import JobError
from shiftbook.jobs.lossy_sync import Coded, LossySource
from shiftbook.jobs.policy_file import BASE_POLICY, load_policy
from shiftbook.jobs.published import Published
from shiftbook.jobs.replay import SMALL, _Replay, reference_job
from shiftbook.jobs.serving import Taken
from shiftbook.jobs.sync_encoding import PatchSource
from shiftbook.jobs.trainer_state import adam_of
from shiftbook.scheduler.workers.host import HostSpec
from shiftbook.verify.replay.protocol import Conditions, Start, Tensors

BOUND = 1e-4
VALUES = {"job": "j", "bundles": "b", "base_policy": "p", "ledger_url": "sqlite:///l.db"}
LOSSY: dict[str, Any] = {"sync_encoding": "lossy", "max_error": BOUND}


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would go through Ray's object store is handed on as it is."""
    for module in (sync_encoding, published_module):
        monkeypatch.setattr(module, "offer", lambda value: value)


@pytest.fixture(scope="module")
def versions() -> list[dict[str, Tensor]]:
    """Six versions, each a step of its learning rate's size away from the one before."""
    generator = torch.Generator().manual_seed(4)
    masters = {name: tensor.float() for name, tensor in load_policy(BASE_POLICY).items()}
    made = []
    for _ in range(6):
        made.append({name: tensor.bfloat16() for name, tensor in masters.items()})
        for tensor in masters.values():
            tensor += 3e-4 * torch.rand(tensor.shape, generator=generator)
    return made


def coded(
    versions: list[dict[str, Tensor]], source: LossySource, first: int = 0, held: Any = None
) -> list[Coded]:
    source.begin(versions[first], first, versions[first] if held is None else held)
    found = [source.held]
    for number in range(first + 1, len(versions)):
        source.code(versions[number], number)  # an update that is made again is coded again
        assert source.root_of(number) == source.code(versions[number], number).root
        found.append(source.settle(versions[number], number))
    return found


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


def test_what_engines_hold_stays_within_the_bound_and_goes_on_from_a_bundle(
    versions: list[dict[str, Tensor]],
) -> None:
    every = coded(versions, LossySource(BOUND, 16))
    for one, exact in zip(every, versions, strict=True):
        assert furthest(one.served, exact) == one.largest_error <= BOUND
        assert fingerprint_tensors(one.served) == one.prints
    assert all(one.largest_error > 0 for one in every[1:])
    size = sum(tensor.nbytes for tensor in versions[0].values())
    plain = PatchSource(16)
    for number, exact in enumerate(versions[:2]):
        without = plain.next(exact, number, fingerprint_tensors(exact))
    assert without is not None
    assert every[1].patch is not None
    assert len(every[1].patch) < 0.75 * without.bytes < 0.75 * size
    again = coded(versions, LossySource(BOUND, 16), 3, every[3].served)
    assert [one.prints for one in again] == [one.prints for one in every[3:]]
    # From the trainer's own weights it would not be the same.
    other = coded(versions, LossySource(BOUND, 16), 3)
    assert [one.root for one in other[1:]] != [one.root for one in every[4:]]


def test_anchors_come_by_version_and_lose_nothing(versions: list[dict[str, Tensor]]) -> None:
    """By their number, so that a job that goes on from a bundle sends them where it would have."""
    source = LossySource(BOUND, 2)
    every = coded(versions, source)
    assert [one.patch is None for one in every] == [True, False] * 3
    assert [one.largest_error == 0 for one in every] == [True, False] * 3
    assert source.loss(every[2]) is None
    loss = source.loss(every[3])
    assert loss is not None
    assert (loss.root, loss.whole, loss.max_error) == (every[3].root, "decoded", BOUND)
    with pytest.raises(JobError, match="expected version 6"):
        source.code(versions[2], 9)
    with pytest.raises(JobError, match="begin with one"):
        _ = LossySource(BOUND, 2).held
    wrong = {name: tensor.clone() for name, tensor in versions[5].items()}
    next(iter(wrong.values())).view(-1)[3] = torch.nan
    source = LossySource(BOUND, 16)
    source.begin(versions[4], 4, versions[4])
    assert source.code(wrong, 5).patch is None


def worker(**config: Any) -> RolloutWorker:
    spec = HostSpec("rollout", "r0", None, "node", "shiftbook.jobs.components:RolloutWorker")
    return RolloutWorker(spec, {"lanes": 2, **config})


def test_engines_hold_one_policy_however_it_came(versions: list[dict[str, Tensor]]) -> None:
    source = LossySource(BOUND, 16)
    every = coded(versions[:3], source)
    sent = [
        Published.coded(exact, one, source.loss(one))
        for exact, one in zip(versions, every, strict=False)
    ]
    assert sent[1].source_prints == fingerprint_tensors(versions[1]) != sent[1].prints
    first, strict = worker(max_error=BOUND), worker()
    for one in (first, strict):
        assert one.call("sync", sent[0].offered()).failure is None
    for version in sent[1:]:
        taken: Taken = first.call("sync", version.offered("patch"))
        assert (taken.failure, taken.base_refused, taken.encoding) == (None, None, "patch")
        assert taken.fingerprints == version.prints
    refused: Taken = strict.call("sync", sent[1].offered("patch"))
    assert "declare the loss" in str(refused.base_refused)
    late = worker(max_error=BOUND)
    assert late.call("sync", sent[2].offered()).fingerprints == sent[2].prints


def test_the_configuration_and_the_plan_declare_it() -> None:
    config = JobConfig.model_validate(VALUES | LOSSY)
    assert LossySource.declared(config) is not None
    assert PatchSource.declared(config) is None
    assert plan_of(config).syncs.max_error == BOUND
    assert LossySource.declared(JobConfig.model_validate(VALUES)) is None
    for wrong in ({"sync_encoding": "lossy"}, {"max_error": BOUND}):
        with pytest.raises(ValueError, match="given together"):
            JobConfig.model_validate(VALUES | wrong)


@pytest.mark.slow
def test_the_replay_of_a_lossy_job_depends_on_no_schedule() -> None:
    """Two iterations, the second with what a lossy sync left."""
    lossy = reference_job(SMALL | LOSSY | {"anchor_every": 16})
    plain = reference_job(SMALL)
    assert lossy.config["max_error"] == BOUND
    assert "max_error" not in plain.config

    def run(job: Any, **how: Any) -> list[list[str]]:
        usual = {"seed": 0, "schedule": "phases", "workers": {"rollout": 1, "trainer": 1}}
        conditions = Conditions(**(usual | {"moves": None, "steps": 2} | how))
        return [[_said(one) for one in step.observations] for step in job.run(conditions)]

    still = run(lossy)
    moved = run(lossy, schedule="streamed", workers={"rollout": 2, "trainer": 2}, moves=3)
    assert still == moved
    without = run(plain)
    assert without[0] == still[0]
    assert without[1] != still[1]


@pytest.mark.slow
def test_a_replay_goes_on_from_a_bundle_with_what_engines_held(tmp_path: Path) -> None:
    """As a shadow does: the second iteration, from a bundle of the first, is the whole run's."""
    values = SMALL | LOSSY | {"anchor_every": 16}
    usual = {"seed": 0, "schedule": "phases", "workers": {"rollout": 1, "trainer": 1}}
    run = _Replay(values, str(BASE_POLICY), Conditions(**usual, steps=2))
    steps = run.steps()
    next(steps)
    policy = run._trainer.parts()["model"]
    served = run._served(policy, 1)
    assert fingerprint_tensors(served) != fingerprint_tensors(policy)
    saved = save_bundle(
        tmp_path,
        {
            "job": "j",
            "attempt": "a",
            "iteration": 1,
            "policy_version": 1,
            "scheduler": {"step": 1},
        },
        run._trainer.parts()
        | {"optimizer": adam_of(run._trainer).tensors(run._trainer.masters), "served": served},
    )
    expected = [_said(one) for one in next(steps).observations]
    start = Start(
        str(saved.path), saved.bundle_id, iteration=1, policy_version=1, cursor=SMALL["groups"]
    )
    job = reference_job(values)
    (again,) = job.run(Conditions(**usual, steps=1, start=start))
    assert [_said(one) for one in again.observations] == expected


def _said(one: Any) -> str:
    return str(fingerprint_tensors(one.tensors)) if isinstance(one, Tensors) else repr(one)
