"""Which event may follow which.

Goal: each event of a reallocation is allowed after exactly the statuses that the design draws,
and each other event that has a rule is refused with the name of that rule. Method: bring a folded
state into every status, offer every event to it, and compare with a table that is written here
once more, from the drawing in the design and not from the code.
"""

from __future__ import annotations

import pytest

from shiftbook.ledger.envelope import Draft, seal
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import lease, reallocation, safety, sync, training
from shiftbook.ledger.events.base import Event
from shiftbook.ledger.legality import check
from shiftbook.ledger.state import LedgerState
from shiftbook.ledger.topology import Topology
from tests.ledger.gate_cases import (
    FINGERPRINT,
    HALF,
    OTHER_FINGERPRINT,
    TRAIN,
    WIDE,
    bundle,
    gain,
    opened,
    proposal,
)

OPERATION = "move-3"
DEVICES = ("n/0", "n/1")


class Fold:
    """A state that events are applied to without a store."""

    def __init__(self) -> None:
        self.state = LedgerState()
        self.versions: dict[str, int] = {}

    def add(self, event: Event, operation: str | None = None, job: str = "j") -> Fold:
        version = self.versions.get(job, -1) + 1
        self.versions[job] = version
        self.state.apply(
            seal(
                Draft(event, operation=operation),
                position=self.state.size,
                job=job,
                version=version,
                recorded_ns=self.state.size,
                writer="w",
                sequence=0,
                actor="a",
                key=None,
            )
        )
        return self

    def rule(self, event: Event, operation: str | None = None, job: str = "j") -> str | None:
        violation = check(self.state, job, operation, event)
        return violation.rule if violation else None


def leased(holder: str = "a1", devices: tuple[str, ...] = DEVICES) -> lease.LeaseGranted:
    return lease.LeaseGranted(devices=devices, holder=holder)


def attempted(
    epoch: int, attempt: str = "a1", topology: Topology = HALF, parent: str | None = None
) -> job_events.AttemptStarted:
    return job_events.AttemptStarted(
        attempt=attempt,
        parent=parent,
        iteration=0,
        epoch=epoch,
        topology=topology,
        policy_version=0,
        policy_fingerprint=FINGERPRINT,
        pid=1,
    )


def started() -> Fold:
    return Fold().add(opened()).add(leased()).add(attempted(1))


def proposed(after: Topology = WIDE, before: Topology = HALF) -> reallocation.ReallocationProposed:
    return proposal(after).event(attempt="a1", before=before, since_last_move_s=None)


def granted(devices: tuple[str, ...] = DEVICES) -> reallocation.ReallocationGranted:
    return reallocation.ReallocationGranted(devices=devices, step_limit_s=1.0)


def verified(before: str = FINGERPRINT, after: str = FINGERPRINT) -> Event:
    return reallocation.ReallocationVerified(before={"p": before}, after={"p": after})


def committed(after: Topology = WIDE) -> Event:
    return reallocation.ReallocationCommitted(
        after=after, moved_bytes=1, stall_s=0.1, kv_tokens_lost=0
    )


def taken_over(previous_epoch: int = 4) -> Event:
    return reallocation.OperationTakenOver(
        devices=DEVICES, previous_epoch=previous_epoch, reason="dead"
    )


STEPS: dict[str, Event] = {
    "ReallocationRejected": reallocation.ReallocationRejected(by="g", rule="r", reason="x"),
    "ReallocationAbandoned": reallocation.ReallocationAbandoned(reason="x"),
    "ReallocationGranted": granted(),
    "ReallocationQuiesced": reallocation.ReallocationQuiesced(
        custody=(), kv_tokens_lost=0, quiesce_s=0.1
    ),
    "ReallocationTransferred": reallocation.ReallocationTransferred(
        moved_bytes=1, transfer_s=0.1, strategy="pause"
    ),
    "ReallocationVerified": verified(),
    "ReallocationCommitted": committed(),
    "ReallocationRolledBack": reallocation.ReallocationRolledBack(cause="x", restored=HALF),
    "ReallocationPoisoned": reallocation.ReallocationPoisoned(devices=DEVICES, cause="x"),
    "OperationTakenOver": taken_over(),
    "GainRealized": gain(1.0),
}

