"""Goal: a proof file convinces whoever has the key and nothing else, and only of what is true.

Method: proofs of every kind go through the command line and are checked in a folder without a
ledger; each value in a proof is changed, removed and replaced by values of other types, and each
byte of its text is changed at random: only a proof that says the same may still hold. Ledgers that
were rewritten, rolled back or forked must not give a proof.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import InvalidInput, NoSignedHead, ProofInvalid, UnknownPosition
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.merkle import tree_root
from shiftbook.ledger.proof import check_proof, encode_proof, prove_event, prove_since
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.signing_keys import Ed25519Signer
from tests.ledger.stores import STORES, attack, copy_ledger, fetch, literal, new_url
from tests.ledger.test_head_signer import grow

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
OTHER = Ed25519Signer("example.com/runs", bytes(32))
PUB = KEY.verifier.text()
SHIFTBOOK = [sys.executable, "-c", "from shiftbook.ledger.cli import main; main()"]


def write_signed(url: str) -> None:
    """A ledger of 600 events with heads at 7, 300 and 590."""
    with Ledger.open(url, writer="w") as ledger:
        signer = HeadSigner(ledger, KEY)
        for count in (7, 293, 290):
            grow(ledger, count, "größer ✓")
            signer.sign()
        grow(ledger, 10)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger in a file."""
    path = tmp_path_factory.mktemp("signed") / "ledger.db"
    write_signed(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="module", params=STORES)
def ledger(
    request: pytest.FixtureRequest, signed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ledger]:
    """The ledger on each store, to read."""
    url = f"sqlite:///{signed}"
    if request.param != "sqlite":
        url = new_url(request.param, tmp_path_factory.mktemp("served"))
        write_signed(url)
    with Ledger.open(url, read_only=True) as opened:
        yield opened


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_every_event_under_a_head_has_a_proof(ledger: Ledger) -> None:
    chance = random.Random(5)
    for size in (7, 300, 590, None):
        for position in {0, 6, *(chance.randrange(size or 590) for _ in range(20))}:
            checked = check_proof(
                encode_proof(prove_event(ledger, position, size=size)), [KEY.verifier]
            )
            assert (checked.kind, checked.position, checked.size) == (
                "inclusion",
                position,
                size or 590,
            )
            assert checked.event is not None
            assert checked.event["position"] == position
            assert checked.event["body"]["reason"] == "größer ✓"


def test_every_earlier_head_is_continued(ledger: Ledger) -> None:
    for head in ledger.tree().heads():
        checked = check_proof(encode_proof(prove_since(ledger, head)), [KEY.verifier])
        assert (checked.kind, checked.since, checked.size) == ("consistency", head.size, 590)
    checked = check_proof(head.data(), [KEY.verifier])
    assert (checked.kind, checked.size) == ("head", 590)


def test_published_heads_are_checked_as_they_lie(tmp_path: Path) -> None:
    """The file that `sign` writes, as it is: each head holds, and none goes back or forks."""
    sizes = (7, 300, 590)
    heads = [SignedHead.sign(size, bytes([size % 256]) * 32, KEY).data() for size in sizes]
    file, pub = tmp_path / "heads", KEY.verifier.text()
    file.write_bytes(b"".join(head + b"\n" for head in heads))
    done = invoke("check", str(file), "--key", pub)
    assert done.exit_code == 0, done.output
    assert "head of example.com/runs, 590 events" in done.output
    other = SignedHead.sign(590, bytes(32), KEY).data()
    stranger = Ed25519Signer("example.com/others", bytes(32))
    foreign = SignedHead.sign(600, bytes(32), stranger).data()
    altered = heads[1].replace(b"\n300\n", b"\n301\n")
    for wrong, code, says in (
        ([*heads, heads[0]], 1, "two histories"),
        ([*heads, other], 1, "two histories"),
        ([*heads, foreign], 1, "others"),
        ([heads[0], altered, heads[2]], 1, ""),
        ([*heads, heads[2][:40]], 2, "neither at byte"),
        ([b"", b""], 2, "empty"),
    ):
        file.write_bytes(b"".join(head + b"\n" for head in wrong))
        done = invoke("check", str(file), "--key", pub, "--key", stranger.verifier.text())
        assert (done.exit_code, says in done.output) == (code, True), done.output


def test_what_cannot_be_proved_is_said_so(ledger: Ledger, store_url: str) -> None:
    with pytest.raises(NoSignedHead, match="over position 595, found one of 590"):
        prove_event(ledger, 595)
    with pytest.raises(UnknownPosition):
        prove_event(ledger, 600)
    with pytest.raises(NoSignedHead, match="of 8 events"):
        prove_event(ledger, 3, size=8)
    beyond = SignedHead.sign(595, bytes(32), KEY)
    with pytest.raises(NoSignedHead, match="at least 595"):
        prove_since(ledger, beyond)
    with pytest.raises(ProofInvalid, match="rolled back"):
        prove_since(ledger, SignedHead.sign(601, bytes(32), KEY))
    with pytest.raises(ProofInvalid, match="rewritten or forked"):
        prove_since(ledger, SignedHead.sign(300, bytes(32), KEY))
    with Ledger.open(store_url) as empty, pytest.raises(NoSignedHead):
        prove_event(empty, 0)


