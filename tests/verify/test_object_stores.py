"""Goal: what happened to an object is a finding; that its store is away is none, and is outlived.

Method: a ledger whose evidence and heads lie in a real server of the S3 protocol is judged while
objects are changed, the bucket is missing or the store refuses; one that is followed is judged on
when the store is back, and has the same verdict.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import EvidenceOutOfReach, PublicationFailed
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import UrlOutlet
from shiftbook.ledger.signing_keys import Ed25519Signer
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import follow, verify
from tests.s3_server import DOWN, S3Server, running_s3

GOLDEN = Path(__file__).parents[1] / "assets/schema-2/job.db"
KEY = Ed25519Signer("example.com/runs", bytes(range(32)))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, running_s3(patch) as running:
        yield running


@pytest.fixture(scope="module")
def book(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a signed ledger with its evidence at ``s3://book/ev`` and its head in ``heads``."""
    path = Path(shutil.copy(GOLDEN, tmp_path_factory.mktemp("book")))
    url = f"sqlite:///{path}"
    store().put(f"{GOLDEN}.evidence/", "book/ev", recursive=True)
    with Ledger.open(url, writer="w") as ledger:
        assert HeadSigner(ledger, KEY, [UrlOutlet("s3://book/heads")]).sign() is not None
    return url


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The server, in order again after each test."""
    yield server
    server.fault = None


def store() -> Any:
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)


def outside(url: str = "s3://book/heads") -> Outside:
    return Outside.read([url], [KEY.verifier.text()])


def test_a_ledger_with_all_of_it_in_a_store_is_clean(s3: S3Server, book: str) -> None:
    verdict = verify(book, evidence="s3://book/ev", outside=outside(), require_signed=True)
    assert (verdict.exit_code, verdict.findings) == (0, ())
    assert verdict.coverage.row("evidence").checks > 0


CHANGES = {
    "deleted": lambda fs, path: fs.rm_file(path),
    "truncated": lambda fs, path: fs.pipe_file(path, fs.cat_file(path)[:100]),
    "emptied": lambda fs, path: fs.pipe_file(path, b""),
    "overwritten": lambda fs, path: fs.pipe_file(path, fs.cat_file(sorted(fs.ls("book/ev"))[1])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_happened_to_a_segment_is_a_finding(
    s3: S3Server, book: str, tmp_path: Path, change: str
) -> None:
    fs, copy = store(), f"book/{tmp_path.name}"
    fs.copy("book/ev", copy, recursive=True)
    path = sorted(fs.ls(copy))[0]
    CHANGES[change](fs, path)
    verdict = verify(book, evidence=f"s3://{copy}", integrity_only=True)
    assert verdict.exit_code == 1
    assert {finding.invariant for finding in verdict.findings} == {"evidence"}
    assert all(path.rsplit("/", 1)[-1] in finding.found for finding in verdict.findings)


@pytest.mark.parametrize("change", CHANGES)
def test_what_happened_to_a_head_between_others_is_found(
    s3: S3Server, book: str, tmp_path: Path, change: str
) -> None:
    fs, heads = store(), f"book/{tmp_path.name}"
    with Ledger.open(book, read_only=True) as ledger:
        size = ledger.head().size
    fs.copy("book/heads", heads, recursive=True)
    (path,) = fs.ls(heads)
    fs.pipe_file(f"{heads}/{size + 1:020d}", fs.cat_file(path))  # so that it is not the last one
    if change == "overwritten":
        fs.pipe_file(path, b"something else")
    else:
        CHANGES[change](fs, path)
    verdict = verify(book, evidence="s3://book/ev", outside=outside(f"s3://{heads}"))
    assert verdict.exit_code == 1
    assert {finding.invariant for finding in verdict.findings} <= {"heads", "outside"}


@pytest.mark.parametrize("integrity_only", [True, False])
def test_a_store_that_is_away_is_held_against_nobody(
    s3: S3Server, book: str, integrity_only: bool
) -> None:
    s3.fault = DOWN
    before = len(s3.requests)
    with pytest.raises(EvidenceOutOfReach, match="expected to read evidence at s3://book/ev"):
        verify(book, evidence="s3://book/ev", integrity_only=integrity_only)
    assert len(s3.requests) - before <= 2, "one object is asked for, not each in turn"
    with pytest.raises(PublicationFailed, match="s3://book/heads"):
        outside()


@pytest.mark.parametrize("evidence", ["s3://bok/ev", "nosuch://book/ev"])
def test_a_slip_in_the_url_ends_with_2(
    s3: S3Server, book: str, evidence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--ledger", book, "--evidence", evidence, "--format", "json"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert evidence in said.err
    assert said.err.count("\n") == 1


def test_a_verdict_that_follows_outlives_the_store(s3: S3Server, book: str) -> None:
    told: list[Exception] = []

    def back_again(error: Exception) -> None:
        told.append(error)
        s3.fault = None

    s3.fault = DOWN
    stop = threading.Event()
    verdict = follow(book, stop=stop, evidence="s3://book/ev", on_problem=back_again)
    assert [type(error) for error in told] == [EvidenceOutOfReach]
    wanted = verify(book, evidence="s3://book/ev")
    assert json.dumps(verdict.plain()) == json.dumps(wanted.plain())


def test_who_stops_during_an_outage_is_told_of_it(s3: S3Server, book: str) -> None:
    s3.fault = DOWN
    stop = threading.Event()
    with pytest.raises(EvidenceOutOfReach):
        follow(book, stop=stop, evidence="s3://book/ev", on_problem=lambda _: stop.set())
