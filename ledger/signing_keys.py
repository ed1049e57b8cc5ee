"""Keys that sign heads and verify them, in the text formats of C2SP signed-note.

A key is bound to the name of the one ledger that it signs for. The first byte of the encoded key
says the algorithm, so another one is another pair of classes in ``ALGORITHMS``.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import secrets
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shiftbook.ledger.durable import sync_path
from shiftbook.ledger.errors import InvalidKey, SigningFailed

ED25519 = 0x01
"""Algorithm byte of Ed25519 in C2SP signed-note."""

PRIVATE_PREFIX = "PRIVATE+KEY"
KEY_BYTES = 32
MAX_KEY_FILE_BYTES = 65_536


def valid_name(name: str) -> bool:
    """Whether a key may have this name: not empty, no space, no plus, no control character."""
    return bool(name) and not any(
        char.isspace() or char == "+" or ord(char) < 0x20 or 0xD800 <= ord(char) < 0xE000
        for char in name
    )


def key_id(name: str, algorithm: int, public: bytes) -> bytes:
    """SHA-256(name || newline || algorithm || public key), its first four bytes."""
    return hashlib.sha256(name.encode() + b"\n" + bytes([algorithm]) + public).digest()[:4]


class Verifier(ABC):
    """Checks signatures of one key."""

    algorithm: ClassVar[int]

    def __init__(self, name: str, public: bytes) -> None:
        if not valid_name(name):
            raise InvalidKey(
                f"expected a key name without spaces and plus signs, found {name!r}; "
                "choose one such as example.com/runs"
            )
        self.name = name
        self.public = public
        self.key_id = key_id(name, self.algorithm, public)

    @abstractmethod
    def verify(self, text: bytes, signature: bytes) -> bool:
        """Whether the signature over the text is this key's."""

    def text(self) -> str:
        """The key as it is handed to whoever verifies: ``name+id+base64(algorithm || key)``."""
        encoded = base64.b64encode(bytes([self.algorithm]) + self.public).decode()
        return f"{self.name}+{self.key_id.hex()}+{encoded}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Verifier) and self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())


class Signer(ABC):
    """Signs texts with one key; hardware or a service behind it is another subclass."""

    verifier: Verifier

    @property
    def name(self) -> str:
        """Name of the key, which is the origin of the heads that it signs."""
        return self.verifier.name

    @abstractmethod
    def sign(self, text: bytes) -> bytes:
        """Signature over the text, without key id."""


class Ed25519Verifier(Verifier):
    """Ed25519 of RFC 8032 over the note's text."""

    algorithm = ED25519

    def __init__(self, name: str, public: bytes) -> None:
        super().__init__(name, public)
        try:
            self._key = Ed25519PublicKey.from_public_bytes(public)
        except ValueError as error:
            raise InvalidKey(f"expected 32 bytes of an Ed25519 key, found {len(public)}") from error

    def verify(self, text: bytes, signature: bytes) -> bool:
        """Whether the signature over the text is this key's."""
        try:
            self._key.verify(signature, text)
        except InvalidSignature:
            return False
        return True


