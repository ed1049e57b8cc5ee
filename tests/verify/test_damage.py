"""Goal: a damaged ledger gives findings or one clear error, never a traceback, and never "clean".

Method: the file of a written run is edited (rows changed, removed, forged through plain SQL with
the triggers dropped), cut, and hit by random byte flips and random cuts; every outcome must be a
verdict or an UnreadableStore, and what was changed must not go unseen where it is in the events.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.errors import InvalidInput, ShiftbookError, UnknownJob, UnknownPosition
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.errors import NothingToJudge, UnreadableStore
from shiftbook.verify.verdict import Verdict, verify
from tests.verify.honest_run import Run, honest_run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written honest run, all of it in one file."""
    path = tmp_path_factory.mktemp("written") / "ledger.db"
    honest_run().write(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=delete")
    return path


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged, evidence included."""
    copy = tmp_path / "ledger.db"
    shutil.copy(written, copy)
    shutil.copytree(f"{written}.evidence", f"{copy}.evidence")
    return copy


def edit(path: Path, *statements: tuple[str, tuple[object, ...]]) -> None:
    """Run statements on the file, past the triggers."""
    with sqlite3.connect(path) as connection:
        for (name,) in connection.execute("select name from sqlite_master where type = 'trigger'"):
            connection.execute(f'drop trigger "{name}"')
        for text, values in statements:
            connection.execute(text, values)


def first(verdict: Verdict) -> tuple[str, int, str, str]:
    finding = verdict.findings[0]
    return finding.invariant, finding.position, finding.expected, finding.found


def test_an_altered_body_is_found_by_its_leaf(damaged: Path) -> None:
    with sqlite3.connect(damaged) as connection:
        ((at, data),) = connection.execute(
            "select position, data from events where type = 'SamplesRewarded' order by 1 limit 1"
        )
    changed = bytes(data).replace(b'"reward_mean"', b'"reward_meam"')
    assert changed != data
    edit(damaged, ("update events set data = ? where position = ?", (changed, at)))
    verdict = verify(f"sqlite:///{damaged}")
    assert first(verdict)[:2] == ("integrity", at)
    assert "the hash of the bytes" in first(verdict)[2]
    assert verdict.judged_until == at - 1
    assert verdict.exit_code == 1
    assert verdict.coverage.row("integrity").status == "broken"


def test_an_altered_body_with_a_forged_leaf_meets_the_invariants(damaged: Path) -> None:
    with sqlite3.connect(damaged) as connection:
        ((data,),) = connection.execute(
            "select data from events where type = 'UpdateApplied' order by position limit 1"
        )
    changed = bytes(data).replace(b'"learning_rate":0.001', b'"learning_rate":0.002')
    assert changed != data
    edit(
        damaged,
        (
            "update events set data = ?, leaf = ? where data = ?",
            (changed, leaf_hash(changed), data),
        ),
    )
    verdict = verify(f"sqlite:///{damaged}")
    assert verdict.coverage.row("integrity").status == "checked"
    assert {f.invariant for f in verdict.findings} == {"I18"}


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("job", "another", "column job 'demo'"),
        ("type", "Nothing", "column type"),
        ("schema", 7, "column schema 1"),
        ("operation", "x", "column operation"),
        ("key", "x", "column key None"),
        ("writer", "w", "column writer 'writer-1'"),
        ("version", 500, "column version 20"),
        ("sequence", 500, "column sequence 20"),
        ("recorded_ns", 1, "column recorded_ns"),
    ],
)
def test_each_column_is_held_against_the_bytes(
    damaged: Path, column: str, value: object, told: str
) -> None:
    edit(
        damaged,
        (f'update events set "{column}" = ? where position = 20', (value,)),
    )
    with sqlite3.connect(damaged) as connection:
        found = connection.execute(f'select "{column}" from events where position = 20').fetchone()
    assert found[0] == value
    verdict = verify(f"sqlite:///{damaged}")
    assert first(verdict)[:2] == ("integrity", 20)
    assert told in first(verdict)[2]


def test_a_removed_event_is_a_gap(damaged: Path) -> None:
    edit(damaged, ("delete from events where position = 30", ()))
    verdict = verify(f"sqlite:///{damaged}")
    assert first(verdict)[:2] == ("integrity", 30)
    assert any(f.found == "position 31" for f in verdict.findings)
    assert any(f.expected == "version of job 'demo' 30" for f in verdict.findings)
    assert any(f.expected == "sequence of 'writer-1' 30" for f in verdict.findings)


def test_a_removed_beginning_is_found(damaged: Path) -> None:
    edit(damaged, ("delete from events where position < 5", ()))
    verdict = verify(f"sqlite:///{damaged}")
    assert first(verdict)[:2] == ("integrity", 0)
    assert verdict.judged_until == -1
    assert verdict.exit_code == 1


def test_a_cut_end_reads_as_a_shorter_ledger_and_the_verdict_says_what_protects_it(
    damaged: Path,
) -> None:
    edit(damaged, ("delete from events where position > 40", ()))
    verdict = verify(f"sqlite:///{damaged}")
    assert verdict.last == 40
    assert any("heads of this ledger are not signed yet" in note for note in verdict.notes)


def test_bytes_that_are_no_envelope(damaged: Path) -> None:
    for number, data in enumerate((b"{}", b"\xff\x00", b"[1]", b'{"position":7,"job":3}', b"")):
        edit(
            damaged,
            ("update events set data = ?, leaf = ? where position = 7", (data, leaf_hash(data))),
        )
        verdict = verify(f"sqlite:///{damaged}")
        assert first(verdict)[:2] == ("integrity", 7), number
        assert verdict.judged_until == 6


def test_a_cause_after_its_effect_and_a_field_too_many(damaged: Path) -> None:
    with sqlite3.connect(damaged) as connection:
        ((data,),) = connection.execute("select data from events where position = 9")
    for extra, told in (({"cause": 9}, "a cause before"), ({"more": 1}, "no other fields")):
        changed = orjson.dumps({**orjson.loads(data), **extra}, option=orjson.OPT_SORT_KEYS)
        edit(
            damaged,
            (
                "update events set data = ?, leaf = ? where position = 9",
                (changed, leaf_hash(changed)),
            ),
        )
        verdict = verify(f"sqlite:///{damaged}")
        assert any(f.position == 9 and told in f.expected for f in verdict.findings), told


def test_a_key_whose_events_are_no_single_batch(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    run = honest_run()
    with Ledger.open(f"sqlite:///{path}", writer="w", actor="a") as ledger:
        for at, key in enumerate(("same", "other", "third")):
            ledger.append("demo", run.entries[at].event, key=key)
    with sqlite3.connect(path) as connection:
        ((data,),) = connection.execute("select data from events where position = 2")
    changed = bytes(data).replace(b'"key":"third"', b'"key":"same"')
    edit(
        path,
        (
            "update events set data = ?, leaf = ?, key = 'same' where position = 2",
            (changed, leaf_hash(changed)),
        ),
    )
    verdict = verify(f"sqlite:///{path}")
    told = [(f.position, f.expected, f.positions) for f in verdict.findings]
    assert told == [(0, "the events of key 'same' of job 'demo' side by side", (0, 2))]


def test_altered_evidence_is_a_finding_and_what_needs_it_is_not_called_checked(
    damaged: Path,
) -> None:
    folder = Path(f"{damaged}.evidence")
    victim = sorted(folder.iterdir())[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(data)
    verdict = verify(f"sqlite:///{damaged}")
    assert {f.invariant for f in verdict.findings} == {"evidence"}
    assert verdict.coverage.row("record").status == "partly"
    assert verdict.judged_until == verdict.last
    shutil.rmtree(folder)
    verdict = verify(f"sqlite:///{damaged}")
    assert {f.invariant for f in verdict.findings} == {"evidence"}
    assert verdict.coverage.row("I11").status == "not checked"


def test_what_cannot_be_judged_is_said_in_a_sentence(tmp_path: Path, written: Path) -> None:
    url = f"sqlite:///{written}"
    empty = tmp_path / "empty.db"
    Ledger.open(f"sqlite:///{empty}").close()
    nothing = tmp_path / "zero.db"
    nothing.touch()
    text = tmp_path / "notes.txt"
    text.write_text("this is no ledger\n" * 300)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("create table t (x)")
    newer = tmp_path / "newer.db"
    shutil.copy(written, newer)
    edit(newer, ("update meta set value = '9' where name = 'storage_schema'", ()))
    tries: list[tuple[Callable[[], object], type[ShiftbookError], str]] = [
        (lambda: verify(f"sqlite:///{empty}"), NothingToJudge, "found an empty one"),
        (lambda: verify(f"sqlite:///{tmp_path}/none.db"), UnreadableStore, "found nothing"),
        (lambda: verify(f"sqlite:///{nothing}"), UnreadableStore, "found an empty file"),
        (lambda: verify(f"sqlite:///{text}"), UnreadableStore, "cannot be read as one|none or is"),
        (lambda: verify(f"sqlite:///{other}"), UnreadableStore, "without a table of events"),
        (lambda: verify(f"sqlite:///{tmp_path}"), UnreadableStore, "found a folder"),
        (lambda: verify(f"sqlite:///{newer}"), UnreadableStore, "storage schema 1 or older"),
        (lambda: verify("mysql://x/y"), UnreadableStore, "this build knows"),
        (lambda: verify(url, job="none"), UnknownJob, "no job 'none'"),
        (lambda: verify(url, until=-1), InvalidInput, "at least 0"),
        (lambda: verify(url, until=10_000), UnknownPosition, "no event at position 10000"),
    ]
    for act, kind, words in tries:
        with pytest.raises(kind, match=words) as caught:
            act()
        assert caught.value.exit_code == 2
    assert not (tmp_path / "none.db").exists()


def test_a_job_without_a_plan_or_without_steps_is_not_called_clean(
    run: Run, tmp_path: Path
) -> None:
    bare = Run([e for e in run.entries if e.name == "LeaseGranted"][:1])
    verdict = verify(bare.write(tmp_path / "a.db"))
    assert verdict.exit_code == 2
    assert "declared no plan" in verdict.could_not[0]
    still = Run(run.entries[:3])
    verdict = verify(still.write(tmp_path / "b.db"))
    assert verdict.exit_code == 2
    assert "neither a training step nor an operation" in verdict.could_not[0]


def outcome(path: Path) -> str:
    """A word for what came out; anything but a verdict or a ShiftbookError fails the test."""
    try:
        verdict = verify(f"sqlite:///{path}")
    except ShiftbookError as error:
        return "many lines" if "\n" in str(error) else type(error).__name__
    return verdict.word


@pytest.fixture(scope="module")
def target(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One place for damaged copies of the file; the evidence stays whole."""
    path = tmp_path_factory.mktemp("target") / "ledger.db"
    shutil.copytree(f"{written}.evidence", f"{path}.evidence")
    return path


COMMON = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@COMMON
@given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 12))
def test_random_byte_flips_never_give_a_traceback(
    written: Path, target: Path, seed: int, flips: int
) -> None:
    chance = random.Random(seed)
    data = bytearray(written.read_bytes())
    for _ in range(flips):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    target.write_bytes(data)
    # Hypothesis prints the seed of a failure.
    assert outcome(target) in {"clean", "findings", "could not judge", "UnreadableStore",
                               "NothingToJudge"}  # fmt: skip


@settings(COMMON, max_examples=60)
@given(cut=st.integers(0, 2**20), tail=st.binary(max_size=300))
def test_a_cut_file_never_gives_a_traceback(
    written: Path, target: Path, cut: int, tail: bytes
) -> None:
    data = written.read_bytes()
    target.write_bytes(data[: cut % len(data)] + tail)
    assert outcome(target) in {"findings", "could not judge", "UnreadableStore", "NothingToJudge"}


def test_every_flip_inside_the_bytes_of_an_event_is_found(damaged: Path) -> None:
    with sqlite3.connect(damaged) as connection:
        ((data,),) = connection.execute("select data from events where position = 33")
    whole = damaged.read_bytes()
    start = whole.find(bytes(data)[:200])
    assert start > 0
    for offset in range(0, 200, 7):
        changed = bytearray(whole)
        changed[start + offset] ^= 0x04
        damaged.write_bytes(changed)
        verdict = verify(f"sqlite:///{damaged}")
        assert verdict.exit_code == 1
        assert verdict.findings[0].position == 33
