"""Goal: a key signs one history only, whatever the database says; what it signed gets outside.

Method: an attacker who owns the database, on either store, rolls it back, rewrites it, cuts it or
forges heads in it between two signatures; a crash is put between each two steps of signing by a
place that fails; a ledger grows by random batches and every head is compared with the root over all
leaves; the tables are read through a counter, so that a head of a large ledger reads a few tiles
and not the ledger.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.errors import (
    InvalidInput,
    PublicationFailed,
    SigningFailed,
    SigningRefused,
)
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.merkle import (
    consistency_path,
    inclusion_path,
    tree_root,
    verify_consistency,
    verify_inclusion,
)
from shiftbook.ledger.publication import (
    CommandOutlet,
    FileOutlet,
    Outlet,
    UrlOutlet,
    open_outlet,
    read_published,
)
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.signing_keys import Ed25519Signer
from tests.ledger.stores import attack, copy_ledger, literal, run_sql
from tests.postgres_server import running_server

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
OTHER = Ed25519Signer("example.com/runs", bytes(32))


def grow(ledger: Ledger, count: int, reason: str = "r") -> None:
    ledger.append("job", [ExperimentForked(parent="p", reason=reason) for _ in range(count)])


def leaves(ledger: Ledger, size: int) -> list[bytes]:
    return [row.leaf for row in ledger.rows(until=size - 1)]


@pytest.fixture
def ledger(store_url: str) -> Iterator[Ledger]:
    """A ledger on each store."""
    with Ledger.open(store_url, writer="w") as opened:
        yield opened


@pytest.fixture
def file_ledger(tmp_path: Path) -> Iterator[Ledger]:
    """One in a file, for an owner who edits it; test_postgres_tree.py has the owner of a server."""
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", writer="w") as opened:
        yield opened


def signer_of(ledger: Ledger, folder: Path) -> HeadSigner:
    return HeadSigner(ledger, KEY, [FileOutlet(folder / "heads")], memory=folder / "key.last")


@pytest.fixture
def signer(ledger: Ledger, tmp_path: Path) -> HeadSigner:
    return signer_of(ledger, tmp_path)


@pytest.fixture
def file_signer(file_ledger: Ledger, tmp_path: Path) -> HeadSigner:
    return signer_of(file_ledger, tmp_path)


def test_heads_of_a_growing_ledger_and_proofs_between_all_of_them(
    ledger: Ledger, signer: HeadSigner, tmp_path: Path
) -> None:
    seed = 20_261_129
    chance = random.Random(seed)
    print("seed", seed)
    assert signer.sign() is None
    heads: list[SignedHead] = []
    for _ in range(14):
        grow(ledger, chance.choice([1, 2, 5, 100, 255, 256, 257]))
        head = signer.sign()
        assert head is not None
        heads.append(head)
    everything = leaves(ledger, heads[-1].size)
    tree = ledger.tree()
    for head in heads:
        assert head.root == tree_root(everything[: head.size]) == tree.root(head.size)
        assert head.verify([KEY.verifier]) == KEY.verifier
        path = consistency_path(head.size, heads[-1].size, tree.node)
        verify_consistency(head.size, heads[-1].size, head.root, heads[-1].root, path)
        for _ in range(5):
            at = chance.randrange(head.size)
            path = inclusion_path(at, head.size, tree.node)
            verify_inclusion(everything[at], at, head.size, path, head.root)
    assert list(tree.heads()) == heads
    assert signer.sign() == heads[-1]
    published = [SignedHead.parse(data) for _, data in read_published(str(tmp_path / "heads"))]
    assert published == heads


def test_a_head_and_a_proof_of_a_large_ledger_read_a_few_tiles(
    ledger: Ledger, signer: HeadSigner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70,000 events make three levels; 1,000 rows are more than four tiles."""
    for _ in range(7):
        grow(ledger, 10_000)
    signer.sign()
    read = 0
    ask = ledger._store.ask

    def counted(*args: object, **values: object) -> list[object]:
        nonlocal read
        found = ask(*args, **values)  # type: ignore[arg-type]
        read += len(found)
        return found

    monkeypatch.setattr(ledger._store, "ask", counted)
    head = ledger.tree().last_head()
    assert head is not None
    inclusion_path(35_123, head.size, ledger.tree().node)
    assert read <= 4 * 256
    read = 0
    grow(ledger, 3)
    signer.sign()
    assert read <= 4 * 256


Sql = Callable[[bytes], str]
"""Spells bytes in a store's SQL."""


def rewritten(sql: Sql) -> list[str]:
    data = b'{"position":3}'
    return [
        "delete from heads",
        "delete from nodes",
        f"update events set data = {sql(data)}, leaf = {sql(leaf_hash(data))} where position = 3",
    ]