PATH: dict[str, list[str]] = {
    "none": [],
    "proposed": [],
    "rejected": ["ReallocationRejected"],
    "abandoned": ["ReallocationAbandoned"],
    "granted": ["ReallocationGranted"],
    "quiesced": ["ReallocationGranted", "ReallocationQuiesced"],
    "transferred": ["ReallocationGranted", "ReallocationQuiesced", "ReallocationTransferred"],
}
PATH["verified"] = [*PATH["transferred"], "ReallocationVerified"]
PATH["committed"] = [*PATH["verified"], "ReallocationCommitted"]
PATH["rolled_back"] = [*PATH["quiesced"], "ReallocationRolledBack"]
PATH["poisoned"] = [*PATH["quiesced"], "ReallocationPoisoned"]

MAY_FOLLOW: dict[str, set[str]] = {
    "none": set(),
    "proposed": {"ReallocationRejected", "ReallocationAbandoned", "ReallocationGranted"},
    "rejected": set(),
    "abandoned": set(),
    "granted": {
        "ReallocationAbandoned",
        "ReallocationQuiesced",
        "ReallocationRolledBack",
        "ReallocationPoisoned",
        "OperationTakenOver",
    },
    "quiesced": {
        "ReallocationTransferred",
        "ReallocationRolledBack",
        "ReallocationPoisoned",
        "OperationTakenOver",
    },
    "transferred": {
        "ReallocationVerified",
        "ReallocationRolledBack",
        "ReallocationPoisoned",
        "OperationTakenOver",
    },
    "verified": {"ReallocationCommitted", "ReallocationPoisoned", "OperationTakenOver"},
    "committed": {"GainRealized"},
    "rolled_back": set(),
    "poisoned": set(),
}


def in_status(status: str) -> Fold:
    fold = started()
    if status != "none":
        fold.add(proposed(), OPERATION)
    for name in PATH[status]:
        fold.add(STEPS[name], OPERATION)
    return fold


@pytest.mark.parametrize("status", list(PATH))
@pytest.mark.parametrize("name", list(STEPS))
def test_each_event_follows_only_its_statuses(status: str, name: str) -> None:
    fold = in_status(status)
    if status != "none":
        assert fold.state.job("j").operations[OPERATION].status == status
    rule = fold.rule(STEPS[name], OPERATION)
    if name in MAY_FOLLOW[status]:
        assert rule is None
    else:
        assert rule == "sequence"


@pytest.mark.parametrize(
    ("status", "event", "rule"),
    [
        ("transferred", verified(after=OTHER_FINGERPRINT), "fingerprints"),
        ("verified", committed(after=HALF), "topology"),
        ("quiesced", reallocation.ReallocationRolledBack(cause="x", restored=WIDE), "topology"),
        ("quiesced", taken_over(previous_epoch=3), "grant"),
        ("proposed", granted(devices=("n/0",)), "grant"),
        ("proposed", granted(devices=(*DEVICES, "n/7")), "lease"),
    ],
)
def test_a_step_in_its_order_with_wrong_content_is_refused(
    status: str, event: Event, rule: str
) -> None:
    assert in_status(status).rule(event, OPERATION) == rule


def test_part_missing_on_one_side_is_no_equality() -> None:
    one_sided = reallocation.ReallocationVerified(
        before={"p": FINGERPRINT}, after={"p": FINGERPRINT, "q": FINGERPRINT}
    )
    assert in_status("transferred").rule(one_sided, OPERATION) == "fingerprints"


def test_a_reshard_without_fingerprints_is_not_verified() -> None:
    fold = started()
    event = proposal(WIDE, strategy="reshard").event(
        attempt="a1", before=HALF, since_last_move_s=None
    )
    fold.add(event, OPERATION)
    for name in PATH["transferred"]:
        fold.add(STEPS[name], OPERATION)
    empty = reallocation.ReallocationVerified(before={}, after={})
    assert fold.rule(empty, OPERATION) == "fingerprints"


