"""Goal: keys, notes and heads are those of C2SP, to the byte; nothing malformed or forged passes.

Method: the examples that the texts of C2SP print are read and verified; notes of our own go through
a round trip; malformed ones (each rule of the text broken once), wrong keys and every single
flipped bit must be refused by an error of our own, whatever the bytes.
"""

from __future__ import annotations

import base64
import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.ledger.errors import InvalidKey, InvalidNote, ProofInvalid, SigningFailed
from shiftbook.ledger.merkle import EMPTY_ROOT
from shiftbook.ledger.signed_note import SignedHead, SignedNote, split_heads
from shiftbook.ledger.signing_keys import (
    Ed25519Signer,
    Ed25519Verifier,
    Signer,
    Verifier,
    new_signer,
    parse_signer,
    parse_verifier,
    read_signer,
    read_verifier,
    write_signer,
)

SUMDB_KEY = "sum.golang.org+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"
"""Key of the Go checksum database, as it is published in Go itself."""

PETER_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_SECRET = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
PETER_TEXT = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
)
PETER_NOTE = (
    PETER_TEXT + "\n— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZ"
    "SNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
).encode()
"""The example of golang.org/x/mod/sumdb/note, whose format C2SP took over."""

SEED = bytes(range(32))
KEY = Ed25519Signer("example.com/runs", SEED)
HEAD = SignedHead.sign(20852163, bytes(range(32)), KEY)


def test_the_example_that_the_format_came_with() -> None:
    note = SignedNote.parse(PETER_NOTE)
    assert note.text == PETER_TEXT
    assert note.data() == PETER_NOTE
    verifier = parse_verifier(PETER_KEY)
    assert note.verify([verifier]) == (verifier,)
    signer = parse_signer(PETER_SECRET)
    assert signer.verifier.text() == PETER_KEY
    # Ed25519 is deterministic, so the same text gives the printed note again.
    assert SignedNote.sign(PETER_TEXT, signer).data() == PETER_NOTE


def test_keys_have_one_text_each() -> None:
    assert parse_verifier(SUMDB_KEY).text() == SUMDB_KEY
    assert parse_verifier(SUMDB_KEY).name == "sum.golang.org"
    assert parse_verifier(KEY.verifier.text()) == KEY.verifier
    again = parse_signer(KEY.private_text())
    assert again.verifier == KEY.verifier
    assert again.sign(b"x") == KEY.sign(b"x")
    assert new_signer().name != new_signer().name
    assert new_signer("a/b").name == "a/b"


