"""Goal: a signal that ends a command ends it in order, with the code that a shell knows it by.

Method: real commands in processes of their own are sent SIGTERM, SIGHUP and Ctrl-C once they have
printed something; a small program shows that what it started is stopped, that a second signal does
not disturb that, and that a library cannot take the handlers away for good.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shiftbook.ledger.stop_signals import handlers_kept, stop_on_signals
from tests.ledger.sample_ledger import Clock, Writer, open_sample

SHIFTBOOK = (sys.executable, "-c", "from shiftbook.ledger.cli import main; main()")
DEADLINE_S = 60

UNWINDS = """
import os, signal, sys
from shiftbook.ledger.cli import main
from shiftbook.ledger.commands import book

def waits(*_, **__):
    try:
        print("up", flush=True)
        while True:
            signal.pause()
    finally:
        if len(sys.argv) > 2:
            os.kill(os.getpid(), signal.SIGTERM)  # whoever asked is impatient
        print("stopped what it started", flush=True)

book.follow.callback = waits
main(["follow", "--ledger", sys.argv[1]])
"""


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    path = tmp_path / "ledger.db"
    clock = Clock()
    with open_sample(path, clock) as opened:
        Writer(opened, clock, "job", "dynamic", random.Random(1)).open()
    return str(path)


def follow(ledger: str, *, before: str = "") -> subprocess.Popen[str]:
    """A following command that has printed its first line, so that its handlers are set."""
    command = [*SHIFTBOOK, "follow", "--ledger", ledger, "--after", "-1"]
    process = subprocess.Popen(
        ["sh", "-c", f'{before} exec "$@"', "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_each_signal_has_the_code_that_a_shell_knows(
    ledger: str, sent: signal.Signals, code: int
) -> None:
    process = follow(ledger)
    process.send_signal(sent)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code
    assert err.strip() == ""


def test_what_nohup_ignores_stays_ignored(ledger: str) -> None:
    process = follow(ledger, before="trap '' HUP;")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143


@pytest.mark.parametrize("impatient", [False, True])
def test_a_command_stops_what_it_started(ledger: str, impatient: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UNWINDS, ledger, *(["twice"] if impatient else [])],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out == "stopped what it started\n"
    assert process.returncode == 143


def test_a_library_does_not_take_the_handlers_away() -> None:
    with stop_on_signals() as stopped:
        mine = signal.getsignal(signal.SIGTERM)
        with handlers_kept():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert stopped.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_that_set_no_handler_keeps_what_a_library_sets() -> None:
    def of_the_library(*_: object) -> None:
        return

    before = signal.getsignal(signal.SIGTERM)
    try:
        with handlers_kept():
            signal.signal(signal.SIGTERM, of_the_library)
        assert signal.getsignal(signal.SIGTERM) is of_the_library
    finally:
        signal.signal(signal.SIGTERM, before)