def forged_head(size: int, key: Ed25519Signer, sql: Sql) -> str:
    note = SignedHead.sign(size, bytes(32), key).data()
    return f"insert into heads values ({size}, {sql(note)})"


ATTACKS: dict[str, tuple[Callable[[Sql], list[str]], str]] = {
    "cut": (lambda sql: ["delete from events where position > 5"], "at least 10"),
    "emptied": (
        lambda sql: ["delete from events", "delete from heads", "delete from nodes"],
        "rolled back",
    ),
    "rewritten": (rewritten, "rewritten or forked"),
    "one leaf": (
        lambda sql: [f"update events set leaf = {sql(bytes(32))} where position = 8"],
        "rewritten or forked",
    ),
    "new event altered": (
        lambda sql: [f"update events set data = {sql(b'{}')} where position = 11"],
        "position 11, found other bytes",
    ),
    "new event removed": (
        lambda sql: ["delete from events where position = 11"],
        "found position 12",
    ),
    "head of another key": (
        lambda sql: ["delete from heads where size = 10", forged_head(10, OTHER, sql)],
        "in the table of heads",
    ),
    "head damaged": (lambda sql: [f"update heads set note = {sql(bytes(1))}"], "damage"),
    "head forged larger": (lambda sql: [forged_head(99, KEY, sql)], "at least 99"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_head_is_refused_after_each_attack_and_nothing_is_signed(
    name: str, ledger: Ledger, signer: HeadSigner, store_url: str, tmp_path: Path
) -> None:
    act, told = ATTACKS[name]
    grow(ledger, 10)
    signer.sign()
    grow(ledger, 4)
    memories = tmp_path / "heads", tmp_path / "key.last"
    before = [path.read_bytes() for path in memories]
    attack(store_url, *act(lambda data: literal(store_url, data)))
    with pytest.raises(SigningRefused, match=told):
        signer.sign()
    assert [path.read_bytes() for path in memories] == before


def test_a_rollback_to_an_old_copy_is_refused_even_when_it_has_grown_again(
    store_urls: Callable[[str], str], tmp_path: Path
) -> None:
    url, old = store_urls("ledger"), store_urls("old")
    options = {"memory": tmp_path / "memory"}
    with Ledger.open(url, writer="w") as ledger:
        grow(ledger, 10)
        HeadSigner(ledger, KEY, **options).sign()
    copy_ledger(url, old)
    with Ledger.open(url, writer="w") as ledger:
        grow(ledger, 10)
        HeadSigner(ledger, KEY, **options).sign()
    with Ledger.open(old, writer="w") as ledger:
        with pytest.raises(SigningRefused, match="rolled back"):
            HeadSigner(ledger, KEY, **options).sign()
        grow(ledger, 30, "another history")
        with pytest.raises(SigningRefused, match="rewritten or forked"):
            HeadSigner(ledger, KEY, **options).sign()
        # Without its memory the key is saved by the place where it published.
        HeadSigner(ledger, KEY).sign()  # and without both nothing can tell


def test_the_place_of_publication_is_a_memory_too(
    store_urls: Callable[[str], str], tmp_path: Path
) -> None:
    heads = FileOutlet(tmp_path / "heads")
    for name, reason in (("one", "first"), ("two", "second")):
        with Ledger.open(store_urls(name), writer="w") as ledger:
            grow(ledger, 5, reason)
            signer = HeadSigner(ledger, KEY, [heads])
            if name == "one":
                signer.sign()
                continue
            with pytest.raises(SigningRefused, match="heads"):
                signer.sign()


def test_one_signer_at_a_time(ledger: Ledger, signer: HeadSigner) -> None:
    grow(ledger, 3)
    tree = ledger.tree()
    head = SignedHead.sign(3, tree_root(leaves(ledger, 3)), KEY)
    with pytest.raises(SigningRefused, match="another signer is at work"):
        tree.add_head(head, 2, [])
    tree.add_head(head, 0, [])
    assert signer.sign() == head


def test_a_key_follows_another_only_where_that_is_said(ledger: Ledger, tmp_path: Path) -> None:
    grow(ledger, 3)
    HeadSigner(ledger, OTHER).sign()
    grow(ledger, 3)
    with pytest.raises(SigningRefused, match="predecessor"):
        HeadSigner(ledger, KEY).sign()
    head = HeadSigner(ledger, KEY, predecessors=[OTHER.verifier]).sign()
    assert head is not None
    assert (head.size, head.verify([KEY.verifier])) == (6, KEY.verifier)


class Failing(Outlet):
    """A place that cannot be reached while ``broken``."""

    name = "failing"

    def __init__(self) -> None:
        self.broken = True
        self.heads: list[SignedHead] = []

    def last(self) -> SignedHead | None:
        if self.broken:
            raise PublicationFailed("out of reach")
        return self.heads[-1] if self.heads else None

    def publish(self, head: SignedHead) -> None:
        if self.broken:
            raise PublicationFailed("out of reach")
        self.heads.append(head)


def test_a_place_out_of_reach_gets_all_heads_once_it_is_back(
    ledger: Ledger, tmp_path: Path
) -> None:
    place, file = Failing(), FileOutlet(tmp_path / "heads")
    place.broken = False
    signer = HeadSigner(ledger, KEY, [place, file])
    grow(ledger, 2)
    signer.sign()
    place.broken = True
    for _ in range(3):
        grow(ledger, 2)
        with pytest.raises(PublicationFailed):
            signer.sign()
    assert signer.signed_size == 8
    assert file.last() == ledger.tree().last_head()
    place.broken = False
    signer.sign()
    assert [head.size for head in place.heads] == [2, 4, 6, 8]


def test_a_crash_after_the_memory_and_before_the_database_is_made_good(
    ledger: Ledger, signer: HeadSigner, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(ledger, 300)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(signer._tree, "add_head", crash)
    with pytest.raises(KeyboardInterrupt):
        signer.sign()
    monkeypatch.undo()
    assert signer.signed_size == 0
    grow(ledger, 5)
    head = signer.sign()
    assert head is not None
    assert head.root == tree_root(leaves(ledger, 305))


def test_a_damaged_or_foreign_memory_stops_the_signer(
    ledger: Ledger, signer: HeadSigner, tmp_path: Path
) -> None:
    grow(ledger, 2)
    signer.sign()
    memory = tmp_path / "key.last"
    whole = memory.read_bytes()
    memory.write_bytes(whole[:-5])
    with pytest.raises(SigningRefused, match="restore the file"):
        signer.sign()
    memory.write_bytes(whole.replace(b"example.com/runs", b"example.com/walk"))
    with pytest.raises(SigningRefused, match=r"memory of example\.com/runs"):
        signer.sign()


def test_nodes_that_an_import_did_not_bring_are_written_again(
    ledger: Ledger, signer: HeadSigner, store_url: str
) -> None:
    def nodes() -> list[list[bytes]]:
        tree = ledger.tree()
        return [tree.hashes(level, 0, count) for level, count in ((1, 3), (2, 0)) if count]

    grow(ledger, 1000)
    signer.sign()
    before = nodes()
    attack(store_url, "delete from nodes where number > 0")
    assert ledger.tree().complete(1000) == 2
    assert nodes() == before
    attack(store_url, "delete from nodes")
    grow(ledger, 100)
    assert signer.sign() is not None
    assert ledger.tree().complete(1100) == 0


def test_a_ledger_of_an_older_build_gets_its_tables_with_its_first_head(
    ledger: Ledger, signer: HeadSigner, store_url: str
) -> None:
    grow(ledger, 300)
    gone = ["drop table heads", "drop table nodes"]
    if not store_url.startswith("sqlite:"):
        gone += [f"drop function {t}_{f}" for t in ("heads", "nodes") for f in ("follow", "refuse")]
    attack(store_url, *gone)
    assert ledger.tree().last_head() is None
    assert list(ledger.tree().heads()) == []
    head = signer.sign()
    assert head == ledger.tree().last_head()
    assert "append only" in (run_sql(store_url, "delete from heads") or "")


REFUSED = {
    "update a head": "update heads set note = x'00'",
    "delete a head": "delete from heads",
    "replace a head": "insert or replace into heads values (5, x'00')",
    "a smaller head": "insert into heads values (4, x'00')",
    "a head of nothing": "insert into heads values (0, x'00')",
    "a head beyond the events": "insert into heads values (301, x'00')",
    "update a node": "update nodes set hash = x'00'",
    "delete a node": "delete from nodes",
    "replace a node": "insert or replace into nodes values (1, 0, x'00')",
    "a gap in a level": "insert into nodes values (1, 2, x'00')",
    "a level of leaves": "insert into nodes values (0, 0, x'00')",
}


@pytest.mark.parametrize("name", REFUSED)
def test_triggers_keep_heads_and_nodes(
    name: str, file_ledger: Ledger, file_signer: HeadSigner, tmp_path: Path
) -> None:
    grow(file_ledger, 5)
    file_signer.sign()
    grow(file_ledger, 295)
    file_signer.sign()
    connection = sqlite3.connect(tmp_path / "ledger.db")
    connection.execute("pragma recursive_triggers=on")
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(REFUSED[name])
    connection.close()


def test_run_signs_by_events_by_time_and_at_the_end(ledger: Ledger, tmp_path: Path) -> None:
    signer, stop, seen = HeadSigner(ledger, KEY), threading.Event(), list[int]()
    came = threading.Condition()

    def on_head(head: SignedHead) -> None:
        with came:
            seen.append(head.size)
            came.notify_all()

    def wait_for(size: int) -> None:
        with came:
            assert came.wait_for(lambda: size in seen, timeout=30), seen

    grow(ledger, 10)
    thread = threading.Thread(
        target=signer.run,
        kwargs={"every": 10, "each_s": 0.5, "stop": stop, "poll_s": 0.01, "on_head": on_head},
    )
    thread.start()
    wait_for(10)
    began = time.monotonic()
    grow(ledger, 3)
    wait_for(13)
    assert time.monotonic() - began >= 0.4
    grow(ledger, 1)
    stop.set()
    thread.join(30)
    assert seen[-1] == 14
    assert signer.signed_size == 14


def test_run_tells_of_a_place_out_of_reach_and_goes_on(ledger: Ledger) -> None:
    place, stop, problems = Failing(), threading.Event(), list[str]()
    grow(ledger, 1)

    def on_problem(error: Exception) -> None:
        problems.append(str(error))
        place.broken = False

    thread = threading.Thread(
        target=HeadSigner(ledger, KEY, [place]).run,
        kwargs={"every": 1, "each_s": 0.05, "stop": stop, "poll_s": 0.01, "on_problem": on_problem},
    )
    thread.start()
    deadline = time.monotonic() + 30
    while not place.heads and time.monotonic() < deadline:
        thread.join(0.02)
    stop.set()
    thread.join(30)
    assert problems == ["out of reach"]
    assert [head.size for head in place.heads] == [1]
    place.broken = True
    grow(ledger, 1)
    with pytest.raises(PublicationFailed):
        HeadSigner(ledger, KEY, [place]).run(stop=stop)


def test_run_outlives_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGUSER", "postgres")
    stop, problem = threading.Event(), threading.Event()
    place, refused = FileOutlet(tmp_path / "heads"), list[Exception]()
    with running_server(fsync="off") as server:
        with Ledger.open(server.url()) as book:
            grow(book, 5)
        with Ledger.open(server.url(), lock_timeout_s=1.0) as book:

            def work() -> None:
                try:
                    HeadSigner(book, KEY, [place]).run(
                        every=1, each_s=0.05, stop=stop, poll_s=0.01,
                        on_problem=lambda error: problem.set(),
                    )  # fmt: skip
                except Exception as error:
                    refused.append(error)

            def signed(size: int) -> None:
                deadline = time.monotonic() + 30
                while not (last := place.last()) or last.size < size:
                    assert time.monotonic() < deadline
                    thread.join(0.02)

            thread = threading.Thread(target=work)
            thread.start()
            signed(5)
            server.stop("fast")
            assert problem.wait(30)
            server.start()
            with Ledger.open(server.url()) as other:
                grow(other, 2)
            signed(7)
            stop.set()
            thread.join(30)
    assert refused == []


def test_what_the_memory_cannot_keep_is_not_signed(ledger: Ledger, tmp_path: Path) -> None:
    grow(ledger, 1)
    place = FileOutlet(tmp_path / "heads")
    signer = HeadSigner(ledger, KEY, [place], memory=tmp_path / "none" / "key.last")
    with pytest.raises(SigningFailed, match=r"nothing was signed; make its folder writable"):
        signer.sign()
    assert (signer.signed_size, place.last()) == (0, None)


# -- places ----------------------------------------------------------------------------------

HEADS = [SignedHead.sign(size, bytes([size] * 32), KEY) for size in range(1, 40)]


@pytest.mark.parametrize("lost", [1, 2, 50, 130])
def test_a_torn_head_in_the_file_is_made_whole(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "heads"
    place = FileOutlet(path)
    for head in HEADS[:3]:
        place.publish(head)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    if lost > 1:
        assert place.last() == HEADS[1]
        place.publish(HEADS[2])
        assert path.read_bytes() == whole
    place.publish(HEADS[3])
    assert [SignedHead.parse(data) for _, data in read_published(str(path))] == HEADS[:4]


def test_a_first_head_that_was_torn_is_made_whole(tmp_path: Path) -> None:
    path = tmp_path / "heads"
    path.write_bytes(HEADS[0].data()[:20])
    place = FileOutlet(path)
    assert place.last() is None
    place.publish(HEADS[0])
    assert path.read_bytes() == HEADS[0].data() + b"\n"


def test_nothing_is_added_behind_a_damaged_head(tmp_path: Path) -> None:
    path = tmp_path / "heads"
    path.write_bytes(HEADS[0].data() + b"\n" + b"something else entirely\n")
    with pytest.raises(PublicationFailed, match="damaged"):
        FileOutlet(path).publish(HEADS[1])
    path.write_bytes(b"\x00" * 100 + b"\n")
    with pytest.raises(PublicationFailed, match="damaged"):
        FileOutlet(path).last()
    with pytest.raises(PublicationFailed, match="No such file"):
        FileOutlet(tmp_path / "none" / "heads").publish(HEADS[0])


def test_the_end_of_a_long_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "heads"
    path.write_bytes(b"".join(head.data() + b"\n" for head in HEADS * 30))
    assert path.stat().st_size > 1 << 17
    place = FileOutlet(path)
    assert place.last() == HEADS[-1]
    place.publish(HEADS[0])
    assert place.last() == HEADS[0]


def test_a_url_has_an_object_for_each_head_and_keeps_each(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/heads"
    place = UrlOutlet(url)
    assert place.last() is None
    for head in HEADS[:12]:
        place.publish(head)
    place.publish(HEADS[11])
    assert place.last() == HEADS[11]
    assert [SignedHead.parse(data) for _, data in read_published(url)] == HEADS[:12]
    fork = SignedHead.sign(12, bytes(32), KEY)
    with pytest.raises(PublicationFailed, match="another head of size 12"):
        place.publish(fork)
    local = tmp_path / "deep" / "folder"
    UrlOutlet(f"file://{local}").publish(HEADS[0])
    assert [data for _, data in read_published(f"file://{local}")] == [HEADS[0].data()]
    joined = tmp_path / "joined"
    joined.write_bytes(HEADS[0].data() + HEADS[1].data())
    assert len(list(read_published(f"file://{joined}"))) == 2


def test_a_folder_at_a_file_url_shows_a_head_synced_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = UrlOutlet(f"file://{tmp_path}/a%20folder")
    place.publish(HEADS[0])
    names = [path.name for path in (tmp_path / "a folder").iterdir()]
    assert names == [f"{1:020d}"], "no draft is left"
    sync = os.fsync

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(PublicationFailed, match="Input/output error"):
        place.publish(HEADS[1])
    assert [path.name for path in (tmp_path / "a folder").iterdir()] == names
    monkeypatch.setattr(os, "fsync", sync)
    place.publish(HEADS[1])
    fork = SignedHead.sign(2, bytes(32), KEY)
    with pytest.raises(PublicationFailed, match="another head of size 2"):
        place.publish(fork)
    assert place.last() == HEADS[1]


def test_messages_show_no_credentials() -> None:
    place = UrlOutlet("memory://user:secret@host/heads")
    assert "secret" not in place.name
    with pytest.raises(InvalidInput, match="no-such-scheme") as caught:
        open_outlet("no-such-scheme://user:secret@host/x")
    assert "secret" not in str(caught.value)


def test_a_command_gets_the_head_and_may_refuse(tmp_path: Path) -> None:
    script = "import sys; sys.exit(3) if b'\\n2\\n' in sys.stdin.buffer.read() else None"
    place = CommandOutlet(f'{sys.executable} -c "{script}"')
    place.publish(HEADS[0])
    assert place.last() == HEADS[0]
    with pytest.raises(PublicationFailed, match="exit code 3"):
        place.publish(HEADS[1])
    assert place.last() == HEADS[0]
    saving = open_outlet(f"exec:tee {tmp_path}/seen")
    saving.publish(HEADS[2])
    assert (tmp_path / "seen").read_bytes() == HEADS[2].data()
    with pytest.raises(PublicationFailed, match="check the command"):
        CommandOutlet("no-such-command-anywhere").publish(HEADS[0])
    with pytest.raises(PublicationFailed, match=r"within 0.2 s"):
        CommandOutlet(f'{sys.executable} -c "import time; time.sleep(60)"', 0.2).publish(HEADS[0])


@pytest.mark.parametrize("target", ["", "exec:", "exec:'", "."])
def test_what_is_no_place_is_said_so(target: str) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        open_outlet(target)


@pytest.mark.parametrize("target", ["/nowhere/heads", "memory://nothing-here", "file:///nowhere"])
def test_what_cannot_be_read_is_said_so(target: str) -> None:
    with pytest.raises(PublicationFailed, match="expected published heads"):
        list(read_published(target))
