"""Goal: many processes and threads write one ledger without gaps; nothing acknowledged is lost.

Method: real processes with threads append and decide while a follower reads; others are killed with
SIGKILL in mid-work after telling, over a pipe, which appends were acknowledged.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger

DEADLINE_S = 90.0
PROCESSES, THREADS, APPENDS = 4, 3, 12

WRITER = """
import sys, threading
from shiftbook.ledger.envelope import Draft
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Decision, Ledger

url, name, threads, appends = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ledger = Ledger.open(url, writer=name, lock_timeout_s=60)

def event(text):
    return ExperimentForked(parent=name, reason=text)

def work(thread):
    for number in range(appends):
        text = f"{thread}:{number}"
        if number % 3 == 2:
            ledger.decide(lambda s: Decision(f"job-{s.size % 2}", [Draft(event(text))]))
        else:
            ledger.append(f"job-{number % 2}", [event(text)] * (1 + number % 2))

running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
sys.stdin.readline()
for thread in running: thread.start()
for thread in running: thread.join()
ledger.close()
"""

MORTAL = """
import sys, threading
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger

url, name = sys.argv[1], sys.argv[2]
ledger = Ledger.open(url, writer=name, lock_timeout_s=60)
lock = threading.Lock()

def work(thread):
    number = 0
    while True:
        text = f"{name}:{thread}:{number}"
        event = ExperimentForked(parent=name, reason=text)
        receipt = ledger.append("job", [event] * (1 + number % 3), key=text)
        with lock:
            sys.stdout.write(f"{text} {receipt.first} {receipt.last}\\n")
            sys.stdout.flush()
        number += 1

for thread in range(2):
    threading.Thread(target=work, args=(thread,), daemon=True).start()
threading.Event().wait()
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def assert_whole(ledger: Ledger) -> list:
    """Positions, versions, sequences and hashes of the whole book are as promised."""
    stored = list(ledger.read())
    assert [event.position for event in stored] == list(range(ledger.head().size))
    versions: dict[str, int] = defaultdict(lambda: -1)
    sequences: dict[str, int] = defaultdict(lambda: -1)
    for event in stored:
        versions[event.job] += 1
        sequences[event.writer] += 1
        assert event.version == versions[event.job]
        assert event.sequence == sequences[event.writer]
        assert leaf_hash(event.data) == event.leaf
    return stored


def test_processes_with_threads_leave_no_gap(store_url: str) -> None:
    url = store_url
    batches = [1 if n % 3 == 2 else 1 + n % 2 for n in range(APPENDS)]
    expected = PROCESSES * THREADS * sum(batches)
    with Ledger.open(url) as ledger:
        seen: list[int] = []
        done = threading.Event()

        def follow() -> None:
            for event in ledger.follow(poll_s=0.002, stop=done):
                seen.append(event.position)
                if len(seen) == expected:
                    return

        follower = threading.Thread(target=follow)
        follower.start()
        children = [start(WRITER, url, f"w{n}", THREADS, APPENDS) for n in range(PROCESSES)]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            child.communicate(timeout=DEADLINE_S)
            assert child.returncode == 0
        follower.join(DEADLINE_S)
        done.set()
        assert seen == list(range(expected)), "follow sees each event once, in order"
        stored = assert_whole(ledger)
        for writer in (f"w{n}" for n in range(PROCESSES)):
            for thread in range(THREADS):
                numbers = [
                    int(event.body["reason"].split(":")[1])
                    for event in stored
                    if event.writer == writer and event.body["reason"].startswith(f"{thread}:")
                ]
                assert numbers == [n for n in range(APPENDS) for _ in range(batches[n])], (
                    "the order of each thread holds"
                )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_was_acknowledged_survives_sigkill(store_url: str, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    url = store_url
    Ledger.open(url).close()
    children = [start(MORTAL, url, f"m{seed}-{n}") for n in range(3)]
    acknowledged: dict[str, tuple[int, int]] = {}
    torn = 0
    for child in children:
        # The pipe gives what was acknowledged; the process dies at some moment after that.
        assert child.stdout is not None
        for _ in range(chance.randint(1, 40)):
            text, first, last = child.stdout.readline().split()
            acknowledged[text] = int(first), int(last)
        os.kill(child.pid, signal.SIGKILL)
        assert child.stdin is not None
        child.stdin.close()
        rest = child.stdout.read()
        for line in rest.splitlines(keepends=True):
            if line.endswith("\n"):
                text, first, last = line.split()
                acknowledged[text] = int(first), int(last)
            else:
                torn += 1
        child.stdout.close()
        child.wait(timeout=DEADLINE_S)
    assert len(acknowledged) >= 3
    with Ledger.open(url) as ledger:
        stored = assert_whole(ledger)
        by_key: dict[str, list[int]] = defaultdict(list)
        for event in stored:
            assert event.key is not None
            by_key[event.key].append(event.position)
        for text, (first, last) in acknowledged.items():
            assert by_key[text] == list(range(first, last + 1)), text
        for text, positions in by_key.items():
            count = 1 + int(text.split(":")[2]) % 3
            assert len(positions) == count, f"{text}: a batch stands whole or not at all"
        # Whoever takes over goes on at the head, and a retry of the last append is settled.
        text = next(iter(acknowledged))
        again = ledger.append(
            "job",
            [ExperimentForked(parent=text.split(":")[0], reason=text)] * len(by_key[text]),
            key=text,
        )
        assert again.repeated
        assert ledger.append("job", ExperimentForked(parent="p", reason="on")).first == len(stored)


OPENED_TWICE = """
import subprocess, sys
from adbc_driver_sqlite import dbapi
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger
path = sys.argv[1]
ledger = Ledger.open(f"sqlite:///{path}")
ledger.append("job", ExperimentForked(parent="p", reason="before"))
with dbapi.connect(f"file:{path}?mode=ro") as connection, connection.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM events")
    assert cursor.fetchone() == (1,)
other = (
    "import sys\\nfrom shiftbook.ledger.events.job import ExperimentForked\\n"
    "from shiftbook.ledger.ledger import Ledger\\n"
    "with Ledger.open(sys.argv[1]) as l:\\n"
    "    l.append('job', ExperimentForked(parent='p', reason='other'))\\n"
)
subprocess.run([sys.executable, "-c", other, f"sqlite:///{path}"], check=True)
for use in (
    lambda: ledger.append("job", ExperimentForked(parent="p", reason="lost?")),
    lambda: ledger.head(),
    lambda: Ledger.open(f"sqlite:///{path}"),
):
    try:
        print("went on", use())
    except LedgerUnreachable as error:
        print(str(error).count("another SQLite library in this process"))
ledger.close()
"""


def test_a_second_sqlite_library_in_the_process_cannot_lose_events(tmp_path: Path) -> None:
    """It drops our locks, the next process to close removes the log; then we refuse to go on."""
    path = tmp_path / "ledger.db"
    done = subprocess.run(
        [sys.executable, "-c", OPENED_TWICE, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "1"], done.stdout
    with Ledger.open(f"sqlite:///{path}") as ledger:
        assert [event.body["reason"] for event in ledger.read()] == ["before", "other"]
        assert ledger.append("job", ExperimentForked(parent="p", reason="on")).first == 2
