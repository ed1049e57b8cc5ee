"""Saves a training state as a durable bundle, with the digests of the live state."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import BundleError, BundleWriteFailed
from shiftbook.checkpoint.failed_saves import tell_failed
from shiftbook.checkpoint.manifest import (
    INDEX_FILE,
    MANIFEST_NAME,
    STATE_FOLDER,
    BundleFields,
    BundleManifest,
    FileRange,
    FileRecord,
    PartRecord,
    TensorRecord,
    check_part,
    encode_manifest,
    sha256_ranges,
)
from shiftbook.checkpoint.restore import restore_bundle
from shiftbook.checkpoint.saver_settings import without_checksums, without_group_warning
from shiftbook.checkpoint.shared_parts import external_part, record_tensor, store_shared
from shiftbook.checkpoint.shelf import (
    SavedBundle,
    incoming_folder,
    latest_bundle,
    next_path,
    retain,
    shelf_lock,
)
from shiftbook.ledger.durable import sync_path

__all__ = [
    "SavedBundle",
    "external_part",
    "latest_bundle",
    "restore_bundle",
    "retain",
    "save_bundle",
    "store_shared",
]

Parts = Mapping[str, Mapping[str, Tensor]]
NOT_BEGUN = "this save has not begun: see to the cause, then save again"
_THREADS = 4  # they wait for the disk or hash without the interpreter lock
_PART_NAME = re.compile(r"^[A-Za-z0-9_.-]+$")


def save_bundle(
    root_dir: str | os.PathLike[str],
    fields: BundleFields | Mapping[str, Any],
    parts: Parts,
    *,
    kinds: Mapping[str, str] | None = None,
    external: Mapping[str, PartRecord] | None = None,
    declared: Collection[str] | None = None,
) -> SavedBundle:
    """Save tensors by part and name as one bundle; on return it is complete and durable.

    `kinds` says what a part is where its name does not. `external` names parts that stand in
    files which bundles share (see `external_part`) and are not written again. `declared` says which
    parts a bundle of this job has, those of `manifest.FIELD_PARTS` included: then none is left out,
    or added, by accident. Fingerprints are taken from the tensors as they are during the call, not
    from the files. The caller is the only
    process that saves this state. Raises BundleWriteFailed when the disk refuses; then nothing
    of the bundle is left and earlier ones stand. Raises EarlierSaveFailed, and saves nothing, where
    a save in the background failed and nobody asked for its result.
    """
    tell_failed(NOT_BEGUN)
    return write_bundle(root_dir, fields, parts, kinds=kinds, external=external, declared=declared)


def write_bundle(
    root_dir: str | os.PathLike[str],
    fields: BundleFields | Mapping[str, Any],
    parts: Parts,
    *,
    kinds: Mapping[str, str] | None = None,
    external: Mapping[str, PartRecord] | None = None,
    declared: Collection[str] | None = None,
) -> SavedBundle:
    """`save_bundle`, without a word about earlier saves."""
    checked = bundle_fields(fields)
    shared = dict(external or {})
    check_part_names(parts, shared)
    check_declared(checked, {*parts, *shared}, declared)
    with shelf_lock(root_dir) as shelf:
        folder: Path | None = None
        try:
            folder = incoming_folder(shelf)
            for name, record in shared.items():
                check_part(folder, name, record, {}, content=False)
            manifest = _write(folder, checked, parts, kinds or {}, shared)
            folder = folder.rename(next_path(shelf, manifest.bundle_id))
            sync_path(shelf)
        except BaseException as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            cause = disk_error(error)
            if cause is None:
                raise
            raise BundleWriteFailed(
                f"{shelf}: could not write the bundle of iteration {checked.iteration} "
                f"({cause.strerror}); nothing of it was kept and earlier bundles stand: free some "
                "space or choose another folder, then save again",
                path=str(shelf),
            ) from error
    return SavedBundle(folder, manifest)


def bundle_fields(fields: BundleFields | Mapping[str, Any]) -> BundleFields:
    """What the caller says about the state, checked. Raises BundleError."""
    if isinstance(fields, BundleFields):
        return fields
    try:
        return BundleFields.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise BundleError(
            f"bundle field {'.'.join(map(str, first['loc']))}: {first['msg']}, found "
            f"{first['input']!r}; BundleFields says what each field holds"
        ) from error


def _write(
    folder: Path,
    fields: BundleFields,
    parts: Parts,
    kinds: Mapping[str, str],
    external: Mapping[str, PartRecord],
) -> BundleManifest:
    """Everything inside of the folder, the manifest last, all of it on disk on return."""
    state = {f"{part}/{name}": t for part, members in parts.items() for name, t in members.items()}
    state_folder = folder / STATE_FOLDER
    # Before the save and not beside it: two threads that hand the interpreter lock to and fro
    # for many small tensors take longer than one after the other.
    records = {
        part: {name: record_tensor(tensor) for name, tensor in members.items()}
        for part, members in parts.items()
    }
    index = _save_tensors(state_folder, state)
    return complete_folder(folder, fields, records, kinds, external, index)


@contextmanager
def _pool() -> Iterator[ThreadPool]:
    """Threads for a block, all of them ended after it.

    Not those of concurrent.futures: they take no work once the interpreter begins to end, and a
    save in the background may go on then.
    """
    pool = ThreadPool(_THREADS)
    try:
        yield pool
    finally:
        pool.close()
        pool.join()


def complete_folder(
    folder: Path,
    fields: BundleFields,
    records: Mapping[str, dict[str, TensorRecord]],
    kinds: Mapping[str, str],
    external: Mapping[str, PartRecord],
    index: Metadata,
) -> BundleManifest:
    """Hash and sync what was saved and described, and write the manifest last."""
    state_folder = folder / STATE_FOLDER
    parts = records
    ranges = {part: _ranges(index, part) for part in parts}
    written = sorted(state_folder.iterdir())
    with _pool() as pool:  # the disk syncs while the bytes are hashed
        synced = [pool.apply_async(sync_path, (file,)) for file in written]
        digests = {
            part: pool.apply_async(sha256_ranges, (folder, pieces))
            for part, pieces in ranges.items()
        }
        described = {
            part: PartRecord(
                kind=kinds.get(part, part),
                ranges=ranges[part],
                sha256=digests[part].get(),
                bytes=sum(piece.bytes for piece in ranges[part]),
                tensors=records[part],
            )
            for part in parts
        }
        files = {f"{STATE_FOLDER}/{file.name}": _file_record(file) for file in written}
        for each in synced:
            each.get()
    manifest = _manifest(fields, files, {**described, **external})
    sync_path(state_folder)
    with (folder / MANIFEST_NAME).open("wb") as stream:
        stream.write(encode_manifest(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    sync_path(folder)
    return manifest


def _file_record(file: Path) -> FileRecord:
    """The index gets a digest of its own; the bytes of data files are their parts'."""
    is_index = file.name == Path(INDEX_FILE).name
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if is_index else None
    return FileRecord(bytes=file.stat().st_size, sha256=digest)


