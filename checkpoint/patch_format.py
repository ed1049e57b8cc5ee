"""The bytes of a patch: a header that says everything, sections of planes, a SHA-256 at the end.

16 bytes   magic
 8 bytes   length of the header as stored, little-endian
 8 bytes   length of the header, decompressed
           header: canonical JSON, zstd
           sections, in the header's order of tensors (sorted by name)
32 bytes   SHA-256 of all bytes before it
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import PatchDamaged
from shiftbook.checkpoint.positions import ITEM_BYTES
from shiftbook.ledger import canonical
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events.base import Count, Hex128
from shiftbook.ledger.events.sync import SyncLoss

MAGIC = b"SHIFTBOOK-PATCH\n"
FORMAT: Final = "shiftbook-patch-v2"
FIRST_FORMAT: Final = "shiftbook-patch-v1"
"""Knows no `packed` encoding. It is read for ever, and written where it will do."""
SLICE_FORMAT: Final = "shiftbook-patch-v3"
"""Knows slices of a tensor that was coded as int8 steps; written where there is one."""
BLOCK = 1 << 18  # units of a tensor whose changes are packed together
INDEX_BYTES = 8  # of each block: its changes and its words
Planes = NDArray[np.uint8]
Fields = dict[str, Any]

_LENGTHS = 16
_DIGEST_BYTES = 32
_MOST_HEADER_BYTES = 256 << 20  # a million tensors; a longer one is a decompression bomb
_PAYS_FROM_BYTES = 64  # shorter sections are stored as they are
_ZSTD_LEVEL = 1

Format = Literal["shiftbook-patch-v1", "shiftbook-patch-v2", "shiftbook-patch-v3"]
Encoding = Literal["same", "changes", "packed", "bits", "int8"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(_Record):
    """One run of bytes: stored as it is, or as one zstd frame where that is shorter."""

    stored: Count
    plain: Count

    @property
    def compressed(self) -> bool:
        """A frame is only kept when it is shorter."""
        return self.stored < self.plain


class TensorPatch(_Record):
    """What happens to one tensor. Fingerprints are of the whole tensor before and after."""

    dtype: str
    shape: tuple[Count, ...]
    base: Hex128 | None = None
    """Absent in an anchor."""
    result: Hex128
    encoding: Encoding
    changed: Count = 0
    """Units that change: elements, or halves of complex128 ones."""
    gap_planes: Annotated[int, Field(ge=0, le=8)] = 0
    value_planes: Annotated[int, Field(ge=0, le=8)] = 0
    sections: tuple[Section, ...] = ()
    largest_error: float | None = None
    """Of a lossy encoding, as measured by the sender."""
    grid: tuple[Count, ...] | None = None
    """Of a slice of what was coded as int8 steps: the shape that the blocks were cut from, and"""
    at: tuple[Count, ...] | None = None
    """where the slice starts in it."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of what is counted in `changed`."""
        return min(8, ITEM_BYTES[self.dtype])

    @property
    def units(self) -> int:
        """Units of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype] // self.unit_bytes

    @property
    def blocks(self) -> int:
        """Blocks that a tensor of so many units is cut into."""
        return -(-self.units // BLOCK)


def _check_record(record: TensorPatch) -> None:
    """Raise ValueError for a tensor whose fields do not fit each other."""
    if record.dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {record.dtype!r}")
    encoding, changed, sections = record.encoding, record.changed, record.sections
    if encoding == "same" and (sections or changed or record.base != record.result):
        raise ValueError("an unchanged tensor with a change")
    units = record.units
    if changed > units:
        raise ValueError(f"{changed} changes in {units} units")
    if record.value_planes > record.unit_bytes:
        raise ValueError(f"{record.value_planes} planes for units of {record.unit_bytes} bytes")
    if (record.grid, record.at) != (None, None):
        _check_slice(record)
    for section in sections:
        if section.stored > section.plain:
            raise ValueError(f"{section.stored} bytes for a plane of {section.plain}")
    if encoding == "packed":
        words_bytes = [section.stored - INDEX_BYTES * record.blocks for section in sections]
        plain = not any(section.compressed for section in sections)
        if not plain or len(words_bytes) != 1 or words_bytes[0] < 0 or words_bytes[0] % 8:
            raise ValueError("packed changes that are no index with words")
    elif encoding in ("changes", "bits"):
        lengths = [changed] * (record.gap_planes + record.value_planes)
        if encoding == "bits":
            lengths = [units] * record.unit_bytes
        if [section.plain for section in sections] != lengths:
            raise ValueError("sections do not have the lengths of their planes")


def _check_slice(record: TensorPatch) -> None:
    """Raise ValueError for a slice that does not lie in its grid."""
    grid, at = record.grid or (), record.at or ()
    axes = len(record.shape)
    if record.encoding != "int8" or (len(grid), len(at)) != (axes, axes):
        raise ValueError("a slice of something that was not coded in steps, or without its place")
    if any(a + n > whole for a, n, whole in zip(at, record.shape, grid, strict=True)):
        raise ValueError(f"a slice of {record.shape} at {at} outside of its grid {grid}")


class Lossy(_Record):
    """A declared lossy encoding: no element is further from the sender's than `max_error`."""

    encoding: Literal["int8-difference"] = "int8-difference"
    max_error: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Header(_Record):
    """Everything about a patch but its planes."""

    format: Format
    version: Count
    base_version: Count | None = None
    """Absent in an anchor."""
    base_root: Hex128 | None = None
    result_root: Hex128
    lossy: Lossy | None = None
    tensors: dict[str, TensorPatch]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        # One validator for all: pydantic's way into one of its own for each tensor costs more than
        # the rest of reading a small patch.
        if not self.tensors:
            raise ValueError("a patch without tensors")
        for name, record in self.tensors.items():
            try:
                _check_record(record)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if root(self.result_fingerprints) != self.result_root:
            raise ValueError("result root is not that of the tensors")
        anchor = self.base_version is None
        bases = {name: t.base for name, t in self.tensors.items() if t.base is not None}
        if anchor:
            if bases or self.base_root is not None or self.lossy is not None:
                raise ValueError("an anchor with a base")
            if any(t.encoding != "bits" for t in self.tensors.values()):
                raise ValueError("an anchor that is not whole")
        elif len(bases) != len(self.tensors) or root(bases) != self.base_root:
            raise ValueError("base root is not that of the tensors")
        if self.lossy is None and any(t.encoding == "int8" for t in self.tensors.values()):
            raise ValueError("a lossy encoding that is not declared")
        every = self.tensors.values()
        if self.format == FIRST_FORMAT and any(t.encoding == "packed" for t in every):
            raise ValueError("packed changes in the first format")
        if self.format != SLICE_FORMAT and any(t.grid is not None for t in every):
            raise ValueError("a slice in a format that has none")
        return self

    @property
    def result_fingerprints(self) -> dict[str, str]:
        """By name, after the patch."""
        return {name: tensor.result for name, tensor in self.tensors.items()}

    @property
    def base_fingerprints(self) -> dict[str, str]:
        """By name, before the patch; empty for an anchor."""
        return {name: t.base for name, t in self.tensors.items() if t.base is not None}


