"""Whole replicas to components so that a sum of concave gains is largest: exact, by margins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shiftbook.scheduler.errors import PlanningError


def allocate(
    margins: Sequence[NDArray[np.float64]], minimum: Sequence[int], budget: int
) -> list[int]:
    """Numbers of replicas whose summed gain is the largest with at most ``budget`` replicas.

    ``margins[c][i]`` is what replica ``minimum[c] + i + 1`` of component c adds; it must not
    increase with i (a concave gain). For a separable concave sum under one budget, taking the
    largest margins is exact (Fox 1966). Replicas that add nothing are not given. O(n) for n
    margins in all. Raises PlanningError when the minima exceed the budget or a gain is not concave.
    """
    spare = budget - sum(minimum)
    if spare < 0:
        raise PlanningError(
            f"expected a budget of at least {sum(minimum)} replicas (the minima), found {budget}"
        )
    for number, margin in enumerate(margins):
        if margin.size > 1 and np.any(np.diff(margin) > 1e-9 * max(1.0, float(abs(margin[0])))):
            raise PlanningError(f"the gain of component {number} is not concave in its replicas")
    useful = [margin[margin > 0] for margin in margins]
    merged = np.concatenate(useful) if useful else np.zeros(0)
    if merged.size <= spare:
        return [low + margin.size for low, margin in zip(minimum, useful, strict=True)]
    if spare == 0:
        return list(minimum)
    threshold = np.partition(merged, merged.size - spare)[merged.size - spare]
    above = [int(np.count_nonzero(margin > threshold)) for margin in useful]
    ties = spare - sum(above)
    counts = []
    for low, margin, more in zip(minimum, useful, above, strict=True):
        equal = min(ties, int(np.count_nonzero(margin == threshold)))
        ties -= equal
        counts.append(low + more + equal)
    return counts


def margins_of_time(work_s: float, minimum: int, maximum: int) -> NDArray[np.float64]:
    """Seconds that each further replica saves when ``work_s`` is shared evenly: work / (n(n+1)).

    The first replica of none saves the whole work and one second per second of it, so that no
    component that has work stays without.
    """
    count = np.arange(minimum, max(maximum, minimum), dtype=np.float64)
    return np.asarray(np.where(count == 0, 2 * work_s, work_s / np.maximum(count * (count + 1), 1)))
