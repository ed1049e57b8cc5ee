"""Goal: saves and loads that overlap leave the process's settings as they found them.

Method: two threads go in and out in the order that breaks save-and-put-back, held by barriers; then
real saves in the background run beside a program that changes its filters of warnings meanwhile.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import torch
from torch.serialization import get_crc32_options

from shiftbook.checkpoint.pending_bundle import save_bundle_async
from shiftbook.checkpoint.restore import restore_bundle
from shiftbook.checkpoint.saver_settings import without_checksums, without_group_warning
from tests.checkpoint.bundle_states import fields, state

torch.set_num_threads(1)
WARNED = "torch.distributed is disabled, it says"


def test_the_last_one_out_puts_the_settings_back() -> None:
    """A goes in, B goes in, A goes out while B is inside, B goes out."""
    assert get_crc32_options()
    filters = list(warnings.filters)
    inside, left = threading.Event(), threading.Event()

    def second() -> None:
        with without_checksums(), without_group_warning():
            inside.set()
            assert left.wait(60)

    thread = threading.Thread(target=second)
    with without_checksums(), without_group_warning():
        assert not get_crc32_options()
        thread.start()
        assert inside.wait(60)
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn(WARNED, stacklevel=1)
        assert not caught
    left.set()
    thread.join(60)
    assert get_crc32_options()
    assert list(warnings.filters) == filters


def test_an_error_inside_puts_the_settings_back() -> None:
    try:
        with without_checksums():
            raise KeyError
    except KeyError:
        pass
    assert get_crc32_options()


def test_saves_at_one_time_leave_the_settings_alone(tmp_path: Path) -> None:
    """The program's own filter, made while they run, stays."""
    with warnings.catch_warnings():
        before = list(warnings.filters)
        pending = [
            save_bundle_async(tmp_path / str(k), fields(k), state(k, width=512)) for k in range(4)
        ]
        warnings.filterwarnings("error", message="of the program")
        ours = warnings.filters[0]
        saved = [one.result(120) for one in pending]
        for one in saved:
            restore_bundle(one.path, ["model"])
        assert [entry for entry in warnings.filters if entry != ours] == before
        assert ours in warnings.filters
    assert get_crc32_options()
