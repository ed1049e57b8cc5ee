"""Two processes of two jobs race for one device: never two owners.

Method: both are told to start an attempt at the same moment, 1,000 times. Exactly one may win
each round; the winner takes the device's lock at once, which fails where the other process still
owns the device. Afterwards the ledger is read from the start and its leases are followed.
"""

from __future__ import annotations

from pathlib import Path

from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.state import fold
from tests.ledger.gate_cases import Process

ROUNDS = 1_000


def test_two_jobs_never_own_one_device(store_url: str, tmp_path: Path) -> None:
    url = store_url
    Ledger.open(url).close()
    wins = {"j": 0, "k": 0}
    with (
        Process("race", url, "j", str(tmp_path)) as first,
        Process("race", url, "k", str(tmp_path)) as second,
    ):
        racers = {"j": first, "k": second}
        for racer in racers.values():
            assert racer.receive() == {"ready": True}
        for number in range(ROUNDS):
            for racer in racers.values():
                racer.send(do="try", round=number)
            answers = {name: racer.receive() for name, racer in racers.items()}
            won = [name for name, answer in answers.items() if answer["won"]]
            assert len(won) == 1, answers
            (lost,) = set(answers) - set(won)
            assert answers[lost]["error"] == "IllegalStep"
            wins[won[0]] += 1
            assert racers[won[0]].ask(do="release") == {"released": True}
    print("wins", wins)
    assert min(wins.values()) > 0, "one of the racers never came first: no race was run"

    with Ledger.open(url, read_only=True) as ledger:
        owner: str | None = None
        granted = 0
        for stored in ledger.read():
            if stored.type == "LeaseGranted":
                assert owner is None, f"two owners at {stored.position}"
                owner, granted = stored.job, granted + 1
            elif stored.type == "LeaseReleased":
                assert owner == stored.job
                owner = None
        assert granted == ROUNDS
        assert fold(ledger.read()) == ledger.state()
