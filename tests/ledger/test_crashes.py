"""Goal: whatever call to the disk fails, and wherever a process dies, nothing acknowledged is lost.

Method: strace fails each write, sync, rename, truncation and removal of an act in turn (EIO, for
some ENOSPC), or kills the process at it; processes that append are killed at random moments; disks
run full. Afterwards what was acknowledged stands, what failed stands once or not at all and its
retry gives one, the verifier finds nothing, and the next append works. Some calls of each act are
tried by default, all of them among the slow tests. What a power cut does to synced data is not
tried.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from shiftbook.ledger.archive import export_archive, import_archive
from shiftbook.ledger.archive_file import ArchiveFile
from shiftbook.ledger.errors import (
    AppendInDoubt,
    ArchiveError,
    EvidenceError,
    InvalidKey,
    LedgerUnreachable,
)
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.events.probes import DataBuilt
from shiftbook.ledger.evidence import read_segment, writable_place, write_segment
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.publication import read_published
from shiftbook.ledger.segment_place import DRAFT
from shiftbook.ledger.signed_note import SignedHead
from shiftbook.ledger.signing_keys import read_signer, write_signer
from shiftbook.ledger.spool import drain_leftovers
from shiftbook.ledger.tiles import write_tiles
from shiftbook.verify.heads import Outside
from shiftbook.verify.verdict import verify
from tests.ledger.crash_acts import ACTS, APPENDS, KEY, ROWS, WHEN, batch, signer_of
from tests.ledger.sample_ledger import write_sample

DEADLINE_S = 600.0
CALLS = ("write", "pwrite64", "fsync", "fdatasync", "rename", "ftruncate", "unlink")
ROOT = Path(__file__).parents[2]

SWALLOWED = {
    ("pwrite64", "lock"),
    ("fdatasync", "folder"),
    ("fdatasync", "ledger"),
    ("fdatasync", "log"),
    ("pwrite64", "ledger"),
    ("ftruncate", "ledger"),
    ("unlink", "log"),
    ("unlink", "index"),
}
SWALLOWED_TOO = {
    "append": set[tuple[str, str]](),
    "import": {("unlink", "draft")},
    "sign": {("fsync", "heads"), ("fsync", "folder")},
}
"""Calls of an append, and further ones of other acts, whose failure nobody is told, with the file:
docs/ledger.md says why each does no harm, and the tests below that it does none."""


@cache
def no_tracing() -> str:
    """Why calls cannot be failed here; empty where they can."""
    if shutil.which("strace") is None:
        return "needs strace, which .ci/run installs where it may"
    probe = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, "-e", "trace=fsync"]
    done = subprocess.run(
        [*probe, "-e", "inject=fsync:error=EIO:when=1", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"tracing is not permitted here: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture
def tracing() -> None:
    if no_tracing():
        pytest.skip(no_tracing())


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with evidence and a signed head, its archive, and an older archive."""
    folder = tmp_path_factory.mktemp("template")
    with write_sample(folder / "ledger.db", schedules=("dynamic",), iterations=1) as ledger:
        signer_of(ledger, folder).sign()
        write_tiles(ledger, folder / "tiles")
        for _ in range(2):  # for a head that the tiles lack, and for one that nobody signed
            signer_of(ledger, folder).sign()
            ledger.append("job", batch(0))
        export_archive(ledger, folder / "whole.tar")
        export_archive(ledger, folder / "old.tar", last=5)
    return folder