def format_of(tensors: Iterable[Fields]) -> Format:
    """The oldest format that can say this, so that as many receivers as possible can read it."""
    every = list(tensors)
    if any(fields.get("grid") is not None for fields in every):
        return SLICE_FORMAT
    return FORMAT if any(fields["encoding"] == "packed" for fields in every) else FIRST_FORMAT


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch whose bytes are those that were written; `read_patch` makes it."""

    header: Header
    data: bytes
    payload_start: int

    @property
    def version(self) -> int:
        """The policy version that comes out."""
        return self.header.version

    @property
    def base_version(self) -> int | None:
        """The version that it applies to; None for an anchor."""
        return self.header.base_version

    @property
    def anchor(self) -> bool:
        """True when it holds everything and needs no base."""
        return self.header.base_version is None

    @property
    def changed(self) -> int:
        """Units that change, in all tensors."""
        return sum(tensor.changed for tensor in self.header.tensors.values())

    @property
    def loss(self) -> SyncLoss | None:
        """What a weight sync that sends this patch says of its loss; None for a lossless one."""
        lossy = self.header.lossy
        if lossy is None:
            return None
        errors = [t.largest_error for t in self.header.tensors.values() if t.largest_error]
        return SyncLoss(
            encoding=lossy.encoding,
            max_error=lossy.max_error,
            largest_error=max(errors, default=0.0),
            root=self.header.result_root,
        )

    def sections(self) -> Iterator[tuple[str, TensorPatch, list[memoryview]]]:
        """Each tensor's stored sections, in order of name."""
        at = self.payload_start
        view = memoryview(self.data)
        for name in sorted(self.header.tensors):
            tensor = self.header.tensors[name]
            stored = []
            for section in tensor.sections:
                stored.append(view[at : at + section.stored])
                at += section.stored
            yield name, tensor, stored


def pack(plane: Planes) -> tuple[Fields, bytes]:
    """A plane as the fields of a section and its bytes: zstd where that is shorter."""
    plain = plane.tobytes()
    stored = plain
    if len(plain) >= _PAYS_FROM_BYTES:
        small = pa.Codec("zstd", compression_level=_ZSTD_LEVEL).compress(plain, asbytes=True)
        stored = min(plain, small, key=len)
    return {"stored": len(stored), "plain": len(plain)}, stored


