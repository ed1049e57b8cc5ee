"""Goal: state that is spread over processes is saved as one bundle and restored into any layout.

Method: 2 processes under FSDP2 save; 4 under tensor parallel and FSDP2, and one alone, restore and
take fingerprints; restore kinds are tried with what is missing expected, and not; a save in
the background is overtaken by training, and by a disk that refuses.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shiftbook.checkpoint import pending_bundle
from shiftbook.checkpoint.bundle import restore_bundle, save_bundle
from shiftbook.checkpoint.errors import BundleError, BundleWriteFailed, PartMismatch, PartMissing
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.pending_bundle import save_bundle_async, save_sharded_async
from shiftbook.checkpoint.restore_plan import plan_restore
from shiftbook.checkpoint.sharded_bundle import restore_into, save_sharded
from shiftbook.checkpoint.shelf import SavedBundle, latest_bundle
from tests.checkpoint import sharded_rank
from tests.checkpoint.bundle_states import fields, same_bits, state

torch.set_num_threads(1)


def world(act: str, size: int, *words: str, killed: int | None = None) -> list[dict[str, Any]]:
    """The answers of all processes but one that is killed."""
    command = [sys.executable, "-m", sharded_rank.__name__, act]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    answers = []
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=240)
        assert process.returncode == (-signal.SIGKILL if rank == killed else 0), err
        if rank != killed:
            answers.append(json.loads(out))
    return answers


def test_two_processes_save_and_four_and_one_restore(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "file").write_text("")
    saved = world("save", 2, str(tmp_path / "store-0"), str(shelf))
    assert len({answer["bundle"] for answer in saved}) == 1
    for answer in saved:
        assert "found absent [], further ['controllers', 'counts'," in answer["undeclared"]
        assert answer["blocked"].startswith("BundleWriteFailed")
    path = Path(saved[0]["path"])
    latest = latest_bundle(shelf)
    assert latest is not None
    assert latest.bundle_id == saved[0]["bundle"]

    expected = sharded_rank.parts_of(sharded_rank.model(11), 3.0)
    flat = {f"{p}/{n}": t for p, members in expected.items() for n, t in members.items()}
    prints = fingerprint_tensors(flat)
    alone = restore_bundle(path)
    for part, members in expected.items():
        assert all(same_bits(alone[part][n], t.detach()) for n, t in members.items())
    for answer in world("load", 4, str(tmp_path / "store-1"), str(shelf), str(path)):
        assert answer["fingerprints"] == prints
        assert "part ema: expected it among the bundle's parts" in answer["absent"]

    one = sharded_rank.parts_of(sharded_rank.model(12), 0.0)
    assert set(restore_into(path, one)) == {"model", "optimizer", "counts"}
    assert (
        fingerprint_tensors(
            {f"{p}/{n}": t for p, members in one.items() for n, t in members.items()}
        )
        == prints
    )

    shard = max((path / "state").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    fresh = sharded_rank.parts_of(sharded_rank.model(12), 0.0)
    before = fingerprint_tensors(
        {f"{p}/{n}": t for p, members in fresh.items() for n, t in members.items()}
    )
    for answer in world("load", 4, str(tmp_path / "store-2"), str(shelf), str(path), "damaged"):
        assert answer["damaged"].startswith("PartDamaged")
        assert answer["fingerprints"] == before  # nothing was loaded


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_leaves_no_half_bundle(victim: int, tmp_path: Path) -> None:
    """One of two is killed as it begins to write: the other one says so, the bundle before it is
    the latest and whole, and the next save stands."""
    shelf = tmp_path / "shelf"
    (told,) = world("killed", 2, str(tmp_path / "store"), str(shelf), str(victim), killed=victim)
    assert told["said"].startswith("BundleWriteFailed")
    latest = latest_bundle(shelf)
    assert latest is not None
    assert latest.manifest.iteration == 1
    expected = sharded_rank.parts_of(sharded_rank.model(11), 3.0)
    back = restore_bundle(latest.path)
    for part, members in expected.items():
        assert all(same_bits(back[part][n], t.detach()) for n, t in members.items())
    saved = save_sharded(shelf, fields(2), expected)
    again = latest_bundle(shelf)
    assert again is not None
    assert again.bundle_id == saved.bundle_id
    assert len(list(shelf.glob("*incoming*"))) == 0


def test_one_process_alone_saves_the_same(tmp_path: Path) -> None:
    parts = state(3)
    one = save_bundle(tmp_path / "a", fields(1), parts)
    other = save_sharded(tmp_path / "b", fields(1), parts)
    assert one.manifest.part_roots == other.manifest.part_roots
    back = restore_bundle(other.path)
    for part, members in parts.items():
        assert all(same_bits(back[part][n], t) for n, t in members.items())


def test_what_is_declared_is_there_and_nothing_else(tmp_path: Path) -> None:
    parts = state(4)
    own = {"model", "masters", "optimizer", "buffer"}
    held = {"rng", "sampler", "in_flight_uids", "scheduler", "controllers"}
    saved = save_bundle(tmp_path, fields(1), parts, declared=own | held)
    for absent in ({"ema"}, {"reference", "ema"}):
        with pytest.raises(BundleError, match=r"found absent .*ema"):
            save_bundle(tmp_path, fields(2), parts, declared=own | held | absent)
    with pytest.raises(BundleError, match=r"further \['buffer'\]"):
        save_bundle(tmp_path, fields(2), parts, declared=(own | held) - {"buffer"})
    with pytest.raises(BundleError, match=r"absent \['rng'\]"):
        save_bundle(tmp_path, fields(2, rng={}), parts, declared=own | held)
    latest = latest_bundle(tmp_path)
    assert latest is not None
    assert latest.path == saved.path


def forms(parts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Dtype and shape by part and name."""
    return {
        part: {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in each.items()}
        for part, each in parts.items()
    }