class Ed25519Signer(Signer):
    """Ed25519 with the private key in this process."""

    def __init__(self, name: str, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise InvalidKey(f"expected {KEY_BYTES} bytes of an Ed25519 seed, found {len(seed)}")
        self._seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.verifier = Ed25519Verifier(name, self._key.public_key().public_bytes_raw())

    def sign(self, text: bytes) -> bytes:
        """Signature over the text, 64 bytes; the same text gives the same signature."""
        return self._key.sign(text)

    def private_text(self) -> str:
        """The private key: ``PRIVATE+KEY+name+id+base64(algorithm || seed)``."""
        encoded = base64.b64encode(bytes([ED25519]) + self._seed).decode()
        return f"{PRIVATE_PREFIX}+{self.name}+{self.verifier.key_id.hex()}+{encoded}"


ALGORITHMS: dict[int, tuple[type[Ed25519Verifier], type[Ed25519Signer]]] = {
    ED25519: (Ed25519Verifier, Ed25519Signer),
}
"""Algorithm byte to the classes that know it."""


def new_signer(name: str | None = None) -> Ed25519Signer:
    """A new key; without a name it gets one of its own, so no two ledgers share an origin."""
    return Ed25519Signer(name or f"shiftbook/{secrets.token_hex(4)}", secrets.token_bytes(32))


def _key_parts(text: str, shape: str) -> tuple[str, str, int, bytes]:
    """Name, id in hex, algorithm and key of ``name+id+base64``. Raises InvalidKey."""
    parts = text.strip().split("+", 2)
    try:
        name, id_hex, encoded = parts
        raw = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InvalidKey(
            f"expected a key {shape}, found {_shown(text)}; copy the whole line that "
            "`shiftbook key new` printed"
        ) from error
    if not raw or raw[0] not in ALGORITHMS:
        known = ", ".join(f"{byte:#04x}" for byte in ALGORITHMS)
        raise InvalidKey(
            f"expected a key of an algorithm that this build knows ({known}), found "
            f"{f'{raw[0]:#04x}' if raw else 'none'}; use another key or a newer Shiftbook"
        )
    return name, id_hex, raw[0], raw[1:]


def parse_verifier(text: str) -> Verifier:
    """Read ``name+id+base64(algorithm || key)``; raise InvalidKey where it is none."""
    if text.startswith(PRIVATE_PREFIX):
        raise InvalidKey(
            "expected a verifier key, found a private one; hand out what `shiftbook key show FILE` "
            "prints, and keep the private key to yourself"
        )
    name, id_hex, algorithm, public = _key_parts(text, "NAME+ID+BASE64")
    verifier = ALGORITHMS[algorithm][0](name, public)
    _same_id(verifier, id_hex)
    return verifier


def parse_signer(text: str) -> Signer:
    """Read a private key; raise InvalidKey where it is none. The key stands in no message."""
    prefix = PRIVATE_PREFIX + "+"
    if not text.startswith(prefix):
        raise InvalidKey(
            f"expected a private key, which begins with {PRIVATE_PREFIX}, found other text; make "
            "one with `shiftbook key new`"
        )
    try:
        name, id_hex, algorithm, seed = _key_parts(text[len(prefix) :], "")
    except InvalidKey:
        # Without its cause: the text that could not be read may hold most of the key.
        raise InvalidKey(
            "expected a private key of a known algorithm, found a damaged one; restore its file"
        ) from None
    signer = ALGORITHMS[algorithm][1](name, seed)
    _same_id(signer.verifier, id_hex)
    return signer


def _same_id(verifier: Verifier, id_hex: str) -> None:
    if verifier.key_id.hex() != id_hex:
        raise InvalidKey(
            f"expected the key id {verifier.key_id.hex()} of {verifier.name}, found {id_hex}: name "
            "or key was altered; copy the whole line again"
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")


def write_signer(signer: Ed25519Signer, path: Path) -> None:
    """Write a private key to a new file that only its owner may read (mode 0600).

    Raises InvalidKey where the file is there already: a key is never overwritten; SigningFailed,
    leaving no file, where it cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise InvalidKey(
            f"expected no file at {path} yet, found one; name another, a key is never overwritten"
        ) from error
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o600)
            file.write(signer.private_text() + "\n")
            file.flush()
            os.fsync(fd)
        sync_path(path.parent)
    except OSError as error:
        # A key that may be gone tomorrow is not handed out: nothing may be signed with it.
        with contextlib.suppress(OSError):
            path.unlink()
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> SigningFailed:
    return SigningFailed(
        f"expected to write a private key to {path}, found: {error.strerror or error}; make its "
        "folder writable and give it space, or name another"
    )


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_KEY_FILE_BYTES).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise InvalidKey(f"expected a key in {path}, found bytes that are no text") from error
    except OSError as error:
        raise InvalidKey(
            f"expected a key in {path}, found: {error.strerror}; check the path, or make a key "
            "with `shiftbook key new`"
        ) from error


def read_signer(path: Path) -> Signer:
    """Read a private key file; raise InvalidKey also where others than its owner may read it."""
    text = _read_text(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InvalidKey(
            f"expected {path} to be its owner's alone, found mode {mode:04o}: who reads it can "
            f"sign any history; mend it with: chmod 600 {path}"
        )
    return parse_signer(text)


def read_verifier(text_or_path: str) -> Verifier:
    """Read a verifier key from its text, or from the file at that path."""
    path = Path(text_or_path)
    try:
        is_file = path.is_file()
    except OSError:  # a name too long for a path
        is_file = False
    return parse_verifier(_read_text(path) if is_file else text_or_path)
