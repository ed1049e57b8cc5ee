"""What a committed move brought, against the end that the topology before would have reached."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from shiftbook.ledger.events.reallocation import GainRealized, Interval, ReallocationProposed
from shiftbook.scheduler.errors import TelemetryError
from shiftbook.scheduler.estimate import Estimate
from shiftbook.scheduler.makespan import Progress
from shiftbook.scheduler.throughput import ThroughputModel, tail_scale

MEASURED_SPREAD = 0.05
"""Relative standard deviation left to a rate that was measured in the same iteration."""


@dataclass(frozen=True)
class RatesMeasured:
    """Rates of the iteration in which the move was made; None or absent where none was measured."""

    turn_s: float | None = None
    """Seconds of one source replica per turn with all lanes full."""
    seconds_per_unit: Mapping[str, float] = field(default_factory=dict)
    """Seconds of one replica per unit, by follower."""
    tail_s: float | None = None
    tail_episodes: int | None = None
    """Episodes that were outstanding when the tail began."""
    update_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What really came after the move."""

    at_move: Progress
    """Progress at the proposal, with the turns that really were left."""
    observed_end_s: float
    """From the proposal to the end of the iteration."""
    iteration_s: float
    """The whole iteration with the move."""
    iteration_before_s: float
    """The last whole iteration before it."""
    devices_before: int
    devices_after: int
    rates: RatesMeasured = RatesMeasured()


def realized(
    model: ThroughputModel, proposed: ReallocationProposed, outcome: Outcome
) -> GainRealized:
    """The gain of a committed move.

    The counterfactual is the model's closed form for the topology before, kept until the end of
    the iteration, fed with the work that really was left at the proposal and the rates measured
    in the same iteration. Its 80 % interval is the model's. ``predicted_gain_s`` is net of the
    predicted cost, as the realised gain is net of the real one. Raises TelemetryError when the
    iteration did not end after the move.
    """
    if outcome.observed_end_s <= 0 or outcome.iteration_s <= 0:
        raise TelemetryError(
            f"expected an iteration that ended after the move, found an end "
            f"{outcome.observed_end_s} s after it; build the gain when the iteration is completed"
        )
    measured = with_rates(model, outcome.rates)
    end = measured.predict_end(proposed.before, outcome.at_move)
    adjusted_s = end.mean_s - outcome.observed_end_s
    return GainRealized(
        baseline_window_s=outcome.iteration_before_s,
        observed_window_s=outcome.iteration_s,
        raw_gain_s=outcome.iteration_before_s - outcome.iteration_s,
        counterfactual=_in_words(proposed, outcome),
        counterfactual_end_s=end.mean_s,
        observed_end_s=outcome.observed_end_s,
        adjusted_gain_s=adjusted_s,
        interval=Interval(
            low=end.low_s - outcome.observed_end_s, high=end.high_s - outcome.observed_end_s
        ),
        device_s_before=outcome.devices_before * outcome.iteration_before_s,
        device_s_after=outcome.devices_after * outcome.iteration_s,
        predicted_gain_s=proposed.predicted_gain_s - proposed.predicted_cost_s,
    )


def with_rates(model: ThroughputModel, rates: RatesMeasured) -> ThroughputModel:
    """A copy of the model in which what was measured replaces what was estimated."""
    copied = copy.deepcopy(model)
    if rates.turn_s is not None:
        copied.turn_s = _known(rates.turn_s)
    for name, seconds in rates.seconds_per_unit.items():
        copied.follower_s[name] = _known(seconds)
    if rates.update_s is not None:
        copied.update_s = _known(rates.update_s)
    if rates.tail_s is not None and rates.tail_episodes:
        copied.tail_s = _known(tail_scale(rates.tail_s, rates.tail_episodes))
    return copied


def _known(value: float) -> Estimate:
    return Estimate(value, MEASURED_SPREAD * value, prior_weight=30.0)


def _in_words(proposed: ReallocationProposed, outcome: Outcome) -> str:
    progress = outcome.at_move
    left = ", ".join(f"{count} of {name}" for name, count in progress.left.items())
    measured = [
        name
        for name, value in (
            ("turns", outcome.rates.turn_s),
            ("tail", outcome.rates.tail_s),
            ("update", outcome.rates.update_s),
        )
        if value is not None
    ] + list(outcome.rates.seconds_per_unit)
    turns = "unknown turns" if progress.turns_left is None else f"{progress.turns_left:g} turns"
    return (
        f"closed form for {proposed.before.text()}, kept until the end of iteration "
        f"{progress.iteration}: {progress.outstanding} episodes ({turns}) outstanding and groups "
        f"left ({left or 'none'}) at the proposal, with the rates of this iteration for "
        f"{', '.join(measured) or 'nothing (the learned ones)'}"
    )