@pytest.fixture
def saved(tmp_path: Path) -> SavedBundle:
    return save_bundle(tmp_path, fields(1), state(5))


def test_a_resume_leaves_nothing_out(saved: SavedBundle) -> None:
    wanted = forms(state(5))
    taken = plan_restore(saved.manifest, wanted, kind="resume")
    assert {part: set(names) for part, names in taken.items()} == {
        part: set(names) for part, names in wanted.items()
    }
    less = {part: names for part, names in wanted.items() if part != "buffer"}
    with pytest.raises(PartMismatch, match=r"every part .*buffer"):
        plan_restore(saved.manifest, less, kind="resume")
    with pytest.raises(PartMismatch, match="nothing to be missing"):
        plan_restore(saved.manifest, wanted, kind="resume", expected_missing=["ema"])
    more = {**wanted, "model": {**wanted["model"], "value_head": ("float32", (8, 1))}}
    with pytest.raises(PartMismatch, match="model/value_head"):
        plan_restore(saved.manifest, more, kind="resume")


def test_a_warm_start_says_what_it_leaves_out(saved: SavedBundle) -> None:
    wanted = forms(state(5))
    model = {"model": wanted["model"]}
    assert set(plan_restore(saved.manifest, model, kind="warm-start")) == {"model"}
    headed = {"model": {**wanted["model"], "value_head": ("float32", (8, 1))}, "ema": {}}
    missing = ["model/value_head", "ema"]
    taken = plan_restore(saved.manifest, headed, kind="warm-start", expected_missing=missing)
    assert set(taken["model"]) == set(wanted["model"])
    with pytest.raises(PartMissing, match="ema"):
        plan_restore(saved.manifest, headed, kind="warm-start", expected_missing=missing[:1])
    with pytest.raises(PartMismatch, match="value_head"):
        plan_restore(saved.manifest, headed, kind="warm-start", expected_missing=missing[1:])
    with pytest.raises(PartMismatch, match=r"\['model/head'\] to be missing, found them"):
        plan_restore(saved.manifest, model, kind="warm-start", expected_missing=["model/head"])
    smaller = {"model": {n: f for n, f in wanted["model"].items() if n != "head"}}
    with pytest.raises(PartMismatch, match="use a transfer"):
        plan_restore(saved.manifest, smaller, kind="warm-start")


