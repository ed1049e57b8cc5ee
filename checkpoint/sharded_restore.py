"""Restores a bundle into tensors that are spread over processes, of any number and layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shiftbook.checkpoint.compare import FingerprintMap
from shiftbook.checkpoint.errors import BundleError, PartDamaged, PartMismatch
from shiftbook.checkpoint.fingerprint import Fingerprint, fingerprint_tensors
from shiftbook.checkpoint.group_agreement import on_all, on_first
from shiftbook.checkpoint.manifest import (
    STATE_FOLDER,
    BundleManifest,
    being_read,
    check_part,
    load_manifest,
)
from shiftbook.checkpoint.patch_places import shared_elements
from shiftbook.checkpoint.restore import check_index
from shiftbook.checkpoint.restore_plan import Form, RestoreKind, plan_restore
from shiftbook.checkpoint.saver_settings import without_group_warning
from shiftbook.checkpoint.shards import join_over_ranks, local_fingerprints
from shiftbook.checkpoint.stored_state import part_readers

Parts = Mapping[str, Mapping[str, Tensor]]


def restore_into(
    path: str | os.PathLike[str],
    parts: Parts,
    *,
    kind: RestoreKind = "resume",
    expected_missing: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
    in_place: bool = False,
) -> dict[str, list[str]]:
    """Load a bundle's tensors into those of `parts`; returns what was loaded, by part.

    Tensors may be DTensors of any layout over the group, whatever layout they were saved from, and
    parts may stand in shared or registered files as well as in the bundle. The group's first
    process checks the files' bytes; then all check the fingerprints of what they loaded together.
    `kind` and `expected_missing` say what may be absent (`plan_restore`). Without an initialised
    process group, this process is alone. Raises what `restore_bundle` raises, on every process.

    Everything is loaded beside the tensors and copied into them when it is checked, so that after
    an error they hold what they held. This takes one more copy of this process's share, on the
    same device. `in_place=True` does without: then a PartDamaged or PartMismatch that says that
    the tensors hold a mixture means it, and another bundle must be restored before anything uses
    them. Of a part in other files each process reads whole tensors, one at a time, and keeps its
    share. Retention leaves the bundle alone meanwhile.
    """
    folder = Path(path)
    with being_read(folder):
        return _restored_into(folder, parts, kind, expected_missing, group, in_place)


def _restored_into(
    folder: Path,
    parts: Parts,
    kind: RestoreKind,
    expected_missing: Collection[str],
    group: dist.ProcessGroup | None,
    in_place: bool,
) -> dict[str, list[str]]:
    forms = on_all(lambda: _forms(parts), group)
    for rank, form in enumerate(forms):
        if form != forms[0]:
            part = next(p for p in sorted({*form, *forms[0]}) if form.get(p) != forms[0].get(p))
            raise PartMismatch(
                f"part {part}: expected tensors of the same names, dtypes and shapes on all "
                f"processes, found others on process {rank} than on process 0; pass the same "
                "logical tensors everywhere",
                part=part,
            )

    def check() -> tuple[BundleManifest, dict[str, list[str]]]:
        try:
            return _checked(folder, forms[0], kind, expected_missing)
        except OSError as error:
            raise BundleError(
                f"{folder}: expected files that can be read, found {error.filename}: "
                f"{error.strerror}; mend the permissions or use another bundle",
                path=str(folder),
            ) from error

    manifest, taken = on_first(check, group)
    chosen = {part: {name: parts[part][name] for name in names} for part, names in taken.items()}
    on_all(lambda: _check_shared(chosen, manifest), group)
    loaded = chosen
    if not in_place:
        loaded = {part: {} for part in chosen}
        on_all(lambda: _beside(chosen, loaded), group)
    left = " the tensors hold a mixture now:" if in_place else " nothing was changed:"
    _load(folder, manifest, loaded, group, left)
    for part, what in _loaded_wrongly(loaded, manifest, group).items():
        raise PartMismatch(
            f"{folder}: part {part}: expected the tensors that were saved, others were loaded "
            f"({what});{left} use an earlier bundle",
            path=str(folder),
            part=part,
        )
    if not in_place:
        for part, members in chosen.items():
            for name, tensor in members.items():
                # One that was made for inference alone takes no other copy.
                with torch.inference_mode(tensor.is_inference()):
                    _local(tensor).copy_(_local(loaded[part][name]))
    return taken


def _forms(parts: Parts) -> dict[str, dict[str, Form]]:
    """Dtype and shape by part and name; BundleError for a tensor that has no box, and PartMismatch
    for what cannot be written."""
    found: dict[str, dict[str, Form]] = {}
    for part, members in parts.items():
        found[part] = {}
        for name, tensor in members.items():
            if (why := _obstacle(tensor)) is not None:
                raise PartMismatch(
                    f"part {part}: tensor {name}: expected a dense torch tensor with memory of its "
                    f"own, found {why}; nothing was changed",
                    part=part,
                )
            if isinstance(tensor, DTensor):
                _box(tensor)
            found[part][name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return found


def _obstacle(tensor: Any) -> str | None:
    """Why a copy into it would fail or be lost, in words; None where it would do."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    local = _local(tensor)
    if local.layout is not torch.strided or local.is_quantized:
        return f"layout {local.layout}, dtype {local.dtype}"
    if local.is_meta:
        return "one on the meta device"
    if shared_elements(tuple(local.shape), local.stride()) is not None:
        return "one whose elements share memory"
    return None


