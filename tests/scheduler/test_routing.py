"""Goal: waiting turns get lanes in the declared order and none waits for ever.

Method: hypothesis drives the queue beside a plain list that is sorted anew for each take; single
properties (order by calls, then cache; ageing; maximal wait; conservation) have tests of their own.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftbook.scheduler.errors import RequestError
from shiftbook.scheduler.routing import TurnQueue, urgency


def put(
    queue: TurnQueue[str, str], key: str, *, calls: int = 0, cached: int = 0, now_s: float = 0.0
) -> None:
    queue.put(key, key.upper(), tool_calls_done=calls, cached_tokens=cached, now_s=now_s)


def test_completed_calls_go_first_then_the_cached_prefix_then_the_first_come() -> None:
    queue: TurnQueue[str, str] = TurnQueue()
    put(queue, "fresh")
    put(queue, "cached", cached=40)
    put(queue, "late", calls=3)
    put(queue, "middle", calls=2, cached=9_000)
    put(queue, "fresh2")
    taken = queue.take(9, 0.0)
    assert [key for key, _ in taken] == ["late", "middle", "cached", "fresh", "fresh2"]
    assert taken[0] == ("late", "LATE")
    assert len(queue) == 0


def test_waiting_counts_as_completed_calls() -> None:
    queue: TurnQueue[str, str] = TurnQueue(ageing_s=2.0, max_wait_s=1_000.0)
    put(queue, "old", calls=0, now_s=0.0)
    put(queue, "new", calls=2, now_s=3.9)
    put(queue, "newer", calls=2, now_s=4.1)
    assert [key for key, _ in queue.take(3, 4.1)] == ["new", "old", "newer"]


def test_a_request_past_the_maximal_wait_goes_before_every_younger_one() -> None:
    queue: TurnQueue[str, str] = TurnQueue(ageing_s=1e9, max_wait_s=5.0)
    put(queue, "starved", now_s=0.0)
    for index in range(20):
        put(queue, f"rich{index}", calls=9, now_s=1.0 + index / 100)
    assert queue.take(1, 4.0)[0][0] == "rich0"
    assert queue.take(1, 5.1)[0][0] == "starved"
    assert queue.oldest_wait_s(5.1) == pytest.approx(4.09)


def test_a_request_handed_back_keeps_its_age() -> None:
    queue: TurnQueue[str, str] = TurnQueue(ageing_s=1.0)
    put(queue, "a", now_s=0.0)
    ((key, item),) = queue.take(1, 0.0)
    put(queue, "b", calls=1, now_s=3.0)
    queue.put(key, item, tool_calls_done=0, cached_tokens=0, now_s=0.0)
    assert [k for k, _ in queue.take(2, 3.0)] == ["a", "b"]


def test_bad_input_is_named() -> None:
    queue: TurnQueue[str, str] = TurnQueue()
    put(queue, "a")
    with pytest.raises(RequestError, match="waits already"):
        put(queue, "a")
    with pytest.raises(RequestError, match="never put"):
        queue.remove("b")
    with pytest.raises(RequestError, match="at least 0"):
        put(queue, "c", calls=-1)
    with pytest.raises(RequestError, match="above 0"):
        TurnQueue(ageing_s=0.0)
    assert queue.oldest_wait_s(-5.0) == 0.0, "a clock that jumps back makes no negative wait"
    assert queue.remove("a") == "A"
    assert queue.take(3, 0.0) == []
    assert queue.oldest_wait_s(1.0) == 0.0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 400)),
        st.tuples(st.just("take"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 50), st.just(0)),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=200)
@given(STEPS, st.floats(0.01, 3.0))
def test_the_queue_equals_a_list_that_is_sorted_anew(
    steps: list[tuple[str, int, int]], pace_s: float
) -> None:
    """Conservation and order against a model: each request leaves once, in the declared order."""
    queue: TurnQueue[int, int] = TurnQueue(ageing_s=2.0, max_wait_s=6.0)
    model: dict[int, tuple[float, int, float]] = {}
    put_count, left = 0, 0
    for index, (step, first, second) in enumerate(steps):
        now_s = index * pace_s
        if step == "put":
            queue.put(
                put_count, put_count, tool_calls_done=first, cached_tokens=second, now_s=now_s
            )
            model[put_count] = (urgency(first, second, now_s, 2.0), put_count, now_s)
            put_count += 1
        elif step == "take":
            expected = []
            for _ in range(min(first, len(model))):
                overdue = [k for k, (_, _, t) in model.items() if now_s - t > 6.0]
                key = min(overdue) if overdue else min(model, key=lambda k: model[k][:2])
                expected.append(key)
                del model[key]
            assert [key for key, _ in queue.take(first, now_s)] == expected
            left += len(expected)
        elif first in model:
            assert queue.remove(first) == first
            del model[first]
            left += 1
        assert len(queue) == len(model) == put_count - left
        assert queue.keys() == sorted(model)
        waits = [now_s - t for _, _, t in model.values()]
        assert queue.oldest_wait_s(now_s) == pytest.approx(max(waits, default=0.0))