def test_a_transfer_takes_what_has_its_place(saved: SavedBundle, tmp_path: Path) -> None:
    wanted = forms(state(5))["model"]
    other = {"model": {"layer.0.weight": wanted["layer.0.weight"], "new": ("int8", (2,))}}
    taken = plan_restore(saved.manifest, other, kind="transfer", expected_missing=["model/new"])
    assert taken == {"model": ["layer.0.weight"]}
    for form in (("float32", (16, 8)), ("bfloat16", (8, 16))):
        with pytest.raises(PartMismatch, match=r"tensor layer.0.weight: expected"):
            plan_restore(saved.manifest, {"model": {"layer.0.weight": form}}, kind="transfer")
    places = {"model": {"layer.0.weight": torch.zeros(16, 8).bfloat16(), "new": torch.ones(2)}}
    restore_into(saved.path, places, kind="transfer", expected_missing=["model/new"])
    assert same_bits(places["model"]["layer.0.weight"], state(5)["model"]["layer.0.weight"])
    assert places["model"]["new"].tolist() == [1, 1]


def test_shards_are_saved_in_the_background_while_training_goes_on(tmp_path: Path) -> None:
    """Three saves wait in line while the model is trained; each bundle has the state of its call,
    and what fails on one process is raised on both."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "file").write_text("")
    one, other = world("background", 2, str(tmp_path / "store"), str(shelf))
    assert one == other
    for path, prints in zip(one["paths"], one["expected"], strict=True):
        back = restore_bundle(path)
        assert prints == fingerprint_tensors(
            {f"{p}/{n}": t for p, members in back.items() for n, t in members.items()}
        )
    assert len({prints["model/0.weight"] for prints in one["expected"]}) == 3
    assert one["rng"] == {"rank/0": "03", "rank/1": "03"}
    assert all(one["done"])
    assert "process 1 of 2: bundle field iteration" in one["unfit"]
    assert one["blocked"].startswith("BundleWriteFailed")
    assert "process 1 of 2: part model: expected the tensors of the call" in one["torn"]
    assert len(list(shelf.glob("bundle-*"))) == 3


def test_one_process_alone_saves_its_shards_in_the_background(tmp_path: Path) -> None:
    parts = state(7)
    pending = save_sharded_async(tmp_path, fields(1), parts)
    for members in parts.values():
        for tensor in members.values():
            tensor.zero_()
    back = restore_bundle(pending.result(60).path)
    for part, members in state(7).items():
        assert all(same_bits(back[part][n], t) for n, t in members.items())


def test_a_save_in_the_background_has_the_state_of_the_call(tmp_path: Path) -> None:
    parts = state(6)
    pending = save_bundle_async(tmp_path, fields(1), parts)
    for members in parts.values():  # training goes on
        for tensor in members.values():
            tensor.zero_()
    saved = pending.result(60)
    assert pending.done
    back = restore_bundle(saved.path)
    expected = state(6)
    for part, members in expected.items():
        assert all(same_bits(back[part][n], t) for n, t in members.items())


def test_a_save_in_the_background_fails_in_the_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be made, unfit fields, and a copy that was written into."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BundleWriteFailed):
        save_bundle_async(blocked / "shelf", fields(1), state(6)).result(60)
    with pytest.raises(BundleError, match="iteration"):
        save_bundle_async(tmp_path, fields(-1), state(6))
    copied = pending_bundle._copied

    def torn(members: Any) -> Any:
        copies = copied(members)
        for tensor in copies.values():
            if tensor.numel() and tensor.dtype is torch.float32:
                tensor.reshape(-1)[-1] += 1
        return copies

    monkeypatch.setattr(pending_bundle, "_copied", torn)
    with pytest.raises(BundleError, match="save between updates"):
        save_bundle_async(tmp_path, fields(1), state(6)).result(60)
    assert latest_bundle(tmp_path) is None