def strace(act: str, call: str, inject: str, template: Path, out: Path, *numbers: int) -> str:
    """Sweep over calls of an act; the log of the calls that were traced."""
    out.mkdir()
    log = out / "log"
    traced = ",".join(CALLS)
    command = [
        *("strace", "-f", "-qq", "-y", "-s", "0", "-o", str(log)),
        # Faster, but strace passes on no signal from where the filter stops a call.
        *(() if inject.startswith("signal=") else ("--seccomp-bpf",)),
        *("-e", f"trace={traced}", "-e", "signal=none"),
        *(("-e", f"inject={call}:{inject}:when={WHEN}") if inject else ()),
        *(sys.executable, "-m", "tests.ledger.crash_acts", act, call, str(template), str(out)),
    ]
    done = subprocess.run(
        [*command, *(str(number) for number in numbers)],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return log.read_text(errors="replace")


_counts: dict[str, Counter[str]] = {}


def calls_of(act: str, template: Path, scratch: Path) -> Counter[str]:
    """How often an act makes each call, counted once."""
    if act not in _counts:
        log = strace(act, "write", "", template, scratch / "count", 0)
        pid = (scratch / "count" / "0" / "pid").read_text()
        names = re.findall(rf"^{pid} +(\w+)\(", log, re.MULTILINE)
        _counts[act] = Counter(names)
        assert all(count < WHEN for count in _counts[act].values()), _counts[act]
        told = (scratch / "count" / "0" / "told").read_text().splitlines()
        assert told, log
        assert all(line.endswith(" ok") for line in told), told
    return _counts[act]


@dataclass
class Case:
    """One child and what it told."""

    folder: Path
    told: list[str]
    hit: str
    """The file whose call failed, or the call itself where it names no open file."""

    def acknowledged(self, name: str) -> bool:
        return f"{name} ok" in self.told

    @property
    def failed(self) -> list[str]:
        return [line for line in self.told if not line.endswith(" ok")]


def ended_by(folder: Path) -> str:
    """Name of the signal that ended a child; empty where it ended by itself."""
    status = int((folder / "status").read_text())
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""


def sweep(
    act: str, call: str, inject: str, template: Path, scratch: Path, *, every: bool
) -> Iterator[Case]:
    """A case for each call of a kind that an act makes, or for some of them."""
    count = calls_of(act, template, scratch)[call]
    numbers = range(1, count + 1)
    chosen = numbers if every else sorted({n for n in (1, (count + 1) // 2, count) if n})
    if not count:
        return
    out = scratch / f"{call}-{inject.replace('=', '-')}"
    log = strace(act, call, inject, template, out, *chosen)
    for number in chosen:
        folder = out / str(number)
        pid = (folder / "pid").read_text()
        lines = [line for line in log.splitlines() if line.startswith(f"{pid} ")]
        made = [line for line in lines if re.match(rf"{pid} +{call}\(", line)]
        # An earlier failure of an act changes what follows, so the last calls may not be made.
        assert len(made) >= WHEN, (number, made[-3:])
        assert ended_by(folder) == ("SIGKILL" if "SIGKILL" in inject else ""), made[WHEN - 1]
        assert ("INJECTED" in made[WHEN - 1]) == inject.startswith("error="), made[WHEN - 1]
        told = (folder / "told").read_text().splitlines() if (folder / "told").exists() else []
        for line in told:
            assert not line.startswith("raised"), (number, made[WHEN - 1], line)
        yield Case(folder, told, made[WHEN - 1])
        shutil.rmtree(folder)


# -- what must hold afterwards ---------------------------------------------------------------------


def sound(path: Path) -> int:
    """Size of a ledger in which the verifier finds nothing wrong."""
    verdict = verify(f"sqlite:///{path}", integrity_only=True)
    assert verdict.exit_code == 0, verdict.findings[:3]
    return verdict.last + 1


def check_appends(case: Case, name: str, before: int) -> None:
    """Acknowledged once, failed once or not at all, retried once, and the ledger goes on."""
    path = case.folder / name
    if not path.exists():
        assert not any(case.acknowledged(f"append {n}") for n in range(APPENDS))
    with Ledger.open(f"sqlite:///{path}") as ledger:
        for _ in ("as it was left", "after the retries"):
            keys = Counter(event.key for event in ledger.read(before - 1))
            for number in range(APPENDS):
                wanted = len(batch(number))
                stands = keys[f"crash {number}"]
                assert stands in (0, wanted), (case.hit, case.told)
                if case.acknowledged(f"append {number}"):
                    assert stands == wanted, (case.hit, case.told)
            for number in range(APPENDS):
                receipt = ledger.append("job", batch(number), key=f"crash {number}")
                assert receipt.repeated == (keys[f"crash {number}"] > 0)
                assert len(receipt.positions) == len(batch(number))
        total = before + sum(len(batch(number)) for number in range(APPENDS))
        assert ledger.append("job", batch(0)).first == total
    assert sound(path) == total + 1


def check_append(case: Case, template: Path) -> None:
    check_appends(case, "ledger.db", sound(template / "ledger.db"))


def check_create(case: Case, template: Path) -> None:
    check_appends(case, "new.db", 0)


def check_evidence(case: Case, template: Path) -> None:
    folder = case.folder / "segments"
    for file in folder.glob("*.parquet"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem, (case.hit, case.told)
    there = {file.stem for file in folder.glob("*.parquet")}
    for number, rows in enumerate(ROWS):
        segment = write_segment(folder, rows)
        if case.acknowledged(f"segment {number}"):
            assert segment.sha256 in there
        assert read_segment(folder, segment).to_pydict() == rows
    others = [file.name for file in folder.iterdir() if file.suffix != ".parquet"]
    assert all(DRAFT.fullmatch(name) for name in others), others
    assert not others or not case.told or case.failed or len(case.told) < len(ROWS)


def check_export(case: Case, template: Path) -> None:
    target = case.folder / "old.tar"
    old, new = (template / name for name in ("old.tar", "whole.tar"))
    found = target.read_bytes()
    assert found in (old.read_bytes(), new.read_bytes()), case.hit
    if case.acknowledged("export"):
        assert found == new.read_bytes()
    with Ledger.open(f"sqlite:///{case.folder}/ledger.db", read_only=True) as ledger:
        export_archive(ledger, target)
    assert target.read_bytes() == new.read_bytes()
    assert not (case.folder / ".old.tar.draft").exists()


def check_import(case: Case, template: Path) -> None:
    path = case.folder / "new.db"
    size = sound(template / "ledger.db")
    if case.acknowledged("import"):
        assert sound(path) == size
    with (
        ArchiveFile.open(case.folder / "whole.tar") as archive,
        Ledger.open(f"sqlite:///{path}") as ledger,
    ):
        done = import_archive(archive, ledger)
        assert done.already + done.imported == size
        if case.acknowledged("import"):
            assert done.imported == 0
        again = case.folder / "again.tar"
        export_archive(ledger, again)
        assert again.read_bytes() == (template / "whole.tar").read_bytes()
        assert ledger.append("job", batch(0)).first == size
    assert sound(path) == size + 1


def check_sign(case: Case, template: Path) -> None:
    """What was signed stands inside and outside, one history only, and the next head is whole."""
    path, heads = case.folder / "ledger.db", case.folder / "heads"
    signed = {tuple(line.split()[1:3]) for line in case.told if line.startswith("head ")}
    sound(path)
    with Ledger.open(f"sqlite:///{path}") as ledger:
        inside = {(str(h.size), h.root.hex()) for h in ledger.tree().heads()}
        assert signed <= inside, (case.hit, case.told)
        *whole, (_, last) = read_published(str(heads))
        whole += [("", last)] if last.endswith(b"\n") else []  # it may be torn, and is mended
        outside = [SignedHead.parse(note) for _, note in whole]
        published = {(str(head.size), head.root.hex()) for head in outside}
        assert signed <= published <= inside, (case.hit, case.told)
        head = signer_of(ledger, case.folder).sign()
        assert head is not None
        assert head.size == ledger.head().size
    verdict = verify(
        f"sqlite:///{path}",
        integrity_only=True,
        outside=Outside.read([str(heads)], [KEY.verifier.text()]),
        require_signed=True,
    )
    assert verdict.exit_code == 0, (case.hit, case.told, verdict.findings[:3])
    assert {row.status for row in verdict.coverage.rows} == {"checked"}
    check_appends(case, "ledger.db", sound(template / "ledger.db"))


def check_tiles(case: Case, template: Path) -> None:
    """The folder holds the tree before or the one after, whole, and the next export goes on."""
    folder, evidence = case.folder / "tiles", str(case.folder / "ledger.db.evidence")
    with Ledger.open(f"sqlite:///{case.folder}/ledger.db", read_only=True) as ledger:
        *_, before, after = (head.data() for head in ledger.tree().heads())
        found = (folder / "checkpoint").read_bytes()
        assert found in (before, after), case.hit
        if case.acknowledged("tiles"):
            assert found == after
        outside = Outside((), (KEY.verifier,))
        for _ in ("as it was left", "after the next export"):
            verdict = verify(str(folder), integrity_only=True, outside=outside, evidence=evidence)
            assert verdict.exit_code == 0, (case.hit, case.told, verdict.findings[:3])
            assert write_tiles(ledger, folder).data() == after


def check_spool(case: Case, template: Path) -> None:
    """Each acknowledged record stands once and in order, whoever emptied the spool."""
    check_spooled(case, template, events=lambda number: len(batch(number)))


def check_segments(case: Case, template: Path) -> None:
    """The same, and no event stands before its segment, whatever became of the store of them."""
    kept = case.folder / "spool" / "w.segments"
    for file in kept.glob("*.parquet"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem, (case.hit, case.told)
    check_spooled(case, template, events=lambda number: 1 + len(batch(number)))


def check_spooled(case: Case, template: Path, events: Callable[[int], int]) -> None:
    path, folder = case.folder / "ledger.db", case.folder / "spool"
    store = case.folder / "ledger.db.evidence"
    before = sound(template / "ledger.db")
    with Ledger.open(f"sqlite:///{path}") as ledger:
        check_segments_of(ledger, before, store, case)
        for _ in ("what was left", "nothing more"):
            for done in drain_leftovers(ledger.append, folder, writable_place(store)).values():
                assert (done.waiting, done.rejected) == (0, ()), (case.hit, case.told)
        check_segments_of(ledger, before, store, case)
        stored = list(ledger.read(before - 1))
        keys = Counter(event.key for event in stored)
        for number in range(APPENDS):
            wanted = events(number) if keys[f"crash {number}"] else 0
            assert keys[f"crash {number}"] == wanted, (case.hit, case.told)
            if case.acknowledged(f"append {number}"):
                assert wanted, (case.hit, case.told)
        records = [event for event in stored if (event.key or "").startswith("crash ")]
        assert records == sorted(records, key=lambda event: (event.key, event.position))
        outages = Counter(event.type for event in stored if event not in records)
        assert set(outages) <= {"LedgerUnreachable", "LedgerRestored"}
        assert set(outages.values()) <= {1}, (case.hit, outages)
        assert ledger.append("job", batch(0)).first == before + len(stored)
    assert not list(folder.glob("*")), (case.hit, case.told, list(folder.glob("*")))
    assert sound(path) == before + len(stored) + 1


def check_segments_of(ledger: Ledger, before: int, store: Path, case: Case) -> None:
    """Each event has its segment in the store, whole, from the moment at which it stands."""
    for event in ledger.read(before - 1, types=["DataBuilt"]):
        parsed = event.parsed()
        assert isinstance(parsed, DataBuilt)
        assert parsed.segment is not None
        rows = read_segment(store, parsed.segment).to_pydict()
        assert rows == ROWS[parsed.size], (case.hit, case.told)


def check_key(case: Case, template: Path) -> None:
    """A key that was acknowledged is whole; another one is no key, or whole, or not there."""
    path = case.folder / "new.key"
    try:
        assert read_signer(path).verifier.text() == KEY.verifier.text()
    except InvalidKey:
        assert not case.acknowledged("key"), (case.hit, case.told)
        path.unlink(missing_ok=True)
        write_signer(KEY, path)
        assert read_signer(path).verifier.text() == KEY.verifier.text()


CHECKS: dict[str, Callable[[Case, Path], None]] = {
    "append": check_append,
    "create": check_create,
    "evidence": check_evidence,
    "export": check_export,
    "import": check_import,
    "key": check_key,
    "segments": check_segments,
    "sign": check_sign,
    "spool": check_spool,
    "tiles": check_tiles,
}


def test_every_act_has_its_check() -> None:
    assert set(CHECKS) == set(ACTS)


# -- calls that fail -------------------------------------------------------------------------------


SOME = [
    ("append", "fdatasync", "error=EIO"),
    ("append", "pwrite64", "signal=SIGKILL"),
    ("create", "fdatasync", "error=EIO"),
    ("create", "rename", "signal=SIGKILL"),
    ("evidence", "fdatasync", "error=EIO"),
    ("evidence", "rename", "signal=SIGKILL"),
    ("export", "fsync", "error=EIO"),
    ("export", "rename", "signal=SIGKILL"),
    ("import", "fdatasync", "error=EIO"),
    ("import", "pwrite64", "signal=SIGKILL"),
    ("key", "fsync", "error=EIO"),
    ("key", "write", "signal=SIGKILL"),
    ("segments", "fsync", "error=EIO"),
    ("segments", "rename", "signal=SIGKILL"),
    ("sign", "fsync", "error=EIO"),
    ("sign", "rename", "signal=SIGKILL"),
    ("spool", "fdatasync", "error=EIO"),
    ("spool", "pwrite64", "signal=SIGKILL"),
    ("tiles", "fsync", "error=EIO"),
    ("tiles", "rename", "signal=SIGKILL"),
]
"""What is tried: the first call of a kind, one in the middle and the last."""
QUICK = [
    ("append", "fdatasync", "error=EIO"),
    ("append", "pwrite64", "signal=SIGKILL"),
    ("export", "rename", "signal=SIGKILL"),
    ("import", "fdatasync", "error=EIO"),
    ("key", "fsync", "error=EIO"),
    ("segments", "rename", "signal=SIGKILL"),
    ("sign", "rename", "signal=SIGKILL"),
    ("spool", "fdatasync", "error=EIO"),
]
"""What is tried by default: of each promise one."""


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("act", "call", "inject"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in SOME],
)
def test_some_calls(act: str, call: str, inject: str, template: Path, tmp_path: Path) -> None:
    tried = 0
    for case in sweep(act, call, inject, template, tmp_path, every=False):
        CHECKS[act](case, template)
        tried += 1
    assert tried


@pytest.mark.slow
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("act", "inject"),
    [
        *((act, inject) for act in sorted(ACTS) for inject in ("error=EIO", "signal=SIGKILL")),
        ("append", "error=ENOSPC"),
        ("export", "error=ENOSPC"),
        ("import", "error=ENOSPC"),
        ("segments", "error=ENOSPC"),
        ("sign", "error=ENOSPC"),
        ("spool", "error=ENOSPC"),
        ("tiles", "error=ENOSPC"),
    ],
)
def test_each_call(act: str, inject: str, template: Path, tmp_path: Path) -> None:
    calls = ("write", "pwrite64", "ftruncate") if "ENOSPC" in inject else CALLS
    tried: Counter[str] = Counter()
    for call in calls:
        for case in sweep(act, call, inject, template, tmp_path, every=True):
            CHECKS[act](case, template)
            tried[call] += 1
    print(f"{act}, {inject}: {dict(tried)}")
    made = calls_of(act, template, tmp_path)
    assert tried == Counter({call: made[call] for call in calls})


def _kind(hit: str) -> str:
    """What kind of file a traced call was about."""
    found = re.search(r"""[<"]([^>"]*)[>"]""", hit)
    assert found, hit
    if ".db.new-" in found[1]:
        return "draft"
    for suffix, kind in (
        (".lock", "lock"), ("-wal", "log"), ("-shm", "index"), ("-journal", "journal"),
        ("ledger.db", "ledger"), ("new.db", "ledger"), ("/heads", "heads"),
    ):  # fmt: skip
        if found[1].endswith(suffix):
            return kind
    return "folder"


@pytest.mark.slow
@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("act", sorted(SWALLOWED_TOO))
def test_the_failures_that_nobody_is_told_are_the_documented_ones(
    act: str, template: Path, tmp_path: Path
) -> None:
    found = set()
    for call in CALLS:
        for case in sweep(act, call, "error=EIO", template, tmp_path, every=True):
            if not case.failed:
                found.add((call, _kind(case.hit)))
    allowed = SWALLOWED | SWALLOWED_TOO[act]
    assert found <= allowed, found - allowed
    assert act != "append" or found == SWALLOWED
    text = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    for call, kind in allowed:
        assert re.search(rf"^\| `{call}` \| {kind} \|", text, re.MULTILINE), (call, kind)


# -- processes that are killed at any moment -------------------------------------------------------

ENDLESS = """
import os, sys
from pathlib import Path
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.evidence import write_segment
from shiftbook.ledger.ledger import Ledger
url, start = sys.argv[1], int(sys.argv[2])
ledger = Ledger.open(url)
number = start
while True:
    segment = write_segment(ledger, {"n": [number]})
    events = [ExperimentForked(parent=segment.sha256, reason=str(number))] * (1 + number % 40)
    ledger.append("job", events, key=str(number))
    os.write(1, b"%d %d\\n" % (number, len(events)))
    number += 1
"""


def killed_rounds(folder: Path, rounds: int, seed: int) -> dict[int, int]:
    """Kill a process that appends, time and again; number and size of every acknowledged append."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    acknowledged: dict[int, int] = {}
    url = f"sqlite:///{folder}/ledger.db"
    for _ in range(rounds):
        start = max(acknowledged, default=-1) + 1
        child = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, url, str(start)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        wanted = chance.randrange(1, 30)
        for line in child.stdout:
            number, size = map(int, line.split())
            acknowledged[number] = size
            wanted -= 1
            if wanted <= 0 and chance.random() < 0.5:
                break
        os.kill(child.pid, signal.SIGKILL)
        for line in child.stdout.read().splitlines(keepends=True):
            if line.endswith(b"\n"):
                number, size = map(int, line.split())
                acknowledged[number] = size
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
    return acknowledged


@pytest.mark.parametrize("rounds", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path: Path, rounds: int) -> None:
    acknowledged = killed_rounds(tmp_path, rounds, seed=rounds)
    path = tmp_path / "ledger.db"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        events = list(ledger.read())
        keys = Counter(int(event.key or -1) for event in events)
        for number, size in acknowledged.items():
            assert keys[number] == size
        # At most the one append that was not acknowledged when the process died.
        assert len(set(keys) - set(acknowledged)) <= rounds
        for number in keys:
            assert keys[number] == 1 + number % 40, "whole batches"
        folder = tmp_path / "ledger.db.evidence"
        for sha256 in {event.body["parent"] for event in events}:
            file = folder / f"{sha256}.parquet"
            assert hashlib.sha256(file.read_bytes()).hexdigest() == sha256
        assert ledger.append("job", batch(0)).first == len(events)
    assert sound(path) == len(events) + 1


# -- disks that run full ---------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"needs the right to mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A ledger whose archive is larger than the small disk."""
    path = tmp_path / "large.db"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        for number in range(8):
            texts = [os.urandom(4000).hex() for _ in range(8)]
            batch = [ExperimentForked(parent="p", reason=text) for text in texts]
            ledger.append("job", batch, key=str(number))
    return path


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)


def test_an_export_to_a_full_disk(large: Path, small_disk: Path) -> None:
    target = small_disk / "a.tar"
    with Ledger.open(f"sqlite:///{large}") as ledger:
        export_archive(ledger, target, last=0)
        before = target.read_bytes()
        (small_disk / "filler").write_bytes(b"x" * 150_000)
        with pytest.raises(ArchiveError, match="give it space"):
            export_archive(ledger, target)
        assert target.read_bytes() == before
        assert sorted(p.name for p in small_disk.iterdir()) == ["a.tar", "filler"]
        grow(small_disk)
        export_archive(ledger, target)
    assert verify(str(target), integrity_only=True).exit_code == 0


def test_an_import_to_a_full_disk(large: Path, small_disk: Path, tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{large}") as ledger:
        export_archive(ledger, tmp_path / "a.tar")
        size = ledger.head().size
    copy = small_disk / "copy.db"
    with (
        ArchiveFile.open(tmp_path / "a.tar") as archive,
        Ledger.open(f"sqlite:///{copy}") as ledger,
    ):
        with pytest.raises(LedgerUnreachable, match="full"):
            import_archive(archive, ledger)
        grow(small_disk)
        done = import_archive(archive, ledger)
        assert done.already + done.imported == size
    assert sound(copy) == size


def test_evidence_on_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "e"
    rows = {"uid": [os.urandom(32).hex() for _ in range(20_000)]}
    kept = write_segment(folder, {"n": [1]})
    with pytest.raises(EvidenceError, match="give it space"):
        write_segment(folder, rows)
    assert [p.stem for p in folder.iterdir()] == [kept.sha256]
    grow(small_disk)
    assert read_segment(folder, write_segment(folder, rows)).num_rows == 20_000


def test_an_import_whose_log_cannot_grow(large: Path, tmp_path: Path) -> None:
    """The same without a right to mount: no file of this process may grow beyond a limit."""
    with Ledger.open(f"sqlite:///{large}") as ledger:
        export_archive(ledger, tmp_path / "a.tar")
        size = ledger.head().size
    with (
        ArchiveFile.open(tmp_path / "a.tar") as archive,
        Ledger.open(f"sqlite:///{tmp_path}/copy.db") as ledger,
    ):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            for _ in range(2):
                with pytest.raises((LedgerUnreachable, AppendInDoubt), match="disk I/O"):
                    import_archive(archive, ledger)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ledger.head().size == 0
        assert import_archive(archive, ledger).imported == size
    assert sound(tmp_path / "copy.db") == size
