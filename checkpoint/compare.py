"""Compares maps of fingerprints and digests them to one root, with the standard library alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

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


def root(fingerprints: Mapping[str, str]) -> str:
    """Digest a map of tensor name to fingerprint into 32 hex digits, whatever the map's order.

    The first 128 bits of a SHA-256 over the sorted (name, fingerprint) pairs, each name with its
    length in front so that no two maps encode alike. A fingerprint is bound to dtype and shape
    (see `shiftbook.checkpoint.fingerprint`), so the root is as well. Raises FingerprintError on a
    value that is no fingerprint.
    """
    digest = hashlib.sha256(_ROOT_DOMAIN)
    digest.update(len(fingerprints).to_bytes(8, "big"))
    for name in sorted(fingerprints):
        encoded = name.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
        digest.update(bytes.fromhex(check_hex(name, fingerprints[name])))
    return digest.hexdigest()[:HEX_DIGITS]


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
        for name, value in self.values.items():
            check_hex(name, value)

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