def _check_shared(chosen: Parts, manifest: BundleManifest) -> None:
    """Raise PartMismatch where two names are one tensor here and two contents in the bundle."""
    seen: dict[tuple[Any, ...], tuple[str, str]] = {}
    for part, members in chosen.items():
        for name, tensor in members.items():
            local = _local(tensor)
            if not local.numel():
                continue
            where = (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())
            first, other = seen.setdefault(where, (part, name))
            one = manifest.parts[first].tensors[other].fingerprint
            if one != manifest.parts[part].tensors[name].fingerprint:
                raise PartMismatch(
                    f"bundle {manifest.bundle_id[:12]}: part {part}: {first}/{other} and "
                    f"{part}/{name} are one tensor here, expected one content, found two; untie "
                    "them, or use a bundle of the tied model",
                    part=part,
                )


def _checked(
    folder: Path,
    forms: Mapping[str, Mapping[str, Form]],
    kind: RestoreKind,
    expected_missing: Collection[str],
) -> tuple[BundleManifest, dict[str, list[str]]]:
    manifest = load_manifest(folder)
    taken = plan_restore(manifest, forms, kind=kind, expected_missing=expected_missing)
    for part in taken:
        check_part(folder, part, manifest.parts[part], manifest.files)
    own = [part for part in taken if manifest.parts[part].format == "dcp"]
    if own:
        check_index(folder, manifest, own)
    return manifest, taken


def _beside(chosen: Parts, loaded: dict[str, dict[str, Tensor]]) -> None:
    """Room for each tensor in its own layout."""
    for part, members in chosen.items():
        for name, tensor in members.items():
            loaded[part][name] = torch.empty_like(tensor.detach())


def _load(
    folder: Path,
    manifest: BundleManifest,
    loaded: Parts,
    group: dist.ProcessGroup | None,
    left: str,
) -> None:
    own = {part: ts for part, ts in loaded.items() if manifest.parts[part].format == "dcp"}
    if own:
        state = {
            f"{part}/{name}": t for part, members in own.items() for name, t in members.items()
        }
        reader = dcp.FileSystemReader(folder / STATE_FOLDER)
        alone = not dist.is_initialized()
        try:
            with without_group_warning():
                dcp.load(state, storage_reader=reader, process_group=group, no_dist=alone)
        except (Exception, CheckpointException) as error:  # raised on every process
            named = ", ".join(own)
            raise PartDamaged(
                f"{folder}: part {named}: the saved tensors cannot be read ({error});{left} use "
                "an earlier bundle",
                path=str(folder),
                part=named,
            ) from error

    def read() -> None:
        for part, members in loaded.items():
            if part not in own:
                readers = part_readers(folder, part, manifest.parts[part])
                for name, tensor in members.items():
                    box = _box(tensor)
                    if box is not None:
                        _local(tensor).copy_(readers[name].read()[box])

    on_all(read, group)


def _local(tensor: Tensor) -> Tensor:
    """What of a tensor lies in this process; the same memory."""
    bare = tensor.detach()
    if isinstance(bare, DTensor):
        local: Tensor = bare.to_local()
        return local
    return bare


def _box(tensor: Tensor) -> tuple[slice, ...] | None:
    """Where this process's share stands in the logical tensor; None where it has none."""
    if not isinstance(tensor, DTensor):
        return ()
    if tensor.device_mesh.get_coordinate() is None:
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise BundleError(
            f"expected a DTensor of shards and replicas, found placements {tensor.placements}; "
            "redistribute the partial sums first"
        )
    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tuple(_local(tensor).shape)
    if local != tuple(size):
        raise BundleError(
            f"expected a local shard of shape {tuple(size)} for placements {tensor.placements}, "
            f"found {local}; the shards of this tensor are no boxes"
        )
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


def _loaded_wrongly(
    loaded: Parts, manifest: BundleManifest, group: dist.ProcessGroup | None
) -> dict[str, str]:
    """What differs from the manifest on any process, by part; the same on all."""
    spread = {
        f"{part}/{name}": tensor
        for part, members in loaded.items()
        for name, tensor in members.items()
        if isinstance(tensor, DTensor)
    }
    shards: dict[str, Fingerprint] = {}
    on_all(lambda: shards.update(local_fingerprints(spread, group)), group)
    whole = join_over_ranks(shards, group)

    def compare() -> dict[str, str]:
        wrong = {}
        for part, members in loaded.items():
            # Each process answers for its own copy of a tensor that is not spread.
            found = fingerprint_tensors(
                {name: t for name, t in members.items() if f"{part}/{name}" not in spread}
            ) | {n: whole[f"{part}/{n}"].hex for n in members if f"{part}/{n}" in spread}
            saved = manifest.parts[part].fingerprints
            difference = FingerprintMap({name: saved[name] for name in members}).compare(found)
            if not difference.equal:
                wrong[part] = difference.describe()
        return wrong

    everywhere: list[dict[str, Any]] = on_all(compare, group)
    return {part: what for each in everywhere for part, what in each.items()}
