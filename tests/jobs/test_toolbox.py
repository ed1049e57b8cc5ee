"""Goal: the calculator serves many calls at once, and no expression can hurt what runs it.

Method: real child processes and a clock that the test moves. Expressions that fill the memory, run
for ever or leave arithmetic must end as errors of their own call only; a child that is killed from
outside must cost no call its result.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Iterator

import pytest

from shiftbook.jobs.errors import ToolboxError
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.tokenizer import ERROR, RESULT, decode
from shiftbook.jobs.toolbox import LATENCY_SCALE, Toolbox, ToolResult, tool_latency_s

SEED = 11
FAR = 1e9


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def toolbox() -> Iterator[Toolbox]:
    with Toolbox(SEED, Clock()) as box:
        yield box


def collect(
    box: Toolbox, count: int, deadline_s: float = 20.0
) -> dict[tuple[str, int], ToolResult]:
    """Poll until ``count`` results are there, whatever their latency."""
    found: dict[tuple[str, int], ToolResult] = {}
    end = time.monotonic() + deadline_s
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} results in {deadline_s} s"
        found |= {result.key: result for result in box.ready(FAR)}
    return found


def test_many_calls_wait_at_once_and_come_back_under_their_keys(toolbox: Toolbox) -> None:
    for index in range(300):
        toolbox.start_call((format_uid(index, 0), 0), f"{index:03d}+{10 + index % 90}")
    found = collect(toolbox, 300)
    for index in range(300):
        result = found[format_uid(index, 0), 0]
        assert result.value == str(index + 10 + index % 90)
    assert toolbox.waiting == []
    assert toolbox.child_restarts == 0


def test_a_result_is_held_back_for_exactly_its_latency(toolbox: Toolbox) -> None:
    key = (format_uid(3, 1), 2)
    wait = toolbox.start_call(key, "40+2")
    assert wait == tool_latency_s(SEED, *key)
    assert toolbox.next_due() == wait
    end = time.monotonic() + 20
    while toolbox._calls[key].result is None:
        assert time.monotonic() < end
        assert toolbox.ready(math.nextafter(wait, 0)) == []
    assert toolbox.ready(math.nextafter(wait, 0)) == []
    (result,) = toolbox.ready(wait)
    assert (result.value, result.latency_s) == ("42", wait)
    assert toolbox.ready(FAR) == []


def test_latencies_follow_the_published_law_and_are_keyed() -> None:
    waits = [tool_latency_s(SEED, format_uid(i // 8, i % 8), i % 5) for i in range(20_000)]
    assert waits == [tool_latency_s(SEED, format_uid(i // 8, i % 8), i % 5) for i in range(20_000)]
    seconds = sorted(wait / LATENCY_SCALE for wait in waits)
    assert seconds[-1] == pytest.approx(120.0)
    assert statistics.median(seconds) == pytest.approx(0.3, rel=0.1)
    assert seconds[int(0.9 * len(seconds))] == pytest.approx(0.3 * math.exp(2.85 * 1.2816), rel=0.1)
    assert max(waits) == pytest.approx(0.6)
    assert tool_latency_s(SEED, "000001/0", 0) != tool_latency_s(SEED + 1, "000001/0", 0)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1<<99999999999", "memory"),
        ("9**9**9", "CPU time"),
        ("__import__('os').system('true')", "forbidden"),
        ("open('/etc/passwd')", "forbidden"),
        ("().__class__", "forbidden"),
        ("'a'*10", "forbidden"),
        ("1 if 1 else 2", "forbidden"),
        ("x", "forbidden"),
        ("1/0", "division"),
        ("2**-1", "negative"),
        ("1<<900", "too large"),
        ("(" * 120 + "1" + ")" * 120, ""),
        ("1+", ""),
    ],
)
def test_what_is_no_cheap_arithmetic_ends_as_an_error_of_its_own_call(
    toolbox: Toolbox, expression: str, reason: str
) -> None:
    toolbox.start_call(("000000/0", 0), "10+20")
    toolbox.start_call(("000000/1", 0), expression)
    toolbox.start_call(("000000/2", 0), "095-12")
    found = collect(toolbox, 3)
    assert found["000000/0", 0].value == "30"
    assert found["000000/2", 0].value == "83"
    bad = found["000000/1", 0]
    if reason:
        assert bad.value is None
        assert reason in bad.error
        assert bad.tokens == [RESULT, ERROR]


def test_arithmetic_with_leading_zeros_and_brackets(toolbox: Toolbox) -> None:
    cases = {"007+010": "17", "0-5": "-5", "(012+3)*2": "30", "100/7": "14", "000*12": "0"}
    for index, expression in enumerate(cases):
        toolbox.start_call((format_uid(index, 0), 0), expression)
    found = collect(toolbox, len(cases))
    assert [found[format_uid(i, 0), 0].value for i in range(len(cases))] == list(cases.values())
    assert decode(found[format_uid(0, 0), 0].tokens) == "<result>017"
    assert found[format_uid(1, 0), 0].tokens == [RESULT, ERROR]


def test_a_child_killed_from_outside_costs_no_call_its_result(toolbox: Toolbox) -> None:
    toolbox.start_call(("000000/0", 0), "1+1")
    collect(toolbox, 1)
    pid = toolbox.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for index in range(20):
        toolbox.start_call((format_uid(index, 1), 0), f"{index}+1")
    os.kill(pid, signal.SIGKILL)
    found = collect(toolbox, 20)
    assert [found[format_uid(i, 1), 0].value for i in range(20)] == [str(i + 1) for i in range(20)]
    assert toolbox.child_restarts >= 1
    assert toolbox.child_pid != pid


def test_a_silent_child_is_replaced_and_its_call_repeated() -> None:
    with Toolbox(SEED, Clock(), evaluation_timeout_s=0.2) as box:
        box.start_call(("000000/0", 0), "1+1")
        collect(box, 1)
        assert box.child_pid is not None
        os.kill(box.child_pid, signal.SIGSTOP)
        box.start_call(("000000/1", 0), "2+2")
        assert collect(box, 1)["000000/1", 0].value == "4"
        assert box.child_restarts >= 1, "its successor may be slow to come up, and be replaced too"


def test_a_call_is_repeatable_under_its_key_and_only_as_the_same_call(toolbox: Toolbox) -> None:
    assert Toolbox.repeatable
    key = ("000000/0", 1)
    assert toolbox.start_call(key, "3+4") == toolbox.start_call(key, "3+4")
    with pytest.raises(ToolboxError, match="one key stands for one call"):
        toolbox.start_call(key, "3+5")
    first = collect(toolbox, 1)[key]
    toolbox.start_call(key, "3+4")
    assert collect(toolbox, 1)[key] == first


def test_drained_calls_can_start_elsewhere(toolbox: Toolbox) -> None:
    for index in range(5):
        toolbox.start_call((format_uid(index, 0), 0), f"{index}+1")
    owed = toolbox.drain()
    assert len(owed) == 5
    assert toolbox.waiting == []
    toolbox.start_call(("000009/0", 0), "50+50")
    assert collect(toolbox, 1)["000009/0", 0].value == "100"
    with Toolbox(SEED, Clock()) as other:
        for key, expression in owed:
            other.start_call(key, expression)
        found = collect(other, 5)
    assert [found[format_uid(i, 0), 0].value for i in range(5)] == [str(i + 1) for i in range(5)]


@pytest.mark.parametrize("expression", ["", "1+1\n2+2", "1" * 300])
def test_what_is_no_line_is_refused(toolbox: Toolbox, expression: str) -> None:
    with pytest.raises(ToolboxError, match="expected one printable line"):
        toolbox.start_call(("000000/0", 0), expression)


def test_closing_ends_the_child() -> None:
    box = Toolbox(SEED, Clock())
    box.start_call(("000000/0", 0), "1+1")
    pid = box.child_pid
    assert pid is not None
    box.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
