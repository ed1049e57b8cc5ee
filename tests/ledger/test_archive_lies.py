"""Goal: an archive that is whole and lies is refused in one line, and leaves nothing behind.

Method: the writer of archives itself writes heads that are none, that fit no event, and that fit
other events; events that follow nothing, behind many that are sound; and segments under another's
name behind a sound one. Each is imported by the command into a store where no ledger stands, and
judged by the verifier, on either store. Controls are the same files without the lie.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shiftbook.ledger.archive import BATCH_EVENTS, export_archive
from shiftbook.ledger.archive_format import Range
from shiftbook.ledger.archive_heads import HEADS_SECTION
from shiftbook.ledger.archive_writer import ArchiveWriter
from shiftbook.ledger.evidence import segment_sha256
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.signed_note import SignedHead
from tests.ledger.test_archive import envelope, evidence, forged, missing, rows, run
from tests.verify.signed_run import EVENTS, KEY, SIZES, Signed, write_signed

Urls = Callable[[str], str]


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


def line(size: object, note: bytes) -> bytes:
    return json.dumps({"size": size, "note": base64.b64encode(note).decode()}).encode() + b"\n"


def head(size: int, root: bytes = bytes(32)) -> bytes:
    """A head that the true key signed over a tree that is not this ledger's."""
    return SignedHead.sign(size, root, KEY).data()


HEADS: dict[str, Callable[[list[bytes]], bytes]] = {
    "no JSON": lambda good: b"text\n",
    "nothing in a line": lambda good: b"\n\n",
    "no number": lambda good: b'{"size": NaN, "note": ""}\n',
    "endless number": lambda good: b'{"size": Infinity, "note": ""}\n',
    "number of many digits": lambda good: b'{"size": %s, "note": ""}\n' % (b"9" * 5_000),
    "number as text": lambda good: line(str(SIZES[0]), good[0]),
    "number with a fraction": lambda good: line(SIZES[0] + 0.5, good[0]),
    "truth as a number": lambda good: line(True, head(1)),
    "deep JSON": lambda good: b"[" * 100_000 + b"\n",
    "no text": lambda good: b'{"size": 60, "note": "\xff"}\n',
    "below nothing": lambda good: line(-5, good[0]),
    "of nothing": lambda good: line(0, head(0)),
    "of another size than its line says": lambda good: line(SIZES[0], good[1]),
    "over more events than there are": lambda good: line(EVENTS + 1, head(EVENTS + 1)),
    "of another history": lambda good: line(SIZES[0], head(SIZES[0])),
    "the last of another history": lambda good: b"".join(
        [*map(line, SIZES[:-1], good), line(EVENTS, head(EVENTS))]
    ),
    "twice": lambda good: line(SIZES[0], good[0]) * 2,
    "swapped": lambda good: line(SIZES[1], good[1]) + line(SIZES[0], good[0]),
    "two of one size": lambda good: line(SIZES[0], good[0]) + line(SIZES[0], head(SIZES[0])),
}


@pytest.mark.parametrize("name", ["control", *HEADS])
def test_heads(signed: Signed, store_urls: Urls, tmp_path: Path, name: str) -> None:
    archive = tmp_path / "a.tar"
    with Ledger.open(f"sqlite:///{signed.path}", read_only=True) as ledger:
        good = [one.data() for one in ledger.tree().heads()]
        lie = HEADS.get(name, lambda good: b"".join(map(line, SIZES, good)))(good)
        export_archive(ledger, archive, sections={HEADS_SECTION: lie})
    verdict = run("verify", archive, "--key", KEY.verifier.text(), "--integrity-only")
    done = run("import", archive, "--ledger", store_urls("copy"))
    if name == "control":
        assert (verdict.exit_code, done.exit_code) == (0, 0), done.stderr
        assert len(rows(store_urls("copy"))) == EVENTS
        return
    assert verdict.exit_code == 1, verdict.output
    assert "heads" in verdict.stdout
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "expected" in done.stderr
    assert missing(store_urls("copy"))


def test_heads_in_a_range(signed: Signed, store_urls: Urls, tmp_path: Path) -> None:
    """A range has no tree: a head of it is a lie, whatever it says."""
    with Ledger.open(f"sqlite:///{signed.path}", read_only=True) as ledger:
        first = next(ledger.tree().heads())
        export_archive(ledger, tmp_path / "a.tar", last=9)
        export_archive(
            ledger,
            tmp_path / "b.tar",
            first=10,
            sections={HEADS_SECTION: line(first.size, first.data())},
        )
    copy = store_urls("copy")
    assert run("import", tmp_path / "a.tar", "--ledger", copy).exit_code == 0
    done = run("import", tmp_path / "b.tar", "--ledger", copy)
    assert (done.exit_code, len(rows(copy))) == (2, 10)
    assert "no tree" in done.stderr


AT = 2 * BATCH_EVENTS + 7
"""Where the lie stands: behind batches that an import would have written by then."""

EVENT_LIES = {
    "of another position": envelope(AT + 1),
    "of a version that is not next": envelope(AT, version=AT + 1),
    "of a version that was there": envelope(AT, version=AT - 1),
    "of a sequence that is not next": envelope(AT, sequence=AT + 1),
    "that begins a job in its middle": envelope(AT, job="other"),
    "that begins a writer in its middle": envelope(AT, writer="other"),
    "of a number beyond 63 bits": envelope(AT, recorded_ns=2**63),
    "with another field": envelope(AT, more=1),
    "without a body": envelope(AT, body=None),
    "cut": envelope(AT)[:-1],
    "of no bytes": b"",
}


@pytest.mark.parametrize("name", ["control", *EVENT_LIES])
def test_events_behind_sound_ones(store_urls: Urls, tmp_path: Path, name: str) -> None:
    sound = [envelope(at) for at in range(AT)]
    lie = EVENT_LIES.get(name, envelope(AT))
    archive = forged(tmp_path / "a.tar", [*sound, lie], AT)
    done = run("import", archive, "--ledger", store_urls("copy"))
    if name == "control":
        assert done.exit_code == 0, done.stderr
        assert len(rows(store_urls("copy"))) == AT + 1
        return
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert str(AT) in done.stderr
    assert missing(store_urls("copy"))


@pytest.mark.parametrize("lie", [False, True])
def test_a_segment_behind_a_sound_one(store_urls: Urls, tmp_path: Path, lie: bool) -> None:
    archive = tmp_path / "a.tar"
    writer = ArchiveWriter(archive, Range(0, 0, None, "tests"))
    segments = sorted((segment_sha256(data), data) for data in (b"one", b"two"))
    for number, (sha256, data) in enumerate(segments):
        writer.segment(sha256, b"other" if lie and number else data)
    writer.event(envelope(0))
    writer.finish(0)
    done = run("import", archive, "--ledger", store_urls("copy"))
    assert done.exit_code == (2 if lie else 0), done.stderr
    assert len(evidence(store_urls("copy"))) == (0 if lie else 2)
    assert missing(store_urls("copy")) == lie