def test_grant_is_refused_where_the_job_does_not_let_it_happen() -> None:
    other = in_status("quiesced").add(proposed(), "move-9")
    assert other.rule(granted(), "move-9") == "one-operation"

    frozen = in_status("proposed").add(
        safety.SafeModeEntered(reason="x", by="operator", topology=HALF)
    )
    assert frozen.rule(granted(), OPERATION) == "safe-mode"

    advising = in_status("proposed").add(
        job_events.PlanAmended(field="moves.mode", before="act", after="advise", reason="x")
    )
    assert advising.rule(granted(), OPERATION) == "mode"

    syncing = in_status("proposed").add(sync_begin(1), "sync-1")
    assert syncing.rule(granted(), OPERATION) == "sync-priority"

    moved = in_status("committed").add(proposed(after=TRAIN, before=WIDE), "move-b")
    moved.add(proposed(after=HALF, before=WIDE), "move-a")
    for name in PATH["verified"]:
        moved.add(STEPS[name], "move-a")
    moved.add(committed(after=HALF), "move-a")
    assert moved.rule(granted(), "move-b") == "stale-topology"

    restarted = in_status("proposed").add(leased("a2")).add(attempted(4, "a2", parent="a1"))
    assert restarted.rule(granted(), OPERATION) == "attempt"

    poisoned = in_status("proposed")
    poisoned.state.quarantine["n/0"] = "move-1"
    assert poisoned.rule(granted(), OPERATION) == "quarantine"


def sync_begin(epoch: int, version: int = 1) -> sync.WeightSyncStarted:
    return sync.WeightSyncStarted(
        attempt="a1",
        version=version,
        source={"w": FINGERPRINT},
        source_root=FINGERPRINT,
        encoding="full",
        targets=("r0",),
        epoch=epoch,
    )


@pytest.mark.parametrize(
    ("status", "rule"),
    [
        ("proposed", None),
        ("granted", None),
        ("quiesced", "sync-order"),
        ("transferred", "sync-order"),
        ("verified", "sync-order"),
        ("committed", None),
        ("rolled_back", None),
    ],
)
def test_a_weight_sync_begins_only_before_quiesced(status: str, rule: str | None) -> None:
    assert in_status(status).rule(sync_begin(1), "sync-1") == rule


def test_weight_sync_events_in_their_order() -> None:
    end = sync.WeightSyncFailed(version=1, reason="x")
    fold = started()
    assert fold.rule(end, "sync-1") == "sequence"
    assert fold.rule(sync_begin(2), "sync-1") == "standing-grant"
    fold.add(sync_begin(1), "sync-1")
    assert fold.rule(sync_begin(1), "sync-2") == "sequence"
    assert fold.rule(sync.WeightSyncFailed(version=2, reason="x"), "sync-1") == "sync-version"
    assert fold.rule(end, "sync-1") is None
    fold.add(end, "sync-1")
    assert fold.rule(end, "sync-1") == "sequence"
    assert fold.rule(sync_begin(1), "sync-2") is None


def test_life_of_a_job_and_its_attempts() -> None:
    empty = Fold()
    closing = job_events.JobClosed(
        outcome="finished", iterations=1, policy_version=1, policy_fingerprint=FINGERPRINT
    )
    assert empty.rule(closing) == "sequence"
    assert empty.rule(attempted(0)) == "sequence"
    assert empty.rule(proposed(), OPERATION) == "sequence"
    assert empty.rule(opened()) is None

    fold = Fold().add(opened())
    assert fold.rule(opened()) == "sequence"
    assert fold.rule(attempted(1)) == "lease"
    fold.add(leased())
    assert fold.rule(attempted(0)) == "lease", "a lease that is newer than the grant"
    assert fold.rule(proposed(), OPERATION) == "attempt"
    fold.add(attempted(1))
    assert fold.rule(attempted(1)) == "attempt"
    assert fold.rule(attempted(1, "a2", parent="a0")) == "attempt"
    assert fold.rule(attempted(1, "a2", parent="a1")) is None
    assert fold.rule(proposed(before=WIDE), OPERATION) == "stale-topology"
    assert fold.rule(proposed()) == "sequence", "without an operation id"
    assert fold.rule(bundle("a9")) == "attempt"
    assert fold.rule(bundle("a1")) is None

    assert in_status("granted").rule(closing) == "sequence"
    assert in_status("granted").rule(attempted(1, "a2", parent="a1")) == "sequence"
    fold.add(closing)
    assert fold.rule(attempted(1, "a2")) == "sequence"
    assert fold.rule(closing) == "sequence"