def unpack(name: str, section: Section, stored: memoryview) -> Planes:
    """The plane of a section. Raises PatchDamaged."""
    if not section.compressed:
        return np.frombuffer(stored, dtype=np.uint8)
    try:
        plain = pa.Codec("zstd").decompress(stored, decompressed_size=section.plain)
    except (OSError, pa.ArrowException) as error:
        raise PatchDamaged(
            f"patch of {name}: expected a zstd frame of {section.plain} bytes, could not read it "
            f"({error}); ask for the patch again, or for an anchor",
            tensor=name,
        ) from error
    return np.frombuffer(plain, dtype=np.uint8)


def write_patch(
    version: int,
    base: tuple[int, str] | None,
    tensors: Mapping[str, Fields],
    payload: Mapping[str, list[bytes]],
    lossy: Lossy | None = None,
) -> bytes:
    """The bytes of a patch to `version` from `base`, a version and its root (None: an anchor).

    `tensors` holds the fields of each TensorPatch that differ from their defaults, plain ones: they
    are right by construction, and the reader checks them. `payload` holds each tensor's sections.
    `lossy` is what was declared, should a tensor make use of it.
    """
    encodings = {fields["encoding"] for fields in tensors.values()}
    header: Fields = {
        "format": format_of(tensors.values()),
        "version": version,
        "result_root": root({name: fields["result"] for name, fields in tensors.items()}),
        "tensors": tensors,
    }
    if base is not None:
        header["base_version"], header["base_root"] = base
    if lossy is not None and "int8" in encodings:
        header["lossy"] = lossy.model_dump(exclude_defaults=True)
    plain = canonical.encode(header)
    small = pa.Codec("zstd", compression_level=_ZSTD_LEVEL).compress(plain, asbytes=True)
    lengths = len(small).to_bytes(8, "little") + len(plain).to_bytes(8, "little")
    pieces = [MAGIC, lengths, small]
    pieces += [piece for name in sorted(tensors) for piece in payload[name]]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return b"".join([*pieces, digest.digest()])


def read_patch(data: bytes) -> Patch:
    """Read a patch's header after checking all of its bytes. Raises PatchDamaged."""
    if len(data) < len(MAGIC) + _LENGTHS + _DIGEST_BYTES:
        raise PatchDamaged(
            f"expected a patch, found {len(data)} bytes, which is too few for one; "
            "ask for the patch again"
        )
    if data[: len(MAGIC)] != MAGIC:
        raise PatchDamaged(
            f"expected a patch to begin with {MAGIC!r}, found {bytes(data[: len(MAGIC)])!r}; "
            "these are other bytes"
        )
    found = hashlib.sha256(memoryview(data)[:-_DIGEST_BYTES]).digest()
    if found != data[-_DIGEST_BYTES:]:
        raise PatchDamaged(
            f"expected a patch with SHA-256 {data[-_DIGEST_BYTES:].hex()[:16]}…, found "
            f"{found.hex()[:16]}…; it was cut off or altered on its way: ask for it again"
        )
    header, start = _read_header(data)
    payload = sum(s.stored for tensor in header.tensors.values() for s in tensor.sections)
    if start + payload + _DIGEST_BYTES != len(data):
        raise _no_patch(f"{payload} bytes of sections in {len(data)}")
    return Patch(header, data, start)


def _read_header(data: bytes) -> tuple[Header, int]:
    at = len(MAGIC)
    stored = int.from_bytes(data[at : at + 8], "little")
    plain = int.from_bytes(data[at + 8 : at + _LENGTHS], "little")
    start = at + _LENGTHS + stored
    if start + _DIGEST_BYTES > len(data) or plain > _MOST_HEADER_BYTES:
        raise _no_patch(f"a header of {stored} bytes ({plain} decompressed) in {len(data)}")
    try:
        text = pa.Codec("zstd").decompress(
            data[at + _LENGTHS : start], decompressed_size=plain, asbytes=True
        )
        value: dict[str, Any] = canonical.decode(text)
        declared = value.get("format")
        if declared not in (FIRST_FORMAT, FORMAT, SLICE_FORMAT):
            raise _no_patch(f"format {declared!r}; a newer Shiftbook may read it")
        return Header.model_validate(value), start
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "header"
        raise _no_patch(f"{place}: {first['msg']}") from error
    except (OSError, pa.ArrowException, InvalidEvent) as error:
        raise _no_patch(f"a header that cannot be read ({error})") from error


def _no_patch(what: str) -> PatchDamaged:
    return PatchDamaged(
        f"expected a patch of format {FORMAT}, found {what}; it was not written by this program: "
        "ask for the patch again, or for an anchor"
    )
