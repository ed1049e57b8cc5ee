"""The manifest of a bundle: what the bundle holds and belongs to, readable without torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import ManifestInvalid, PartDamaged, PartMissing
from shiftbook.ledger import canonical
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events.base import Count, Hex128, HexBytes, Sha256

MANIFEST_NAME = "manifest.json"
STATE_FOLDER = "state"
INDEX_FILE = f"{STATE_FOLDER}/.metadata"
INDEX_OWNER = "index of the saved tensors"
FORMAT: Final = "shiftbook-bundle-v1"
_READ_BYTES = 1 << 20
FIELD_PARTS = (
    "rng",
    "sampler",
    "in_flight_uids",
    "scheduler",
    "scaler",
    "controllers",
    "config_digest",
    "data_digest",
    "parent",
)
"""Parts of the state that stand in the manifest itself, and that a job may declare."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class TensorRecord(_Record):
    """One logical tensor; the fingerprint was taken from the live tensor at the save."""

    dtype: str
    shape: tuple[Count, ...]
    fingerprint: Hex128


class FileRange(_Record):
    """A range of bytes of a file; the path is relative to the bundle unless it is absolute."""

    file: str
    offset: Count
    bytes: Count


class FileRecord(_Record):
    """A whole file of the bundle, as it was written."""

    bytes: Count
    sha256: Sha256 | None = None
    """Absent for data files: there each part answers for its own ranges."""


class PartRecord(_Record):
    """A part: which tensors, and which bytes of which files hold them."""

    kind: str
    format: Literal["dcp", "safetensors", "dcp-folder"] = "dcp"
    """The bundle's own save; safetensors files; a DCP folder that stands elsewhere."""
    external: bool = False
    """True when the bytes stand in a file that several bundles share."""
    ranges: tuple[FileRange, ...]
    sha256: Sha256
    """Over the bytes of the ranges, in order."""
    bytes: Count
    tensors: dict[str, TensorRecord]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each tensor, by name."""
        return {name: record.fingerprint for name, record in self.tensors.items()}

    @property
    def root(self) -> str:
        """One digest of all fingerprints of the part; 32 hex digits."""
        return root(self.fingerprints)


class SamplerCursor(_Record):
    """Where the declared sampler stands: the draw that comes next, and in which order.

    ``mixture`` is the SHA-256 of a declared mixture, "" without one. A cursor without its order
    fits any sampler, which is all that can be said of it.
    """

    epoch: Count
    position: Count
    unit: Literal["samples"] = "samples"
    rule: str | None = None
    seed: int | None = None
    size: Count | None = None
    mixture: str | None = None


class BundleFields(_Record):
    """What the caller of a save says about the state; the rest is measured."""

    job: str
    attempt: str
    parent: Sha256 | None = None
    """Bundle id of the bundle before this one in the lineage."""
    iteration: Count
    """Iterations completed."""
    policy_version: Count
    snapshot: str | None = None
    """Id of the one moment from which all parts were taken; made from their roots if absent."""
    rng: dict[str, HexBytes] = Field(default_factory=dict)
    """State of each named owner's generator."""
    sampler: SamplerCursor | None = None
    in_flight_uids: tuple[str, ...] | None = None
    """Uids drawn and not yet consumed; an empty buffer is one, None is a job that keeps none."""
    config_digest: Sha256 | None = None
    """Of what the job was configured to do; what it digests is the job's to say."""
    data_digest: Sha256 | None = None
    """Of the data set that the sampler's position counts in."""
    scheduler: dict[str, float] = Field(default_factory=dict)
    """Learning-rate schedule, such as `step` and `learning_rate`."""
    scaler: dict[str, float] | None = None
    """Loss scaling, as `torch.amp.GradScaler.state_dict()` gives it."""
    controllers: dict[str, float] = Field(default_factory=dict)
    """Values that a controller moves, such as `kl_coefficient`, and what normalisers hold."""

    def given(self) -> set[str]:
        """Names of the parts of the state that stand in these fields: those of FIELD_PARTS that
        are not None and not an empty mapping."""
        values = {name: getattr(self, name) for name in FIELD_PARTS}
        return {name for name, value in values.items() if value is not None and value != {}}