BAD_KEYS = {
    "nothing": "",
    "words": "no key at all",
    "two parts": "name+00000000",
    "another id": SUMDB_KEY.replace("033de0ae", "033de0af"),
    "another name": SUMDB_KEY.replace("sum.golang", "sum.golanh"),
    "another algorithm": "name+00000000+" + base64.b64encode(b"\x02" + SEED).decode(),
    "a short key": "name+00000000+" + base64.b64encode(b"\x01" + SEED[:31]).decode(),
    "no key": "name+00000000+",
    "no base64": "name+00000000+====",
    "a name with a space": "na me+00000000+" + base64.b64encode(b"\x01" + SEED).decode(),
    "no name": "+00000000+" + base64.b64encode(b"\x01" + SEED).decode(),
    "a private key": PETER_SECRET,
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_what_is_no_verifier_key_is_said_so(name: str) -> None:
    with pytest.raises(InvalidKey, match="expected"):
        parse_verifier(BAD_KEYS[name])


@pytest.mark.parametrize(
    "text", [SUMDB_KEY, "", "PRIVATE+KEY+", PETER_SECRET[:-6], PETER_SECRET.replace("c7", "c8")]
)
def test_what_is_no_private_key_is_said_so_without_telling_it(text: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        parse_signer(text)
    assert "AYEKFALV" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_private_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.key"
    old = os.umask(0)
    try:
        write_signer(KEY, path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_signer(path).verifier == KEY.verifier
    with pytest.raises(InvalidKey, match="never overwritten"):
        write_signer(KEY, path)
    path.chmod(0o640)
    with pytest.raises(InvalidKey, match="chmod 600"):
        read_signer(path)
    with pytest.raises(InvalidKey, match="No such file"):
        read_signer(tmp_path / "none")
    public = tmp_path / "log.pub"
    public.write_text(KEY.verifier.text() + "\n")
    assert read_verifier(str(public)) == read_verifier(KEY.verifier.text()) == KEY.verifier
    public.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidKey, match="no text"):
        read_verifier(str(public))


def test_a_head_is_three_lines_and_the_name_is_the_origin() -> None:
    lines = HEAD.data().decode().split("\n")
    assert lines[:4] == [
        "example.com/runs",
        "20852163",
        base64.b64encode(bytes(range(32))).decode(),
        "",
    ]
    assert lines[4].startswith("— example.com/runs ")
    assert SignedHead.parse(HEAD.data()) == HEAD
    assert HEAD.verify([KEY.verifier]) == KEY.verifier
    extended = SignedHead.sign(0, EMPTY_ROOT, KEY, ("one", "two"))
    assert SignedHead.parse(extended.data()).extensions == ("one", "two")


def _signed(text: str) -> bytes:
    """A note over any text, without the checks of ours."""
    signature = base64.b64encode(KEY.verifier.key_id + KEY.sign(text.encode())).decode()
    return f"{text}\n— example.com/runs {signature}\n".encode()


ROOT = base64.b64encode(bytes(32)).decode()
BAD_NOTES = {
    "nothing": b"",
    "no signature": b"text\n\n",
    "no blank line": "text\n— a AAAAAAAA\n".encode(),
    "no text": "\n\n— a AAAAAAAA\n".encode(),
    "cut in the signature": HEAD.data()[:-1],
    "no UTF-8": b"\xff" + HEAD.data(),
    "a carriage return": HEAD.data().replace(b"\n", b"\r\n"),
    "a control character": HEAD.data().replace(b"example", b"exa\x07ple", 1),
    "a hyphen for the dash": HEAD.data().replace("—".encode(), b"-"),
    "no base64": "text\n\n— a !!!!!!!!\n".encode(),
    "base64 with stray bits": HEAD.data()[:-3] + bytes([HEAD.data()[-3] + 1]) + b"=\n",
    "a short signature": "text\n\n— a AAAAAA==\n".encode(),
    "a name with plus": "text\n\n— a+b AAAAAAAA\n".encode(),
    "no name": "text\n\n—  AAAAAAAA\n".encode(),
    "words among signatures": HEAD.data() + b"words\n",
    "too many signatures": b"t\n\n" + "— a AAAAAAAA\n".encode() * 101,
    "too long": b"t" * (1 << 20) + b"\n\n" + "— a AAAAAAAA\n".encode(),
}


@pytest.mark.parametrize("name", BAD_NOTES)
def test_what_is_no_note_is_refused(name: str) -> None:
    with pytest.raises(InvalidNote, match="expected"):
        SignedNote.parse(BAD_NOTES[name])


BAD_HEADS = {
    "two lines": "o\n1\n",
    "an empty extension": f"o\n1\n{ROOT}\n\nx\n",
    "a leading zero": f"o\n01\n{ROOT}\n",
    "a sign": f"o\n+1\n{ROOT}\n",
    "a negative size": f"o\n-1\n{ROOT}\n",
    "digits of another script": f"o\n١\n{ROOT}\n",
    "a blank before": f"o\n 1\n{ROOT}\n",
    "a size beyond 63 bits": f"o\n{2**63}\n{ROOT}\n",
    "a huge size": f"o\n{'9' * 5000}\n{ROOT}\n",
    "a short root": f"o\n1\n{ROOT[:-8]}\n",
    "a root that is no base64": f"o\n1\n{'*' * 44}\n",
    "a root with stray bits": f"o\n1\n{ROOT[:-2]}B=\n",
    "an empty origin": f"\n1\n{ROOT}\n",
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_signed_text_that_is_no_head_is_refused(name: str) -> None:
    with pytest.raises(InvalidNote, match="expected"):
        SignedHead.parse(_signed(BAD_HEADS[name]))


def test_only_known_keys_count_and_each_of_them_must_hold() -> None:
    other = Ed25519Signer("example.com/runs", bytes(32))
    witness = Ed25519Signer("witness.example", bytes([7] * 32))
    both = SignedHead.parse(SignedNote.sign(HEAD.note.text, witness, KEY).data())
    assert both.verify([KEY.verifier]) == KEY.verifier
    assert set(both.note.verify([KEY.verifier, witness.verifier])) == {
        KEY.verifier,
        witness.verifier,
    }
    with pytest.raises(ProofInvalid, match=r"signatures of example\.com/runs"):
        HEAD.verify([other.verifier])
    with pytest.raises(ProofInvalid, match=r"signature of none"):
        HEAD.verify([])
    with pytest.raises(ProofInvalid, match="another ledger's"):
        both.verify([witness.verifier])
    # A key with the same name and id, which an attacker can find, gets no further.
    forged = Forged("example.com/runs", other.verifier.public)
    with pytest.raises(ProofInvalid, match="does not hold"):
        HEAD.verify([forged])


class Forged(Ed25519Verifier):
    """Another key under the id of ours."""

    def __init__(self, name: str, public: bytes) -> None:
        super().__init__(name, public)
        self.key_id = KEY.verifier.key_id


class Shouting(Signer):
    """A signer of another algorithm, as hardware might bring one."""

    class _Verifier(Verifier):
        algorithm = 0xFF

        def verify(self, text: bytes, signature: bytes) -> bool:
            return signature == text.upper()

    verifier = _Verifier("example.com/loud", b"loud")

    def sign(self, text: bytes) -> bytes:
        return text.upper()


def test_another_algorithm_needs_no_change_of_notes() -> None:
    head = SignedHead.parse(SignedHead.sign(1, bytes(32), Shouting()).data())
    assert head.verify([Shouting.verifier, KEY.verifier]) == Shouting.verifier
    with pytest.raises(ProofInvalid):
        head.verify([KEY.verifier])


def test_every_flipped_bit_of_a_head_is_noticed() -> None:
    data = HEAD.data()
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((InvalidNote, ProofInvalid)):
            SignedHead.parse(bytes(changed)).verify([KEY.verifier])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(max_size=200).map(str.encode)))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for attempt in (data, b"o\n1\n" + data, data + HEAD.data(), HEAD.data() + data):
        try:
            head = SignedHead.parse(attempt)
        except InvalidNote:
            continue
        assert head.data() == attempt


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="+"), min_size=1, max_size=9),
    st.integers(0, 2**63 - 1),
    st.binary(min_size=32, max_size=32),
)
def test_round_trip_of_any_head(name: str, size: int, root: bytes) -> None:
    try:
        signer = Ed25519Signer(name, SEED)
    except InvalidKey:
        assert any(char.isspace() or ord(char) < 0x20 for char in name)
        return
    head = SignedHead.sign(size, root, signer)
    again = SignedHead.parse(head.data())
    assert (again.origin, again.size, again.root) == (name, size, root)
    assert again.verify([parse_verifier(signer.verifier.text())]) == signer.verifier


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 99), max_size=5), st.integers(0, 2), st.integers(0, 400))
def test_heads_in_one_file_are_split_where_they_were_joined(
    sizes: list[int], blanks: int, cut: int
) -> None:
    notes = [SignedHead.sign(size, bytes(32), KEY).data() for size in sizes]
    joined = b"".join(note + b"\n" * blanks for note in notes)
    found = list(split_heads(joined))
    assert [chunk.rstrip(b"\n") + b"\n" for _, chunk in found if chunk.strip()] == notes
    assert all(joined[at : at + len(chunk)] == chunk for at, chunk in found)
    torn = [chunk for _, chunk in split_heads(joined[: len(joined) - cut])]
    assert len(torn) <= max(1, len(notes) + 1)


def test_a_key_that_cannot_be_written_is_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no half-written key stays in the way of a new one. Method: a sync fails once."""
    path = tmp_path / "new.key"

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(SigningFailed, match="make its folder writable"):
            write_signer(KEY, path)
    assert not path.exists()
    with pytest.raises(SigningFailed, match="No such file"):
        write_signer(KEY, tmp_path / "none" / "new.key")
    write_signer(KEY, path)
    assert read_signer(path).verifier.text() == KEY.verifier.text()
