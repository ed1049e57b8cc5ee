"""Goal: an archive is judged as its ledger is, and no changed byte of it ever gives "clean".

Method: verdicts on a ledger and on its archive are compared field by field; archives are cut at
every block and their bytes are flipped, and each outcome must be a finding or one line of an error;
archives that are whole and say what no export would write are made by the writer itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shiftbook.ledger import archive_writer
from shiftbook.ledger.archive import export_archive
from shiftbook.ledger.archive_format import BLOCK, Range
from shiftbook.ledger.archive_writer import ArchiveWriter
from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import InvalidInput, UnknownPosition
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.errors import UnreadableStore
from shiftbook.verify.verdict import Verdict, follow, verify
from tests.verify.honest_run import Run, honest_run

LAST = len(honest_run().entries) - 1
"""Last position of the run that is archived."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written honest run."""
    path = tmp_path_factory.mktemp("written") / "ledger.db"
    honest_run().write(path)
    return path


@pytest.fixture(scope="module")
def archive(ledger: Path) -> Path:
    """Its archive, with several members of events."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_writer, "CHUNK_BYTES", 8_000)
        return exported(ledger, "archive.tar")


def exported(ledger: Path, name: str, first: int = 0, last: int | None = None) -> Path:
    with Ledger.open(f"sqlite:///{ledger}", read_only=True) as book:
        export_archive(book, ledger.with_name(name), first=first, last=last)
    return ledger.with_name(name)


def same_but_for_the_name(one: Verdict, two: Verdict) -> bool:
    return replace(one, url="") == replace(two, url="")


def test_the_verdict_is_that_of_the_ledger(ledger: Path, archive: Path) -> None:
    verdict = verify(str(archive))
    assert verdict.exit_code == 0
    assert verdict.url == str(archive)
    assert same_but_for_the_name(verdict, verify(f"sqlite:///{ledger}"))
    assert same_but_for_the_name(
        verify(str(archive), until=40), verify(f"sqlite:///{ledger}", until=40)
    )
    assert same_but_for_the_name(
        verify(str(archive), "demo"), verify(f"sqlite:///{ledger}", "demo")
    )


def test_findings_are_those_of_the_ledger(run: Run, tmp_path: Path) -> None:
    run.get("UpdateApplied", 0).change(learning_rate=0.5)
    url = run.write(tmp_path / "ledger.db")
    archive = exported(tmp_path / "ledger.db", "archive.tar")
    assert verify(str(archive)).exit_code == 1
    assert same_but_for_the_name(verify(str(archive)), verify(url))


def test_a_prefix_is_judged_and_a_later_range_is_not(ledger: Path) -> None:
    prefix = exported(ledger, "prefix.tar", last=60)
    assert same_but_for_the_name(verify(str(prefix)), verify(f"sqlite:///{ledger}", until=60))
    later = exported(ledger, "later.tar", first=30, last=60)
    verdict = verify(str(later))
    assert (verdict.exit_code, verdict.findings) == (2, ())
    assert "begins at position 30" in verdict.could_not[0]
    verdict = verify(str(later), integrity_only=True)
    assert (verdict.exit_code, verdict.could_not) == (0, ())
    assert (verdict.first, verdict.last, verdict.judged_until) == (30, 60, 60)
    assert verdict.plain()["first"] == 30
    assert [row.invariant for row in verdict.coverage.rows] == ["integrity", "evidence"]
    assert verify(str(later), until=45, integrity_only=True).judged_until == 45
    for until in (29, 61):
        with pytest.raises(UnknownPosition):
            verify(str(later), until=until)


def test_the_stored_bytes_alone(ledger: Path, archive: Path) -> None:
    of_ledger = verify(f"sqlite:///{ledger}", integrity_only=True)
    assert (of_ledger.exit_code, of_ledger.judged_until) == (0, LAST)
    assert same_but_for_the_name(of_ledger, verify(str(archive), integrity_only=True))


def test_evidence_is_read_from_where_it_is_said_to_lie(ledger: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ledger.db"
    shutil.copy(ledger, copy)
    assert {f.invariant for f in verify(f"sqlite:///{copy}").findings} >= {"evidence"}
    elsewhere = shutil.copytree(f"{ledger}.evidence", tmp_path / "elsewhere")
    assert verify(f"sqlite:///{copy}", evidence=str(elsewhere)).exit_code == 0
    assert verify(f"sqlite:///{copy}", evidence=f"file://{elsewhere}").exit_code == 0
    lost = verify(f"sqlite:///{copy}", evidence="memory://nothing-there")
    assert {f.invariant for f in lost.findings} >= {"evidence"}
    assert "memory://nothing-there/" in lost.findings[0].found


def test_a_segment_that_was_left_out_is_a_finding(ledger: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ledger.db"
    shutil.copy(ledger, copy)
    shutil.copytree(f"{ledger}.evidence", f"{copy}.evidence")
    next(Path(f"{copy}.evidence").iterdir()).unlink()
    archive = exported(copy, "archive.tar")
    verdict = verify(str(archive))
    assert verdict.exit_code == 1
    assert not verdict.integrity_broken
    assert f"{archive}:evidence/" in next(
        f.found for f in verdict.findings if f.invariant == "evidence"
    )


# -- damage ----------------------------------------------------------------------------------------


def outcome(path: Path) -> tuple[int, int]:
    """Exit code, and the last position that was judged; -2 where nothing could be opened."""
    try:
        verdict = verify(str(path))
    except UnreadableStore as error:
        return error.exit_code + str(error).count("\n"), -2
    assert verdict.exit_code != 0
    assert verdict.integrity_broken
    for finding in verdict.findings:
        assert "\n" not in finding.found
    return verdict.exit_code, verdict.judged_until


def test_cut_anywhere_it_is_torn(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    cut = tmp_path / "archive.tar"
    sizes = [*range(0, len(whole), BLOCK), len(whole) - 1, len(whole) - BLOCK - 1, 21, 22, 23]
    outcomes = []
    for size in sorted(set(sizes) - {len(whole)}):
        cut.write_bytes(whole[:size])
        outcomes.append(outcome(cut))
    assert {code for code, _ in outcomes} == {1, 2}
    assert sorted(until for _, until in outcomes) == [until for _, until in outcomes]
    assert outcomes[-1][1] == LAST, "what stands before the tear is judged"
    cut.write_bytes(whole + b"\0")
    assert outcome(cut) == (1, LAST)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 10**9), bit=st.integers(0, 7))
@example(at=0, bit=0)
@example(at=100, bit=0)
@example(at=BLOCK, bit=0)
def test_a_flipped_bit_is_never_clean(archive: Path, tmp_path: Path, at: int, bit: int) -> None:
    data = bytearray(archive.read_bytes())
    data[at % len(data)] ^= 1 << bit
    file = tmp_path / "flipped.tar"
    file.write_bytes(data)
    outcome(file)


@pytest.mark.slow
def test_each_byte_flipped(archive: Path, tmp_path: Path) -> None:
    """Every byte of the headers, notes and padding, and every seventh of what is hashed."""
    whole = archive.read_bytes()
    file = tmp_path / "flipped.tar"
    for at in [*range(0, 2 * BLOCK), *range(2 * BLOCK, len(whole), 29)]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        outcome(file)


def test_the_first_bad_position_is_named(archive: Path, tmp_path: Path) -> None:
    """A bit in the third member of events: what stands in the first two is judged."""
    whole = archive.read_bytes()
    starts = [at for at in range(0, len(whole), BLOCK) if whole[at : at + 7] == b"events/"]
    first = int(whole[starts[2] + 7 : starts[2] + 19])
    at = starts[2] + BLOCK + 100
    file = tmp_path / "flipped.tar"
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    verdict = verify(str(file))
    assert verdict.findings[0].position == first > 0
    assert verdict.judged_until == first - 1


# -- archives that are whole and say what no export would write ------------------------------------


def envelope(position: int, /, **changes: object) -> dict[str, object]:
    return {
        "position": position, "job": "j", "version": position, "type": "T", "schema": 1,
        "occurred_ns": 0, "recorded_ns": 0, "writer": "w", "sequence": position, "actor": "a",
        "body": {}, **changes,
    }  # fmt: skip


@pytest.fixture
def forge(tmp_path: Path) -> Callable[..., Verdict]:
    """The verdict on a whole archive with these events."""

    def make(*events: object, first: int = 0, last: int | None = None) -> Verdict:
        end = first + len(events) - 1 if last is None else last
        before = "0" * 64 if first else None
        writer = ArchiveWriter(tmp_path / "forged.tar", Range(first, end, before, "tests"))
        for event in events:
            writer.event(event if isinstance(event, bytes) else orjson.dumps(event))
        writer._next = end + 1
        writer.finish(0)
        return verify(str(tmp_path / "forged.tar"), integrity_only=True)

    return make


def test_the_forger_can_make_a_clean_one(forge: Callable[..., Verdict]) -> None:
    assert forge(envelope(0), envelope(1)).exit_code == 0
    assert forge(envelope(7), envelope(8), first=7).exit_code == 0


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (envelope(2), "position 1"),
        (envelope(1, version=2), "version of job 'j' 1"),
        (envelope(1, sequence=2), "sequence of 'w' 1"),
        (envelope(1, position="1"), "a valid position"),
        (envelope(1, job=7), "a valid job"),
        (envelope(1, cause=1), "a cause before its effect"),
        (envelope(1, more=1), "no other fields"),
        (b"{", "the bytes of an event"),
        (b"", "the bytes of an event"),
        (b"[]", "the bytes of an event"),
    ],
)
def test_what_no_ledger_holds(forge: Callable[..., Verdict], second: object, told: str) -> None:
    verdict = forge(envelope(0), second)
    assert verdict.exit_code == 1
    assert (verdict.findings[0].position, verdict.judged_until) == (1, 0)
    assert any(told in f.expected for f in verdict.findings)


def test_fewer_and_more_events_than_the_range_says(forge: Callable[..., Verdict]) -> None:
    verdict = forge(envelope(0), last=5)
    assert verdict.findings[0].position == 1
    assert "found them to end or jump after 0" in verdict.findings[0].found
    assert forge(envelope(0), envelope(1), last=0).exit_code == 1


def test_an_end_that_names_another_head(
    forge: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_writer, "leaf_hash", lambda data: bytes(32))
    verdict = forge(envelope(0), envelope(1))
    assert [f.position for f in verdict.findings] == [2]
    assert "of its last event where its end says" in verdict.findings[0].found


def test_a_key_that_was_used_twice(forge: Callable[..., Verdict]) -> None:
    events = [envelope(n, key="k" if n in (1, 2, 5) else f"own {n}") for n in range(7)]
    verdict = forge(*events)
    assert [f.position for f in verdict.findings] == [1]
    assert "spread from 1 to 5" in verdict.findings[0].found
    assert forge(*[envelope(n, key=str(n // 3)) for n in range(7)]).exit_code == 0


# -- the command -----------------------------------------------------------------------------------


def test_the_command(ledger: Path, archive: Path) -> None:
    def run(*words: object) -> tuple[int, str, str]:
        done = CliRunner().invoke(main, ["verify", *(str(word) for word in words)])
        return done.exit_code, done.stdout, done.stderr

    assert run(archive)[0] == 0
    code, out, _ = run(archive, "--integrity-only", "--format", "json")
    assert (code, orjson.loads(out)["verdict"]) == (0, "clean")
    later = exported(ledger, "later.tar", first=30)
    assert run(later)[0] == 2
    assert run(later, "--integrity-only")[0] == 0
    for words, told in (
        ((archive, "--record"), "cannot be recorded"),
        ((archive, "--integrity-only", "--job", "demo"), "goes with no"),
        ((archive, "--follow"), "does not grow"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert told in err
        assert err.count("\n") == 1


def test_an_archive_is_not_followed(archive: Path) -> None:
    import threading

    with pytest.raises(InvalidInput, match="does not grow"):
        follow(str(archive), stop=threading.Event())
