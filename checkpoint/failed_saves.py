"""Saves in the background that failed and that nobody asked about: whoever saves next is told.

A save that is waited for says itself how it ended. One that nobody waits for would fail unheard,
and a training run would go on for days without a bundle. So each save in the background is kept
here until somebody asks it. One that failed is raised by the next save of the process, by the
recorder as it is closed, or as the interpreter ends, whichever comes first.
"""

from __future__ import annotations

import atexit
import threading
import traceback

from shiftbook.checkpoint.errors import BundleError, EarlierSaveFailed

_lock = threading.Lock()
_going_on: list[SaveUnderWay] = []
_unheard: list[SaveUnderWay] = []
"""Saves that failed and that nobody was told about."""


class SaveUnderWay:
    """A save whose end somebody has to hear of; ``what`` names it in the text that tells of it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: BaseException | None = None
        self._heard = False
        with _lock:
            _going_on.append(self)

    def ended(self, error: BaseException | None) -> None:
        """The bundle is there, or the save failed. Tensors that frames of the error's traceback
        hold are let go: nobody may ask for a long time."""
        seen: list[BaseException] = []
        inner: BaseException | None = error
        while inner is not None and inner not in seen:
            traceback.clear_frames(inner.__traceback__)
            seen.append(inner)
            inner = inner.__cause__ or inner.__context__
        self.error = error
        with _lock:
            _going_on.remove(self)
            if error is not None and not self._heard:
                _unheard.append(self)

    def heard(self) -> None:
        """Somebody was told how it ended."""
        with _lock:
            self._heard = True
            if self in _unheard:
                _unheard.remove(self)


def going_on() -> list[SaveUnderWay]:
    """The saves of this process that have not ended."""
    with _lock:
        return list(_going_on)


def tell_failed(then: str) -> None:
    """Raise EarlierSaveFailed where saves failed that nobody asked about; it tells each once.

    ``then`` ends the text: what becomes of the call that raises it.
    """
    with _lock:
        told = list(_unheard)
        _unheard.clear()
    if not told:
        return
    error = told[0].error
    more = "".join(f"; {other.what} failed too: {_text(other)}" for other in told[1:])
    raise EarlierSaveFailed(
        f"expected {told[0].what}, begun in the background, to become a bundle, found that it "
        f"failed and that nobody asked for its result: {_text(told[0])}{more}; bundles before it "
        f"stand; {then}",
        path=error.path if isinstance(error, BundleError) else "",
        part=error.part if isinstance(error, BundleError) else None,
    ) from error


def _text(save: SaveUnderWay) -> str:
    error = save.error
    return str(error) if isinstance(error, BundleError) else f"{type(error).__name__}: {error}"


def _at_exit() -> None:
    """Called when the threads that write have ended; Python prints what this raises."""
    tell_failed("the process ends now: see to the cause before the next one saves")


atexit.register(_at_exit)
