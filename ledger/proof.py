"""Proofs that stand alone: one event under a signed head, or one signed head under a later one.

A proof is a JSON document with everything that checking it needs but the key. Checking opens no
ledger. A proof is checked against its own head before it is handed out.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shiftbook.ledger.canonical import decode, leaf_hash
from shiftbook.ledger.errors import (
    InvalidInput,
    InvalidNote,
    LedgerError,
    NoSignedHead,
    ProofInvalid,
    UnknownPosition,
)
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.merkle import (
    consistency_path,
    inclusion_path,
    verify_consistency,
    verify_inclusion,
)
from shiftbook.ledger.signed_note import SignedHead, split_heads, strict_base64
from shiftbook.ledger.signing_keys import Verifier

INCLUSION = "shiftbook-inclusion-proof/1"
CONSISTENCY = "shiftbook-consistency-proof/1"

MAX_PROOF_BYTES = 4 << 20
"""A proof holds an event, at most two notes and at most 128 hashes."""

MAX_HEADS_BYTES = 64 << 20
"""Some 300,000 published heads: one every 10 s for a month."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a proof proves."""

    kind: str
    """``inclusion``, ``consistency`` or ``head``."""
    origin: str
    key: str
    """The verifier key that signed the head."""
    size: int
    """Events under the head."""
    position: int | None = None
    """Of the event, in an inclusion proof."""
    since: int | None = None
    """Events under the earlier head, in a consistency proof."""
    event: dict[str, Any] | None = None

    @property
    def sentence(self) -> str:
        """What is proved, in words."""
        if self.kind == "inclusion":
            what = f"this event stands at position {self.position} of"
        elif self.kind == "consistency":
            what = f"the first {self.since} events are unchanged in"
        else:
            what = "this is a head of"
        return f"{what} {self.origin}, {self.size} events, signed by {self.key}"


def prove_event(ledger: Ledger, position: int, *, size: int | None = None) -> dict[str, Any]:
    """Proof that an event stands under a signed head: the last one, or the one of ``size`` events.

    Reads one event and at most a tile of each level. Raises UnknownPosition, NoSignedHead where no
    signed head covers the position, and ProofInvalid where the ledger does not fit its own head.
    """
    head = _head(ledger, size)
    if position >= head.size:
        events = ledger.head().size
        if position >= events:
            raise UnknownPosition(position, events)
        raise NoSignedHead(
            f"expected a signed head over position {position}, found one of {head.size} events; "
            "run `shiftbook sign` and try again"
        )
    stored = next(iter(ledger.rows(position - 1, until=position)), None)
    if stored is None:
        raise UnknownPosition(position, ledger.head().size)
    path = inclusion_path(position, head.size, ledger.tree().node)
    try:
        verify_inclusion(leaf_hash(stored.data), position, head.size, path, head.root)
    except ProofInvalid as error:
        raise _does_not_fit(head, error) from error
    try:
        text = stored.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProofInvalid(f"expected text at position {position}, found other bytes") from error
    return {
        "format": INCLUSION,
        "position": position,
        "event": text,
        "path": [base64.b64encode(value).decode() for value in path],
        "head": head.data().decode(),
    }


def prove_since(ledger: Ledger, old: SignedHead) -> dict[str, Any]:
    """Proof that the last signed head continues an earlier one, from whereever that is known.

    Raises ProofInvalid where it does not (rolled back, rewritten, forked), and NoSignedHead where
    no later head is signed.
    """
    events = ledger.head().size
    if events < old.size:
        raise ProofInvalid(
            f"expected at least {old.size} events, as under the head given, found {events}: the "
            "ledger was rolled back or cut, or it is another one"
        )
    new = _head(ledger, None)
    if new.size < old.size:
        raise NoSignedHead(
            f"expected a signed head of at least {old.size} events, found one of {new.size}; "
            "run `shiftbook sign` and try again"
        )
    path = consistency_path(old.size, new.size, ledger.tree().node)
    try:
        verify_consistency(old.size, new.size, old.root, new.root, path)
    except ProofInvalid as error:
        raise ProofInvalid(
            f"expected the ledger to continue the head of {old.size} events of {old.origin}, "
            f"found that it does not: its history was rewritten or forked, or it is another "
            f"ledger ({error})"
        ) from error
    return {
        "format": CONSISTENCY,
        "path": [base64.b64encode(value).decode() for value in path],
        "since": old.data().decode(),
        "head": new.data().decode(),
    }


def _head(ledger: Ledger, size: int | None) -> SignedHead:
    tree = ledger.tree()
    head = tree.last_head() if size is None else tree.head(size)
    if head is None:
        if size is None:
            raise NoSignedHead(
                "expected a signed head in the ledger, found none; run `shiftbook sign` and try "
                "again"
            )
        raise no_head_of(size, tree.sizes_near(size))
    return head


def no_head_of(size: int, near: Sequence[int]) -> NoSignedHead:
    """The error for a size at which no head was signed, with the sizes nearest to it."""
    if not near:
        return NoSignedHead(
            f"expected a signed head of {size} events, found none of any size; run `shiftbook "
            "sign`, or give the file of a head that was published"
        )
    named = ", ".join(str(one) for one in near)
    return NoSignedHead(
        f"expected a signed head of {size} events, found none of that size; the nearest are of "
        f"{named}: name one of them, or sign more often (`shiftbook sign --follow`)"
    )


