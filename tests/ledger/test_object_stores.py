"""Goal: evidence and heads in an object store are as safe as in a folder, and an outage is said.

Method: a real server of the S3 protocol on this machine, reached through s3fs as a user reaches S3:
objects are written, overwritten, cut and deleted; buckets and rights are missing; the store goes
away, loses an answer, knows no conditional writes; two signers write at once, held at a barrier
until both requests are there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger.archive import export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.errors import EvidenceError, EvidenceOutOfReach, PublicationFailed
from shiftbook.ledger.evidence import read_segment, write_segment
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.object_folder import READ_AT_ONCE
from shiftbook.ledger.publication import UrlOutlet, read_published
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.signing_keys import Ed25519Signer
from tests.ledger.sample_ledger import write_sample
from tests.s3_server import DOWN, Application, Respond, S3Server, refused, running_s3

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
HEADS = [SignedHead.sign(size, bytes([size]) * 32, KEY) for size in range(1, READ_AT_ONCE + 3)]
ROWS = {"uid": ["a", "b"], "reward": [0.0, 1.0]}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, running_s3(patch) as running:
        yield running


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The server, in order again after each test."""
    yield server
    server.fault = None


@pytest.fixture
def folder(s3: S3Server, tmp_path: Path) -> str:
    """A prefix of this test's own."""
    return f"s3://book/{tmp_path.name}"


def store() -> Any:
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)


def buckets() -> list[str]:
    return sorted(store().ls(""))


def published(url: str) -> list[SignedHead]:
    return [SignedHead.parse(data) for _, data in read_published(url)]


# -- evidence ------------------------------------------------------------------------------


def test_a_segment_overwritten_cut_or_deleted_is_named_and_written_again(folder: str) -> None:
    segment = write_segment(folder, ROWS)
    assert read_segment(folder, segment).to_pydict() == ROWS
    path = f"{folder}/{segment.sha256}.parquet"
    whole = store().cat_file(path)
    for bad in (whole[:100], b"", b"\x00" + whole[1:]):
        store().pipe_file(path, bad)
        with pytest.raises(EvidenceError, match="restore it from a copy") as caught:
            read_segment(folder, segment)
        assert not isinstance(caught.value, EvidenceOutOfReach)
        assert write_segment(folder, ROWS) == segment
        assert store().cat_file(path) == whole
    store().rm_file(path)
    with pytest.raises(EvidenceError, match="found none; restore it") as caught:
        read_segment(folder, segment)
    assert not isinstance(caught.value, EvidenceOutOfReach)


def test_a_segment_that_stands_is_not_written_again(s3: S3Server, folder: str) -> None:
    write_segment(folder, ROWS)
    before = len(s3.requests)
    write_segment(folder, ROWS)
    assert {method for method, _ in s3.requests[before:]} <= {"GET", "HEAD"}


def test_a_bucket_that_is_missing_is_said_and_not_made(s3: S3Server) -> None:
    before = buckets()
    segment = write_segment("s3://book/there", ROWS)
    for act in (
        lambda: write_segment("s3://bok/there", ROWS),
        lambda: read_segment("s3://bok/there", segment),
    ):
        with pytest.raises(EvidenceOutOfReach, match="no bucket bok"):
            act()
    place = UrlOutlet("s3://bok/heads")
    for publish in (place.last, lambda: place.publish(HEADS[0])):
        with pytest.raises(PublicationFailed, match="no bucket bok"):
            publish()
    with pytest.raises(PublicationFailed, match="no bucket bok"):
        published("s3://bok/heads")
    assert buckets() == before


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        ("403 Forbidden", "AccessDenied", "PermissionError"),
        ("403 Forbidden", "SignatureDoesNotMatch", "PermissionError"),
        ("503 Service Unavailable", "ServiceUnavailable", "OSError"),
        ("500 Internal Server Error", "InternalError", "OSError"),
    ],
)
def test_a_store_that_refuses_is_out_of_reach(
    s3: S3Server, folder: str, status: str, code: str, said: str
) -> None:
    segment = write_segment(folder, ROWS)
    s3.fault = refused(status, code)
    for act in (lambda: write_segment(folder, ROWS), lambda: read_segment(folder, segment)):
        with pytest.raises(EvidenceOutOfReach, match=f"{said}.*see that fsspec reaches it"):
            act()
    place = UrlOutlet(f"{folder}/heads")
    for ask in (place.last, lambda: place.publish(HEADS[0]), lambda: published(f"{folder}/heads")):
        with pytest.raises(PublicationFailed, match=said) as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_a_ledger_goes_through_an_archive_into_a_store_and_back(
    s3: S3Server, folder: str, tmp_path: Path
) -> None:
    source, copied = (f"sqlite:///{tmp_path}/{name}.db" for name in ("source", "copy"))
    write_sample(source, schedules=("dynamic",), iterations=1).close()
    first, again = tmp_path / "first.tar", tmp_path / "again.tar"
    with Ledger.open(source, read_only=True) as ledger:
        export_archive(ledger, first)
    with Ledger.open(copied, evidence=folder) as copy:
        with ArchiveFile.open(first) as archive:
            done = import_archive(archive, copy)
        s3.fault = DOWN
        with pytest.raises(EvidenceOutOfReach):
            export_archive(copy, again)
        assert not again.exists(), "half an archive is none"
        with pytest.raises(EvidenceOutOfReach):
            Mirror.open(copy)
        s3.fault = None
        assert export_archive(copy, again).segments == done.segments > 0
        with Mirror.open(copy) as mirror:
            assert mirror.missing_segments == 0
            assert mirror.rows("SELECT count(*) AS n FROM samples")[0]["n"] > 0
    assert again.read_bytes() == first.read_bytes()


