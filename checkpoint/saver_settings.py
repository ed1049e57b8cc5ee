"""Settings that saves and loads change while they run, in any thread.

Several run at one time, so none of them puts back what another one had changed. Nobody waits for
anybody: a save may stand in a collective that another save of this process, on another group, must
not hold up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, cast

from torch.serialization import get_crc32_options, set_crc32_options

_NO_GROUP = "torch.distributed is disabled"


@dataclass
class _Inside:
    """How many are inside, and what there was before the first one came."""

    count: int = 0
    before: Any = None
    lock: Lock = field(default_factory=Lock)


_saving = _Inside()
_quiet = _Inside()


@contextmanager
def without_checksums() -> Iterator[None]:
    """No CRC-32 in what torch writes: SHA-256 and the fingerprints say more about the same bytes.

    The option belongs to the thread in some versions of torch and to the process in others.
    """
    with _saving.lock:
        before = get_crc32_options()
        # Off while somebody is inside: they turned it off, where it is the process's.
        theirs = _saving.count > 0 and not before
        if _saving.count == 0:
            _saving.before = before
        _saving.count += 1
        set_crc32_options(False)
    try:
        yield
    finally:
        with _saving.lock:
            _saving.count -= 1
            if not theirs:
                set_crc32_options(before)
            elif _saving.count == 0:
                set_crc32_options(_saving.before)


@contextmanager
def without_group_warning() -> Iterator[None]:
    """No warning that no process group exists, where that is meant.

    One filter goes in and out, and the list stays: `catch_warnings` would put a list back that
    another thread has changed since.
    """
    filters = cast(list[Any], warnings.filters)
    with _quiet.lock:
        if _quiet.count == 0:
            known = list(filters)
            warnings.filterwarnings("ignore", message=_NO_GROUP)
            ours = warnings.filters[0]
            _quiet.before = None if ours in known else ours
        _quiet.count += 1
    try:
        yield
    finally:
        with _quiet.lock:
            _quiet.count -= 1
            if _quiet.count == 0 and _quiet.before is not None:
                with suppress(ValueError):  # somebody reset the filters meanwhile
                    cast(list[Any], warnings.filters).remove(_quiet.before)
