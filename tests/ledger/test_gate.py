"""The gate's commands, one by one.

Goal: every rule accepts what it should and rejects what it should under its own name, every step
is idempotent and in time, weight syncs go first, and safe mode freezes. Method: a gate on a
SQLite file with a boot clock and a wall clock that the test moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shiftbook.ledger.errors import (
    IdempotencyConflict,
    IllegalStep,
    InvalidInput,
    LossNotDeclared,
    Rejected,
    ShiftbookError,
    StaleGrant,
    StepTimeout,
    SyncMustWait,
    TopologyChanged,
    UnknownJob,
    UnknownOperation,
)
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.events.lease import LeaseGranted
from shiftbook.ledger.events.sync import (
    SyncLoss,
    TargetOutcome,
    WeightSyncCommitted,
    WeightSyncDelivered,
    WeightSyncFailed,
)
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.job_state import JobState, OperationState
from shiftbook.ledger.plan import SyncPlan, TrainingView
from shiftbook.ledger.rules import RULES, involved_devices
from shiftbook.ledger.topology import Topology
from tests.ledger.gate_cases import (
    FINGERPRINT,
    HALF,
    OTHER_FINGERPRINT,
    TRAIN,
    WIDE,
    Clock,
    advance,
    bundle,
    gain,
    open_gate,
    opened,
    plan,
    proposal,
    running,
    start,
    step,
    sync_started,
)

CLOSED = JobClosed(
    outcome="finished", iterations=1, policy_version=1, policy_fingerprint=FINGERPRINT
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(store_url: str, clock: Clock) -> Iterator[Gate]:
    made = open_gate(store_url, clock)
    yield made
    made.ledger.close()


def job(gate: Gate, name: str = "j") -> JobState:
    return gate.ledger.state().job(name)


def move(gate: Gate, operation: str) -> OperationState:
    return job(gate).operations[operation]


def types(gate: Gate, after: int = -1) -> list[str]:
    return [stored.type for stored in gate.ledger.read(after)]


def granted(gate: Gate, after: Topology = WIDE, **changes: Any) -> Grant:
    return gate.grant("j", gate.propose("j", proposal(after, **changes)))


# The rules. Each case: what the job and the ledger are like, and the proposal that is refused.

VIEW = plan().view()


def _other_view(**changes: Any) -> TrainingView:
    return VIEW.model_copy(update=changes)


def test_every_rule_has_a_case() -> None:
    covered = {case.values[0] for case in REFUSED}
    assert covered | {"lease", "quarantine", "one-operation", "sync-priority", "cooldown"} == set(
        RULES
    )


REFUSED = [
    pytest.param("stale-topology", {}, {"before": TRAIN}, "planned on rollout[]", id="stale"),
    pytest.param(
        "move-class", {"allow": ("reshard",)}, {}, "allows reshard, not pause", id="class"
    ),
    pytest.param(
        "boundary",
        {},
        {"sees": _other_view(virtual_ranks=8)},
        "virtual_ranks: the plan declares 4, after the move 8",
        id="boundary-ranks",
    ),
    pytest.param(
        "boundary",
        {},
        {"sees": _other_view(engine_dtype="bfloat16")},
        "engine_dtype: the plan declares 'float32', after the move 'bfloat16'",
        id="boundary-dtype",
    ),
    pytest.param(
        "elastic-range",
        {},
        {"after": Topology.of({"rollout": ["n/0"], "trainer": ["n/1"], "tool": ["n/0"]})},
        "tool declares no elastic range, so 0 replicas, not 1",
        id="not-elastic",
    ),
    pytest.param(
        "elastic-range",
        {},
        {"after": Topology.of({"rollout": ["n/0"], "trainer": ["n/1"], "judge": ["n/0"]})},
        "judge is no component",
        id="unknown-component",
    ),
    pytest.param(
        "elastic-range",
        {},
        {"after": Topology.of({"rollout": ["n/0"] * 5, "trainer": ["n/1"]})},
        "rollout: 0 to 4 replicas, not 5",
        id="too-many",
    ),
    pytest.param(
        "elastic-range",
        {},
        {"after": Topology.of({"rollout": ["n/0", "n/0"], "trainer": ["n/1"]})},
        "rollout stands twice on n/0",
        id="twice-on-a-device",
    ),
    pytest.param(
        "owes-work",
        {},
        {"after": TRAIN, "owed": {"rollout": 3}},
        "rollout would stand nowhere and owes 3",
        id="owes",
    ),
    pytest.param(
        "owes-work",
        {},
        {"after": TRAIN, "owed": {}},
        "rollout would stand nowhere and the proposal does not say",
        id="owes-unsaid",
    ),
    pytest.param(
        "durable-bundle", {}, {"strategy": "reshard"}, "bundle of policy version 0", id="bundle"
    ),
    pytest.param(
        "durable-bundle", {}, {"strategy": "reboot"}, "bundle of policy version 0", id="bundle-boot"
    ),
    pytest.param(
        "gain-over-cost", {"margin_s": 4.5}, {}, "gain 5.000 s against cost 1.000 s", id="margin"
    ),
    pytest.param(
        "gain-over-cost", {}, {"predicted_gain_s": 1.0}, "gain 1.000 s against cost", id="no-gain"
    ),
    pytest.param(
        "gain-over-cost", {}, {"predicted_gain_s": float("nan")}, "gain nan s", id="gain-unknown"
    ),
    pytest.param("safe-mode", {"frozen": True}, {}, "only restoring moves", id="safe-mode"),
    pytest.param(
        "safe-mode",
        {"frozen": True},
        {"restoring": True},
        "rollout[n/0 n/1] trainer[n/1] tool[] restores none of",
        id="safe-mode-liar",
    ),
    pytest.param("mode", {"mode": "advise"}, {}, "mode advise: nothing moves", id="advise"),
]


@pytest.mark.parametrize(("rule", "moves", "changes", "says"), REFUSED)
def test_rule_refuses_by_its_name(
    gate: Gate, rule: str, moves: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    frozen = moves.pop("frozen", False) if (moves := dict(moves)) else False
    running(gate, **moves)
    if frozen:
        gate.freeze("j", by="operator", reason="looking")
    with pytest.raises(Rejected) as caught:
        gate.propose("j", proposal(**changes))
    assert caught.value.rule == rule
    assert says in caught.value.reason
    assert types(gate)[-2:] == ["ReallocationProposed", "ReallocationRejected"]
    assert move(gate, caught.value.operation).status == "rejected"


def test_boundary_follows_an_amendment(gate: Gate) -> None:
    running(gate)
    wider = _other_view(virtual_ranks=8)
    gate.amend("j", "update.virtual_ranks", 8, "more ranks from here")
    assert gate.propose("j", proposal(sees=wider))
    with pytest.raises(Rejected, match="boundary"):
        gate.propose("j", proposal())


def test_lease_rule(gate: Gate) -> None:
    running(gate)
    after = Topology.of({"rollout": ["n/0", "n/5"], "trainer": ["n/1"], "tool": []})
    with pytest.raises(Rejected, match=r"rule lease: n/5 is leased by nobody"):
        gate.propose("j", proposal(after))
    gate.open_job("k", opened(devices=("n/5",), topology=Topology.of({"rollout": ["n/5"]})))
    start(gate, "k", topology=Topology.of({"rollout": ["n/5"]}))
    with pytest.raises(Rejected, match=r"rule lease: n/5 is leased by k"):
        gate.propose("j", proposal(after))


def test_one_operation_rule_and_its_end(gate: Gate) -> None:
    running(gate)
    first = granted(gate)
    with pytest.raises(Rejected, match=r"rule one-operation: move-3 is granted on n/0, n/1"):
        gate.propose("j", proposal())
    assert job(gate).open_operation == first.operation
    advance(gate, first, "committed")
    assert gate.propose("j", proposal(HALF))


def test_durable_bundle_must_hold_the_last_update_of_this_lineage(gate: Gate) -> None:
    running(gate)
    gate.ledger.append("j", bundle(policy_version=1))
    with pytest.raises(Rejected, match="the last one holds 1"):
        gate.propose("j", proposal(strategy="reshard"))
    gate.ledger.append("j", bundle(policy_version=0))
    assert gate.propose("j", proposal(strategy="reshard"))
    start(gate, "j", "a2")
    with pytest.raises(Rejected, match="there is none"):
        gate.propose("j", proposal(strategy="reshard"))


def test_cooldown_counts_on_the_boot_clock_of_the_gate(gate: Gate, clock: Clock) -> None:
    running(gate, cooldown_s=30.0)
    operation = granted(gate)
    advance(gate, operation, "committed")
    clock.boot_s += 29.0
    clock.wall_ns += int(1e15)  # a wall clock that jumps says nothing about seconds that passed
    with pytest.raises(Rejected, match=r"rule cooldown: the last move ended 29.000 s ago"):
        gate.propose("j", proposal(HALF))
    assert gate.propose("j", proposal(HALF, proposer="operator"))
    assert gate.propose("j", proposal(HALF, restoring=True))
    clock.boot_s += 1.0
    name = gate.propose("j", proposal(HALF))
    stored = gate.ledger.event(move(gate, name).proposed_position)
    assert stored.body["since_last_move_s"] == 30.0


def test_cooldown_of_a_move_that_another_process_ended(
    gate: Gate, clock: Clock, store_url: str
) -> None:
    running(gate, cooldown_s=30.0)
    advance(gate, granted(gate), "committed")
    other = open_gate(store_url, clock, by="other")
    clock.wall_ns += int(29e9)
    with pytest.raises(Rejected, match="cooldown"):
        other.propose("j", proposal(HALF))
    clock.wall_ns -= int(500e9)
    with pytest.raises(Rejected, match=r"ended 0\.000 s ago"):
        other.propose("j", proposal(HALF))
    clock.wall_ns += int(502e9)
    assert other.propose("j", proposal(HALF))


def test_exemptions_reach_no_further_than_gain_and_cooldown(gate: Gate) -> None:
    running(gate, margin_s=100.0)
    with pytest.raises(Rejected, match="gain-over-cost"):
        gate.propose("j", proposal())
    with pytest.raises(Rejected, match="gain-over-cost"):
        gate.propose("j", proposal(restoring=True))  # WIDE was never valid
    assert gate.propose("j", proposal(proposer="operator", predicted_gain_s=0.0))
    with pytest.raises(Rejected, match="boundary"):
        gate.propose("j", proposal(proposer="operator", sees=_other_view(group_size=1)))


def test_observe_records_no_proposal(gate: Gate) -> None:
    running(gate, mode="observe")
    size = gate.ledger.head().size
    with pytest.raises(IllegalStep, match="observe"):
        gate.propose("j", proposal())
    assert gate.ledger.head().size == size


def test_advise_names_mode_only_for_moves_that_would_have_been_granted(gate: Gate) -> None:
    running(gate, mode="advise")
    with pytest.raises(Rejected, match="rule mode"):
        gate.propose("j", proposal())
    with pytest.raises(Rejected, match="rule boundary"):
        gate.propose("j", proposal(sees=_other_view(group_size=1)))
    gate.amend("j", "moves.mode", "act", "trusted now")
    assert gate.propose("j", proposal())


# Proposing and granting.


def test_grant_judges_again_on_what_stands_by_then(gate: Gate) -> None:
    running(gate)
    first = gate.propose("j", proposal())
    second = gate.propose("j", proposal())
    advance(gate, gate.grant("j", first), "committed")
    with pytest.raises(Rejected, match="stale-topology"):
        gate.grant("j", second)
    assert move(gate, second).status == "rejected"
    with pytest.raises(IllegalStep, match="rejected"):
        gate.grant("j", second)


def test_proposal_and_grant_may_be_repeated(gate: Gate) -> None:
    running(gate)
    assert gate.propose("j", proposal(), operation="mine") == "mine"
    size = gate.ledger.head().size
    assert gate.propose("j", proposal(), operation="mine") == "mine"
    assert gate.ledger.head().size == size
    with pytest.raises(IllegalStep, match="repeated"):
        gate.propose("j", proposal(TRAIN), operation="mine")
    grant = gate.grant("j", "mine", mover="tests:mover")
    assert gate.grant("j", "mine") == grant
    assert gate.ledger.head().size == size + 1
    assert move(gate, "mine").mover == "tests:mover"
    assert gate.controller in move(gate, "mine").controller

    with pytest.raises(Rejected):
        gate.propose("j", proposal(), operation="second")
    with pytest.raises(Rejected, match="one-operation"):
        gate.propose("j", proposal(), operation="second")


def test_a_grant_is_given_to_one_controller(gate: Gate, clock: Clock, store_url: str) -> None:
    running(gate)
    grant = granted(gate)
    other = open_gate(store_url, clock, by="other")
    with pytest.raises(IllegalStep, match="granted"):
        other.grant("j", grant.operation)
    with pytest.raises(StaleGrant, match="granted to gate@"):
        other.abandon("j", grant.operation, "mine is better")
    assert gate.abandon("j", grant.operation, "x").repeated is False
    assert gate.abandon("j", grant.operation, "x").repeated is True


def test_the_grant_covers_every_device_of_the_components_that_change() -> None:
    three = Topology.of({"rollout": ["n/0"], "trainer": ["n/1", "n/2"], "judge": ["n/3"]})
    two = Topology.of({"rollout": ["n/0", "n/2"], "trainer": ["n/1"], "judge": ["n/3"]})
    assert involved_devices(three, two) == ("n/0", "n/1", "n/2")
    assert involved_devices(three, three) == ("n/0", "n/1", "n/2", "n/3")


def test_a_topology_is_the_same_whatever_the_order(gate: Gate) -> None:
    running(gate)
    grant = granted(gate, Topology.of({"trainer": ["n/1"], "rollout": ["n/1", "n/0"]}))
    advance(gate, grant, "committed")
    assert job(gate).topology.matches(WIDE)
    assert not job(gate).topology.matches(HALF)


# Steps.


def test_a_whole_move(gate: Gate) -> None:
    running(gate)
    grant = granted(gate)
    advance(gate, grant, "committed")
    assert job(gate).topology.matches(WIDE)
    assert job(gate).open_operation is None
    causes = [(e.type, e.cause) for e in gate.ledger.read(3)]
    assert causes == [
        ("ReallocationGranted", 3),
        ("ReallocationQuiesced", 4),
        ("ReallocationTransferred", 5),
        ("ReallocationVerified", 6),
        ("ReallocationCommitted", 7),
    ]


@pytest.mark.parametrize("status", ["quiesced", "transferred", "verified", "committed"])
def test_a_step_may_be_repeated_with_the_same_content_only(gate: Gate, status: str) -> None:
    running(gate)
    grant = granted(gate)
    advance(gate, grant, status)
    size = gate.ledger.head().size
    repeated = step(gate, grant, status)
    assert gate.ledger.head().size == size
    if status == "committed":
        assert repeated.repeated
        assert repeated.first == size - 1
    other: Any = {
        "quiesced": lambda: gate.quiesced(grant, [], kv_tokens_lost=9, quiesce_s=0.1),
        "transferred": lambda: gate.transferred(grant, moved_bytes=9, transfer_s=0.1, parts={}),
        "verified": lambda: gate.verified(grant, {"q": FINGERPRINT}, {"q": FINGERPRINT}),
        "committed": lambda: gate.committed(
            grant, moved_bytes=9, stall_s=0.2, kv_tokens_lost=0, stalls={}
        ),
    }[status]
    with pytest.raises(IllegalStep, match="repeated"):
        other()
    assert gate.ledger.head().size == size


def test_a_step_out_of_order_is_refused(gate: Gate) -> None:
    running(gate)
    grant = granted(gate)
    for status in ("transferred", "verified", "committed"):
        with pytest.raises(IllegalStep, match="sequence"):
            step(gate, grant, status)
    advance(gate, grant, "verified")
    for status in ("quiesced", "transferred", "rolled_back"):
        with pytest.raises(IllegalStep, match="sequence"):
            step(gate, grant, status)
    assert move(gate, grant.operation).status == "verified"


def test_different_fingerprints_are_not_verified(gate: Gate) -> None:
    running(gate)
    grant = advance(gate, granted(gate), "transferred")
    with pytest.raises(IllegalStep, match=f"fingerprints: expected p {FINGERPRINT}"):
        gate.verified(grant, {"p": FINGERPRINT}, {"p": OTHER_FINGERPRINT})
    assert move(gate, grant.operation).status == "transferred"
    gate.rolled_back(grant, "fingerprints differ", HALF)
    assert job(gate).topology.matches(HALF)


@pytest.mark.parametrize("reached", ["granted", "quiesced", "transferred"])
def test_a_move_rolls_back_to_the_topology_before_only(gate: Gate, reached: str) -> None:
    running(gate)
    grant = granted(gate)
    if reached != "granted":
        advance(gate, grant, reached)
    with pytest.raises(IllegalStep, match="topology"):
        gate.rolled_back(grant, "x", WIDE)
    receipt = gate.rolled_back(grant, "x", HALF)
    assert gate.rolled_back(grant, "x", HALF).first == receipt.first
    assert job(gate).topology.matches(HALF)
    with pytest.raises(IllegalStep):
        step(gate, grant, "quiesced")


def test_poison_and_what_an_operator_may_do(gate: Gate) -> None:
    running(gate)
    grant = advance(gate, granted(gate), "quiesced")
    gate.poisoned(grant, "neither way")
    assert gate.poisoned(grant, "neither way").repeated
    with pytest.raises(Rejected, match=r"rule quarantine: n/0 was poisoned by move-3"):
        gate.propose("j", proposal())
    with pytest.raises(IllegalStep, match="quarantine: expected n/0 usable, found poisoned"):
        start(gate, "j", "a2")
    with pytest.raises(IllegalStep, match="quarantine"):
        gate.lift_quarantine("j", grant.operation, by="gate", reason="x")
    gate.close_job("j", CLOSED)
    assert set(gate.ledger.state().quarantine) == {"n/0", "n/1"}
    assert gate.lift_quarantine("j", grant.operation, by="operator", reason="reset by hand")
    assert gate.lift_quarantine("j", grant.operation, by="operator", reason="again") is None
    running(gate, "k")
    assert gate.propose("k", proposal())


# Epochs and time limits.


def test_a_newer_epoch_makes_every_earlier_grant_stale(
    gate: Gate, clock: Clock, store_url: str
) -> None:
    running(gate)
    old = advance(gate, granted(gate), "quiesced")
    other = open_gate(store_url, clock, by="recover")
    new = other.take_over("j", old.operation, "controller presumed dead")
    assert new.epoch > old.epoch
    for status in ("quiesced", "transferred", "rolled_back", "poisoned"):
        with pytest.raises(StaleGrant, match=f"epoch {old.epoch} .* in force is epoch {new.epoch}"):
            step(gate, old, status)
    with pytest.raises(StaleGrant):
        gate.holds(old)
    other.rolled_back(new, "x", HALF)
    assert move(gate, old.operation).status == "rolled_back"
    with pytest.raises(StaleGrant):
        step(gate, old, "transferred")


def test_a_grant_that_nobody_gave_is_refused(gate: Gate) -> None:
    running(gate)
    grant = granted(gate)
    for forged in (
        Grant("j", "move-99", grant.devices, grant.epoch),
        Grant("k", grant.operation, grant.devices, grant.epoch),
        Grant("j", grant.operation, ("n/0",), grant.epoch),
        Grant("j", grant.operation, grant.devices, grant.epoch + 1),
    ):
        with pytest.raises(StaleGrant):
            step(gate, forged, "quiesced")


@pytest.mark.parametrize("reached", ["granted", "quiesced", "transferred", "verified"])
def test_a_step_after_its_time_limit_is_refused(gate: Gate, clock: Clock, reached: str) -> None:
    running(gate, step_limit_s=20.0)
    grant = granted(gate)
    order = ["granted", "quiesced", "transferred", "verified", "committed"]
    for status in order[1 : order.index(reached) + 1]:
        clock.boot_s += 20.0
        step(gate, grant, status)
    late = order[order.index(reached) + 1]
    clock.boot_s += 20.5
    clock.wall_ns -= int(1e12)
    with pytest.raises(StepTimeout, match=r"within 20 s of .*found 20\.500 s"):
        step(gate, grant, late)
    assert move(gate, grant.operation).status == reached
    if reached == "verified":
        new = gate.take_over("j", grant.operation, "too late")
        step(gate, new, "committed")
    else:
        step(gate, grant, "rolled_back")


def test_a_reboot_has_a_limit_of_its_own(gate: Gate, clock: Clock) -> None:
    """Processes start anew within a step, which takes longer than any step of the other moves."""
    running(gate, step_limit_s=20.0, reboot_limit_s=90.0)
    gate.ledger.append("j", bundle())
    grant = granted(gate, strategy="reboot")
    step(gate, grant, "quiesced")
    clock.boot_s += 89.0
    step(gate, grant, "transferred")
    clock.boot_s += 91.0
    with pytest.raises(StepTimeout, match=r"within 90 s of .*found 91\.000 s"):
        step(gate, grant, "verified")


def test_repeating_a_step_is_never_too_late(gate: Gate, clock: Clock) -> None:
    running(gate)
    grant = advance(gate, granted(gate), "quiesced")
    clock.boot_s += 1e6
    assert step(gate, grant, "quiesced") == grant


# Weight syncs.


def delivered(version: int = 1, root: str = FINGERPRINT) -> WeightSyncDelivered:
    return WeightSyncDelivered(
        target="rollout-n.0",
        incarnation="i1",
        version=version,
        root=root,
        fingerprint_of="resident",
        moved_bytes=1,
        full_bytes=1,
        sync_s=0.1,
    )


def sync_committed(version: int = 1) -> WeightSyncCommitted:
    return WeightSyncCommitted(
        version=version,
        outcomes=(TargetOutcome(target="rollout-n.0", outcome="serving"),),
        stall_s=0.1,
        caches_flushed=("rollout-n.0",),
    )


def test_a_whole_sync_with_repeats(gate: Gate) -> None:
    standing = running(gate)
    name = gate.begin_sync("j", sync_started(standing), operation="s1")
    assert gate.begin_sync("j", sync_started(standing), operation="s1") == name == "s1"
    with pytest.raises(IllegalStep, match="repeated"):
        gate.begin_sync("j", sync_started(standing, version=2), operation="s1")
    with pytest.raises(IllegalStep, match="s1 is open"):
        gate.begin_sync("j", sync_started(standing, version=2))
    damaged = gate.sync_delivered("j", name, delivered(root=OTHER_FINGERPRINT))
    whole = gate.sync_delivered("j", name, delivered())
    assert gate.sync_delivered("j", name, delivered()).repeated
    assert damaged.first + 1 == whole.first
    with pytest.raises(IllegalStep, match="sync-version"):
        gate.sync_committed("j", name, sync_committed(2))
    done = gate.sync_committed("j", name, sync_committed())
    assert gate.sync_committed("j", name, sync_committed()).first == done.first
    with pytest.raises(IllegalStep):
        gate.sync_failed("j", name, WeightSyncFailed(version=1, reason="x"))
    assert job(gate).open_sync is None


LOSS = SyncLoss(
    encoding="int8-difference", max_error=1e-3, largest_error=4e-4, root=OTHER_FINGERPRINT
)


def test_a_sync_that_loses_something_needs_its_declaration(gate: Gate) -> None:
    """It is refused and nothing is written; without a loss the version may go out, as ever."""
    standing = running(gate)
    size = gate.ledger.head().size
    with pytest.raises(LossNotDeclared, match="does not declare"):
        gate.begin_sync("j", sync_started(standing).model_copy(update={"lossy": LOSS}))
    assert gate.ledger.head().size == size
    name = gate.begin_sync("j", sync_started(standing))
    assert job(gate).syncs[name].lossy_root is None


def test_a_sync_loses_no_more_than_is_declared(gate: Gate) -> None:
    told = opened()
    assert told.plan is not None
    syncs = SyncPlan(encoding="int8-difference", max_error=1e-3)
    plan_with = told.plan.model_copy(update={"syncs": syncs})
    gate.open_job("j", told.model_copy(update={"plan": plan_with}))
    begun = sync_started(start(gate))
    for fields, objection in (
        ({"largest_error": 2e-3}, "outside its bound"),
        ({"max_error": 2e-3}, "above the plan's"),
    ):
        with pytest.raises(LossNotDeclared, match=objection):
            gate.begin_sync("j", begun.model_copy(update={"lossy": LOSS.model_copy(update=fields)}))
    name = gate.begin_sync("j", begun.model_copy(update={"lossy": LOSS}))
    assert job(gate).syncs[name].lossy_root == OTHER_FINGERPRINT


def test_a_sync_abandons_moves_that_have_not_quiesced(gate: Gate) -> None:
    standing = running(gate)
    pending = gate.propose("j", proposal())
    grant = granted(gate)
    size = gate.ledger.head().size
    name = gate.begin_sync("j", sync_started(standing))
    assert types(gate, size - 1) == [
        "ReallocationAbandoned",
        "ReallocationAbandoned",
        "WeightSyncStarted",
    ]
    assert name == f"sync-{size + 2}"
    assert {move(gate, o).status for o in (pending, grant.operation)} == {"abandoned"}
    with pytest.raises(IllegalStep, match="abandoned"):
        step(gate, grant, "quiesced")
    with pytest.raises(Rejected, match="sync-priority"):
        gate.propose("j", proposal())
    gate.sync_failed("j", name, WeightSyncFailed(version=1, reason="no engine"))
    assert gate.propose("j", proposal())


@pytest.mark.parametrize("reached", ["quiesced", "transferred", "verified"])
def test_a_sync_waits_for_a_move_that_has_quiesced(gate: Gate, reached: str) -> None:
    standing = running(gate)
    grant = advance(gate, granted(gate), reached)
    with pytest.raises(SyncMustWait) as caught:
        gate.begin_sync("j", sync_started(standing))
    assert (caught.value.operation, caught.value.status) == (grant.operation, reached)
    step(gate, grant, "committed" if reached == "verified" else "rolled_back")
    assert gate.begin_sync("j", sync_started(standing))


def test_a_sync_for_the_engines_of_another_topology_is_refused(gate: Gate) -> None:
    standing = running(gate)
    seen = job(gate).topology
    step(gate, advance(gate, granted(gate), "verified"), "committed")
    now = job(gate).topology
    assert not seen.matches(now)
    size = gate.ledger.head().size
    with pytest.raises(TopologyChanged, match="read the topology again") as caught:
        gate.begin_sync("j", sync_started(standing), topology=seen)
    assert (caught.value.seen, caught.value.found) == (seen.text(), now.text())
    assert gate.ledger.head().size == size
    name = gate.begin_sync("j", sync_started(standing), topology=now)
    # What has begun is begun, whatever was seen: a repeat after a lost answer is no new request.
    assert gate.begin_sync("j", sync_started(standing), operation=name, topology=seen) == name


def test_a_sync_runs_in_safe_mode_and_under_the_current_attempt_only(gate: Gate) -> None:
    old = running(gate)
    gate.freeze("j", by="operator", reason="x")
    gate.begin_sync("j", sync_started(old), operation="s1")
    new = start(gate, "j", "a2")
    assert job(gate).syncs["s1"].status == "failed"
    with pytest.raises(StaleGrant, match=f"a2 at epoch {new.epoch}"):
        gate.begin_sync("j", sync_started(old))
    assert gate.begin_sync("j", sync_started(new))


# Safe mode.


def test_freeze_abandons_what_has_not_begun_and_lets_the_rest_end(gate: Gate) -> None:
    running(gate)
    pending = gate.propose("j", proposal())
    grant = granted(gate)
    assert gate.freeze("j", by="operator", reason="x") is not None
    assert gate.freeze("j", by="operator", reason="x") is None
    assert {move(gate, o).status for o in (pending, grant.operation)} == {"abandoned"}
    assert job(gate).frozen == HALF
    with pytest.raises(IllegalStep, match="thaw"):
        gate.thaw("j", by="scheduler", reason="x")
    assert gate.thaw("j", by="operator:ada", reason="looked") is not None
    assert gate.thaw("j", by="operator:ada", reason="looked") is None

    begun = advance(gate, granted(gate), "quiesced")
    gate.freeze("j", by="verifier", reason="finding")
    for status in ("transferred", "verified", "committed"):
        step(gate, begun, status)
    assert job(gate).topology.matches(WIDE)
    with pytest.raises(Rejected, match="safe-mode"):
        gate.propose("j", proposal(TRAIN, owed={"rollout": 0}))
    back = granted(gate, HALF, restoring=True, predicted_gain_s=-5.0)
    advance(gate, back, "committed")
    assert job(gate).topology.matches(HALF)


def test_a_declared_rule_may_thaw(gate: Gate) -> None:
    running(gate, rules_may_thaw=("calm-again",))
    gate.freeze("j", by="gate", reason="x")
    assert gate.thaw("j", by="calm-again", reason="x") is not None


def losing_move(gate: Gate, after: Topology, adjusted_s: float) -> None:
    grant = granted(gate, after)
    advance(gate, grant, "committed")
    gate.gain_realized("j", grant.operation, gain(adjusted_s))


def test_losing_moves_in_a_row_end_in_safe_mode(gate: Gate) -> None:
    running(gate, max_losing_moves=3)
    for adjusted_s in (-1.0, -1.0, 3.0, -1.0, -1.0):
        losing_move(gate, WIDE if job(gate).topology.matches(HALF) else HALF, adjusted_s)
        assert job(gate).safe_mode is None
    losing_move(gate, HALF if job(gate).topology.matches(WIDE) else WIDE, -0.5)
    assert job(gate).safe_mode == "3 losing moves in a row"
    assert types(gate)[-2:] == ["GainRealized", "SafeModeEntered"]
    gate.thaw("j", by="operator", reason="new model")
    assert job(gate).losing_moves == 0


def test_gains_outside_their_interval_in_a_row_end_in_safe_mode(gate: Gate) -> None:
    running(gate, max_missed_predictions=3)
    for adjusted_s in (9.0, 9.0, 2.0, 1.0, 9.0):
        losing_move(gate, WIDE if job(gate).topology.matches(HALF) else HALF, adjusted_s)
        assert job(gate).safe_mode is None
    losing_move(gate, HALF if job(gate).topology.matches(WIDE) else WIDE, 1.0)
    assert job(gate).safe_mode == "3 gains in a row outside their predicted interval"


def test_a_gain_is_recorded_once(gate: Gate) -> None:
    running(gate)
    grant = granted(gate)
    with pytest.raises(IllegalStep, match="granted"):
        gate.gain_realized("j", grant.operation, gain(1.0))
    advance(gate, grant, "committed")
    first = gate.gain_realized("j", grant.operation, gain(1.0))
    assert gate.gain_realized("j", grant.operation, gain(1.0)).first == first.first
    with pytest.raises(IllegalStep, match="repeated"):
        gate.gain_realized("j", grant.operation, gain(2.0))


# Jobs, attempts, leases.


def test_open_job_once(gate: Gate) -> None:
    first = gate.open_job("j", opened())
    assert gate.open_job("j", opened()).first == first.first
    assert gate.open_job("j", opened()).repeated
    with pytest.raises(IdempotencyConflict, match="'open'"):
        gate.open_job("j", opened(mode="advise"))
    with pytest.raises(InvalidInput):
        gate.open_job("shiftbook", opened())


def test_a_second_attempt_has_a_new_epoch_and_closes_what_was_pending(gate: Gate) -> None:
    first = running(gate)
    pending = gate.propose("j", proposal())
    second = start(gate, "j", "a2", topology=WIDE)
    assert second.epoch > first.epoch
    assert start(gate, "j", "a2", topology=WIDE) == second
    assert move(gate, pending).status == "abandoned"
    assert {held.epoch for held in gate.ledger.state().leases.values()} == {second.epoch}
    assert job(gate).topology.matches(WIDE)
    stored = gate.ledger.event(second.epoch)
    assert isinstance(stored.parsed(), LeaseGranted)
    assert gate.ledger.event(second.epoch + 1).type == "AttemptStarted"


def test_an_attempt_waits_for_an_open_move(gate: Gate) -> None:
    running(gate)
    grant = granted(gate)
    with pytest.raises(IllegalStep, match="recover first"):
        start(gate, "j", "a2")
    for blocked in (
        lambda: gate.close_job("j", CLOSED),
        lambda: gate.release("j", holder="a1", reason="x"),
        lambda: gate.expire("j", holder="a1", evidence="locks free"),
    ):
        with pytest.raises(IllegalStep):
            blocked()
    step(gate, grant, "rolled_back")
    assert start(gate, "j", "a2")


def test_leases_across_jobs(gate: Gate) -> None:
    running(gate)
    gate.open_job("k", opened())
    with pytest.raises(IllegalStep, match=r"lease: expected n/0 free, found leased by j at 1"):
        start(gate, "k")
    with pytest.raises(IllegalStep, match="evidence"):
        gate.expire("j", holder="a1", evidence="")
    assert gate.expire("j", holder="nobody", evidence="x") is None
    assert gate.expire("j", holder="a1", evidence="device locks free") is not None
    assert start(gate, "k")
    with pytest.raises(IllegalStep, match="leased by k"):
        start(gate, "j", "a2")
    assert gate.release("k", holder="a1", reason="done") is not None
    assert gate.release("k", holder="a1", reason="done") is None
    assert start(gate, "j", "a2")


def test_closing_a_job_frees_its_devices_and_ends_it(gate: Gate) -> None:
    running(gate)
    pending = gate.propose("j", proposal())
    receipt = gate.close_job("j", CLOSED)
    assert [gate.ledger.event(p).type for p in receipt.positions] == [
        "ReallocationAbandoned",
        "JobClosed",
        "LeaseReleased",
    ]
    assert gate.ledger.state().leases == {}
    assert move(gate, pending).status == "abandoned"
    assert gate.close_job("j", CLOSED).repeated
    for refused in (
        lambda: start(gate, "j", "a2"),
        lambda: gate.propose("j", proposal()),
        lambda: gate.amend("j", "seed", 8, "x"),
        lambda: gate.freeze("j", by="operator", reason="x"),
    ):
        with pytest.raises(IllegalStep, match="closed"):
            refused()


def test_amend_names_what_is_wrong(gate: Gate) -> None:
    running(gate)
    with pytest.raises(InvalidInput, match=r"no field 'moves\.speed'"):
        gate.amend("j", "moves.speed", 3, "x")
    with pytest.raises(IllegalStep, match=r"moves\.cooldown_s"):
        gate.amend("j", "moves.cooldown_s", -1, "x")
    gate.amend("j", "moves.allow", ["pause"], "no trainer moves")
    gate.amend("j", "moves.allow", ["pause", "reboot"], "some trainer moves")
    current = job(gate).plan
    assert current is not None
    assert current.moves.allow == ("pause", "reboot")


def test_unknown_names(gate: Gate) -> None:
    with pytest.raises(UnknownJob, match="jobs here: none"):
        gate.freeze("nope", by="operator", reason="x")
    running(gate)
    with pytest.raises(UnknownOperation):
        gate.grant("j", "move-77")
    with pytest.raises(ShiftbookError):
        gate.propose("nope", proposal())
