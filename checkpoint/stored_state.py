"""Reads states as they lie on disk, a tensor at a time: bundles, DCP, safetensors, Hugging Face.

Folders that this program did not write are read as they are. The index of a DCP folder is a pickle:
reading one from somebody else means to trust them, as loading it with torch does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from shiftbook.checkpoint.errors import BundleError, PartDamaged, PartMissing
from shiftbook.checkpoint.manifest import (
    MANIFEST_NAME,
    STATE_FOLDER,
    BundleManifest,
    PartRecord,
    check_files,
)
from shiftbook.checkpoint.saver_settings import without_group_warning

DCP_INDEX = ".metadata"
HF_INDEX = "model.safetensors.index.json"
HF_INDEXES = "*.safetensors.index.json"
"""Other models than the one that a folder is about are named otherwise (variants, parts)."""
HF_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")

Kind = Literal["bundle", "dcp", "safetensors"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk: dtype and shape, and how to read it."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    fingerprint: str | None = None
    """As the manifest of a bundle gives it."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state on disk. A folder that is no bundle has one part."""

    path: Path
    kind: Kind
    parts: dict[str, dict[str, StoredTensor]]
    files: tuple[Path, ...]
    """What holds it, but for bundles, whose manifest says so."""
    not_tensors: tuple[str, ...] = ()
    """Names of what else a DCP folder holds; it is left aside."""
    manifest: BundleManifest | None = None
    """Of a bundle."""


def open_stored_state(path: str | os.PathLike[str], *, part: str = "policy") -> StoredState:
    """Open a bundle, a DCP folder, a safetensors file or a folder of them (Hugging Face's).

    `part` names the one part of what is no bundle. Bundles are checked against their manifest
    first. Raises ManifestInvalid, PartMissing or PartDamaged, and BundleError for what is none of
    these.
    """
    place = Path(path)
    if (place / MANIFEST_NAME).is_file():
        return _bundle(place)
    if (place / DCP_INDEX).is_file():
        return _dcp_folder(place, part)
    if place.is_file() and place.suffix == ".safetensors":
        return _safetensors(place, part, (place,))
    index = _hf_index(place, part) if place.is_dir() else None
    if index is not None:
        return _indexed(place, part, index)
    found = tuple(sorted(place.glob("*.safetensors"))) if place.is_dir() else ()
    if found:
        _check_counted(place, part, found)
        return _safetensors(place, part, found)
    raise BundleError(
        f"{place}: expected a bundle, a folder of torch.distributed.checkpoint, a .safetensors "
        "file or a folder of such files, found none of these; give the folder that holds "
        f"{MANIFEST_NAME}, {DCP_INDEX} or *.safetensors",
        path=str(place),
    )


def _bundle(folder: Path) -> StoredState:
    manifest: BundleManifest = check_files(folder)
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, record in manifest.parts.items():
        readers = part_readers(folder, name, record)
        missing = sorted(set(record.tensors) - set(readers))
        if missing:
            raise PartMissing(
                f"{folder}: part {name}: expected tensor {missing[0]}, found none of that name",
                path=str(folder),
                part=name,
            )
        parts[name] = {
            tensor: StoredTensor(entry.dtype, entry.shape, readers[tensor].read, entry.fingerprint)
            for tensor, entry in record.tensors.items()
        }
    return StoredState(folder, "bundle", parts, (), manifest=manifest)


def part_readers(folder: Path, name: str, record: PartRecord) -> dict[str, StoredTensor]:
    """The tensors of one part of a bundle as they stand on disk; check the part's bytes first."""
    if record.format == "dcp":
        return _dcp_tensors(folder / STATE_FOLDER, name, f"{name}/")[0]
    files = dict.fromkeys(folder / piece.file for piece in record.ranges)
    if record.format == "dcp-folder":
        return _dcp_tensors(next(iter(files)).parent, name, "")[0]
    return _safetensors(folder, name, tuple(files)).parts[name]


def _dcp_folder(folder: Path, part: str) -> StoredState:
    tensors, others = _dcp_tensors(folder, part, "")
    files = [folder / DCP_INDEX, *sorted(folder.glob("*.distcp"))]
    return StoredState(folder, "dcp", {part: tensors}, tuple(files), tuple(others))


