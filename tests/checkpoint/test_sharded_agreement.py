"""Goal: a group saves and restores one state, or every process of it says why not, and none waits.

Method: two real processes; one of them has other fields, generators, parts, tensors or places than
the other, and both must raise the same. Bundles with parts in shared and registered files, and with
parts of two steps, are restored into shards.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shiftbook.checkpoint.bundle import restore_bundle, save_bundle, store_shared
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.manifest import MANIFEST_NAME, BundleManifest, encode_manifest
from shiftbook.checkpoint.register import register_state
from shiftbook.checkpoint.sharded_bundle import restore_into
from shiftbook.checkpoint.shelf import list_bundles
from tests.checkpoint import agreement_rank
from tests.checkpoint.agreement_rank import weights
from tests.checkpoint.bundle_states import fields

FIELDS = {"job": "sft", "attempt": "a0", "iteration": 1, "policy_version": 1}


def two(act: str, folder: Path, shelf: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", agreement_rank.__name__, act]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / f"store-{act}"), str(shelf)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = []
    for process in ranks:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    assert [answer["there"] for answer in answers] == [2, 2]
    return answers


SAID = {
    "conflict": ("BundleError", "one state of owner 'torch'", "'rank/1/torch'"),
    "iteration": ("BundleError", "bundle field policy_version", "6 on process 1 and 5 on"),
    "unfit": ("BundleError", "process 1 of 2", "bundle field policy_version"),
    "name": ("BundleError", "process 1 of 2", "letters, digits"),
    "tensor": ("FingerprintError", "process 1 of 2", "redistribute the partial sums"),
    "shape": ("BundleError", "part counts: expected the same", "1 tensors, names and forms"),
    "part": ("BundleError", "part counts: expected the same", "None on process 0"),
    "declared": ("BundleError", "declared: expected the same"),
    "kinds": ("BundleError", "kinds: expected the same", "theta"),
    "not_there": ("BundleError", "absent ['rng']"),
}


def test_what_one_process_has_otherwise_is_refused_on_both(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    one, other = two("save", tmp_path, shelf)
    assert one == other
    for case, words in SAID.items():
        for word in words:
            assert word in one[case], (case, one[case])
    assert one["rng"] == {"rank/0/torch": "00", "rank/1/torch": "01", "sampler": "abcd"}
    assert one["brought"] == {"torch": "01"}
    assert len(list_bundles(shelf)) == 2
    back = restore_bundle(one["path"])  # the fingerprints are those of what was written
    assert back["copies"]["plain"].tolist() == [0, 0, 0]
    assert back["copies"]["seen"].tolist() == [0, 0]
    assert fingerprint_tensors(back["model"]) == fingerprint_tensors(weights(1))


def mixed(shelf: Path) -> None:
    """The optimizer of another step than the manifest describes, all digests made to fit."""
    sound = save_bundle(shelf / "sound", fields(1), {"model": weights(1), "optimizer": weights(2)})
    other = save_bundle(shelf, fields(1), {"model": weights(1), "optimizer": weights(3)})
    content = other.manifest.model_dump()
    described = sound.manifest.model_dump()["parts"]["optimizer"]["tensors"]
    content["parts"]["optimizer"]["tensors"] = described
    manifest = BundleManifest.model_validate(content)
    (other.path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


@pytest.fixture
def shelves(tmp_path: Path) -> Path:
    """A folder of bundles for each case."""
    save_file(weights(4), tmp_path / "model.safetensors")
    register_state(tmp_path / "model.safetensors", tmp_path / "safetensors", FIELDS)
    hugging = tmp_path / "hf"
    hugging.mkdir()
    names = list(weights(4))
    files = {name: f"model-{k}.safetensors" for k, name in enumerate(names)}
    for name, file in files.items():
        save_file({name: weights(4)[name]}, hugging / file)
    (hugging / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    register_state(hugging, tmp_path / "hugging-face", FIELDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(tmp_path / "theirs")
        dcp.save(weights(4), storage_writer=writer, no_dist=True)
    register_state(tmp_path / "theirs", tmp_path / "dcp", FIELDS)
    for case in ("reference", "damaged"):
        shelf = tmp_path / case
        plain = {"plain": {"w": torch.ones(2)}} if case == "reference" else {}
        shared = {"reference": store_shared(shelf, weights(5), kind="reference")}
        save_bundle(shelf, fields(1), {"model": weights(1), **plain}, external=shared)
    file = next((tmp_path / "damaged" / "shared").iterdir())
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    mixed(tmp_path / "mixed")
    return tmp_path


def test_parts_in_other_files_are_restored_and_a_mixture_changes_nothing(shelves: Path) -> None:
    theirs = {f"policy/{n}": value for n, value in fingerprint_tensors(weights(4)).items()}
    whole = {"model": weights(1), "reference": weights(5), "plain": {"w": torch.ones(2)}}
    expected = fingerprint_tensors(
        {f"{part}/{n}": t for part, members in whole.items() for n, t in members.items()}
    )
    for answer in two("restore", shelves, shelves):
        for case in ("dcp", "safetensors", "hugging-face"):
            assert answer[case] == theirs, case
        assert answer["reference"] == expected
        assert set(answer["taken"]) == {"model", "reference", "plain"}
        assert answer["mixed"].startswith("PartMismatch")
        assert "part optimizer" in answer["mixed"]
        assert "nothing was changed" in answer["mixed"]
        assert answer["untouched"]
        assert "hold a mixture" in answer["in_place"]
        assert answer["mixture"]
        assert answer["other_places"].startswith("PartMismatch: part model")
        assert "found others on process 1" in answer["other_places"]
        assert answer["partial"].startswith("BundleError: process 1 of 2")
        assert answer["damaged"].startswith("PartDamaged")
        assert "part reference" in answer["damaged"]
        assert answer["damaged_untouched"]


def test_one_process_alone_restores_the_same(shelves: Path) -> None:
    """Plain tensors, parameters that ask for gradients among them."""
    for case in ("dcp", "safetensors", "hugging-face"):
        made = {"policy": {n: torch.nn.Parameter(t) for n, t in weights(9).items()}}
        places = dict(made["policy"])
        restore_into(next((shelves / case).glob("bundle-*")), made)
        assert fingerprint_tensors(places) == fingerprint_tensors(weights(4))
