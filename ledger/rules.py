"""The rules that a proposed move must pass, each a named function that gives a reason or None.

They are applied twice: when a move is proposed, and again under the append lock when it is
granted, since the ledger may have moved on in between. The first rule that refuses is the one
that the rejection names. ``mode`` comes last, so that in mode ``advise`` a rejection by ``mode``
means that the move would have been granted.

Exempt from ``cooldown`` and ``gain-over-cost`` are an operator's moves (a person answers for
them, and knows reasons that no model predicts) and restoring moves (they lead back to a topology
that was valid, which is worth more than seconds). No move is exempt from any other rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shiftbook.ledger.events.reallocation import ReallocationProposed
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.plan import Plan
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.topology import Topology

TRAINER_STRATEGIES = frozenset({"reshard", "reboot"})
"""Strategies that move training state."""


@dataclass(frozen=True, slots=True)
class Case:
    """A proposed move and the ledger that it would change."""

    state: LedgerState
    job: JobState
    plan: Plan
    operation: str
    proposed: ReallocationProposed
    planned_on: Topology
    """Topology that the proposer looked at."""
    since_last_move_s: float | None

    @property
    def restores(self) -> bool:
        """True for a move that claims to restore and really leads to a topology that was valid."""
        after = self.proposed.after
        return self.proposed.restoring and any(after.matches(t) for t in valid_topologies(self.job))

    @property
    def owes_no_gain(self) -> bool:
        """True for moves that no prediction has to justify."""
        return self.restores or self.proposed.proposer == "operator"


def valid_topologies(job: JobState) -> tuple[Topology, ...]:
    """Where a restoring move may lead: what safe mode froze, the topology before the last
    committed move, and the one that the attempt started in."""
    attempt = job.current_attempt()
    known = (job.frozen, job.previous_topology, attempt.topology if attempt else None)
    return tuple(topology for topology in known if topology is not None)


def involved_devices(before: Topology, after: Topology) -> tuple[str, ...]:
    """Devices of every component whose placement changes, before and after, sorted.

    Devices on which such a component stays are among them: its replicas there take part in the
    move. Where nothing changes (a reboot in place) it is every device.
    """
    names = {*before.components, *after.components}
    changed = {name for name in names if before.replicas(name) != after.replicas(name)} or names
    return tuple(
        sorted(
            {
                device
                for topology in (before, after)
                for component, replica in topology.walk()
                if component in changed
                for device in replica.devices
            }
        )
    )


def stale_topology(case: Case) -> str | None:
    """The move starts from the topology that is in force."""
    for seen in (case.planned_on, case.proposed.before):
        if not seen.matches(case.job.topology):
            return f"planned on {seen.text()}, in force is {case.job.topology.text()}"
    return None


def one_operation(case: Case) -> str | None:
    """No other move of the job is granted and not closed."""
    running = case.job.operation_running()
    if running is None or running.operation == case.operation:
        return None
    return f"{running.operation} is {running.status} on {', '.join(running.devices)}"


def sync_priority(case: Case) -> str | None:
    """No weight sync is open; a sync goes before a move."""
    open_sync = case.job.open_sync
    return f"weight sync {open_sync} is open" if open_sync is not None else None


def safe_mode(case: Case) -> str | None:
    """In safe mode only moves back to a topology that was valid."""
    if case.job.safe_mode is None or case.restores:
        return None
    if case.proposed.restoring:
        valid = "; ".join(dict.fromkeys(t.text() for t in valid_topologies(case.job)))
        return f"{case.proposed.after.text()} restores none of: {valid}"
    return f"safe mode ({case.job.safe_mode}): only restoring moves"


def move_class(case: Case) -> str | None:
    """The plan allows the strategy."""
    allowed = case.plan.moves.allow
    if case.proposed.strategy in allowed:
        return None
    return f"the plan allows {', '.join(allowed) or 'no moves'}, not {case.proposed.strategy}"


def boundary(case: Case) -> str | None:
    """The training sees after the move what the plan, as amended, declares."""
    differing = case.plan.view().differences(case.proposed.sees)
    if not differing:
        return None
    parts = [
        f"{name}: the plan declares {here!r}, after the move {there!r}"
        for name, (here, there) in sorted(differing.items())
    ]
    return "; ".join(parts)


def elastic_range(case: Case) -> str | None:
    """Every component keeps a declared number of replicas; without a range it keeps its number."""
    opened = case.job.opened
    assert opened is not None, "a job with a plan was opened"
    before, after = case.proposed.before, case.proposed.after
    for component in sorted({*after.components, *before.components}):
        if component not in opened.components:
            return f"{component} is no component of the job ({', '.join(opened.components)})"
        count = len(after.replicas(component))
        declared = opened.elastic.get(component)
        if declared is None:
            was = len(before.replicas(component))
            if count != was:
                return f"{component} declares no elastic range, so {was} replicas, not {count}"
        elif not declared.minimum <= count <= declared.maximum:
            return f"{component}: {declared.minimum} to {declared.maximum} replicas, not {count}"
        devices = after.placement().get(component, [])
        twice = sorted({device for device in devices if devices.count(device) > 1})
        if twice:
            return f"{component} stands twice on {twice[0]}"
    return None


def owes_work(case: Case) -> str | None:
    """A component goes down to no replica only when it owes nothing and expects nothing."""
    for component in sorted(case.proposed.before.components):
        if case.proposed.after.replicas(component) or not case.proposed.before.replicas(component):
            continue
        owed = case.proposed.owed.get(component)
        if owed is None:
            return f"{component} would stand nowhere and the proposal does not say what it owes"
        if owed:
            return f"{component} would stand nowhere and owes {owed}"
    return None


def lease(case: Case) -> str | None:
    """The job leases every device that the move touches."""
    for device in _touched(case):
        held = case.state.leases.get(device)
        if held is None or held.job != case.job.name:
            return f"{device} is leased by {held.job if held else 'nobody'}"
    return None


def quarantine(case: Case) -> str | None:
    """No device that the move touches is in quarantine."""
    for device in _touched(case):
        if device in case.state.quarantine:
            return f"{device} was poisoned by {case.state.quarantine[device]}"
    return None


def _touched(case: Case) -> tuple[str, ...]:
    involved = involved_devices(case.proposed.before, case.proposed.after)
    return tuple(sorted({*involved, *case.proposed.after.devices()}))


def durable_bundle(case: Case) -> str | None:
    """Before training state moves, the last update is durable in a bundle."""
    if case.proposed.strategy not in TRAINER_STRATEGIES:
        return None
    saved, version = case.job.last_bundle, case.job.policy_version
    if saved is not None and saved.policy_version == version:
        return None
    found = f"the last one holds {saved.policy_version}" if saved else "there is none"
    return f"a {case.proposed.strategy} needs a durable bundle of policy version {version}; {found}"


def cooldown(case: Case) -> str | None:
    """The last move is long enough ago."""
    since_s, least_s = case.since_last_move_s, case.plan.moves.cooldown_s
    if since_s is None or since_s >= least_s or case.owes_no_gain:
        return None
    return f"the last move ended {since_s:.3f} s ago, the cooldown is {least_s:g} s"


def gain_over_cost(case: Case) -> str | None:
    """The predicted gain exceeds the predicted cost by the declared margin."""
    if case.owes_no_gain:
        return None
    gain_s, cost_s = case.proposed.predicted_gain_s, case.proposed.predicted_cost_s
    margin_s = case.plan.moves.margin_s
    # Written so that a gain or cost that is no number refuses.
    if gain_s > cost_s and gain_s - cost_s >= margin_s:
        return None
    return (
        f"predicted gain {gain_s:.3f} s against cost {cost_s:.3f} s, the declared margin is "
        f"{margin_s:g} s"
    )


def mode(case: Case) -> str | None:
    """The job lets moves happen."""
    declared = case.plan.moves.mode
    return None if declared == "act" else f"the job is in mode {declared}: nothing moves"


RULES: dict[str, Callable[[Case], str | None]] = {
    "stale-topology": stale_topology,
    "one-operation": one_operation,
    "sync-priority": sync_priority,
    "safe-mode": safe_mode,
    "move-class": move_class,
    "boundary": boundary,
    "elastic-range": elastic_range,
    "owes-work": owes_work,
    "lease": lease,
    "quarantine": quarantine,
    "durable-bundle": durable_bundle,
    "cooldown": cooldown,
    "gain-over-cost": gain_over_cost,
    "mode": mode,
}
"""Every rule by the name that a rejection carries, in the order in which they are applied."""


def judge(case: Case) -> tuple[str, str] | None:
    """Name and reason of the first rule that refuses the move; None where all pass."""
    for name, rule in RULES.items():
        reason = rule(case)
        if reason is not None:
            return name, reason
    return None