class BundleManifest(BundleFields):
    """All of a bundle. `bundle_id` is the SHA-256 of its canonical form."""

    format: Literal["shiftbook-bundle-v1"] = FORMAT
    snapshot: str
    files: dict[str, FileRecord]
    parts: dict[str, PartRecord]

    @model_validator(mode="after")
    def _parts_add_up(self) -> Self:
        for name, part in self.parts.items():
            if sum(r.bytes for r in part.ranges) != part.bytes:
                raise ValueError(f"part {name}: the ranges do not add up to {part.bytes} bytes")
        return self

    def canonical(self) -> bytes:
        """The one serialisation: sorted keys, absent fields left out."""
        return canonical.encode(self.model_dump(exclude_none=True))

    @property
    def bundle_id(self) -> str:
        """SHA-256 of the canonical manifest; 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @property
    def part_roots(self) -> dict[str, str]:
        """Root fingerprint of each part, as CheckpointSaved carries them."""
        return {name: part.root for name, part in self.parts.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all parts, those in shared files included."""
        return sum(part.bytes for part in self.parts.values())


def encode_manifest(manifest: BundleManifest) -> bytes:
    """The bytes of a manifest file: the manifest under its own digest."""
    return canonical.encode(
        {"bundle_id": manifest.bundle_id, "manifest": manifest.model_dump(exclude_none=True)}
    )


def _text_of(file: Path) -> bytes:
    """What a manifest holds; empty where it cannot be one, so that no file of tensors is read."""
    if file.exists() and not file.is_file():  # to open a FIFO waits for whoever writes to it
        return b""
    with file.open("rb") as opened:
        first = opened.read(1)
        return first + opened.read() if first == b"{" else b""


