"""Lets a shadow follow a job of the demo while that runs, and says what came of it."""

from __future__ import annotations

import threading

from shiftbook.ledger.errors import UnknownJob
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.shadowing import Outcome, Shadow

LOOK_AGAIN_S = 0.2
LIMIT_S = 600.0
"""How long the demo waits for the last windows once the job has ended."""


class Beside:
    """A shadow in a thread of its own; it begins once the job is opened."""

    def __init__(self, ledger_url: str, job: str) -> None:
        self._url, self._job = ledger_url, job
        self._stop = threading.Event()
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def finish(self) -> list[Outcome]:
        """Wait for the last window of a job that has closed; raises what stopped the shadow."""
        self._thread.join(LIMIT_S)
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcomes

    def stop(self) -> None:
        """End after the window at hand, whatever the job does."""
        self._stop.set()

    def _guarded(self) -> None:
        try:
            with Ledger.open(self._url, create=False) as ledger:
                while not self._stop.is_set():
                    try:
                        shadow = Shadow(ledger, self._job)
                    except UnknownJob:
                        self._stop.wait(LOOK_AGAIN_S)
                        continue
                    with shadow:
                        self._outcomes = shadow.run(follow=True, stop=self._stop)
                    return
        except BaseException as error:  # told to whoever waits
            self._error = error


def shadow_text(outcomes: list[Outcome]) -> str:
    """The windows in a line, for the demo's table."""
    agreed = sum(one.word == "agreed" for one in outcomes)
    seen = sum(one.compared.observations for one in outcomes if one.compared is not None)
    text = f"{agreed} of {len(outcomes)} windows agreed, {seen} observations"
    others = [one for one in outcomes if one.word != "agreed"]
    if others:
        first = others[0]
        text += f"; {first.word} at iteration {first.window[0]}"
        text += f": {first.could_not}" if first.could_not else ""
    return text
