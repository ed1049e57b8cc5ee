"""Goal: state is saved, restored, moved and shipped from whatever device it lies on.

Method: the same tests on the CPU and, where there is one, on a GPU: a state there goes through a
bundle, a trainer there through a resize in the middle of an update, and weights there over a
transport; bits and fingerprints must be those of the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shiftbook.checkpoint.bundle import restore_bundle, save_bundle
from shiftbook.checkpoint.elastic import VirtualRanks
from shiftbook.checkpoint.elastic_move import _packed, _unpacked
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.live import LiveSnapshot
from shiftbook.checkpoint.pending_bundle import save_bundle_async
from shiftbook.checkpoint.sharded_bundle import restore_into
from tests.checkpoint import device_rank
from tests.checkpoint.bundle_states import fields, same_bits, state
from tests.checkpoint.elastic_rank import GROUPS, Setup, batch_of, make

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
on_each = pytest.mark.parametrize("device", DEVICES)


@on_each
def test_a_bundle_takes_state_from_a_device(device: str, tmp_path: Path) -> None:
    here = state(3)
    there = {part: {n: t.to(device) for n, t in members.items()} for part, members in here.items()}
    one = save_bundle(tmp_path / "here", fields(1), here)
    other = save_bundle(tmp_path / "there", fields(1), there)
    behind = save_bundle_async(tmp_path / "behind", fields(1), there).result(60)
    assert one.manifest.part_roots == other.manifest.part_roots == behind.manifest.part_roots
    back = restore_bundle(other.path)
    places = {p: {n: torch.zeros_like(t) for n, t in m.items()} for p, m in there.items()}
    restore_into(other.path, places)
    for part, members in here.items():
        assert all(same_bits(back[part][n].cpu(), t) for n, t in members.items())
        assert all(same_bits(places[part][n].cpu(), t) for n, t in members.items())
        assert all(t.device.type == device for t in places[part].values())


def trainer_on(device: str) -> VirtualRanks:
    made = make(Setup(clip_norm=0.5))
    model = made.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return VirtualRanks(model, optimizer, made.loss, groups=GROUPS, seed=5, clip_norm=0.5)


def fed(trainer: VirtualRanks, device: str, groups: range) -> None:
    for group in groups:
        trainer.add(group, tuple(t.to(device) for t in batch_of(trainer.updates, group)))


@on_each
def test_a_half_done_update_goes_on_elsewhere(device: str) -> None:
    """What a resize sends lands on the receiver's device and gives the whole update's bits."""
    whole = trainer_on(device)
    fed(whole, device, range(GROUPS))
    whole.update()
    first, second = trainer_on(device), trainer_on(device)
    fed(first, device, range(3))
    snapshot = LiveSnapshot.take(
        policy_version=0,
        iteration=0,
        tensors=first.parts(),
        accumulators=first.accumulator.snapshot(),
        uids=(),
    )
    came = _unpacked(_packed(snapshot), second)
    for part in came.tensors.values():
        assert all(tensor.device.type == device for tensor in part.values())
    second.load(came.tensors, came.policy_version)
    second.accumulator.restore([came.accumulators])
    fed(second, device, range(3, GROUPS))
    second.update()
    for part, members in whole.parts().items():
        assert fingerprint_tensors(members) == fingerprint_tensors(second.parts()[part])


@on_each
def test_sharded_updates_on_a_device(device: str, tmp_path: Path) -> None:
    """One process under FSDP2: the group's own backend has to take what is reduced."""
    done = subprocess.run(
        [sys.executable, "-m", device_rank.__name__, device, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"update": 1, "finite": True}