def _does_not_fit(head: SignedHead, error: ProofInvalid) -> ProofInvalid:
    return ProofInvalid(
        f"expected the ledger to fit its signed head of {head.size} events, found that it does not "
        f"({error}); run `shiftbook verify`"
    )


def encode_proof(document: dict[str, Any]) -> bytes:
    """A proof as it is written to a file."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def is_proof(head: bytes) -> bool:
    """True for bytes that begin as `encode_proof` writes them."""
    opening = rb'\{\s*"format": "(%s|%s)"' % (INCLUSION.encode(), CONSISTENCY.encode())
    return re.match(opening, head) is not None


def check_proof(data: bytes, verifiers: Sequence[Verifier]) -> Checked:
    """Check a proof, or signed heads as they are published, with keys only.

    Raises InvalidInput where the bytes are neither, and ProofInvalid or InvalidNote (both as
    ProofInvalid's exit code 1 at the command line) where they are and do not hold.
    """
    proof = data.lstrip().startswith(b"{")
    limit = MAX_PROOF_BYTES if proof else MAX_HEADS_BYTES
    if len(data) > limit:
        raise InvalidInput(f"expected a proof of at most {limit} bytes, found {len(data)}")
    if not proof:
        return _check_heads(data, verifiers)
    try:
        document = json.loads(data)
        format_ = document.get("format")
    except (ValueError, RecursionError, AttributeError) as error:
        raise InvalidInput(
            "expected a proof as `shiftbook prove` writes it, found other JSON or a part of one; "
            "copy the whole file"
        ) from error
    if format_ == INCLUSION:
        return _check_inclusion(document, verifiers)
    if format_ == CONSISTENCY:
        return _check_consistency(document, verifiers)
    raise InvalidInput(
        f"expected a proof of the format {INCLUSION} or {CONSISTENCY}, found "
        f"{str(format_)[:60]!r}; check it with the Shiftbook that wrote it"
    )


def _check_heads(data: bytes, verifiers: Sequence[Verifier]) -> Checked:
    """One signed head, or a file of several as they are published: all must hold, the last counts.

    A head of an earlier size after a later one, and two of one size with different roots, do not
    belong to one history.
    """
    last: SignedHead | None = None
    for offset, note in split_heads(data):
        try:
            head = SignedHead.parse(note)
        except InvalidNote as error:
            raise InvalidInput(
                f"expected a proof, or signed heads, found neither at byte {offset} ({error})"
            ) from error
        key = head.verify(verifiers)
        if last is not None and last.origin != head.origin:
            raise ProofInvalid(
                f"expected heads of one ledger, found {last.origin} and {head.origin}"
            )
        if last is not None and (
            head.size < last.size or (head.size == last.size and head.root != last.root)
        ):
            raise ProofInvalid(
                f"expected a head of more than {last.size} events after the one of that size, "
                f"found another of {head.size} at byte {offset}: these heads are of two histories"
            )
        last = head
    if last is None:
        raise InvalidInput("expected a proof, or signed heads, found an empty file")
    return Checked("head", last.origin, key.text(), last.size)


def _check_inclusion(document: dict[str, Any], verifiers: Sequence[Verifier]) -> Checked:
    head, key = _signed(document, "head", verifiers)
    position, event = document.get("position"), document.get("event")
    if not isinstance(position, int) or isinstance(position, bool) or not isinstance(event, str):
        raise ProofInvalid("expected a position and an event in the proof, found other values")
    try:
        data = event.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ProofInvalid("expected the text of an event, found a part of one") from error
    verify_inclusion(leaf_hash(data), position, head.size, _path(document), head.root)
    try:
        value = decode(data)
    except LedgerError as error:
        raise ProofInvalid(f"expected an event at position {position}, found {error}") from error
    if value.get("position") != position:
        raise ProofInvalid(
            f"expected an event that names its position {position}, found one that names "
            f"{value.get('position')!r}: the ledger was written by another program"
        )
    return Checked("inclusion", head.origin, key.text(), head.size, position=position, event=value)


def _check_consistency(document: dict[str, Any], verifiers: Sequence[Verifier]) -> Checked:
    old, _ = _signed(document, "since", verifiers)
    new, key = _signed(document, "head", verifiers)
    if old.origin != new.origin:
        raise ProofInvalid(f"expected two heads of one ledger, found {old.origin} and {new.origin}")
    verify_consistency(old.size, new.size, old.root, new.root, _path(document))
    return Checked("consistency", new.origin, key.text(), new.size, since=old.size)


def _signed(
    document: dict[str, Any], name: str, verifiers: Sequence[Verifier]
) -> tuple[SignedHead, Verifier]:
    text = document.get(name)
    try:
        head = SignedHead.parse(text.encode() if isinstance(text, str) else b"")
    except (InvalidNote, UnicodeEncodeError) as error:
        raise ProofInvalid(
            f"expected a signed head as {name!r} of the proof, found none: {error}"
        ) from error
    return head, head.verify(verifiers)


def _path(document: dict[str, Any]) -> list[bytes]:
    listed = document.get("path")
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise ProofInvalid("expected a list of hashes as the path of the proof, found none")
    try:
        return [strict_base64(item) for item in listed]
    except ValueError as error:
        raise ProofInvalid("expected hashes in base64 as the path, found other text") from error
