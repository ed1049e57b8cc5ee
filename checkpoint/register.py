"""Registers states that others saved as bundles, without writing their tensors again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Literal

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.manifest import BundleFields, FileRange, PartRecord, TensorRecord
from shiftbook.checkpoint.shelf import SavedBundle
from shiftbook.checkpoint.stored_state import StoredState, open_stored_state

_READ_BYTES = 1 << 20


def register_state(
    source: str | os.PathLike[str],
    shelf: str | os.PathLike[str],
    fields: BundleFields | Mapping[str, Any],
    *,
    part: str = "policy",
    kind: str | None = None,
) -> SavedBundle:
    """Make a bundle on `shelf` whose one part is the DCP, safetensors or HF state at `source`.

    The files stay where they are and are named by absolute path, each with all of its bytes in the
    part's SHA-256. The fingerprints are taken from the file, since the live state is gone: what
    was wrong when it was saved is wrong here. Raises BundleError and its kinds.
    """
    state = open_stored_state(source, part=part)
    if state.kind == "bundle":
        raise BundleError(
            f"{source}: expected a state that is no bundle, found one; it is registered already",
            path=str(source),
        )
    record = _part_record(state, part, kind or part)
    return save_bundle(shelf, fields, {}, external={part: record})


def _part_record(state: StoredState, part: str, kind: str) -> PartRecord:
    tensors = {}
    for name, stored in state.parts[part].items():
        found = fingerprint(stored.read())
        tensors[name] = TensorRecord(dtype=found.dtype, shape=found.shape, fingerprint=found.hex)
    if not tensors:
        raise BundleError(
            f"{state.path}: expected at least one tensor, found none", path=str(state.path)
        )
    ranges = []
    digest = hashlib.sha256()
    for file in state.files:
        whole = file.resolve()
        ranges.append(FileRange(file=str(whole), offset=0, bytes=whole.stat().st_size))
        with whole.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
    form: Literal["dcp-folder", "safetensors"] = (
        "dcp-folder" if state.kind == "dcp" else "safetensors"
    )
    return PartRecord(
        kind=kind,
        format=form,
        external=True,
        ranges=tuple(ranges),
        sha256=digest.hexdigest(),
        bytes=sum(piece.bytes for piece in ranges),
        tensors=tensors,
    )
