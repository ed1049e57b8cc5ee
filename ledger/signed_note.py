"""Signed notes of C2SP, and the heads of a tree (C2SP tlog-checkpoint) that are such notes.

Reading is strict: what is taken as a note gives the same bytes when it is written again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shiftbook.ledger.errors import InvalidNote, ProofInvalid
from shiftbook.ledger.merkle import HASH_BYTES
from shiftbook.ledger.signing_keys import Signer, Verifier, valid_name

MAX_NOTE_BYTES = 1 << 20
MAX_SIGNATURES = 100
MAX_SIZE = 2**63 - 1

MARK = "— "
"""Em dash and space: what a line of a signature begins with."""


@dataclass(frozen=True, slots=True)
class NoteSignature:
    """One line of a note: who signed, with which key, and the signature itself."""

    name: str
    key_id: bytes
    signature: bytes

    def line(self) -> str:
        """The line with its newline."""
        return f"{MARK}{self.name} {base64.b64encode(self.key_id + self.signature).decode()}\n"


def strict_base64(text: str) -> bytes:
    """Decode base64 that has one spelling only; raise ValueError for any other."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("no base64") from error
    if base64.b64encode(data).decode() != text:
        raise ValueError("base64 with stray bits")
    return data


@dataclass(frozen=True, slots=True)
class SignedNote:
    """A text, which ends with a newline, and the signatures over it."""

    text: str
    signatures: tuple[NoteSignature, ...]

    def data(self) -> bytes:
        """The note as bytes."""
        return (self.text + "\n" + "".join(s.line() for s in self.signatures)).encode()

    @classmethod
    def sign(cls, text: str, *signers: Signer) -> SignedNote:
        """Sign a text; raise InvalidNote where a note cannot hold it."""
        note = cls(
            text,
            tuple(NoteSignature(s.name, s.verifier.key_id, s.sign(text.encode())) for s in signers),
        )
        return cls.parse(note.data())

    @classmethod
    def parse(cls, data: bytes) -> SignedNote:
        """Read a note; raise InvalidNote, which says what is wrong with the bytes."""
        if len(data) > MAX_NOTE_BYTES:
            raise InvalidNote(f"expected a note of at most {MAX_NOTE_BYTES} bytes, found more")
        try:
            whole = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidNote(f"expected a note in UTF-8, found other bytes ({error})") from error
        if any(ord(char) < 0x20 and char != "\n" for char in whole):
            raise InvalidNote("expected a note without control characters, found one with some")
        # The last blank line divides text and signatures; the text may have blank lines too.
        text, blank, rest = whole.rpartition("\n\n")
        if not blank or not text or not rest.endswith("\n"):
            raise InvalidNote(
                "expected a text, a blank line and lines of signatures, found no such note; it was "
                "cut short or is something else"
            )
        lines = rest[:-1].split("\n")
        if len(lines) > MAX_SIGNATURES:
            raise InvalidNote(f"expected at most {MAX_SIGNATURES} signatures, found {len(lines)}")
        return cls(text + "\n", tuple(_signature(line) for line in lines))

    def verify(self, verifiers: Iterable[Verifier]) -> tuple[Verifier, ...]:
        """Known keys whose signatures hold; signatures of unknown keys are passed over.

        Raises ProofInvalid where a known key's signature does not hold, or none is known.
        """
        known = {(v.name, v.key_id): v for v in verifiers}
        held: list[Verifier] = []
        text = self.text.encode()
        for signature in self.signatures:
            verifier = known.get((signature.name, signature.key_id))
            if verifier is None or verifier in held:
                continue
            if not verifier.verify(text, signature.signature):
                raise ProofInvalid(
                    f"expected a signature of {verifier.name} over this head, found one that does "
                    "not hold: the head was changed after it was signed, or was never signed"
                )
            held.append(verifier)
        if not held:
            wanted = ", ".join(v.text() for v in known.values()) or "none"
            found = ", ".join(f"{s.name}+{s.key_id.hex()}" for s in self.signatures)
            raise ProofInvalid(
                f"expected a signature of {wanted}, found signatures of {found} only; "
                "give the key of this ledger's signer"
            )
        return tuple(held)


