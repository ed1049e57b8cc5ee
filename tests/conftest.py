"""Which tests run, in what order, and their budget: fast ones first, so that a limit leaves out
the slowest.

``pytest`` alone runs those that are neither slow nor on a Ray cluster. Where ``-m`` or a path is
given, whatever that names runs.

With ``SHIFTBOOK_TEST_BUDGET_S`` set, a test marked ``slow`` or ``ray`` that would start later than
that many seconds after the session began is skipped, and the summary says so. Without it all run.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.one_cluster import OneCluster

ORDER: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"ray"}),
    frozenset({"slow", "ray"}),
    frozenset({"slow"}),
)
"""Marks of a test by the time it is run; left out from the end."""

BUDGET = "SHIFTBOOK_TEST_BUDGET_S"
BEGAN_S = time.monotonic()

# An example takes longer where the machine is busy; pytest-timeout ends those that hang.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


FAST = "not slow and not ray and not vllm"
"""What runs where nobody says what should."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leave the user's own data alone, and let what tests start be interrupted.

    A shell starts what runs in its background with SIGINT ignored, and `nohup` with SIGHUP; so
    would every command be that a test starts and sends one of them.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and not config.option.markexpr and not config.option.keyword:
        config.option.markexpr = FAST
    data = tempfile.mkdtemp(prefix="shiftbook-data-")
    atexit.register(shutil.rmtree, data, ignore_errors=True)
    os.environ["XDG_DATA_HOME"] = data
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what is left out where nobody asked for it."""
    if config.option.markexpr != FAST:
        return None
    return "left out: slow tests and those on a Ray cluster (-m 'slow or ray' runs them)"


def place(item: pytest.Item) -> int:
    """Place of a test in ORDER; those with vLLM come last, since their cluster stays to the end."""
    if item.get_closest_marker("vllm"):
        return len(ORDER)
    return ORDER.index(frozenset(mark for mark in ("slow", "ray") if item.get_closest_marker(mark)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by ORDER, in each place those marked ``first`` before the others; apart from that the
    order stays, so fixtures of a module are made once."""
    items.sort(key=lambda item: (place(item), item.get_closest_marker("first") is None))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a test out once the budget is used up; fast ones are never left out."""
    budget_s = os.environ.get(BUDGET)
    if budget_s and place(item) and time.monotonic() - BEGAN_S > float(budget_s):
        pytest.skip(f"left out: {BUDGET}={budget_s} is used up")


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneCluster]:
    """The Ray cluster of all tests that can share one."""
    shared = OneCluster(tmp_path_factory.mktemp("cluster"))
    yield shared
    shared.close()
