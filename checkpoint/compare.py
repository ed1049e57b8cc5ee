"""Compares maps of fingerprints and digests them to one root, with the standard library alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shiftbook.checkpoint.errors import FingerprintError

HEX_DIGITS = 32  # 128 bits
_HEX = frozenset("0123456789abcdef")
_ROOT_DOMAIN = b"shiftbook-fingerprint-root-v1"


def check_hex(name: str, value: object) -> str:
    """Return `value` when it is the 32 lower-case hex digits of a fingerprint, else raise."""
    if isinstance(value, str) and len(value) == HEX_DIGITS and _HEX.issuperset(value):
        return value
    raise FingerprintError(
        f"fingerprint of {name!r}: expected {HEX_DIGITS} lower-case hex digits, found {value!r}; "
        "take it from Fingerprint.hex or fingerprint_tensors()"
    )


def raw_fingerprints(fingerprints: Mapping[str, str], names: Sequence[str]) -> bytes:
    """The fingerprints of some tensors, 16 bytes each, in the order of `names`.

    All are read and checked at once: a model has hundreds. Raises FingerprintError on a value that
    is no fingerprint.
    """
    values: list[Any] = [fingerprints[name] for name in names]
    try:
        joined = "".join(values)
        raw = bytes.fromhex(joined)
    except (TypeError, ValueError):
        joined, raw = "", b"?"
    # `fromhex` takes spaces and capitals too; what it read must be what stands there.
    if raw.hex() != joined or any(len(value) != HEX_DIGITS for value in values):
        for name in names:
            check_hex(name, fingerprints[name])
    return raw


def root(fingerprints: Mapping[str, str]) -> str:
    """Digest a map of tensor name to fingerprint into 32 hex digits, whatever the map's order.

    The first 128 bits of a SHA-256 over the sorted (name, fingerprint) pairs, each name with its
    length in front so that no two maps encode alike. A fingerprint is bound to dtype and shape
    (see `shiftbook.checkpoint.fingerprint`), so the root is as well. Raises FingerprintError on a
    value that is no fingerprint.
    """
    names = sorted(fingerprints)
    raw = raw_fingerprints(fingerprints, names)
    pieces = [_ROOT_DOMAIN, len(names).to_bytes(8, "big")]
    for k, name in enumerate(names):
        pieces += _named(name), raw[16 * k : 16 * k + 16]
    return hashlib.sha256(b"".join(pieces)).hexdigest()[:HEX_DIGITS]


@lru_cache(maxsize=65_536)
def _named(name: str) -> bytes:
    """A name with its length in front."""
    encoded = name.encode("utf-8")
    return len(encoded).to_bytes(8, "big") + encoded


@dataclass(frozen=True, slots=True)
class Difference:
    """How a map of fingerprints differs from the expected one; names are sorted."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True when both maps hold the same names with the same fingerprints."""
        return not (self.missing or self.extra or self.changed)

    def describe(self, *, limit: int = 5) -> str:
        """One line that names up to `limit` tensors of each sort of difference."""
        parts = []
        for label in ("missing", "extra", "changed"):
            names: tuple[str, ...] = getattr(self, label)
            if names:
                more = f" and {len(names) - limit} more" if len(names) > limit else ""
                parts.append(f"{label}: {', '.join(names[:limit])}{more}")
        return "; ".join(parts) or "equal"


@dataclass(frozen=True)
class FingerprintMap:
    """Fingerprints of named tensors, as an event or a manifest holds them."""

    values: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raw_fingerprints(self.values, list(self.values))

    @property
    def root(self) -> str:
        """The one digest of all names and fingerprints; 32 hex digits."""
        return root(self.values)

    def compare(self, found: FingerprintMap | Mapping[str, str]) -> Difference:
        """Say how `found` differs from this map, which is the expected one."""
        other = found if isinstance(found, FingerprintMap) else FingerprintMap(found)
        mine, theirs = self.values, other.values
        return Difference(
            missing=tuple(sorted(set(mine) - set(theirs))),
            extra=tuple(sorted(set(theirs) - set(mine))),
            changed=tuple(sorted(n for n in mine if n in theirs and mine[n] != theirs[n])),
        )
