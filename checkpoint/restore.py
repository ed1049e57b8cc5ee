"""Restores the parts of a bundle, each byte and each tensor checked against the manifest."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shiftbook.checkpoint.compare import FingerprintMap
from shiftbook.checkpoint.errors import BundleError, PartDamaged, PartMismatch, PartMissing
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.manifest import (
    INDEX_FILE,
    INDEX_OWNER,
    STATE_FOLDER,
    BundleManifest,
    FileRange,
    PartRecord,
    being_read,
    check_part,
    check_size,
    load_manifest,
    sha256_ranges,
)
from shiftbook.checkpoint.saver_settings import without_group_warning
from shiftbook.checkpoint.stored_state import part_readers


def restore_bundle(
    path: str | os.PathLike[str], parts: Collection[str] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Load parts of a bundle (all by default) as CPU tensors by part and name.

    Before loading: each part's bytes have the digest that the manifest gives, and the index names
    exactly the manifest's tensors and covers each of their elements once. After loading: each
    tensor has the fingerprint that the live tensor had. Retention leaves the bundle alone
    meanwhile. Raises ManifestInvalid, or PartMissing, PartDamaged or PartMismatch with the part in
    its text and in `.part`.
    """
    folder = Path(path)
    with being_read(folder):
        return _restored(folder, parts)


def _restored(folder: Path, parts: Collection[str] | None) -> dict[str, dict[str, Tensor]]:
    manifest = load_manifest(folder)
    wanted = list(manifest.parts) if parts is None else list(parts)
    for name in wanted:
        if name not in manifest.parts:
            raise _refusal(
                PartMissing,
                folder,
                name,
                f"expected one of the bundle's parts ({', '.join(manifest.parts)}), found no such",
            )
        check_part(folder, name, manifest.parts[name], manifest.files)
    saved = [name for name in wanted if manifest.parts[name].format == "dcp"]
    restored = _read_saved(folder, manifest, saved) if saved else {}
    for name in wanted:
        if name not in restored:
            readers = part_readers(folder, name, manifest.parts[name])
            restored[name] = {tensor: stored.read() for tensor, stored in readers.items()}
        _check_tensors(folder, name, manifest.parts[name], restored[name])
    return {name: restored[name] for name in wanted}


def _read_saved(
    folder: Path, manifest: BundleManifest, parts: list[str]
) -> dict[str, dict[str, Tensor]]:
    """Load parts through the distributed checkpoint, its index checked against the manifest."""
    reader = check_index(folder, manifest, parts)
    state = {
        f"{part}/{name}": torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        for part in parts
        for name, record in manifest.parts[part].tensors.items()
    }
    try:
        with without_group_warning():
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # it is no Exception
        raise _refusal(
            PartDamaged, folder, ", ".join(parts), f"the saved tensors cannot be read ({error})"
        ) from error
    return {
        part: {name: state[f"{part}/{name}"] for name in manifest.parts[part].tensors}
        for part in parts
    }


def check_index(folder: Path, manifest: BundleManifest, parts: list[str]) -> dcp.FileSystemReader:
    """Check the index of the saved tensors against the manifest; the reader of those files."""
    entry = manifest.files.get(INDEX_FILE)
    # The index is a pickle: its digest is checked before it is opened.
    if entry is None or entry.sha256 is None:
        raise _refusal(PartMissing, folder, parts[0], "expected the index of the saved tensors")
    check_size(folder / INDEX_FILE, entry.bytes, folder, INDEX_OWNER)
    whole = (FileRange(file=INDEX_FILE, offset=0, bytes=entry.bytes),)
    if sha256_ranges(folder, whole) != entry.sha256:
        raise _refusal(PartDamaged, folder, INDEX_OWNER, "its bytes changed after the save")
    reader = dcp.FileSystemReader(folder / STATE_FOLDER)
    try:
        index = reader.read_metadata()
    except Exception as error:
        raise _refusal(PartDamaged, folder, INDEX_OWNER, f"it cannot be read ({error})") from error
    for part in parts:
        _check_index(folder, part, manifest.parts[part], index)
    return reader


def _check_index(folder: Path, name: str, part: PartRecord, index: Metadata) -> None:
    """The index holds the part's tensors and no others, each element of them once."""
    prefix = f"{name}/"
    found = {
        key.removeprefix(prefix): entry
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(prefix)
    }
    missing, extra = sorted(set(part.tensors) - set(found)), sorted(set(found) - set(part.tensors))
    if missing or extra:
        raise _refusal(
            PartMismatch,
            folder,
            name,
            f"expected the manifest's tensors, found missing {missing[:5]}, extra {extra[:5]}",
        )
    for tensor, record in part.tensors.items():
        entry = found[tensor]
        shape = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != record.shape:
            raise _refusal(
                PartMismatch,
                folder,
                name,
                f"tensor {tensor}: expected shape {record.shape}, found {shape}",
            )
        assert isinstance(entry, TensorStorageMetadata)
        boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        if not _tiles(boxes, record.shape):
            raise _refusal(
                PartMismatch,
                folder,
                name,
                f"tensor {tensor}: expected shards that cover each element once, found {boxes[:4]}",
            )


def _tiles(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """True when the boxes lie inside of `shape`, do not overlap, and fill it."""
    filled = 0
    for position, (start, size) in enumerate(boxes):
        if any(s + n > g for s, n, g in zip(start, size, shape, strict=True)):
            return False
        filled += torch.Size(size).numel()
        for other_start, other_size in boxes[:position]:
            if (
                all(
                    a < b + m and b < a + n
                    for a, n, b, m in zip(start, size, other_start, other_size, strict=True)
                )
                and torch.Size(size).numel()
            ):
                return False
    return filled == torch.Size(shape).numel()


def _check_tensors(
    folder: Path, name: str, part: PartRecord, tensors: Mapping[str, Tensor]
) -> None:
    difference = FingerprintMap(part.fingerprints).compare(fingerprint_tensors(tensors))
    if not difference.equal:
        raise _refusal(
            PartMismatch,
            folder,
            name,
            f"expected the tensors that were saved, found others ({difference.describe()})",
        )


def _refusal(kind: type[BundleError], folder: Path, part: str, what: str) -> BundleError:
    return kind(
        f"{folder}: part {part}: {what}; use an earlier bundle", path=str(folder), part=part
    )
