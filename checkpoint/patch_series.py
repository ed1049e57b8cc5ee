"""A series of patches: the sender with its anchors and fed-back errors, and their composition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiftbook.checkpoint.errors import PatchRefused, PatchUnencodable
from shiftbook.checkpoint.patch import NaN, apply_patch, encode_anchor, encode_patch
from shiftbook.checkpoint.patch_codec import (
    Changes,
    decode_bits,
    decode_changes,
    encode_bits,
    encode_changes,
    merge_changes,
)
from shiftbook.checkpoint.patch_format import (
    Fields,
    Lossy,
    Patch,
    read_patch,
    write_patch,
)
from shiftbook.checkpoint.patch_places import HostPlace, host_copy

ANCHOR_EVERY = 16


class PatchSender:
    """Keeps what the receivers have (one copy in host memory) and sends them what is missing.

    With a lossy encoding that copy holds the receivers' bits, so each difference contains what the
    last one left over.
    """

    def __init__(
        self,
        *,
        anchor_every: int = ANCHOR_EVERY,
        lossy: Lossy | None = None,
        nan: NaN = "refuse",
        threads: int = 1,
    ) -> None:
        self._anchor_every = anchor_every
        self._lossy = lossy
        self._nan: NaN = nan
        self._threads = threads
        self._sent: dict[str, HostPlace] = {}
        self._fingerprints: dict[str, str] = {}
        self._version: int | None = None
        self._since_anchor = 0

    @property
    def version(self) -> int | None:
        """The version that the receivers have after the last message; None before the first."""
        return self._version

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of what the receivers have then."""
        return dict(self._fingerprints)

    def refused(self) -> None:
        """A receiver refused the last message: the next one is an anchor."""
        self._since_anchor = self._anchor_every

    def next(self, tensors: Mapping[str, Any], *, version: int) -> bytes:
        """The next message: an anchor at first, every `anchor_every` versions and when refused.

        Raises PatchUnencodable; the series then stands where it stood.
        """
        if self._version is not None and version <= self._version:
            raise PatchUnencodable(
                f"expected a version after {self._version}, which was sent, found {version}; a "
                "series only goes up: begin another one"
            )
        if self._version is None or self._since_anchor + 1 >= self._anchor_every:
            data = encode_anchor(tensors, version=version, nan=self._nan, threads=self._threads)
            self._sent = {name: host_copy(tensor) for name, tensor in tensors.items()}
            self._fingerprints = read_patch(data).header.result_fingerprints
            self._since_anchor = 0
        else:
            data = encode_patch(
                self._sent,
                tensors,
                base_version=self._version,
                version=version,
                base_fingerprints=self._fingerprints,
                lossy=self._lossy,
                nan=self._nan,
                threads=self._threads,
            )
            done = apply_patch(
                data,
                self._sent,
                version=self._version,
                accept_error=self._lossy.max_error if self._lossy else None,
                fingerprints=self._fingerprints,
                threads=self._threads,
            )
            self._fingerprints = done.fingerprints
            self._since_anchor += 1
        self._version = version
        return data


def compose(first: Patch | bytes, second: Patch | bytes) -> bytes:
    """One patch that does what two do in a row, without the tensors.

    The bytes are those that encoding base to result directly gives. An anchor followed by a patch
    is an anchor; one that follows replaces what came before. Raises PatchRefused when the second
    does not stand on the first or one is lossy, and PatchDamaged.
    """
    one = first if isinstance(first, Patch) else read_patch(first)
    two = second if isinstance(second, Patch) else read_patch(second)
    if two.anchor:
        return bytes(two.data)
    stands = (
        two.base_version == one.version
        and two.header.base_fingerprints == one.header.result_fingerprints
    )
    if not stands:
        raise PatchRefused(
            f"expected a patch on version {one.version} with root {one.header.result_root}, found "
            f"one on version {two.base_version} with root {two.header.base_root}; compose patches "
            "in the order in which they were made"
        )
    if one.header.lossy is not None or two.header.lossy is not None:
        raise PatchRefused(
            "expected lossless patches, found a lossy one, whose result depends on the tensors; "
            "apply them one after the other"
        )
    records: dict[str, Fields] = {}
    payload: dict[str, list[bytes]] = {}
    later = {name: (record, stored) for name, record, stored in two.sections()}
    for name, record, stored in one.sections():
        after, after_stored = later[name]
        changes = decode_changes(name, after, after_stored)
        if one.anchor:
            units = decode_bits(name, record, stored).copy()
            units[changes.positions] += changes.differences
            fields, payload[name] = encode_bits(units)
        else:
            merged: Changes = merge_changes(decode_changes(name, record, stored), changes)
            fields, payload[name] = encode_changes(merged, record.units)
        known = {"dtype": record.dtype, "shape": record.shape, "result": after.result}
        records[name] = known | ({} if record.base is None else {"base": record.base}) | fields
    base = None
    if one.base_version is not None and one.header.base_root is not None:
        base = (one.base_version, one.header.base_root)
    return write_patch(two.version, base, records, payload)
