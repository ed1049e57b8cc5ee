"""Child processes of the test with many writers: ``-m tests.ledger.writing_process ROLE ...``.

``write URL NAME THREADS SEED`` appends until its input ends and tells each acknowledged append;
``follow URL LIMIT_S`` follows until an event of the job ``end`` and tells what it saw.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
import traceback

from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.job import ExperimentForked
from shiftbook.ledger.ledger import Ledger

LOCK_LIMIT_S = 60.0
DIED = 3
"""Exit code of a process of which a thread met an error that it does not expect."""


def reopened(url: str, name: str) -> Ledger:
    """Open for writing; a server that is just starting is asked again."""
    deadline_s = time.monotonic() + LOCK_LIMIT_S
    while True:
        try:
            return Ledger.open(url, create=False, writer=name, lock_timeout_s=LOCK_LIMIT_S)
        except LedgerUnreachable:
            if time.monotonic() > deadline_s:
                raise


def write(url: str, name: str, threads: str, seed: str) -> None:
    """Append batches from several threads; every other thread without keys of its own."""
    ledger = reopened(url, name)
    stop, told = threading.Event(), threading.Lock()

    def work(thread: int) -> None:
        chance = random.Random(int(seed) * 100 + thread)
        number = 0
        while not stop.is_set():
            text = f"{name}:{thread}:{number}"
            events = [ExperimentForked(parent=name, reason=text)] * chance.randint(1, 8)
            try:
                key = text if thread % 2 else None
                receipt = ledger.append(f"job-{thread % 3}", events, key=key)
            except LedgerUnreachable:
                continue  # nothing was written: the same content again
            with told:
                sys.stdout.write(f"{text} {receipt.first} {receipt.last}\n")
                sys.stdout.flush()
            number += 1

    def watched(thread: int) -> None:
        try:
            work(thread)
        except BaseException:
            traceback.print_exc()
            os._exit(DIED)  # a thread that ends by itself would be missed by nobody

    running = [threading.Thread(target=watched, args=(n,)) for n in range(int(threads))]
    for thread in running:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in running:
        thread.join()
    ledger.close()


def seen_by_follower(ledger: Ledger, limit_s: float) -> tuple[int, str]:
    """Follow from the beginning to the job ``end``; number of events and hash over their leaves.

    Goes on after the last event it saw where the store was away, for ``limit_s`` in all.
    """
    digest, last = hashlib.sha256(), -1
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            for event in ledger.follow(last):
                if event.position != last + 1:
                    return last, f"expected {last + 1}, found {event.position}"
                last = event.position
                digest.update(event.leaf)
                if event.job == "end":
                    return last + 1, digest.hexdigest()
        except LedgerUnreachable as error:
            if time.monotonic() > deadline_s:
                return last, str(error)


def follow(url: str, limit_s: str) -> None:
    """Tell that the ledger is open, and in the end what a follower of this process saw."""
    with Ledger.open(url, read_only=True, lock_timeout_s=LOCK_LIMIT_S) as ledger:
        print("open", flush=True)
        sys.stdout.write("{} {}\n".format(*seen_by_follower(ledger, float(limit_s))))


if __name__ == "__main__":
    {"write": write, "follow": follow}[sys.argv[1]](*sys.argv[2:])