def _manifest(
    fields: BundleFields, files: dict[str, FileRecord], parts: dict[str, PartRecord]
) -> BundleManifest:
    values = fields.model_dump(exclude_none=True)
    if fields.snapshot is None:
        values["snapshot"] = root({name: part.root for name, part in parts.items()})
    return BundleManifest.model_validate({**values, "files": files, "parts": parts})


def _save_tensors(folder: Path, state: dict[str, Any]) -> Metadata:
    """One distributed-checkpoint save by one saver; syncing is left to the caller."""
    writer = dcp.FileSystemWriter(folder, sync_files=False, thread_count=1)
    with without_checksums(), without_group_warning():
        index: Metadata = dcp.save(state, storage_writer=writer, no_dist=True)
    return index


def _ranges(index: Metadata, part: str) -> tuple[FileRange, ...]:
    """The bytes that hold a part, neighbours joined, in the order of file and offset."""
    pieces = sorted(
        (f"{STATE_FOLDER}/{info.relative_path}", info.offset, info.length)
        for key, info in index.storage_data.items()
        if key.fqn.startswith(f"{part}/")
    )
    joined: list[FileRange] = []
    for file, offset, length in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.file == file and last.offset + last.bytes == offset:
            joined[-1] = FileRange(file=file, offset=last.offset, bytes=last.bytes + length)
        else:
            joined.append(FileRange(file=file, offset=offset, bytes=length))
    return tuple(joined)


def check_declared(
    fields: BundleFields, parts: Collection[str], declared: Collection[str] | None
) -> None:
    """Raise BundleError where a declared part is absent, or another one is there."""
    if declared is None:
        return
    found = {*parts, *fields.given()}
    absent, further = sorted(set(declared) - found), sorted(found - set(declared))
    if absent or further:
        raise BundleError(
            f"expected the declared parts ({', '.join(sorted(declared))}), found absent {absent}, "
            f"further {further}; save them all, or declare what this job's bundles hold",
            part=(absent or further)[0],
        )


def check_part_names(parts: Parts, external: Mapping[str, PartRecord]) -> None:
    """Raise BundleError for a part without tensors, or given twice, or with another name, and for
    what is no torch tensor: distributed checkpoints would keep it as a pickle."""
    for name in [*parts, *external]:
        if not _PART_NAME.match(name):
            raise BundleError(
                f"part {name!r}: expected a name of letters, digits, '.', '_' and '-'", part=name
            )
    for name, members in parts.items():
        if name in external:
            raise BundleError(f"part {name}: given both as tensors and as external", part=name)
        if not members:
            raise BundleError(
                f"part {name}: expected at least one tensor, found none; leave the part out",
                part=name,
            )
        for tensor, value in members.items():
            if not isinstance(value, Tensor):
                raise BundleError(
                    f"part {name}: tensor {tensor}: expected a torch tensor, found "
                    f"{type(value).__name__}; convert it (torch.as_tensor)",
                    part=name,
                )


def disk_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind what the savers wrap around it, if there is one."""
    if error is None or isinstance(error, BundleError):
        return None
    if isinstance(error, OSError):
        return error
    wrapped = [failure[0] for failure in getattr(error, "failures", {}).values()]
    for inner in (*wrapped, error.__cause__, error.__context__):
        found = disk_error(inner)
        if found is not None:
            return found
    return None
