"""Goal: states that others saved are registered as they lie, restored, checked, and compared.

Method: real DCP folders, safetensors files and Hugging Face folders are made with their own
libraries; the files' bytes and times are compared before and after; then they are damaged.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.checkpoint.errors import BundleError, PartDamaged, PartMissing
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.manifest import check_files
from shiftbook.checkpoint.register import register_state
from shiftbook.checkpoint.restore import restore_bundle
from shiftbook.checkpoint.stored_state import open_stored_state
from shiftbook.ledger.cli import main
from tests.checkpoint.bundle_states import fields, state

FIELDS = {"job": "sft", "attempt": "a1", "iteration": 7, "policy_version": 3}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "embed": torch.randn(30, 8, generator=generator).bfloat16(),
        "head.weight": torch.randn(8, 30, generator=generator).half(),
        "norm": torch.ones(8),
        "steps": torch.tensor(5),
    }


def in_dcp(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {**weights(), "note": "text"}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)
    return folder / "dcp"


def in_one_file(folder: Path) -> Path:
    save_file(weights(), folder / "model.safetensors")
    return folder / "model.safetensors"


def in_hugging_face_shards(folder: Path) -> Path:
    place = folder / "hf"
    place.mkdir()
    tensors = weights()
    shards = {"model-1.safetensors": ["embed"], "model-2.safetensors": sorted(tensors)[1:]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, place / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "config.json").write_text("{}")
    return place


Maker = Callable[[Path], Path]
MAKERS = [in_dcp, in_one_file, in_hugging_face_shards]


def files_of(place: Path) -> dict[Path, tuple[bytes, int]]:
    every = place.rglob("*") if place.is_dir() else [place]
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in every if p.is_file()}


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


@pytest.mark.parametrize("make", MAKERS)
def test_register_restores_and_rewrites_nothing(make: Maker, tmp_path: Path) -> None:
    source = make(tmp_path)
    before = files_of(source)
    bundle = register_state(source, tmp_path / "shelf", FIELDS, kind="model")
    assert files_of(source) == before
    assert bundle.manifest.parts["policy"].fingerprints == fingerprint_tensors(weights())
    assert bundle.manifest.iteration == 7
    check_files(bundle.path)
    restored = restore_bundle(bundle.path)["policy"]
    assert {n: t.dtype for n, t in restored.items()} == {n: t.dtype for n, t in weights().items()}
    assert fingerprint_tensors(restored) == fingerprint_tensors(weights())
    assert sum(f.stat().st_size for f in bundle.path.rglob("*") if f.is_file()) < 16_000


@pytest.mark.parametrize("make", MAKERS)
def test_a_registered_state_that_changed_is_refused(make: Maker, tmp_path: Path) -> None:
    source = make(tmp_path)
    bundle = register_state(source, tmp_path / "shelf", FIELDS)
    pattern = "*.distcp" if make is in_dcp else "*.safetensors"
    data = max(source.glob(pattern)) if source.is_dir() else source
    good = data.read_bytes()
    data.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(PartDamaged, match="part policy"):
        restore_bundle(bundle.path)
    assert run("verify", bundle.path).exit_code == 1
    data.write_bytes(good[:-1])
    with pytest.raises(PartDamaged, match="torn"):
        restore_bundle(bundle.path)
    data.unlink()
    with pytest.raises(PartMissing, match="part policy"):
        restore_bundle(bundle.path)


def test_what_cannot_be_registered(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BundleError, match="found none of these"):
        register_state(empty, shelf, FIELDS)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(in_one_file(tmp_path).read_bytes()[:-5])
    with pytest.raises(PartDamaged, match=r"torn\.safetensors"):
        register_state(torn, shelf, FIELDS)
    folder = in_hugging_face_shards(tmp_path)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(PartMissing, match=r"model-2\.safetensors"):
        register_state(folder, shelf, FIELDS)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(PartDamaged, match=r"index\.json cannot be read"):
        register_state(folder, shelf, FIELDS)
    twice = tmp_path / "twice"
    twice.mkdir()
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, twice / f"{name}.safetensors")
    with pytest.raises(PartDamaged, match="two files"):
        register_state(twice, shelf, FIELDS)
    (in_dcp(tmp_path) / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(PartDamaged, match="index cannot be read"):
        register_state(tmp_path / "dcp", shelf, FIELDS)
    save_file({}, tmp_path / "nothing.safetensors")
    with pytest.raises(BundleError, match="at least one tensor"):
        register_state(tmp_path / "nothing.safetensors", shelf, FIELDS)
    bundle = save_bundle(tmp_path / "own", fields(1), state(1))
    with pytest.raises(BundleError, match="registered already"):
        register_state(bundle.path, shelf, FIELDS)
    assert not list(shelf.glob("bundle-*"))


def shards_of(folder: Path, shards: dict[str, list[str]], **indexes: dict[str, Any]) -> Path:
    """A folder with shards of these names and tensors, and indexes by their weight maps."""
    folder.mkdir()
    for file, names in shards.items():
        save_file({name: torch.ones(2) for name in names}, folder / file)
    for stem, weight_map in indexes.items():
        name = f"{stem}.safetensors.index.json"
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


ONE, TWO, THREE = (f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3))
WHOLE = {ONE: ["a"], TWO: ["b", "c"], THREE: ["d"]}
MAP = {"a": ONE, "b": TWO, "c": TWO, "d": THREE}


@pytest.mark.parametrize(
    ("shards", "indexes", "says"),
    [
        ({ONE: ["a"], THREE: ["d"]}, {"model": MAP}, f"the shard {TWO} that model"),
        ({ONE: ["a"], THREE: ["d"]}, {"model.fp16": MAP}, f"the shard {TWO} that model.fp16"),
        ({ONE: ["a"], THREE: ["d"]}, {}, f"the shard {TWO} that the names of the others count"),
        ({ONE: ["a"], TWO: ["b"]}, {}, f"the shard {THREE} that the names of the others count"),
        ({**WHOLE, TWO: ["b"]}, {"model": MAP}, f"expected c in {TWO}"),
        ({**WHOLE, ONE: ["a", "c"], TWO: ["b"]}, {"model": MAP}, f"expected c in {TWO}"),
        (WHOLE, {"model": MAP | {"e": THREE}}, f"expected e in {THREE}"),
        (WHOLE, {"model": MAP | {"e": 5}}, "index.json cannot be read"),
        (WHOLE, {"a": MAP, "b": MAP}, "expected one index"),
    ],
)
def test_a_hugging_face_folder_that_is_not_whole_is_refused(
    tmp_path: Path, shards: dict[str, list[str]], indexes: dict[str, Any], says: str
) -> None:
    """A shard that was lost, with its index or without, and one of another model in its place."""
    folder = shards_of(tmp_path / "hf", shards, **indexes)
    with pytest.raises((PartMissing, PartDamaged), match=re.escape(says)):
        register_state(folder, tmp_path / "shelf", FIELDS)
    assert not list((tmp_path / "shelf").glob("bundle-*"))


@pytest.mark.parametrize("stem", ["model", "model.fp16", None])
@pytest.mark.parametrize("first", [0, 1])
def test_a_hugging_face_folder_that_is_whole_is_taken(
    tmp_path: Path, stem: str | None, first: int
) -> None:
    """With the usual index, another one or none; shards may count from 0."""
    named = {f: f.replace(f"{n:05d}-", f"{n - 1 + first:05d}-") for n, f in enumerate(WHOLE, 1)}
    shards = {named[file]: tensors for file, tensors in WHOLE.items()}
    weight_map = {tensor: named[file] for tensor, file in MAP.items()}
    indexes = {} if stem is None else {stem: weight_map}
    bundle = register_state(
        shards_of(tmp_path / "hf", shards, **indexes), tmp_path / "shelf", FIELDS
    )
    assert sorted(restore_bundle(bundle.path)["policy"]) == ["a", "b", "c", "d"]


def test_the_command_registers_and_says_what(tmp_path: Path) -> None:
    source = in_dcp(tmp_path)
    done = run("register", source, tmp_path / "shelf", "--job", "sft", "--iteration", 7)
    assert done.exit_code == 0, done.output
    assert "4 tensors" in done.stdout
    assert run("verify", tmp_path / "shelf").exit_code == 0
    (listed,) = json.loads(run("list", tmp_path / "shelf", "--format", "json").stdout)
    assert (listed["job"], listed["iteration"]) == ("sft", 7)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    refused = run("register", nothing, tmp_path / "shelf", "--job", "sft")
    assert refused.exit_code == 2
    assert "found none of these" in refused.stderr
    assert "Traceback" not in refused.output


def test_the_same_state_in_all_forms_does_not_differ(tmp_path: Path) -> None:
    places = [make(tmp_path) for make in MAKERS]
    places.append(register_state(places[0], tmp_path / "shelf", FIELDS).path)
    for one in places:
        for other in places:
            done = run("diff", one, other)
            assert done.exit_code == 0, (one, other, done.output)


def test_differences_are_named_and_counted(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({**weights(), "old": torch.ones(3)}, first)
    changed = weights()
    changed["embed"][4, 2:5] += 1
    changed["norm"] = torch.ones(8, dtype=torch.float64)
    changed["head.weight"] = changed["head.weight"].reshape(30, 8).contiguous()
    save_file({**changed, "new": torch.zeros(2, 2)}, second)
    done = run("diff", first, second, "--format", "json")
    assert done.exit_code == 1
    rows = {row["tensor"]: row for row in json.loads(done.stdout)}
    assert {
        name: (row["what"], row["differing"], row["elements"]) for name, row in rows.items()
    } == {
        "embed": ("elements", 3, 240),
        "head.weight": ("shape", None, 240),
        "new": ("only in B", None, 4),
        "norm": ("dtype", None, 8),
        "old": ("only in A", None, 3),
    }
    assert rows["norm"]["a"] == "float32 [8]"
    assert rows["norm"]["b"] == "float64 [8]"
    assert rows["embed"]["a"] == fingerprint_tensors(weights())["embed"]


def test_bundles_differ_by_part_and_only_what_differs_is_read(tmp_path: Path) -> None:
    one, other = (save_bundle(tmp_path / str(k), fields(k), state(k)) for k in (1, 2))
    rows = json.loads(run("diff", one.path, tmp_path / "2", "--format", "json").stdout)
    differing = {
        (part, name)
        for part, record in one.manifest.parts.items()
        for name, tensor in record.tensors.items()
        if tensor.fingerprint != other.manifest.parts[part].tensors[name].fingerprint
    }
    tensors = [row for row in rows if row["elements"] is not None]
    assert {(row["part"], row["tensor"]) for row in tensors} == differing
    assert differing
    assert run("diff", one.path, one.path).exit_code == 0
    shutil.rmtree(one.path / "state")
    broken = run("diff", one.path, other.path)
    assert broken.exit_code == 2
    assert "Traceback" not in broken.output


OTHER_FIELDS = {
    "rng": {"trainer/0": "00ff10" * 30, "new": "ab"},
    "sampler": {"epoch": 1, "position": 41},
    "in_flight_uids": (),
    "scheduler": {"step": 1.0, "learning_rate": -0.0, "warmup": float("nan")},
    "controllers": {"kl_coefficient": 0.06},
    "config_digest": "a" * 64,
    "parent": "b" * 64,
    "policy_version": 2,
}


def test_bundles_with_the_same_tensors_differ_by_what_their_manifests_say(tmp_path: Path) -> None:
    """Every field, by owner or key, in both directions; a NaN is no difference to itself."""
    one = save_bundle(tmp_path / "a", fields(1), state(1))
    other = save_bundle(tmp_path / "b", fields(1, **OTHER_FIELDS), state(1))
    done = run("diff", one.path, other.path, "--format", "json")
    assert done.exit_code == 1
    rows = {(row["part"], row["tensor"]): row for row in json.loads(done.stdout)}
    assert {place: row["what"] for place, row in rows.items()} == {
        ("rng", "trainer/0"): "value",
        ("rng", "sampler"): "only in A",
        ("rng", "new"): "only in B",
        ("sampler", "position"): "value",
        ("in_flight_uids", ""): "value",
        ("scheduler", "learning_rate"): "value",
        ("scheduler", "warmup"): "only in B",
        ("controllers", "kl_coefficient"): "value",
        ("config_digest", ""): "only in B",
        ("parent", ""): "only in B",
        ("policy_version", ""): "value",
    }
    position = rows["sampler", "position"]
    assert (position["a"], position["b"], position["elements"]) == ("40", "41", None)
    generator = rows["rng", "trainer/0"]
    assert (generator["a"], generator["b"][:7]) == ("00ff10", "sha256:")
    assert "kl_coefficient" in run("diff", one.path, other.path).stdout
    back = run("diff", other.path, one.path, "--format", "json")
    assert {row["what"] for row in json.loads(back.stdout)} == {"only in A", "only in B", "value"}
    same = save_bundle(tmp_path / "c", fields(1, **OTHER_FIELDS), state(1))
    assert run("diff", other.path, same.path).exit_code == 0


def test_fields_that_may_differ_are_named_and_kinds_compared(tmp_path: Path) -> None:
    """Two runs of one seed hold one state under two names; a part of another kind is another."""
    one = save_bundle(tmp_path / "a", fields(1), state(1))
    other = save_bundle(tmp_path / "b", fields(1, job="again", attempt="a7"), state(1))
    assert run("diff", one.path, other.path).exit_code == 1
    spared = ("--ignore", "job", "--ignore", "attempt")
    assert run("diff", one.path, other.path, *spared).exit_code == 0
    unknown = run("diff", one.path, other.path, "--ignore", "jobs")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "found 'jobs'" in unknown.stderr
    kinds = save_bundle(tmp_path / "c", fields(1), state(1), kinds={"masters": "fp64 masters"})
    (row,) = json.loads(run("diff", one.path, kinds.path, "--format", "json").stdout)
    assert (row["part"], row["a"], row["b"]) == ("masters", "kind masters", "kind fp64 masters")
    named = save_bundle(tmp_path / "d", fields(1, snapshot="moment 7"), state(1))
    (row,) = json.loads(run("diff", one.path, named.path, "--format", "json").stdout)
    assert (row["part"], row["what"], row["b"]) == ("snapshot", "only in B", "moment 7")


def test_complex_elements_count_once(tmp_path: Path) -> None:
    folders = []
    for index in range(2):
        value = torch.ones(6, dtype=torch.complex128)
        value[2] += index * (1 + 1j)
        folder = tmp_path / str(index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"z": value}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        folders.append(folder)
    (row,) = json.loads(run("diff", *folders, "--format", "json").stdout)
    assert (row["differing"], row["elements"]) == (1, 6)
    assert open_stored_state(folders[0]).kind == "dcp"