def _dcp_tensors(folder: Path, part: str, prefix: str) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors whose keys begin with a prefix, by the rest of the key; and other entries."""
    try:
        index: Metadata = dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # a pickle fails in many ways
        raise _damaged(folder, part, f"its index cannot be read ({error})") from error
    tensors: dict[str, StoredTensor] = {}
    others = []
    for key, entry in index.state_dict_metadata.items():
        if not key.startswith(prefix):
            continue
        if isinstance(entry, BytesStorageMetadata):
            others.append(key)
            continue
        dtype, shape = entry.properties.dtype, tuple(int(n) for n in entry.size)
        tensors[key.removeprefix(prefix)] = StoredTensor(
            str(dtype).removeprefix("torch."), shape, _dcp_reader(folder, part, key, dtype, shape)
        )
    return tensors, others


def _dcp_reader(
    folder: Path, part: str, key: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        state = {key: torch.empty(shape, dtype=dtype)}
        try:
            with without_group_warning():
                dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            raise _damaged(folder, part, f"{key} cannot be read ({error})") from error
        return state[key]

    return read


def _hf_index(folder: Path, part: str) -> Path | None:
    """The Hugging Face index of a folder; None where it has none."""
    if (folder / HF_INDEX).is_file():
        return folder / HF_INDEX
    found = sorted(folder.glob(HF_INDEXES))
    if len(found) > 1:
        names = ", ".join(index.name for index in found)
        raise _damaged(folder, part, f"expected one index, found {names}; keep one model a folder")
    return found[0] if found else None


def _indexed(folder: Path, part: str, index: Path) -> StoredState:
    """The shards that an index names; each tensor stands in the one that the index says."""
    try:
        weights = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = {name: folder / name for name in sorted(set(weights.values()))}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(folder, part, f"{index.name} cannot be read ({error!r})") from error
    for name, file in files.items():
        if not file.is_file():
            raise _shard_missing(folder, part, name, f"that {index.name} names")
    state = _safetensors(folder, part, tuple(files.values()))
    held = {name: _file_tensors(folder, part, file).keys() for name, file in files.items()}
    for tensor, name in sorted(weights.items()):
        if tensor not in held[name]:
            raise PartMissing(
                f"{folder}: part {part}: expected {tensor} in {name}, as {index.name} says, found "
                "none of that name there; the shard is of another model or save: fetch it again",
                path=str(folder),
                part=part,
            )
    return state


def _check_counted(folder: Path, part: str, files: tuple[Path, ...]) -> None:
    """Shards that say how many they are must be all there, also where the index is lost."""
    there: dict[tuple[str, str], dict[int, str]] = {}
    for file in files:
        counted = HF_SHARD.fullmatch(file.name)
        if counted is not None:
            stem, number, last = counted.groups()
            there.setdefault((stem, last), {})[int(number)] = number
    for (stem, last), numbers in there.items():
        first = 0 if 0 in numbers else 1
        width = len(next(iter(numbers.values())))
        for number in range(first, first + int(last)):
            if number not in numbers:
                name = f"{stem}-{number:0{width}d}-of-{last}.safetensors"
                raise _shard_missing(folder, part, name, "that the names of the others count")


def _shard_missing(folder: Path, part: str, name: str, why: str) -> PartMissing:
    return PartMissing(
        f"{folder}: part {part}: expected the shard {name} {why}, found no such file; fetch it "
        "again",
        path=str(folder),
        part=part,
    )


def _safetensors(place: Path, part: str, files: tuple[Path, ...]) -> StoredState:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _file_tensors(place, part, file).items():
            if name in tensors:
                raise _damaged(place, part, f"{name} stands in two files, {file.name} among them")
            tensors[name] = tensor
    return StoredState(place, "safetensors", {part: tensors}, files)


def _file_tensors(place: Path, part: str, file: Path) -> dict[str, StoredTensor]:
    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            try:
                with safe_open(file, framework="pt") as stream:
                    tensor: Tensor = stream.get_tensor(name)
                    return tensor
            except (OSError, SafetensorError) as error:
                raise _damaged(place, part, f"{name} cannot be read ({error})") from error

        return read

    found = {}
    try:
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118, this is no mapping
                view = stream.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype())
                found[name] = StoredTensor(dtype, tuple(view.get_shape()), reader(name))
    except (OSError, SafetensorError) as error:
        raise _damaged(
            place, part, f"{file.name} is no whole safetensors file ({error})"
        ) from error
    return found


_SAFETENSORS_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "U16": "uint16",
    "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip


def _damaged(place: Path, part: str, what: str) -> PartDamaged:
    return PartDamaged(
        f"{place}: part {part}: {what}; restore the files or use an earlier state",
        path=str(place),
        part=part,
    )
