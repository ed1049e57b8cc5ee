"""Goal: every part of a training state that the design names is saved, declared and restored.

Method: one state with all of them, generators that have been drawn from among them, is saved and
restored by one process and by two in other layouts; each part is left out once, and once more is
brought, against the declaration; a job with an empty in-flight buffer is not a job without one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shiftbook.checkpoint.bundle import restore_bundle, save_bundle
from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.manifest import FIELD_PARTS, BundleFields, BundleManifest, load_manifest
from shiftbook.checkpoint.random_streams import RandomStreams
from shiftbook.checkpoint.sharded_bundle import save_sharded
from tests.checkpoint import whole_state as states
from tests.checkpoint.bundle_states import same_bits
from tests.checkpoint.whole_state import declared, streams, whole_fields, whole_state

torch.set_num_threads(1)
ABSENT = {"rng": {}, "scheduler": {}, "controllers": {}}
"""What stands for an absent field; None for the others."""


def check_fields(found: BundleManifest, rng: dict[str, str]) -> None:
    expected = BundleFields(**whole_fields(rng))
    values = found.model_dump(include=set(BundleFields.model_fields) - {"snapshot"})
    assert values == expected.model_dump(exclude={"snapshot"})
    assert found.given() == set(FIELD_PARTS)


def test_one_process_saves_and_restores_every_part(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(7, generator=generator)
    rng = RandomStreams({"rank/0/torch": generator}).states()
    following = torch.rand(4, generator=generator)
    saved = save_bundle(tmp_path, whole_fields(rng), whole_state(1), declared=declared())
    back = restore_bundle(saved.path)
    for part, members in whole_state(1).items():
        assert set(back[part]) == set(members)
        assert all(same_bits(back[part][name], t) for name, t in members.items()), part
    manifest = load_manifest(saved.path)
    check_fields(manifest, rng)
    restored = torch.Generator()
    RandomStreams({"rank/0/torch": restored}).restore(manifest.rng)
    assert torch.equal(torch.rand(4, generator=restored), following)
    scaler = torch.amp.GradScaler("cpu")
    assert manifest.scaler is not None
    scaler.load_state_dict(scaler.state_dict() | manifest.scaler)
    assert scaler.state_dict()["scale"] == 65536.0


def test_two_processes_save_and_restore_every_part(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", states.__name__, str(rank)),
                *(str(tmp_path / "store"), str(tmp_path / "shelf")),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    expected = fingerprint_tensors(
        {f"{part}/{n}": t for part, members in whole_state(1).items() for n, t in members.items()}
    )
    for process in ranks:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        told = json.loads(out)
        assert told["prints"] == expected
    rng = streams("rank/0/torch", 0).states() | streams("rank/1/torch", 1).states()
    check_fields(load_manifest(told["path"]), rng)
    back = restore_bundle(told["path"])
    assert expected == fingerprint_tensors(
        {f"{part}/{n}": t for part, members in back.items() for n, t in members.items()}
    )


@pytest.mark.parametrize("save", [save_bundle, save_sharded])
def test_no_part_is_left_out_or_added_by_accident(
    tmp_path: Path, save: Callable[..., object]
) -> None:
    rng = {"sampler": "ab"}
    parts = whole_state(1)
    for part in parts:
        fewer = {name: members for name, members in parts.items() if name != part}
        with pytest.raises(BundleError, match=rf"absent \['{part}'\]"):
            save(tmp_path, whole_fields(rng), fewer, declared=declared())
    for name in FIELD_PARTS:
        fewer = whole_fields(rng) | {name: ABSENT.get(name)}
        with pytest.raises(BundleError, match=rf"absent \['{name}'\]") as caught:
            save(tmp_path, fewer, parts, declared=declared())
        assert caught.value.part == name
        with pytest.raises(BundleError, match=rf"further \['{name}'\]"):
            save(tmp_path, whole_fields(rng), parts, declared=set(declared()) - {name})
    assert not list(tmp_path.glob("bundle-*"))


def test_an_empty_buffer_is_a_buffer(tmp_path: Path) -> None:
    fields = whole_fields({"sampler": "ab"}, in_flight_uids=())
    saved = save_bundle(tmp_path, fields, whole_state(1), declared=declared())
    assert load_manifest(saved.path).in_flight_uids == ()
    without = save_bundle(tmp_path, whole_fields({}, in_flight_uids=None), whole_state(1))
    assert load_manifest(without.path).in_flight_uids is None
