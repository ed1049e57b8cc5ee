"""Registers states that others saved as bundles, without writing their tensors again.

With a ledger the registration is an event of the job that the state is for, so that an attempt
which begins from the bundle has an origin that the ledger knows.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.fingerprint import fingerprint
from shiftbook.checkpoint.manifest import BundleFields, FileRange, PartRecord, TensorRecord
from shiftbook.checkpoint.shelf import SavedBundle, withdraw
from shiftbook.checkpoint.stored_state import StoredState, open_stored_state
from shiftbook.ledger.errors import AppendInDoubt, IllegalStep
from shiftbook.ledger.events.state import CheckpointRegistered
from shiftbook.ledger.gate import Gate

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
    _check_named(fields)
    state = open_stored_state(source, part=part)
    if state.kind == "bundle":
        raise BundleError(
            f"{source}: expected a state that is no bundle, found one; it is registered already",
            path=str(source),
        )
    record = _part_record(state, part, kind or part)
    return save_bundle(shelf, fields, {}, external={part: record})


def register_in_ledger(
    gate: Gate,
    source: str | os.PathLike[str],
    shelf: str | os.PathLike[str],
    fields: BundleFields,
    *,
    part: str = "policy",
    kind: str | None = None,
) -> SavedBundle:
    """`register_state`, and its record as an event of the job that the fields name.

    Where the ledger refuses it or cannot be reached, no bundle stands either. Raises IllegalStep
    for a job that is closed, before anything is read, and what `register_state` raises.
    """
    if gate.ledger.state().job(fields.job).status == "closed":
        raise IllegalStep("sequence", f"a job {fields.job} that is not closed", "it is closed")
    began_s = time.monotonic()
    bundle = register_state(source, shelf, fields, part=part, kind=kind)
    record = bundle.manifest.parts[part]
    event = CheckpointRegistered(
        bundle=bundle.bundle_id,
        path=str(bundle.path.resolve()),
        source=os.path.realpath(source),
        form="dcp" if record.format == "dcp-folder" else "safetensors",
        iteration=fields.iteration,
        policy_version=fields.policy_version,
        parts=bundle.manifest.part_roots,
        bytes=record.bytes,
        register_s=time.monotonic() - began_s,
    )
    try:
        gate.register(fields.job, event)
    except AppendInDoubt:
        raise  # it may stand, and then it names the bundle
    except BaseException:
        withdraw(bundle)
        raise
    return bundle


def _check_named(fields: BundleFields | Mapping[str, Any]) -> None:
    plain = fields.model_dump() if isinstance(fields, BundleFields) else fields
    for name in ("job", "attempt"):
        if not str(plain.get(name, name)).strip():
            raise BundleError(f"expected a name of the {name}, found an empty one; give it one")


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