def _signature(line: str) -> NoteSignature:
    name, space, encoded = line.removeprefix(MARK).rpartition(" ")
    try:
        raw = strict_base64(encoded)
    except ValueError:
        raw = b""
    if not line.startswith(MARK) or not space or not valid_name(name) or len(raw) < 5:
        raise InvalidNote(f"expected a line `— NAME SIGNATURE`, found {line[:80]!r}")
    return NoteSignature(name, raw[:4], raw[4:])


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A head of the tree: origin, number of events, root, and the note that says so."""

    origin: str
    size: int
    root: bytes
    note: SignedNote = field(repr=False)
    extensions: tuple[str, ...] = ()

    @classmethod
    def sign(
        cls, size: int, root: bytes, signer: Signer, extensions: Sequence[str] = ()
    ) -> SignedHead:
        """Sign a head of the ledger whose name is the signer's."""
        text = head_text(signer.name, size, root, extensions)
        return cls.parse(SignedNote.sign(text, signer).data())

    @classmethod
    def parse(cls, data: bytes) -> SignedHead:
        """Read a head; raise InvalidNote where the bytes are none. Nothing is verified."""
        note = SignedNote.parse(data)
        origin, size, root, extensions = parse_head_text(note.text)
        return cls(origin, size, root, note, extensions)

    def data(self) -> bytes:
        """The note as bytes."""
        return self.note.data()

    def verify(self, verifiers: Iterable[Verifier]) -> Verifier:
        """The key of this log that signed the head; raise ProofInvalid where there is none."""
        held = self.note.verify(verifiers)
        for verifier in held:
            if verifier.name == self.origin:
                return verifier
        raise ProofInvalid(
            f"expected a head of {held[0].name}, found one of {self.origin!r}: another ledger's"
        )


def head_text(origin: str, size: int, root: bytes, extensions: Sequence[str] = ()) -> str:
    """Text of a head: origin, size, root and extensions, a line each."""
    lines = [origin, str(size), base64.b64encode(root).decode(), *extensions]
    return "\n".join(lines) + "\n"


def parse_head_text(text: str) -> tuple[str, int, bytes, tuple[str, ...]]:
    """Origin, size, root and extension lines; raise InvalidNote where the text is no head."""
    lines = text.removesuffix("\n").split("\n")
    if not text.endswith("\n") or len(lines) < 3 or not all(lines):
        raise InvalidNote("expected lines with origin, size and root, found another text")
    origin, size_text, root_text, *extensions = lines
    if not (size_text.isascii() and size_text.isdigit() and len(size_text) < 20) or (
        size_text != str(int(size_text)) or int(size_text) > MAX_SIZE
    ):
        raise InvalidNote(f"expected the size of a tree in digits, found {size_text[:40]!r}")
    try:
        root = strict_base64(root_text)
    except ValueError:
        root = b""
    if len(root) != HASH_BYTES:
        raise InvalidNote(f"expected a root of 32 bytes in base64, found {root_text[:60]!r}")
    return origin, int(size_text), root, tuple(extensions)


def split_heads(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(byte offset, bytes) of each note in a file that has one after the other.

    Every note but the last is followed by a line that begins no signature; blank lines between
    notes are passed over. A torn last note is given as it is.
    """
    start, at, signed, mark = 0, 0, False, MARK.encode()
    for line in data.splitlines(keepends=True):
        if signed and not line.startswith(mark):
            yield start, data[start:at]
            start, signed = at, False
        if line == b"\n" and start == at:
            start += 1
        signed = signed or line.startswith(mark)
        at += len(line)
    if start < at:
        yield start, data[start:at]


def holds_trace(data: bytes, names: Iterable[str] = ()) -> bool:
    """True where something in the bytes can only be left of a head: never of another text.

    That is a line that begins a signature, one that is a root, or a beginning with the name of one
    of the keys, or with a part of it where the bytes end there.
    """
    begun = data.strip()
    for name in names:
        if begun and (begun.startswith(name.encode()) or name.encode().startswith(begun)):
            return True
    return any(line.startswith(_TORN_MARK) or _is_root(line) for line in data.splitlines())


_TORN_MARK = MARK.strip().encode()


def _is_root(line: bytes) -> bool:
    try:
        return len(strict_base64(line.decode("ascii"))) == HASH_BYTES
    except ValueError:
        return False
