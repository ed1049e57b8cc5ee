"""The live snapshot: arrives as it was sent, or says which tensor did not; counts real bytes.

Method: a snapshot goes through pickle, as it does between processes; single elements of each
tensor, the half-done accumulators included, are changed on the way.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import LiveSnapshotDamaged
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.live import LiveSnapshot
from tests.checkpoint.bundle_states import UIDS, state


def snapshot() -> LiveSnapshot:
    accumulators = {
        "ranks": {0: {"gradients": [torch.randn(3, 4), torch.zeros(2)], "count": 5}, 1: None},
        "norms": (torch.tensor(2.5, dtype=torch.float64),),
    }
    return LiveSnapshot.take(
        policy_version=4,
        iteration=5,
        tensors=state(4),
        accumulators=accumulators,
        uids=UIDS,
        rng={"trainer/0": "00ff"},
    )


def test_it_arrives_as_it_was_sent() -> None:
    sent = snapshot()
    received: LiveSnapshot = pickle.loads(pickle.dumps(sent))
    received.check()
    assert received.fingerprints == sent.fingerprints
    assert (received.uids, received.rng, received.policy_version) == (UIDS, sent.rng, 4)
    assert "accumulators/ranks/0/gradients/1" in received.fingerprints
    model = fingerprint_tensors(state(4)["model"])
    assert received.part_roots()["model"] == root(model)
    assert set(received.part_roots()) == {*state(4), "accumulators"}


def test_bytes_are_those_of_tensors_and_generators() -> None:
    tensors = sum(t.nbytes for members in state(4).values() for t in members.values())
    assert snapshot().nbytes == tensors + (12 + 2) * 4 + 8 + 2


def test_each_changed_tensor_is_named() -> None:
    for name in snapshot().fingerprints:
        received = snapshot()
        tensor: Any = dict(received.named_tensors())[name]
        if tensor.numel() == 0:
            continue
        flat = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
        index = (-1,) * flat.ndim
        flat[index] = 1 - flat[index] if tensor.dtype is torch.bool else flat[index] + 1
        with pytest.raises(LiveSnapshotDamaged, match="transfer it again") as caught:
            received.check()
        named = caught.value.tensor
        # The head is a view of a layer in this state, so a change of one is a change of both.
        assert named == name or {named, name} == {"model/head", "model/layer.2.weight"}


def test_missing_and_extra_tensors_are_named() -> None:
    sent = snapshot()
    fewer = {part: dict(members) for part, members in sent.tensors.items()}
    lost = fewer["optimizer"].pop("layer.1.weight/exp_avg")
    short = LiveSnapshot(4, 5, fewer, sent.accumulators, UIDS, sent.rng, sent.fingerprints)
    with pytest.raises(LiveSnapshotDamaged, match="no such tensor") as caught:
        short.check()
    assert caught.value.tensor == "optimizer/layer.1.weight/exp_avg"
    fewer["optimizer"]["layer.1.weight/exp_avg"] = lost
    fewer["model"]["ghost"] = lost
    longer = LiveSnapshot(4, 5, fewer, sent.accumulators, UIDS, sent.rng, sent.fingerprints)
    with pytest.raises(LiveSnapshotDamaged, match="model/ghost"):
        longer.check()
