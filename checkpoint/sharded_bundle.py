"""Bundles of tensors that are spread over processes: each saves its own shards.

Every process of a group calls the same function with the same names. DTensors go by shard, plain
tensors are taken from the group's first process, and generators from all. The first process makes
the folder, describes it and writes the manifest. What one process finds wrong is raised on every
one, before they write. A bundle holds logical tensors, so it can be restored into another number of
processes and another layout (`restore_into`), or into one process (`restore_bundle`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shiftbook.checkpoint.bundle import (
    NOT_BEGUN,
    Parts,
    bundle_fields,
    check_declared,
    check_part_names,
    complete_folder,
    disk_error,
)
from shiftbook.checkpoint.errors import BundleError, BundleWriteFailed
from shiftbook.checkpoint.failed_saves import tell_failed
from shiftbook.checkpoint.fingerprint import Fingerprint
from shiftbook.checkpoint.group_agreement import on_all, on_first
from shiftbook.checkpoint.manifest import (
    STATE_FOLDER,
    BundleFields,
    PartRecord,
    TensorRecord,
    check_part,
)
from shiftbook.checkpoint.saver_settings import without_group_warning
from shiftbook.checkpoint.sharded_restore import restore_into
from shiftbook.checkpoint.shards import join_over_ranks, local_fingerprints
from shiftbook.checkpoint.shelf import (
    SavedBundle,
    incoming_folder,
    next_path,
    shelf_lock,
)
from shiftbook.ledger.durable import sync_path

__all__ = ["Described", "describe", "restore_into", "save_sharded", "write_described"]

T = TypeVar("T")
_SHOWN_CHARACTERS = 100
"""Of a value in a refusal."""


@dataclass(frozen=True)
class Described:
    """A state on whose description all processes of a group agree, before it is written."""

    fields: BundleFields
    records: dict[str, dict[str, TensorRecord]]
    kinds: dict[str, str]
    external: dict[str, PartRecord]
    own: dict[str, Fingerprint]
    """This process's parts of the fingerprints, by PART/NAME."""


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

    `fields` are the same on all processes but for `rng`: there each may bring owners of its own,
    and the bundle holds those of all. Two states of one owner are refused, and so are other
    differences. Raises the same errors, on every process.
    """
    on_all(partial(tell_failed, NOT_BEGUN), group)
    described = describe(
        fields, parts, kinds=kinds, external=external, declared=declared, group=group
    )
    return write_described(root_dir, described, parts, group)


def describe(
    fields: BundleFields | Mapping[str, Any],
    parts: Parts,
    *,
    kinds: Mapping[str, str] | None = None,
    external: Mapping[str, PartRecord] | None = None,
    declared: Collection[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Described:
    """Fingerprints of the live tensors, and the fields that the processes have together.

    Raises BundleError on every process where one of them has something unfit or other than the
    first one has.
    """
    shared, named = dict(external or {}), dict(kinds or {})
    own: dict[str, Fingerprint] = {}

    def look() -> tuple[BundleFields, dict[str, Any]]:
        checked = bundle_fields(fields)
        check_part_names(parts, shared)
        own.update(local_fingerprints(flat(parts), group))
        return checked, {
            **{f"part {part}": _form(members) for part, members in parts.items()},
            **{f"external part {name}": record.sha256 for name, record in shared.items()},
            "kinds": named,
            "declared": None if declared is None else sorted(declared),
        }

    looks = on_all(look, group)
    _agree([{**form, **_plain(one)} for one, form in looks])
    joined = _joined_fields([one for one, _ in looks])
    check_declared(joined, {*parts, *shared}, declared)
    whole = join_over_ranks(own, group)
    records = {
        part: {
            name: TensorRecord(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                fingerprint=whole[f"{part}/{name}"].hex,
            )
            for name, tensor in members.items()
        }
        for part, members in parts.items()
    }
    return Described(joined, records, named, shared, own)


def write_described(
    root_dir: str | os.PathLike[str],
    described: Described,
    parts: Parts,
    group: dist.ProcessGroup | None,
) -> SavedBundle:
    """Write tensors that were described; on return the bundle is complete on every process."""
    with ExitStack() as held:

        def begin() -> str:
            shelf = held.enter_context(shelf_lock(root_dir))
            folder = incoming_folder(shelf)
            held.callback(shutil.rmtree, folder, ignore_errors=True)  # gone once it was renamed
            for name, record in described.external.items():
                check_part(folder, name, record, {}, content=False)
            return str(folder)

        folder = Path(on_first(_writing(begin, root_dir), group))
        try:
            _save_shards(folder / STATE_FOLDER, flat(parts), group)
        except (Exception, CheckpointException) as error:  # raised on every process
            raise _not_written(root_dir, error) from error

        def complete() -> SavedBundle:
            index = dcp.FileSystemReader(folder / STATE_FOLDER).read_metadata()
            manifest = complete_folder(
                folder,
                described.fields,
                described.records,
                described.kinds,
                described.external,
                index,
            )
            final = folder.rename(next_path(folder.parent, manifest.bundle_id))
            sync_path(final.parent)
            return SavedBundle(final, manifest)

        return on_first(_writing(complete, root_dir), group)


def flat(parts: Parts) -> dict[str, Tensor]:
    """All tensors by PART/NAME."""
    return {f"{part}/{name}": t for part, members in parts.items() for name, t in members.items()}


def _save_shards(folder: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    writer = _Writer(folder, sync_files=True, thread_count=1)
    # A copy that several processes hold is written by the lowest of them, whose fingerprint the
    # manifest has; torch's own choice is the process with the least to write.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    alone = not dist.is_initialized()
    with without_group_warning():
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)


class _Writer(dcp.FileSystemWriter):
    """Fails with what the disk said: other processes get the error without its causes."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause = disk_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from error