def test_a_ledger_that_was_changed_gives_no_proof(store_url: str) -> None:
    write_signed(store_url)
    data = b'{"position":20}'
    changed = f"data = {literal(store_url, data)}, leaf = {literal(store_url, leaf_hash(data))}"
    attack(store_url, f"update events set {changed} where position = 20")
    with Ledger.open(store_url, read_only=True) as ledger:
        with pytest.raises(ProofInvalid, match="fit its signed head"):
            prove_event(ledger, 20)
        with pytest.raises(ProofInvalid):
            prove_event(ledger, 21)


def test_wrong_keys_and_files_that_are_no_proofs(ledger: Ledger) -> None:
    data = encode_proof(prove_event(ledger, 3))
    with pytest.raises(ProofInvalid, match="expected a signature of"):
        check_proof(data, [OTHER.verifier])
    for other in (b"", b"{", b"{}", b"[]", b'{"format": 3}', b"\xff", b"[" * 100_000,
                  b'{"a":' * 100_000, data[: len(data) // 2], b"x" * (5 << 20)):  # fmt: skip
        with pytest.raises(InvalidInput, match="expected"):
            check_proof(other, [KEY.verifier])


VALUES: list[Any] = [None, "", "x", 0, -1, 2**70, 1.5, True, [], {}, ["x"], ["AAAA"], [1], "\ud800"]


def test_no_changed_value_is_believed(ledger: Ledger) -> None:
    documents = [prove_event(ledger, 300), prove_since(ledger, next(ledger.tree().heads()))]
    for document in documents:
        for name in document:
            for value in VALUES:
                changed = {**document, name: value}
                text = json.dumps(changed).encode()
                with pytest.raises((ProofInvalid, InvalidInput)):
                    check_proof(text, [KEY.verifier])
            less = {key: value for key, value in document.items() if key != name}
            with pytest.raises((ProofInvalid, InvalidInput)):
                check_proof(json.dumps(less).encode(), [KEY.verifier])
    event, since = documents
    for changed in (
        {**event, "position": 301},
        {**event, "path": event["path"][::-1]},
        {**event, "event": event["event"].replace("größer", "grösser")},
        {**event, "head": since["since"]},
        {**since, "since": since["head"], "head": since["since"]},
        {**since, "path": event["path"]},
    ):
        with pytest.raises(ProofInvalid):
            check_proof(encode_proof(changed), [KEY.verifier])


@cache
def proofs_of(path: Path) -> list[dict[str, Any]]:
    with Ledger.open(f"sqlite:///{path}", read_only=True) as ledger:
        events = [prove_event(ledger, position) for position in range(0, 590, 50)]
        return events + [prove_since(ledger, next(ledger.tree().heads()))] * 8


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_no_changed_byte_is_believed(signed: Path, chance: random.Random, changes: int) -> None:
    document = proofs_of(signed)[chance.randrange(20)]
    data = bytearray(encode_proof(document))
    for _ in range(changes):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    try:
        check_proof(bytes(data), [KEY.verifier])
    except (ProofInvalid, InvalidInput):
        return
    assert json.loads(data) == document  # white space, or one letter's case of an escape


def test_an_event_that_claims_another_place_is_refused(tmp_path: Path) -> None:
    """The signer signs bytes; that they name their own place is for the checker to see."""
    data = b'{"position":7}'
    root = tree_root([leaf_hash(data)])
    head = SignedHead.sign(1, root, KEY).data().decode()
    document = {"format": "shiftbook-inclusion-proof/1", "position": 0, "event": data.decode(),
                "path": [], "head": head}  # fmt: skip
    with pytest.raises(ProofInvalid, match="names its position 0"):
        check_proof(encode_proof(document), [KEY.verifier])


# -- the command line ------------------------------------------------------------------------


def test_key_sign_prove_and_check(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Ledger.open(store_url, writer="w") as ledger:
        grow(ledger, 20)
    monkeypatch.setenv("SHIFTBOOK_LEDGER", store_url)
    made = invoke("key", "new", "--name", "example.com/runs", "-o", "safe.key")
    assert made.exit_code == 0
    pub = made.stdout.strip()
    assert stat.S_IMODE((tmp_path / "safe.key").stat().st_mode) == 0o600
    assert invoke("key", "show", "safe.key").stdout.strip() == pub
    again = invoke("key", "new", "-o", "safe.key")
    assert again.exit_code == 2
    assert "never overwritten" in again.stderr

    assert invoke("prove", "3").exit_code == 2
    told = invoke("sign", "--key", "safe.key", "--format", "json")
    assert told.exit_code == 0, told.stderr
    (row,) = json.loads(told.stdout)
    assert (row["size"], row["origin"], row["key"]) == (20, "example.com/runs", pub)
    first = (tmp_path / "safe.key.heads").read_bytes()
    assert SignedHead.parse(first.rstrip(b"\n") + b"\n").size == 20
    (tmp_path / "first").write_bytes(first)

    assert invoke("prove", "3", "-o", "three.json").exit_code == 0
    with Ledger.open(store_url, writer="w") as ledger:
        grow(ledger, 20)
    published = invoke(
        "sign", "--key", "safe.key", "--publish", "out", "--publish", "exec:tee seen"
    )
    assert published.exit_code == 0, published.stderr
    assert (tmp_path / "seen").read_bytes() in (tmp_path / "out").read_bytes()
    for since in ("first", "20"):
        assert invoke("prove", "--since", since, "-o", "since.json").exit_code == 0
    assert invoke("prove", "--since", "21").exit_code == 2
    assert invoke("prove", "39").stdout.startswith("{")
    for missed in (("prove", "3", "--at", "30"), ("prove", "--since", "30")):
        refused = invoke(*missed)
        assert refused.exit_code == 2
        assert "found none of that size; the nearest are of 20, 40:" in refused.stderr
    for missed in (("prove", "3", "--at", "9" * 18), ("prove", "--since", "9" * 30)):
        refused = invoke(*missed)
        assert refused.exit_code == 2
        assert "the nearest are of 20, 40:" in refused.stderr

    alone = tmp_path / "elsewhere"
    alone.mkdir()
    for name in ("three.json", "since.json", "seen"):
        shutil.copy(name, alone)
    monkeypatch.chdir(alone)
    monkeypatch.delenv("SHIFTBOOK_LEDGER")
    checked = invoke("check", "three.json", "--key", pub)
    assert checked.exit_code == 0, checked.stderr
    assert checked.stdout.startswith("this event stands at position 3 of example.com/runs, 20 ")
    (alone / "pub").write_text(pub + "\n")
    document = json.loads(invoke("check", "since.json", "--key", "pub", "--format", "json").stdout)
    assert (document["kind"], document["since"], document["size"]) == ("consistency", 20, 40)
    assert "this is a head of" in invoke("check", "seen", "--key", pub).stdout
    altered = (alone / "three.json").read_text().replace('"position": 3', '"position": 4')
    (alone / "altered.json").write_text(altered)
    for arguments, code in (
        (("check", "altered.json", "--key", pub), 1),
        (("check", "three.json", "--key", OTHER.verifier.text()), 1),
        (("check", "three.json", "--key", "no key"), 2),
        (("check", "pub", "--key", pub), 2),
        (("check", "none.json", "--key", pub), 2),
        (("check", "three.json"), 2),
        (("prove",), 2),
        (("prove", "3", "--since", "first"), 2),
        (("prove", "--since", "20", "--at", "20"), 2),
        (("sign", "--key", "none.key"), 2),
        (("key", "show", "pub"), 2),
    ):
        result = invoke(*arguments)
        assert result.exit_code == code, (arguments, result.output)
        assert result.stderr.count("\n") == 1, (arguments, result.stderr)
        assert "Traceback" not in result.stderr


def test_sign_refuses_a_rollback_with_exit_code_1(
    store_urls: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, old = store_urls("book"), store_urls("old")
    invoke("key", "new", "-o", "k")
    with Ledger.open(url, writer="w") as ledger:
        grow(ledger, 5)
    copy_ledger(url, old)
    with Ledger.open(url, writer="w") as ledger:
        grow(ledger, 5)
    assert invoke("sign", "--ledger", url, "--key", "k").exit_code == 0
    refused = invoke("sign", "--ledger", old, "--key", "k")
    assert refused.exit_code == 1
    assert "rolled back" in refused.stderr


def test_sign_follow_signs_what_comes_and_what_is_left(store_url: str, tmp_path: Path) -> None:
    key = tmp_path / "k"
    assert invoke("key", "new", "-o", str(key)).exit_code == 0
    with Ledger.open(store_url, writer="w") as ledger:
        grow(ledger, 5)
        with subprocess.Popen(
            [*SHIFTBOOK, "sign", "--ledger", store_url, "--key", str(key), "--follow",
             "--every", "5", "--each", "3600"],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["size"] == 5
            grow(ledger, 7)
            assert json.loads(process.stdout.readline())["size"] == 12
            grow(ledger, 2)
            process.send_signal(signal.SIGTERM)
            assert json.loads(process.stdout.readline())["size"] == 14
            assert process.wait(30) == 0
        assert ledger.tree().root(14) == tree_root(row.leaf for row in ledger.rows())
    sizes = fetch(store_url, "SELECT size FROM heads ORDER BY size")
    assert sizes == [(5,), (12,), (14,)]


def test_a_hash_has_one_spelling(ledger: Ledger) -> None:
    document = prove_event(ledger, 3)
    first = document["path"][0]
    # The last letter before the padding has two bits that base64 does not use.
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = first[:-2] + letters[letters.index(first[-2]) + 1] + "="
    with pytest.raises(ProofInvalid, match="base64"):
        check_proof(encode_proof({**document, "path": [other, *document["path"][1:]]}),
                    [KEY.verifier])  # fmt: skip