def load_manifest(path: str | os.PathLike[str]) -> BundleManifest:
    """Read a bundle's manifest, given the bundle's folder or the manifest itself.

    Raises ManifestInvalid when it is missing, cut off, malformed, or differs from its digest.
    """
    file = Path(path)
    file = file / MANIFEST_NAME if file.is_dir() else file
    where = str(file)
    try:
        outer = canonical.decode(_text_of(file))
    except OSError as error:
        if file.parent.exists():
            why = "a bundle without a manifest was never completed: use an earlier one"
        else:
            why = "its folder is not there, retention may have taken it: use the latest bundle"
        raise ManifestInvalid(
            f"{where}: expected a bundle manifest, could not read it ({error.strerror}); {why}",
            path=where,
        ) from error
    except InvalidEvent as error:
        raise ManifestInvalid(
            f"{where}: manifest is torn or was edited: {error}; use an earlier bundle", path=where
        ) from error
    inner = outer.get("manifest")
    declared = inner.get("format") if isinstance(inner, dict) else None
    if declared != FORMAT:
        raise ManifestInvalid(
            f"{where}: expected format {FORMAT!r}, found {declared!r}; "
            "a newer Shiftbook may read it",
            path=where,
        )
    try:
        manifest = BundleManifest.model_validate(inner)
    except ValidationError as error:
        first = error.errors()[0]
        raise ManifestInvalid(
            f"{where}: field {'.'.join(map(str, first['loc']))}: {first['msg']}; "
            "the manifest was not written by this program or was edited: use an earlier bundle",
            path=where,
        ) from error
    if outer.get("bundle_id") != manifest.bundle_id:
        raise ManifestInvalid(
            f"{where}: expected bundle id {outer.get('bundle_id')}, its content gives "
            f"{manifest.bundle_id}; the manifest was edited: use an earlier bundle",
            path=where,
        )
    return manifest


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Keep retention from a bundle while it is read, on this machine and wherever its file system
    takes locks. The lock goes with the process; a bundle that is not there is not locked."""
    try:
        descriptor = os.open(folder / MANIFEST_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the reader finds out, and says so
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def tensor_place(folder: str | os.PathLike[str], part: str, tensor: str) -> str:
    """One tensor of a bundle as one text, by which ``kept_tensors`` finds it again."""
    return f"{os.fspath(folder)}#{part}#{tensor}"


def check_files(path: str | os.PathLike[str], *, content: bool = True) -> BundleManifest:
    """Check that every file of a bundle is there, as long as it was, and has the bytes it had.

    `content=False` looks at names and sizes only. Returns the manifest. Raises ManifestInvalid,
    PartMissing or PartDamaged; the two name the part.
    """
    folder = Path(path)
    manifest = load_manifest(folder)
    check_sizes(folder, manifest)
    for name, part in manifest.parts.items():
        check_part(folder, name, part, manifest.files, content=content)
    for relative, record in manifest.files.items():
        owner = _owner(relative, manifest)
        if content and record.sha256 is not None:
            found = sha256_ranges(folder, (FileRange(file=relative, offset=0, bytes=record.bytes),))
            if found != record.sha256:
                raise _damaged(folder, owner, relative, record.sha256, found)
    return manifest


def check_sizes(folder: Path, manifest: BundleManifest) -> None:
    """Check that the bundle's own files are there and whole.

    Of a file that is cut off it names those parts whose bytes are gone, of another one all that
    have bytes in it.
    """
    for relative, record in manifest.files.items():
        ends = {
            name: max(piece.offset + piece.bytes for piece in part.ranges if piece.file == relative)
            for name, part in manifest.parts.items()
            if any(piece.file == relative for piece in part.ranges)
        }
        try:
            found_bytes = (folder / relative).stat().st_size
        except OSError:
            found_bytes = record.bytes  # check_size says that it is not there
        torn = [name for name, end in ends.items() if found_bytes < end]
        named = ", ".join(torn or ends) or INDEX_OWNER
        check_size(folder / relative, record.bytes, folder, named)


def check_part(
    folder: Path, name: str, part: PartRecord, files: dict[str, FileRecord], *, content: bool = True
) -> None:
    """The same for the bytes of one part; what others have in its files is not looked at."""
    for piece in part.ranges:
        end = piece.offset + piece.bytes
        # A file of the bundle may be cut off, or go on, beyond this part's bytes.
        own = piece.file in files
        check_size(folder / piece.file, end, folder, name, at_least=own)
    if content:
        found = sha256_ranges(folder, part.ranges)
        if found != part.sha256:
            named = ", ".join(sorted({piece.file for piece in part.ranges}))
            raise _damaged(folder, name, named, part.sha256, found)


def check_size(
    file: Path, expected_bytes: int, folder: Path, part: str, *, at_least: bool = False
) -> None:
    """Raise PartMissing or PartDamaged when a file is not there or has another length (or, with
    `at_least`, a smaller one)."""
    try:
        found_bytes = file.stat().st_size
    except OSError as error:
        raise PartMissing(
            f"{folder}: part {part}: expected file {file.name}, could not find it "
            f"({error.strerror}); restore the file or use an earlier bundle",
            path=str(folder),
            part=part,
        ) from error
    if found_bytes < expected_bytes or (found_bytes > expected_bytes and not at_least):
        raise PartDamaged(
            f"{folder}: part {part}: expected {file.name} of {expected_bytes} bytes"
            f"{' or more' if at_least else ''}, found {found_bytes}; the file is torn or "
            "another's: use an earlier bundle",
            path=str(folder),
            part=part,
        )


def sha256_ranges(folder: Path, ranges: tuple[FileRange, ...]) -> str:
    """SHA-256 over ranges of bytes, in order, read in pieces of a MiB; 64 hex digits."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    for piece in ranges:
        with (folder / piece.file).open("rb", buffering=0) as stream:
            stream.seek(piece.offset)
            left = piece.bytes
            while left:
                got = stream.readinto(buffer[: min(left, _READ_BYTES)])
                if not got:
                    break  # shorter than declared: the digest will differ
                digest.update(buffer[:got])
                left -= got
    return digest.hexdigest()


def _owner(relative: str, manifest: BundleManifest) -> str:
    """The part that a file belongs to, or what else it is."""
    for name, part in manifest.parts.items():
        if any(piece.file == relative for piece in part.ranges):
            return name
    return INDEX_OWNER


def _damaged(folder: Path, part: str, file: str, expected: str, found: str) -> PartDamaged:
    return PartDamaged(
        f"{folder}: part {part}: expected SHA-256 {expected[:16]}… of {file}, found {found[:16]}…; "
        "the bytes changed after the save: use an earlier bundle",
        path=str(folder),
        part=part,
    )


def plain(manifest: BundleManifest) -> dict[str, Any]:
    """The manifest with its id, as plain values for JSON output."""
    return {"bundle_id": manifest.bundle_id, **manifest.model_dump(mode="json", exclude_none=True)}
