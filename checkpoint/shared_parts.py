"""Parts that stand in one safetensors file and are shared by many bundles, by digest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import BundleError, BundleWriteFailed, PartDamaged
from shiftbook.checkpoint.fingerprint import fingerprint, fingerprint_tensors
from shiftbook.checkpoint.manifest import (
    FileRange,
    PartRecord,
    TensorRecord,
    check_size,
    sha256_ranges,
)
from shiftbook.checkpoint.shelf import BUNDLE_PREFIX, shelf_lock
from shiftbook.ledger.durable import sync_path

_SHARED_FOLDER = "shared"


def external_part(
    path: str | os.PathLike[str], *, kind: str, root_dir: str | os.PathLike[str] | None = None
) -> PartRecord:
    """Describe a safetensors file as a part, so that bundles refer to it by its digest.

    Make the record once and pass it to each save. A file inside of `root_dir`, the folder of the
    bundles, is recorded relative to the bundles, so that the folder can be moved; any other by
    its absolute path. It must not lie inside of a bundle, which retention may delete.
    """
    file = Path(path).resolve()
    where = str(file)
    if root_dir is not None and file.is_relative_to(Path(root_dir).resolve()):
        relative = file.relative_to(Path(root_dir).resolve())
        if relative.parts[0].startswith(BUNDLE_PREFIX):
            raise BundleError(
                f"{file}: expected a file outside of the bundles, found one inside of "
                f"{relative.parts[0]}; copy it with store_shared()",
                path=where,
            )
        where = str(Path("..") / relative)
    check_size(file, file.stat().st_size if file.exists() else 0, file.parent, kind)
    size_bytes = file.stat().st_size
    whole = FileRange(file=where, offset=0, bytes=size_bytes)
    digest = sha256_ranges(file.parent, (FileRange(file=file.name, offset=0, bytes=size_bytes),))
    bare = PartRecord(
        kind=kind,
        format="safetensors",
        external=True,
        ranges=(whole,),
        sha256=digest,
        bytes=size_bytes,
        tensors={},
    )
    tensors = read_safetensors(file.parent, kind, bare, file=file)
    records = {name: record_tensor(tensor) for name, tensor in tensors.items()}
    return bare.model_copy(update={"tensors": records})


def store_shared(
    root_dir: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, kind: str
) -> PartRecord:
    """Write tensors once beside the bundles, under the name of their root, for later saves."""
    name = f"{root(fingerprint_tensors(tensors))}.safetensors"
    with shelf_lock(root_dir) as shelf:
        file = shelf / _SHARED_FOLDER / name
        if not file.exists():
            try:
                file.parent.mkdir(exist_ok=True)
                half_done = file.with_suffix(".incoming")
                half_done.write_bytes(save({n: t.contiguous() for n, t in tensors.items()}))
                sync_path(half_done)
                half_done.rename(file)
                sync_path(file.parent)
                sync_path(shelf)
            except OSError as error:
                raise BundleWriteFailed(
                    f"{file}: could not write the shared part ({error.strerror}); free some space "
                    "or choose another folder",
                    path=str(shelf),
                    part=kind,
                ) from error
    return external_part(file, kind=kind, root_dir=root_dir)


def read_safetensors(
    folder: Path, name: str, part: PartRecord, *, file: Path | None = None
) -> dict[str, Tensor]:
    """Tensors of a part's safetensors file (of `file` where it is given); PartDamaged if torn."""
    source = file if file is not None else folder / part.ranges[0].file
    try:
        return dict(load_file(source))
    except (OSError, SafetensorError) as error:
        raise PartDamaged(
            f"{folder}: part {name}: expected a safetensors file at {source}, it cannot be read "
            f"({error}); use an earlier bundle or restore the file",
            path=str(folder),
            part=name,
        ) from error


def record_tensor(tensor: Tensor) -> TensorRecord:
    """Dtype, shape and fingerprint of a tensor as it is now."""
    found = fingerprint(tensor)
    return TensorRecord(dtype=found.dtype, shape=found.shape, fingerprint=found.hex)
