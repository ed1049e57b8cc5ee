"""Bundles come back bit for bit, and only as what they are.

Method: states with NaN, infinities, negative zero, denormals, views, empty and scalar tensors are
saved and restored; then each way in which files get mixed up (cut off, one bit flipped, another
step's file, a manifest that was edited or belongs to another step, tensors added, dropped or
covered in part) is done to a good bundle, and the refusal must name the part.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from shiftbook.checkpoint.bundle import (
    SavedBundle,
    external_part,
    latest_bundle,
    restore_bundle,
    retain,
    save_bundle,
    store_shared,
)
from shiftbook.checkpoint.errors import (
    BundleError,
    ManifestInvalid,
    PartDamaged,
    PartMismatch,
    PartMissing,
)
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.manifest import (
    MANIFEST_NAME,
    BundleManifest,
    check_files,
    encode_manifest,
    load_manifest,
)
from shiftbook.checkpoint.shelf import list_bundles
from tests.checkpoint.bundle_states import UIDS, fields, same_bits, state

torch.set_num_threads(1)
DATA = "state/__0_0.distcp"


@pytest.fixture
def saved(tmp_path: Path) -> SavedBundle:
    return save_bundle(tmp_path, fields(3), state(3), kinds={"masters": "fp32 masters"})


def rewrite(bundle: SavedBundle, **changes: Any) -> None:
    """Put a changed manifest in place, with a digest that fits it: a mistake no checksum shows."""
    manifest = BundleManifest.model_validate({**bundle.manifest.model_dump(), **changes})
    (bundle.path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def with_part(bundle: SavedBundle, name: str, **changes: Any) -> dict[str, Any]:
    parts = bundle.manifest.model_dump()["parts"]
    parts[name].update(changes)
    return parts


def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    before = state(3)
    saved = save_bundle(tmp_path, fields(3), before)
    after = restore_bundle(saved.path)
    assert {part: set(members) for part, members in after.items()} == {
        part: set(members) for part, members in before.items()
    }
    for part, members in before.items():
        for name, tensor in members.items():
            assert same_bits(after[part][name], tensor), (part, name)
    assert set(restore_bundle(saved.path, ["model"])) == {"model"}


def test_manifest_says_what_was_saved(saved: SavedBundle) -> None:
    manifest = load_manifest(saved.path)
    assert manifest == saved.manifest
    assert manifest.bundle_id == saved.bundle_id
    assert manifest.sampler is not None
    assert (manifest.sampler.epoch, manifest.sampler.position) == (1, 40)
    assert manifest.sampler.unit == "samples"
    assert manifest.in_flight_uids == UIDS
    assert manifest.rng["trainer/0"] == "00ff10"
    assert manifest.scheduler == {"step": 3.0, "learning_rate": 1e-4}
    assert manifest.controllers == {"kl_coefficient": 0.05}
    assert manifest.parts["masters"].kind == "fp32 masters"
    assert manifest.parts["model"].tensors["layer.0.weight"].dtype == "bfloat16"
    assert manifest.parts["model"].fingerprints == fingerprint_tensors(state(3)["model"])
    assert check_files(saved.path) == manifest


def test_non_finite_controller_values_survive(tmp_path: Path) -> None:
    given = fields(1, controllers={"a": float("nan"), "b": float("inf"), "c": -0.0})
    found = load_manifest(save_bundle(tmp_path, given, state(1)).path).controllers
    assert found["a"] != found["a"]
    assert found["b"] == float("inf")
    assert str(found["c"]) == "-0.0"


def test_the_fingerprint_is_of_the_state_at_the_call(tmp_path: Path) -> None:
    live = state(3)
    saved = save_bundle(tmp_path, fields(3), live)
    live["masters"]["layer.1.weight"] += 1
    assert saved.manifest.parts["masters"].fingerprints == fingerprint_tensors(state(3)["masters"])
    assert same_bits(
        restore_bundle(saved.path)["masters"]["layer.1.weight"],
        state(3)["masters"]["layer.1.weight"],
    )


def test_plain_distributed_checkpoint_reads_a_bundle(saved: SavedBundle) -> None:
    """Nothing of ours is needed to get the tensors out."""
    wanted = {"masters/layer.1.weight": torch.empty(16, 8)}
    torch.distributed.checkpoint.load(wanted, checkpoint_id=saved.path / "state", no_dist=True)
    assert same_bits(wanted["masters/layer.1.weight"], state(3)["masters"]["layer.1.weight"])


def test_external_parts_are_referred_to_and_checked(tmp_path: Path) -> None:
    reference = {"w": torch.randn(6, 4).bfloat16(), "nan": torch.tensor([float("nan")])}
    record = store_shared(tmp_path, reference, kind="reference")
    again = store_shared(tmp_path, reference, kind="reference")
    assert again == record
    bundles = [
        save_bundle(tmp_path, fields(k), state(k), external={"reference": record}) for k in (1, 2)
    ]
    assert len(list((tmp_path / "shared").iterdir())) == 1
    assert bundles[0].manifest.parts["reference"].external
    moved = tmp_path.with_name("moved")
    shutil.move(tmp_path, moved)
    for bundle in list_bundles(moved):
        back = restore_bundle(bundle.path, ["reference"])["reference"]
        assert all(same_bits(back[name], tensor) for name, tensor in reference.items())
    file = next((moved / "shared").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    for act in (check_files, restore_bundle):
        with pytest.raises(PartDamaged, match="part reference"):
            act(moved / bundles[0].path.name)
    file.unlink()
    with pytest.raises(PartMissing, match="part reference"):
        restore_bundle(moved / bundles[0].path.name)


def test_external_part_of_any_file_by_absolute_path(tmp_path: Path, saved: SavedBundle) -> None:
    import safetensors.torch

    elsewhere = tmp_path / "base.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, elsewhere)
    record = external_part(elsewhere, kind="reference")
    bundle = save_bundle(tmp_path / "b", fields(4), state(4), external={"reference": record})
    assert torch.equal(restore_bundle(bundle.path)["reference"]["w"], torch.ones(3))
    with pytest.raises(BundleError, match="outside of the bundles"):
        external_part(saved.path / DATA, kind="reference", root_dir=tmp_path)
    with pytest.raises(PartMissing, match="could not find"):
        external_part(tmp_path / "absent", kind="reference")
    elsewhere.unlink()
    with pytest.raises(PartMissing, match="part reference"):
        save_bundle(tmp_path / "b", fields(5), state(5), external={"reference": record})
    assert [p for p in (tmp_path / "b").iterdir() if p.is_dir()] == [bundle.path]
    assert list_bundles(tmp_path / "b") == []  # without the shared file it is not complete


def test_each_flipped_bit_is_refused_by_the_name_of_its_part(saved: SavedBundle) -> None:
    file = saved.path / DATA
    good = file.read_bytes()
    for name, part in saved.manifest.parts.items():
        for piece in part.ranges:
            for at in (
                piece.offset,
                piece.offset + piece.bytes // 2,
                piece.offset + piece.bytes - 1,
            ):
                bad = bytearray(good)
                bad[at] ^= 1 << (at % 8)
                file.write_bytes(bad)
                for act in (check_files, restore_bundle):
                    with pytest.raises(PartDamaged, match=f"part {name}") as caught:
                        act(saved.path)
                    assert caught.value.part == name
    file.write_bytes(good)
    restore_bundle(saved.path)


def test_parts_that_are_whole_can_be_restored_beside_a_damaged_one(saved: SavedBundle) -> None:
    piece = saved.manifest.parts["buffer"].ranges[0]
    file = saved.path / DATA
    bad = bytearray(file.read_bytes())
    bad[piece.offset + 9] ^= 1
    file.write_bytes(bad)
    assert set(restore_bundle(saved.path, ["masters"])) == {"masters"}
    with pytest.raises(PartDamaged, match="part buffer"):
        restore_bundle(saved.path, ["buffer"])


def test_torn_and_absent_files_are_refused(saved: SavedBundle) -> None:
    last = max(
        saved.manifest.parts,
        key=lambda name: max(p.offset + p.bytes for p in saved.manifest.parts[name].ranges),
    )
    for relative in (DATA, "state/.metadata", MANIFEST_NAME):
        file = saved.path / relative
        good = file.read_bytes()
        for cut in (0, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:cut])
            for act in (restore_bundle, check_files):
                with pytest.raises((PartDamaged, ManifestInvalid)) as caught:
                    act(saved.path)
                if relative == DATA and cut == len(good) - 1:
                    assert caught.value.part == last
            assert latest_bundle(saved.path.parent) is None
        file.unlink()
        with pytest.raises((PartMissing, ManifestInvalid), match="expected"):
            restore_bundle(saved.path)
        assert latest_bundle(saved.path.parent) is None
        file.write_bytes(good)
    index = saved.path / "state/.metadata"
    index.write_bytes(b"\x00" * index.stat().st_size)
    for act in (check_files, restore_bundle):
        with pytest.raises(PartDamaged, match="index of the saved tensors"):
            act(saved.path)


def test_a_file_that_is_cut_off_names_the_parts_that_lost_bytes(tmp_path: Path) -> None:
    """The end of the file is cut off, further and further back: the parts that stand there are
    named, and no others; a part before the cut can still be restored by itself."""
    saved = save_bundle(tmp_path, fields(3), state(3) | {"zlast": {"w": torch.randn(40)}})
    file = saved.path / DATA
    good = file.read_bytes()
    ends = {
        name: max(piece.offset + piece.bytes for piece in part.ranges)
        for name, part in saved.manifest.parts.items()
    }
    assert ends["zlast"] == len(good)
    for kept in (*(end - 1 for end in ends.values()), len(good) - 100, 0):
        file.write_bytes(good[:kept])
        torn = sorted(name for name, end in ends.items() if kept < end)
        with pytest.raises(PartDamaged) as caught:
            check_files(saved.path)
        assert caught.value.part == ", ".join(torn)
        assert f"part {', '.join(torn)}: expected {file.name} of {len(good)}" in str(caught.value)
        with pytest.raises(PartDamaged) as caught:
            restore_bundle(saved.path)
        assert caught.value.part == torn[0]
        whole = [name for name in ends if name not in torn]
        assert set(restore_bundle(saved.path, whole)) == set(whole)
    file.write_bytes(good + b"more")
    with pytest.raises(PartDamaged, match="part buffer, masters, model, optimizer, zlast"):
        check_files(saved.path)
    assert set(restore_bundle(saved.path, ["zlast"])) == {"zlast"}
    file.unlink()
    with pytest.raises(PartMissing, match="part buffer, masters, model, optimizer, zlast"):
        check_files(saved.path)


def test_a_file_of_another_step_is_refused(tmp_path: Path, saved: SavedBundle) -> None:
    other = save_bundle(tmp_path, fields(4), state(4))
    assert (other.path / DATA).stat().st_size == (saved.path / DATA).stat().st_size
    shutil.copy(other.path / DATA, saved.path / DATA)
    with pytest.raises(PartDamaged, match=r"part (model|masters|optimizer|buffer)"):
        restore_bundle(saved.path)


def test_parts_of_two_steps_under_one_manifest_are_refused(
    tmp_path: Path, saved: SavedBundle
) -> None:
    """The optimizer of step 4 with the rest of step 3, all file digests made to fit."""
    mixed = state(3)
    mixed["optimizer"] = state(4)["optimizer"]
    other = save_bundle(tmp_path, fields(3), mixed)
    parts = other.manifest.model_dump()["parts"]
    for name, part in parts.items():
        part["tensors"] = saved.manifest.model_dump()["parts"][name]["tensors"]
    rewrite(other, parts=parts)
    check_files(other.path)  # the bytes are as the manifest says
    with pytest.raises(PartMismatch, match=r"part optimizer.*changed: layer") as caught:
        restore_bundle(other.path)
    assert caught.value.part == "optimizer"


def test_manifest_of_another_digest_format_or_content_is_refused(saved: SavedBundle) -> None:
    file = saved.path / MANIFEST_NAME
    good = orjson.loads(file.read_bytes())

    def refused(said: str, outer: Any) -> None:
        file.write_bytes(orjson.dumps(outer))
        with pytest.raises(ManifestInvalid, match=said):
            load_manifest(saved.path)

    refused("edited", {**good, "manifest": {**good["manifest"], "iteration": 9}})
    refused("format", {**good, "manifest": {**good["manifest"], "format": "shiftbook-bundle-v9"}})
    refused("iteration", {**good, "manifest": {**good["manifest"], "iteration": -1}})
    refused("surprise", {**good, "manifest": {**good["manifest"], "surprise": 1}})
    refused("torn", [1, 2])
    refused("format", {})
    file.write_bytes(b"\xff\x00not json")
    with pytest.raises(ManifestInvalid, match="torn"):
        load_manifest(saved.path)
    with pytest.raises(ManifestInvalid, match="could not read"):
        load_manifest(saved.path / "absent")


def test_tensors_added_or_dropped_are_named(saved: SavedBundle) -> None:
    tensors = saved.manifest.model_dump()["parts"]["masters"]["tensors"]
    added = {**tensors, "layer.9.weight": tensors["layer.1.weight"]}
    rewrite(saved, parts=with_part(saved, "masters", tensors=added))
    with pytest.raises(PartMismatch, match=r"part masters.*missing \['layer.9.weight'\]"):
        restore_bundle(saved.path)
    dropped = {name: record for name, record in tensors.items() if name != "layer.1.weight"}
    rewrite(saved, parts=with_part(saved, "masters", tensors=dropped))
    with pytest.raises(PartMismatch, match=r"part masters.*extra \['layer.1.weight'\]"):
        restore_bundle(saved.path)
    reshaped = {**tensors, "layer.1.weight": {**tensors["layer.1.weight"], "shape": (8, 16)}}
    rewrite(saved, parts=with_part(saved, "masters", tensors=reshaped))
    with pytest.raises(PartMismatch, match=r"part masters.*expected shape"):
        restore_bundle(saved.path)


@pytest.mark.parametrize("defect", ["gap", "overlap", "outside"])
def test_shards_must_cover_each_element_once(saved: SavedBundle, defect: str) -> None:
    file = saved.path / "state/.metadata"
    index = pickle.loads(file.read_bytes())
    entry = index.state_dict_metadata["masters/layer.1.weight"]
    whole = entry.chunks[0]
    if defect == "gap":
        entry.chunks = [type(whole)(whole.offsets, torch.Size((8, 8)))]
    elif defect == "overlap":
        entry.chunks = [whole, type(whole)(torch.Size((4, 0)), torch.Size((4, 8)))]
    else:
        entry.chunks = [type(whole)(torch.Size((1, 0)), whole.sizes)]
    file.write_bytes(pickle.dumps(index))
    record = {
        "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    rewrite(saved, files={**saved.manifest.model_dump()["files"], "state/.metadata": record})
    with pytest.raises(PartMismatch, match=r"part masters.*cover each element once"):
        restore_bundle(saved.path)


def test_retention_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    bundles = [save_bundle(tmp_path, fields(k), state(k)) for k in range(6)]
    assert [b.path for b in list_bundles(tmp_path)] == [b.path for b in bundles]
    broken = tmp_path / "bundle-00000099-abcabcabcabc"
    broken.mkdir()
    (broken / "something").write_text("not ours to delete")
    gone = retain(tmp_path, 2, protected={bundles[1].bundle_id})
    assert gone == [bundles[0].path, bundles[2].path, bundles[3].path]
    left = {b.bundle_id for b in list_bundles(tmp_path)}
    assert left == {bundles[k].bundle_id for k in (1, 4, 5)}
    assert broken.exists()
    assert retain(tmp_path, 1) == [bundles[1].path, bundles[4].path]
    latest = latest_bundle(tmp_path)
    assert latest is not None
    assert latest.bundle_id == bundles[5].bundle_id
    with pytest.raises(BundleError, match="at least 1"):
        retain(tmp_path, 0)
    following = save_bundle(tmp_path, fields(6), state(6))
    assert following.path.name.startswith("bundle-00000100-")


def test_unfit_requests_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    record = store_shared(tmp_path, {"w": torch.ones(2)}, kind="reference")
    with pytest.raises(BundleError, match="letters, digits"):
        save_bundle(tmp_path, fields(1), {"a/b": {"w": torch.ones(1)}})
    with pytest.raises(BundleError, match="at least one tensor"):
        save_bundle(tmp_path, fields(1), {"model": {}})
    with pytest.raises(BundleError, match="both"):
        save_bundle(tmp_path, fields(1), state(1), external={"model": record})
    with pytest.raises(BundleError, match="bundle field rng"):
        save_bundle(tmp_path, fields(1, rng={"owner": "xyz"}), state(1))
    with pytest.raises(BundleError, match="bundle field surprise"):
        save_bundle(tmp_path, fields(1, surprise=1), state(1))
    assert list_bundles(tmp_path) == []
    bundle = save_bundle(tmp_path, fields(1), state(1))
    with pytest.raises(PartMissing, match="part ema"):
        restore_bundle(bundle.path, ["ema"])
    assert latest_bundle(tmp_path / "absent") is None
