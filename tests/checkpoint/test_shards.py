"""Goal: the shards of a DTensor add up to the whole tensor's fingerprint, on every mesh.

Method: torch's fake process group plays each rank of a mesh in turn within this process, over all
pairs of placements, uneven sizes included; then four real processes with gloo and FSDP2.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute
from torch.testing._internal.distributed.fake_pg import FakeStore

from shiftbook.checkpoint.errors import FingerprintError, IncompleteFingerprint
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint, fingerprint_tensors
from shiftbook.checkpoint.shards import shard_fingerprint
from tests.checkpoint import shard_rank

torch.set_num_threads(1)
PLACEMENTS = (Shard(0), Shard(1), Replicate())


def as_rank(rank: int, mesh: tuple[int, ...], whole: torch.Tensor, how: tuple[Placement, ...]):
    """The part that one rank of a mesh contributes."""
    world = 1
    for size in mesh:
        world *= size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        device_mesh = init_device_mesh("cpu", mesh)
        tensor = distribute(whole, device_mesh, how, src_data_rank=None)
        return shard_fingerprint(tensor)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", [*itertools.product(PLACEMENTS, repeat=2)], ids=str)
def test_all_pairs_of_placements(how: tuple[Placement, Placement]) -> None:
    for shape in ((8, 6), (5, 7), (1, 3)):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
        parts = [as_rank(rank, (2, 3), whole, how) for rank in range(6)]
        total = Fingerprint.empty("bfloat16", shape)
        for part in parts:
            total += part
        assert total == fingerprint(whole)
        if any(isinstance(placement, Shard) for placement in how):
            with pytest.raises(IncompleteFingerprint):
                _ = (total + parts[0]).hex


def test_pending_sums_and_unequal_shards_are_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        pending = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
        with pytest.raises(FingerprintError, match="partial sums"):
            shard_fingerprint(pending)
        odd = DTensor.from_local(
            torch.ones(3), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
        )
        with pytest.raises(FingerprintError, match="no boxes"):
            shard_fingerprint(odd)
    finally:
        dist.destroy_process_group()


def test_four_processes_with_fsdp2_agree_with_one(tmp_path: Path) -> None:
    """FSDP2 over 2 ranks and tensor parallel over 2; a rank with another tensor is refused."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", shard_rank.__name__, str(rank), "4", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    answers = []
    for process in ranks:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    expected = fingerprint_tensors(dict(shard_rank.model().named_parameters()))
    for answer in answers:
        assert answer["fingerprints"] == {**expected, "plain": fingerprint(torch.ones(3)).hex}
        assert "the same tensors on all ranks" in answer["refused"]