def _form(members: Mapping[str, Tensor]) -> str:
    """One digest of the names, dtypes and shapes of a part's logical tensors."""
    forms = sorted((name, str(t.dtype), tuple(map(int, t.shape))) for name, t in members.items())
    digest = hashlib.sha256(repr(forms).encode()).hexdigest()
    return f"{len(forms)} tensors, names and forms {digest[:16]}"


def _plain(fields: BundleFields) -> dict[str, Any]:
    values = fields.model_dump(mode="json", exclude={"rng"})
    return {f"bundle field {name}": value for name, value in values.items()}


def _agree(seen: list[dict[str, Any]]) -> None:
    """Raise BundleError where a process has another value than the first one; the same on all."""
    first = seen[0]
    for rank, other in enumerate(seen):
        for what in sorted({*first, *other}):
            one, its = first.get(what), other.get(what)
            if one != its:
                raise BundleError(
                    f"{what}: expected the same on all processes, found {_short(its)} on process "
                    f"{rank} and {_short(one)} on process 0; pass the same everywhere",
                    part=what.rpartition("part ")[2] if "part " in what else None,
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _joined_fields(seen: list[BundleFields]) -> BundleFields:
    """The first process's fields with the generators of all; BundleError for a conflict."""
    rng: dict[str, str] = {}
    holders: dict[str, int] = {}
    for rank, fields in enumerate(seen):
        for owner, state in fields.rng.items():
            holder = holders.setdefault(owner, rank)
            if rng.setdefault(owner, state) != state:
                raise BundleError(
                    f"bundle field rng: expected one state of owner {owner!r}, found another on "
                    f"process {rank} than on process {holder}; give the generators of each "
                    f"process an owner of their own, such as 'rank/{rank}/{owner}'",
                    part="rng",
                )
    return seen[0].model_copy(update={"rng": rng})


def _writing(act: Callable[[], T], where: Any) -> Callable[[], T]:
    """The act, with what the disk refuses as a BundleWriteFailed."""

    def attempt() -> T:
        try:
            return act()
        except OSError as error:
            raise _not_written(where, error) from error

    return attempt


def _not_written(where: Any, error: BaseException) -> BundleError:
    cause = disk_error(error)
    reason = cause.strerror if cause is not None else f"{type(error).__name__}: {error}"
    return BundleWriteFailed(
        f"{where}: could not write the bundle ({reason}); nothing of it was kept and earlier "
        "bundles stand: free some space or choose another folder, then save again",
        path=str(where),
    )
