"""Bundles of tensors that are spread over processes: each saves and loads its own shards.

Every process of a group calls the same function with the same names. DTensors go by shard, plain
tensors are taken from the group's first process. That one makes the folder, describes it and
writes the manifest; what it finds wrong is raised everywhere. A bundle holds logical tensors, so
it can be restored into another number of processes and another layout, or into one process
(`restore_bundle`).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from shiftbook.checkpoint.bundle import (
    Parts,
    bundle_fields,
    check_declared,
    check_part_names,
    complete_folder,
    disk_error,
)
from shiftbook.checkpoint.compare import FingerprintMap
from shiftbook.checkpoint.errors import BundleError, BundleWriteFailed, PartDamaged, PartMismatch
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.manifest import (
    STATE_FOLDER,
    BundleFields,
    BundleManifest,
    PartRecord,
    TensorRecord,
    check_part,
    load_manifest,
)
from shiftbook.checkpoint.restore import check_index
from shiftbook.checkpoint.restore_plan import RestoreKind, plan_restore
from shiftbook.checkpoint.shards import distributed_fingerprints
from shiftbook.checkpoint.shelf import (
    SavedBundle,
    incoming_folder,
    next_path,
    shelf_lock,
    sync_path,
)

T = TypeVar("T")


def save_sharded(
    root_dir: str | os.PathLike[str],
    fields: BundleFields | Mapping[str, Any],
    parts: Parts,
    *,
    kinds: Mapping[str, str] | None = None,
    external: Mapping[str, PartRecord] | None = None,
    declared: Collection[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> SavedBundle:
    """`save_bundle` by all processes of a group, which share the folder `root_dir`.

    Raises the same errors, on every process.
    """
    shared = dict(external or {})
    checked = bundle_fields(fields)
    check_part_names(parts, shared)
    check_declared(checked, {*parts, *shared}, declared)
    prints = _joined(parts, group)
    records = {
        part: {
            name: TensorRecord(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                fingerprint=prints[f"{part}/{name}"],
            )
            for name, tensor in members.items()
        }
        for part, members in parts.items()
    }
    with ExitStack() as held:

        def begin() -> str:
            shelf = held.enter_context(shelf_lock(root_dir))
            folder = incoming_folder(shelf)
            held.callback(shutil.rmtree, folder, ignore_errors=True)  # gone once it was renamed
            for name, record in shared.items():
                check_part(folder, name, record, {}, content=False)
            return str(folder)

        folder = Path(_first(begin, group, root_dir))
        state = _flat(parts)
        try:
            writer = dcp.FileSystemWriter(folder / STATE_FOLDER, sync_files=True, thread_count=1)
            alone = not dist.is_initialized()
            _quietly(dcp.save, state, storage_writer=writer, process_group=group, no_dist=alone)
        except Exception as error:  # raised on every process
            raise _not_written(root_dir, error) from error

        def complete() -> SavedBundle:
            index = dcp.FileSystemReader(folder / STATE_FOLDER).read_metadata()
            manifest = complete_folder(folder, checked, records, kinds or {}, shared, index)
            final = folder.rename(next_path(folder.parent, manifest.bundle_id))
            sync_path(final.parent)
            return SavedBundle(final, manifest)

        return _first(complete, group, root_dir)


def restore_into(
    path: str | os.PathLike[str],
    parts: Parts,
    *,
    kind: RestoreKind = "resume",
    expected_missing: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
) -> dict[str, list[str]]:
    """Load a bundle's tensors into those of `parts`, in place; returns what was loaded, by part.

    Tensors may be DTensors of any layout over the group, whatever layout they were saved from. The
    group's first process checks the files' bytes; then all check the fingerprints of what they
    loaded together. `kind` and `expected_missing` say what may be absent (`plan_restore`). Without
    an initialised process group, this process is alone. Raises what `restore_bundle` raises. When
    it raises after loading began (PartDamaged, or PartMismatch with "were loaded" in it), the
    tensors hold a mixture: restore another bundle before anything uses them.
    """
    folder = Path(path)
    places = {
        part: {
            name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in members.items()
        }
        for part, members in parts.items()
    }

    def check() -> dict[str, list[str]]:
        manifest = load_manifest(folder)
        taken = plan_restore(manifest, places, kind=kind, expected_missing=expected_missing)
        for part in taken:
            record = manifest.parts[part]
            if record.format != "dcp":
                raise PartMismatch(
                    f"{folder}: part {part}: expected tensors that the bundle holds itself, found "
                    f"{record.format}; read it with restore_bundle",
                    path=str(folder),
                    part=part,
                )
            check_part(folder, part, record, manifest.files)
        check_index(folder, manifest, list(taken))
        return taken

    taken = _first(check, group, folder)
    manifest = load_manifest(folder)
    chosen = {part: {name: parts[part][name] for name in names} for part, names in taken.items()}
    state = _flat(chosen)
    reader = dcp.FileSystemReader(folder / STATE_FOLDER)
    alone = not dist.is_initialized()
    try:
        _quietly(dcp.load, state, storage_reader=reader, process_group=group, no_dist=alone)
    except Exception as error:
        named = ", ".join(taken)
        raise PartDamaged(
            f"{folder}: part {named}: the saved tensors cannot be read ({error}); use an earlier "
            "bundle",
            path=str(folder),
            part=named,
        ) from error
    for part, what in _loaded_wrongly(chosen, manifest, group).items():
        raise PartMismatch(
            f"{folder}: part {part}: expected the tensors that were saved, others were loaded "
            f"({what}); use an earlier bundle",
            path=str(folder),
            part=part,
        )
    return taken


def _loaded_wrongly(
    chosen: Parts, manifest: BundleManifest, group: dist.ProcessGroup | None
) -> dict[str, str]:
    """What differs from the manifest on any process, by part; the same on all."""
    spread = {
        part: {name: t for name, t in members.items() if isinstance(t, DTensor)}
        for part, members in chosen.items()
    }
    found = _joined(spread, group)
    wrong: dict[str, str] = {}
    for part, members in chosen.items():
        # Each process answers for its own copy of a tensor that is not spread.
        copies = fingerprint_tensors({n: t for n, t in members.items() if n not in spread[part]})
        saved = manifest.parts[part].fingerprints
        difference = FingerprintMap({name: saved[name] for name in members}).compare(
            copies | {name: found[f"{part}/{name}"] for name in spread[part]}
        )
        if not difference.equal:
            wrong[part] = difference.describe()
    if not dist.is_initialized():
        return wrong
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, wrong, group=group)
    return {part: what for each in everywhere for part, what in each.items()}


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{part}/{name}": t for part, members in parts.items() for name, t in members.items()}


def _joined(parts: Parts, group: dist.ProcessGroup | None) -> dict[str, str]:
    """Fingerprints of the logical tensors, by PART/NAME."""
    flat = _flat(parts)
    return (
        distributed_fingerprints(flat, group)
        if dist.is_initialized()
        else fingerprint_tensors(flat)
    )


def _quietly(act: Callable[..., Any], *arguments: Any, **how: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        act(*arguments, **how)


def _first(act: Callable[[], T], group: dist.ProcessGroup | None, where: Any) -> T:
    """What the group's first process makes of it, on all; an error of its own is raised on all."""
    if not dist.is_initialized():
        return _attempt(act, where)[0]
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [_attempt(act, where)[0], None]
        except Exception as error:  # the others wait for an answer
            outcome = [None, error]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    made: T = outcome[0]
    return made


def _attempt(act: Callable[[], T], where: Any) -> tuple[T]:
    try:
        return (act(),)
    except OSError as error:
        raise _not_written(where, error) from error


def _not_written(where: Any, error: BaseException) -> BundleError:
    cause = disk_error(error)
    reason = cause.strerror if cause is not None else f"{type(error).__name__}: {error}"
    return BundleWriteFailed(
        f"{where}: could not write the bundle ({reason}); nothing of it was kept and earlier "
        "bundles stand: free some space or choose another folder, then save again",
        path=str(where),
    )