def test_an_import_that_loses_the_store_goes_on_where_it_was(
    s3: S3Server, folder: str, tmp_path: Path
) -> None:
    source, copied = (f"sqlite:///{tmp_path}/{name}.db" for name in ("source", "copy"))
    write_sample(source, schedules=("dynamic",), iterations=1).close()
    first, again = tmp_path / "first.tar", tmp_path / "again.tar"
    with Ledger.open(source, read_only=True) as ledger:
        export_archive(ledger, first)
    left = 3

    def third(request: dict[str, Any], store: Application, respond: Respond) -> Iterable[bytes]:
        nonlocal left
        left -= request["REQUEST_METHOD"] == "PUT"
        return (DOWN if left <= 0 else lambda r, s, a: s(r, a))(request, store, respond)

    with Ledger.open(copied, evidence=folder) as copy, ArchiveFile.open(first) as archive:
        s3.fault = third
        with pytest.raises(EvidenceOutOfReach):
            import_archive(archive, copy)
        assert copy.head().size == 0, "no event before its evidence"
        s3.fault = None
        import_archive(archive, copy)
        export_archive(copy, again)
    assert again.read_bytes() == first.read_bytes()


# -- heads ---------------------------------------------------------------------------------


def test_every_head_stays_an_object_of_its_own(folder: str) -> None:
    place = UrlOutlet(folder)
    assert place.last() is None
    store().pipe({f"{folder}/{head.size:020d}": head.data() for head in HEADS[2:]})
    for head in (HEADS[0], HEADS[1], HEADS[30]):
        place.publish(head)
    assert place.last() == HEADS[-1]
    assert published(folder) == HEADS, "more than are asked for at once, and in their order"
    with pytest.raises(PublicationFailed, match="another head of size 12"):
        place.publish(SignedHead.sign(12, bytes(32), KEY))
    assert published(folder) == HEADS


def test_two_signers_at_once_do_not_overwrite_each_other(s3: S3Server, folder: str) -> None:
    both = threading.Barrier(2, timeout=60)

    def together(request: dict[str, Any], store: Application, respond: Respond) -> Iterable[bytes]:
        if request["REQUEST_METHOD"] == "PUT":
            both.wait()  # each has looked by then, and found no object
        return store(request, respond)

    heads = [SignedHead.sign(7, bytes([root]) * 32, KEY) for root in (1, 2)]
    said: list[str] = []

    def publish(head: SignedHead) -> None:
        try:
            UrlOutlet(folder).publish(head)
            said.append("published")
        except PublicationFailed as error:
            said.append(str(error))

    s3.fault = together
    writers = [threading.Thread(target=publish, args=(head,)) for head in heads]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    s3.fault = None
    assert sorted("another head of size 7" in text for text in said) == [False, True]
    assert said.count("published") == 1
    assert len(published(folder)) == 1


def test_an_answer_that_was_lost_is_looked_for(s3: S3Server, folder: str) -> None:
    def lost(request: dict[str, Any], store: Application, respond: Respond) -> Iterable[bytes]:
        if request["REQUEST_METHOD"] != "PUT":
            return store(request, respond)
        list(store(request, lambda *_: None))
        return DOWN(request, store, respond)

    s3.fault = lost
    UrlOutlet(folder).publish(HEADS[0])
    assert published(folder) == HEADS[:1]


def test_a_store_without_conditional_writes_is_still_written_to(s3: S3Server, folder: str) -> None:
    """Such as an older one that speaks the protocol; the gap between look and write is told of."""

    def older(request: dict[str, Any], store: Application, respond: Respond) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" in request:
            return refused("501 Not Implemented", "NotImplemented")(request, store, respond)
        return store(request, respond)

    s3.fault = older
    place = UrlOutlet(folder)
    place.publish(HEADS[0])
    assert published(folder) == HEADS[:1]
    with pytest.raises(PublicationFailed, match="another head of size 1"):
        place.publish(SignedHead.sign(1, bytes(32), KEY))


def test_a_signer_outlives_the_store_and_brings_every_head_there(
    s3: S3Server, folder: str, store_url: str, tmp_path: Path
) -> None:
    from shiftbook.ledger.events.job import ExperimentForked

    with Ledger.open(store_url, writer="w") as ledger:
        signer = HeadSigner(ledger, KEY, [UrlOutlet(folder)], memory=tmp_path / "key.last")
        sizes = []
        for size in range(1, 5):
            ledger.append("job", ExperimentForked(parent="p", reason="r"))
            s3.fault = DOWN if size in (2, 3) else None
            try:
                signer.sign()
            except PublicationFailed:
                sizes.append(size)
        assert sizes == [2, 3]
    assert [head.size for head in published(folder)] == [1, 2, 3, 4]