def test_leases() -> None:
    fold = started()
    assert fold.rule(leased("b1"), job="k") == "lease"
    assert fold.rule(leased("a2")) is None, "the same job renews its own"
    released = lease.LeaseReleased(devices=DEVICES, holder="a1", reason="x")
    assert fold.rule(released, job="k") == "lease"
    assert in_status("granted").rule(released) == "sequence"
    assert fold.rule(lease.LeaseExpired(devices=DEVICES, holder="a1", evidence=" ")) == "evidence"
    expired = lease.LeaseExpired(devices=DEVICES, holder="a1", evidence="device locks free")
    assert fold.rule(expired) is None
    fold.add(expired)
    assert fold.rule(released) == "lease"
    assert fold.rule(leased("b1"), job="k") is None
    poisoned = in_status("poisoned")
    assert poisoned.rule(leased("a2")) == "quarantine"
    free = tuple(d for d in DEVICES if d not in poisoned.state.quarantine)
    poisoned.add(leased("a2", free))
    assert poisoned.rule(attempted(poisoned.state.size - 1, "a2", parent="a1")) == "quarantine"


def test_safe_mode_quarantine_and_amendments() -> None:
    enter = safety.SafeModeEntered(reason="x", by="gate", topology=HALF)
    leave = safety.SafeModeLeft(by="operator", reason="x")
    fold = started()
    assert fold.rule(leave) == "sequence"
    assert fold.rule(enter) is None
    fold.add(enter)
    assert fold.rule(enter) == "sequence"
    assert fold.rule(safety.SafeModeLeft(by="scheduler", reason="x")) == "thaw"
    assert fold.rule(leave) is None

    lift = safety.QuarantineLifted(devices=("n/0",), by="operator:ada", reason="reset")
    assert started().rule(lift) == "quarantine"
    assert in_status("poisoned").rule(lift) is None
    by_gate = safety.QuarantineLifted(devices=("n/0",), by="gate", reason="reset")
    assert in_status("poisoned").rule(by_gate) == "quarantine"

    def amend(field: str, before: object, after: object) -> str | None:
        event = job_events.PlanAmended(field=field, before=before, after=after, reason="x")
        return started().rule(event)

    assert amend("moves.mode", "act", "advise") is None
    assert amend("moves.mode", "observe", "advise") == "amendment"
    assert amend("moves.mode", "act", "sometimes") == "amendment"
    assert amend("moves.speed", None, 1) == "amendment"
    assert amend("seed.x", None, 1) == "amendment"


def test_update_chain_counts_versions() -> None:
    def update(version: int) -> training.UpdateApplied:
        return training.UpdateApplied(
            attempt="a1",
            iteration=0,
            policy_version=version,
            params_before=FINGERPRINT,
            params_after=FINGERPRINT,
            masters_before=FINGERPRINT,
            masters_after=FINGERPRINT,
            optimizer_before=FINGERPRINT,
            optimizer_after=FINGERPRINT,
            optimizer_step=version,
            learning_rate=0.1,
            tokens=1,
            divisor=1.0,
            loss=0.0,
            kl=0.0,
            grad_norm=0.0,
            clipped=False,
            skipped=False,
            virtual_ranks=(),
        )

    fold = started()
    assert fold.rule(update(2)) == "version"
    assert fold.rule(update(1)) is None


def test_an_impossible_amendment_in_a_ledger_does_not_stop_the_fold() -> None:
    fold = started().add(
        job_events.PlanAmended(field="moves.mode", before="act", after="sometimes", reason="x")
    )
    plan = fold.state.job("j").plan
    assert plan is not None
    assert plan.moves.mode == "act"
