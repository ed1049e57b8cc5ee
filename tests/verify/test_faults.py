"""Goal: each invariant names the fault that breaks it, where it is, and what should have been.

Method: one fault at a time is put into the honest run, as a faulty job would have written it; the
run is written through a real ledger and judged. Each case states the invariant that must speak,
the position, words of expected and found, and every other invariant that may speak about the same
fault, so that a fault does not read as many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shiftbook.checkpoint.sampler import HASH_SORT, expected_draws
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.events.lease import LeaseGranted
from shiftbook.ledger.events.reallocation import ReallocationPoisoned
from shiftbook.ledger.events.safety import ShadowDifference
from shiftbook.ledger.topology import Topology
from shiftbook.verify.verdict import Verdict
from tests.verify.honest_run import (
    DATASET,
    JOB,
    MOVED,
    PLACES,
    SEED,
    Entry,
    Run,
    advantages,
    h128,
    h256,
    index_of,
    parts,
    policy,
    prompt,
)


@dataclass(frozen=True)
class Case:
    """A fault: how it is put in (gives its position), who speaks, what is said."""

    name: str
    invariant: str
    put_in: Callable[[Run], int]
    expected: str
    found: str
    also: frozenset[str] = field(default_factory=frozenset)


CASES: list[Case] = []


def case(
    invariant: str, expected: str, found: str, *also: str
) -> Callable[[Callable[[Run], int]], Callable[[Run], int]]:
    """Register the decorated fault."""

    def register(put_in: Callable[[Run], int]) -> Callable[[Run], int]:
        name = put_in.__name__.strip("_")
        CASES.append(Case(name, invariant, put_in, expected, found, frozenset(also)))
        return put_in

    return register


def change(run: Run, name: str, number: int = 0, **fields: object) -> int:
    run.get(name, number).change(**fields)
    return run.at(name, number)


def rows(run: Run, name: str, number: int = 0) -> dict[str, list]:
    found = run.get(name, number).rows
    assert found is not None
    return found


def with_part(run: Run, name: str, part: str, value: str | None, number: int = 0) -> int:
    entry = run.get(name, number)
    kept = {**entry.event.parts, part: value}
    entry.change(parts={k: v for k, v in kept.items() if v is not None})
    return run.at(name, number)


# -- legality, leases, operations ----------------------------------------------------------


@case("legality", "ReallocationQuiesced after granted", "is proposed")
def _quiesced_without_grant(run: Run) -> int:
    at = run.at("ReallocationQuiesced", 0)
    run.entries[at - 1], run.entries[at] = run.entries[at], run.entries[at - 1]
    return at - 1


@case("legality", "JobOpened once", "the job is open", "I8", "I15")
def _opened_twice(run: Run) -> int:
    run.entries.insert(3, Entry(run.get("JobOpened").event))
    shift(run)
    return 3


@case("legality", "rollout[n/0 n/1 n/2]", "ReallocationCommitted while rollout[n/3]")
def _committed_elsewhere(run: Run) -> int:
    return change(run, "ReallocationCommitted", after=Topology.of({"rollout": ["n/3"]}))


@case("legality", "rollout[n/0 n/1 n/2]", "ReallocationRolledBack while rollout[n/0]")
def _rolled_back_elsewhere(run: Run) -> int:
    return change(run, "ReallocationRolledBack", restored=Topology.of({"rollout": ["n/0"]}))


@case("legality", "policy version", "5", "I15", "I8", "I6", "I17b", "I13")
def _version_jumps(run: Run) -> int:
    return change(run, "UpdateApplied", -1, policy_version=5)


@case("legality", "granted at", "leases in force")
def _attempt_without_standing_grant(run: Run) -> int:
    at = run.at("AttemptStarted", 1)
    run.entries[at].change(epoch=at)
    for later in run.entries[at:]:
        if later.name == "WeightSyncStarted":
            later.change(epoch=at)
    return at


@case("legality", "while the job is open", "the job is closed", "I4")
def _draws_after_the_end(run: Run) -> int:
    draws = expected_draws(HASH_SORT, SEED, DATASET, 16, 4)
    event = run.get("SamplesDrawn", -1).event
    indices = tuple(draw.index for draw in draws)
    run.add(event.model_copy(update={"start": 16, "indices": indices}))
    return len(run.entries) - 1


@case("lease", "n/0 free", f"leased by {JOB}")
def _leased_to_another_job(run: Run) -> int:
    at = run.at("IterationCompleted", 0) + 1
    run.entries.insert(at, Entry(LeaseGranted(devices=("n/0",), holder="b"), job="other"))
    shift(run)
    return at


@case("lease", "n/9 leased by", "leased by nobody", "legality")
def _granted_outside_the_lease(run: Run) -> int:
    return change(run, "ReallocationGranted", 0, devices=("n/2", "n/9"))


@case("lease", "n/7 leased by", "leased by nobody")
def _replica_outside_the_lease(run: Run) -> int:
    return change(run, "ReplicaStarted", 0, devices=("n/7",))


@case("operations", "closed before the job", "proposed when the job closed")
def _operation_left_open(run: Run) -> int:
    at = run.at("ReallocationRejected")
    del run.entries[at]
    shift(run)
    return at - 1


@case("operations", "the last weight sync", "still started", "I6", "legality")
def _sync_left_open(run: Run) -> int:
    at = run.at("WeightSyncCommitted", -1)
    del run.entries[at]
    return run.at("WeightSyncStarted", -1)


@case("operations", "committed or rolled back", "poisoned: both ways failed", "legality", "lease")
def _poisoned(run: Run) -> int:
    at = run.at("ReallocationRolledBack", 1)
    operation = run.entries[at].operation
    event = ReallocationPoisoned(devices=("n/2",), cause="both ways failed")
    run.entries[at] = Entry(event, operation)
    return at


@case("move-equality", "1 fingerprints as before", "rollout")
def _moved_state_differs(run: Run) -> int:
    return change(run, "ReallocationVerified", after={"rollout": h128("other")})


@case("move-equality", "2 fingerprints as before", "rollout")
def _moved_state_lost_a_part(run: Run) -> int:
    before = {"rollout": policy(0), "trainer": policy(0)}
    after = {"trainer": policy(0)}
    return change(run, "ReallocationVerified", before=before, after=after)


# -- restore and first use -----------------------------------------------------------------


@case("I1", "part optimizer", "differing: optimizer", "I17b")
def _optimizer_not_restored(run: Run) -> int:
    return with_part(run, "CheckpointRestored", "optimizer", h128("fresh"))


@case("I1", "part masters", "nothing recorded", "I17b")
def _a_part_is_missing_after_the_restore(run: Run) -> int:
    return with_part(run, "CheckpointRestored", "masters", None)


@case("I1", "iteration 2", "iteration 1")
def _iteration_not_restored(run: Run) -> int:
    return change(run, "CheckpointRestored", iteration=1)


@case(
    "I1",
    "which the attempt names",
    "bundle",
    "I15",
    "I2",
    "I17",
    "I19",
    "I17b",
    "I6",
    "I13",
    "I18",
    "I24",
    "I9b",
    "I26",
    "I8",
)
def _another_bundle_restored(run: Run) -> int:
    return change(run, "CheckpointRestored", bundle=h256("bundle", 1))


@case("I14", "reference", "reference", "I1b")
def _reference_follows_the_policy(run: Run) -> int:
    return with_part(run, "CheckpointSaved", "reference", policy(4), 3)


@case("I14", "reference", "reference", "I1", "I17b")
def _reference_lost_in_the_restore(run: Run) -> int:
    with_part(run, "StateFirstUsed", "reference", h128("zero"), 1)
    return with_part(run, "CheckpointRestored", "reference", h128("zero"))


@case("I17b", "masters", "differing: masters")
def _masters_overwritten_before_first_use(run: Run) -> int:
    return with_part(run, "StateFirstUsed", "masters", h128("late init"), 1)


@case("I17b", "model", "differing: model", "I6", "I8")
def _moved_engine_reloads_the_base_policy(run: Run) -> int:
    return with_part(run, "StateFirstUsed", "model", h128("base"))


# -- order and consumption -----------------------------------------------------------------


@case("I2", "ordinal 8", "ordinal 0", "I3", "I10", "I10b", "replay", "I11", "I12")
def _sampler_restarts_after_the_crash(run: Run) -> int:
    return change(run, "SamplesDrawn", 3, start=0)


@case("I2", "ordinal 4", "ordinal 6", "I3", "I10", "I10b", "I4")
def _sampler_runs_ahead(run: Run) -> int:
    return change(run, "SamplesDrawn", 1, start=6)


@case("I2", "cursor from 4", "cursor 8", "I10b")
def _bundle_cursor_ahead(run: Run) -> int:
    return change(run, "CheckpointSaved", 0, cursor=8)


@case("I2", "cursor from 4", "cursor 0")
def _bundle_cursor_behind(run: Run) -> int:
    return change(run, "CheckpointSaved", 0, cursor=0)


@case("I2", "bundle's cursor 8", "cursor 4")
def _cursor_not_restored(run: Run) -> int:
    return change(run, "CheckpointRestored", cursor=4)


@case("I3", "draws index", "index", "I4")
def _indices_exchanged(run: Run) -> int:
    event = run.get("SamplesDrawn", 1).event
    a, b, *rest = event.indices
    return change(run, "SamplesDrawn", 1, indices=(b, a, *rest))


@case("I3", "draws index", "index", "replay", "I4")
def _second_epoch_in_the_first_ones_order(run: Run) -> int:
    # Ordinals 8 and 9 are of the first epoch of 10 prompts, 10 and 11 of the second.
    first = run.get("SamplesDrawn", 0).event.indices
    event = run.get("SamplesDrawn", 2).event
    for number in (2, 3):
        change(run, "SamplesDrawn", number, indices=(*event.indices[:2], *first[:2]))
    return run.at("SamplesDrawn", 2)


@case("I3", "seed 5", "seed 6")
def _another_seed(run: Run) -> int:
    return change(run, "SamplesDrawn", 0, seed=6)


@case("I3", "epoch 0", "epoch 1")
def _wrong_epoch(run: Run) -> int:
    return change(run, "SamplesDrawn", 0, epoch=1)


@case("I10", "consumed 1 time", "twice in one batch", "I12b", "I21", "I5")
def _sample_twice_in_a_batch(run: Run) -> int:
    columns = rows(run, "BatchConsumed", 0)
    for values in columns.values():
        values.append(values[0])
    return run.at("BatchConsumed", 0)


@case("I10", "consumed 1 time", "000000/0: closed before", "I12b", "I10b", "replay", "I5")
def _old_sample_consumed_again(run: Run) -> int:
    rows(run, "BatchConsumed", 1)["uid"][0] = "000000/0"
    return run.at("BatchConsumed", 1)


@case("I10", "consumed 1 time", "4/0: no uid of the form 000123/5", "I12b", "I10b")
def _uid_written_otherwise(run: Run) -> int:
    rows(run, "BatchConsumed", 1)["uid"][0] = "4/0"
    return run.at("BatchConsumed", 1)


@case("I10", "consumed 1 time", "000077/0: never drawn", "I12b", "I10b", "I5")
def _made_up_sample(run: Run) -> int:
    rows(run, "BatchConsumed", 1)["uid"][0] = "000077/0"
    return run.at("BatchConsumed", 1)


@case("I10", "consumed 1 time", "000005/2: dropped before", "I12b", "I11", "I12", "I10b", "I16")
def _dropped_sample_consumed(run: Run) -> int:
    columns = rows(run, "BatchConsumed", 1)
    at = columns["uid"].index("000005/1")
    columns["uid"][at] = "000005/2"
    columns["uid"][0], columns["uid"][at] = columns["uid"][at], columns["uid"][0]
    return run.at("BatchConsumed", 1)


@case("I10", "consumed 1 time", "000012/0, 000012/1, 000012/2 and 13 more: consumed before", "I21")
def _batch_consumed_twice(run: Run) -> int:
    at = run.at("BatchConsumed", -1) + 1
    original = run.entries[at - 1]
    run.entries.insert(at, Entry(original.event, rows=dict(original.rows or {})))
    shift(run)
    return at


@case("I10b", "16 samples of iteration 0", "1 neither: 000003/3", "I12b", "I21")
def _sample_lost(run: Run) -> int:
    for values in rows(run, "BatchConsumed", 0).values():
        values.pop()
    fix_tokens(run, 0)
    return run.at("IterationCompleted", 0)


@case("I10b", "16 samples of iteration 1", "1 neither: 000005/2", "I12b")
def _dropped_without_an_event(run: Run) -> int:
    at = run.at("SamplesDropped")
    del run.entries[at]
    shift(run)
    return run.at("IterationCompleted", 1)


@case("I10b", "a drop rule", "too long")
def _dropped_for_an_undeclared_reason(run: Run) -> int:
    return change(run, "SamplesDropped", reason="too long: 2000 tokens")


@case("I10b", "000005/9 drawn", "never drawn", "I10b")
def _drop_of_another_sample(run: Run) -> int:
    return change(run, "SamplesDropped", uids=("000005/2", "000005/9"))


# -- linkage -------------------------------------------------------------------------------


@case("I11", "000004/1: tokens", "tokens", "I12")
def _tokens_encoded_again(run: Run) -> int:
    rows(run, "BatchConsumed", 1)["token_digest"][1] = h128("re-encoded")
    return run.at("BatchConsumed", 1)


@case("I11", "000004/1: generated before", "never generated", "I12", "I13")
def _consumed_and_never_generated(run: Run) -> int:
    for values in rows(run, "SamplesGenerated", 1).values():
        del values[1]
    return run.at("SamplesRewarded", 1)


@case("I12", "reward", "reward", "I12b")
def _rewards_slip_by_one(run: Run) -> int:
    values = rows(run, "BatchConsumed", 1)["reward"]
    values.append(values.pop(0))
    return run.at("BatchConsumed", 1)


@case("I12", "000004/2: a recorded reward", "none recorded")
def _reward_not_recorded(run: Run) -> int:
    for values in rows(run, "SamplesRewarded", 1).values():
        del values[2]
    return run.at("BatchConsumed", 1)


@case("I12b", "000004/0: advantage", "mean")
def _advantage_of_another_group(run: Run) -> int:
    values = rows(run, "BatchConsumed", 1)["advantage"]
    rows(run, "BatchConsumed", 1)["advantage"][:] = [values[-1] + 1.0, *values[1:]]
    return run.at("BatchConsumed", 1)


@case("I12b", "one group for each draw", "in group 0")
def _groups_by_stride_after_a_loss(run: Run) -> int:
    columns = rows(run, "BatchConsumed", 1)
    columns["group"] = [i // 4 for i in range(len(columns["uid"]))]
    columns["virtual_rank"] = [g // 2 for g in columns["group"]]
    columns["group"] = [0, 0, 0, 0, 0, *columns["group"][5:]]
    columns["virtual_rank"] = [0, 0, 0, 0, 0, *columns["virtual_rank"][5:]]
    columns["advantage"] = advantages(columns["uid"])
    return run.at("BatchConsumed", 1)


@case("I12b", "consumed with its group", "left out", "I10b", "I21")
def _group_without_a_member(run: Run) -> int:
    columns = rows(run, "BatchConsumed", 0)
    for values in columns.values():
        del values[5]
    columns["advantage"] = advantages(columns["uid"])
    fix_tokens(run, 0)
    return run.at("BatchConsumed", 0)


@case("record", "digest", "in BatchConsumed")
def _digest_of_another_batch(run: Run) -> int:
    entry = run.get("BatchConsumed", 1)
    entry.filled = False
    entry.change(count=15, tokens=105, digest="1" * 64)
    return run.at("BatchConsumed", 1)


@case("record", "reward_mean", "in SamplesRewarded")
def _mean_of_another_batch(run: Run) -> int:
    entry = run.get("SamplesRewarded", 0)
    original = entry.rows
    assert original is not None
    entry.filled = False
    from shiftbook.ledger.digests import rewarded_digest

    scored = zip(original["uid"], original["token_digest"], original["reward"], strict=True)
    entry.change(count=16, reward_mean=9.0, digest=rewarded_digest(scored))
    return run.at("SamplesRewarded", 0)


# -- versions and syncs --------------------------------------------------------------------


@case("I13", "tokens of versions 1 to 1", "versions 0 to 0", "I6", "I8")
def _stale_sample(run: Run) -> int:
    columns = rows(run, "SamplesGenerated", 1)
    columns["version_min"][3] = columns["version_max"][3] = 0
    change(run, "BatchConsumed", 1, version_min=0)
    return run.at("BatchConsumed", 1)


@case("I13", "one version a sample", "versions 0 to 1", "I8")
def _mixed_versions_in_a_sample(run: Run) -> int:
    rows(run, "SamplesGenerated", 1)["version_min"][3] = 0
    change(run, "BatchConsumed", 1, version_min=0)
    return run.at("BatchConsumed", 1)


@case("I13", "consumed by version 1", "policy_version 3", "I13")
def _trainer_counter_wrong(run: Run) -> int:
    return change(run, "BatchConsumed", 1, policy_version=3)


@case("I8", "version 1 is policy", "IterationCompleted says")
def _version_of_another_policy(run: Run) -> int:
    return change(run, "IterationCompleted", 0, policy_fingerprint=h128("other"))


@case("I8", "of its own for version 2", "which is version 1")
def _version_counts_calls(run: Run) -> int:
    return change(run, "IterationCompleted", 0, policy_version=2)


@case("I15", "version 2 of the bundle", "version 0", "I8", "I6", "I17", "legality", "replay", "I13")
def _version_restarts_after_the_crash(run: Run) -> int:
    at = run.at("AttemptStarted", 1)
    run.entries[at].change(policy_version=0, policy_fingerprint=policy(0))
    return at


@case("I15", "bundle of version 1", "version 2", "I8")
def _bundle_stamped_with_a_live_counter(run: Run) -> int:
    return change(run, "CheckpointSaved", 0, policy_version=2)


@case("I6", "source root", "source root", "I8")
def _sync_sends_the_old_policy(run: Run) -> int:
    at = run.at("WeightSyncStarted", 1)
    operation = run.entries[at].operation
    run.entries[at].change(source_root=policy(0))
    for entry in run.entries[at:]:
        if entry.name == "WeightSyncDelivered" and entry.operation == operation:
            entry.change(root=policy(0))
    return at


@case("I6", "as it was sent", "differing: lm_head")
def _engine_keeps_an_old_tensor(run: Run) -> int:
    return change(run, "WeightSyncDelivered", 2, root=h128("half"), differing=("lm_head",))


@case("I6", "verified at version 1", "samples at version 1")
def _engine_restarts_and_serves_at_once(run: Run) -> int:
    at = run.at("SamplesGenerated", 1)
    columns = rows(run, "SamplesGenerated", 1)
    columns["incarnation"] = ["rollout-n.0#again", *columns["incarnation"][1:]]
    return at


@case("I6", "a delivery for each serving target", "no delivery to rollout-n.1", "I6")
def _failed_delivery_passed_over(run: Run) -> int:
    at = run.at("WeightSyncDelivered", 1)
    del run.entries[at]
    shift(run)
    return at


@case("I6", "outcome for each target", "no outcome of rollout-n.1")
def _target_without_an_outcome(run: Run) -> int:
    entry = run.get("WeightSyncCommitted", 0)
    return change(run, "WeightSyncCommitted", 0, outcomes=entry.event.outcomes[:1])


# -- updates -------------------------------------------------------------------------------


@case("I17", "masters", "masters")
def _masters_changed_between_updates(run: Run) -> int:
    return change(run, "UpdateApplied", 1, masters_before=h128("other"))


@case("I17", "model", "model", "I8", "I22")
def _policy_reloaded_between_updates(run: Run) -> int:
    return change(run, "UpdateApplied", 1, params_before=policy(0))


@case("I17", "optimizer", "optimizer")
def _optimizer_lost_in_the_crash(run: Run) -> int:
    return change(run, "UpdateApplied", 2, optimizer_before=h128("fresh"))


@case("I17", "masters", "in the bundle", "I1", "I17b", "I1b")
def _bundle_of_another_moment(run: Run) -> int:
    return with_part(run, "CheckpointSaved", "masters", h128("masters", 0), 0)


@case("I18", "learning rate 0.001", "0.002")
def _wrong_learning_rate(run: Run) -> int:
    return change(run, "UpdateApplied", 1, learning_rate=2e-3)


@case("I19", "optimizer step 2", "step 1", "I19")
def _optimizer_counter_restarts(run: Run) -> int:
    return change(run, "UpdateApplied", 1, optimizer_step=1)


@case("I21", "105 tokens, as consumed", "98 tokens")
def _micro_batch_left_out(run: Run) -> int:
    return change(run, "UpdateApplied", 1, tokens=98)


@case("I21", "divisor 105", "divisor 2")
def _mean_of_means(run: Run) -> int:
    return change(run, "UpdateApplied", 1, divisor=2.0)


@case("I21", "a BatchConsumed", "none", "I10b", "I5")
def _update_of_an_unrecorded_batch(run: Run) -> int:
    del run.entries[run.at("BatchConsumed", 1)]
    shift(run)
    return run.at("UpdateApplied", 1)


@case("I23", "masters changed", "same fingerprint", "I17", "replay")
def _update_without_effect(run: Run) -> int:
    at = run.at("UpdateApplied", 0)
    run.entries[at].change(masters_after=parts(0)["masters"])
    return at


@case("I23", "skipped update", "masters changed", "I19", "I18", "I24")
def _skipped_and_applied(run: Run) -> int:
    return change(run, "UpdateApplied", 1, skipped=True)


@case("I5", "one virtual rank", "by 0 and 1")
def _group_split_over_ranks(run: Run) -> int:
    # Both groups of each rank keep their number: one member of group 0 goes to rank 1.
    columns = rows(run, "BatchConsumed", 1)
    columns["virtual_rank"][1] = 1
    change(run, "UpdateApplied", 1, virtual_ranks=ranks(run, 2, 3))
    return run.at("BatchConsumed", 1)


@case("I5", "virtual rank 1 added its 2", "1 groups")
def _rank_lost_a_group(run: Run) -> int:
    return change(run, "UpdateApplied", 1, virtual_ranks=ranks(run, 2, 1))


@case("I5", "2 virtual ranks", "virtual ranks 0")
def _rank_missing(run: Run) -> int:
    return change(run, "UpdateApplied", 1, virtual_ranks=ranks(run, 2))


@case("replay", "digest of generated samples", "", "I16")
def _replay_samples_differ(run: Run) -> int:
    rows(run, "SamplesGenerated", 3)["logp_digest"][0] = h128("other bits")
    return run.at("SamplesGenerated", 3)


@case("replay", "digest of rewards", "", "I12", "I12b")
def _replay_rewards_differ(run: Run) -> int:
    rows(run, "SamplesRewarded", 3)["reward"][0] += 1.0
    return run.at("SamplesRewarded", 3)


@case("evidence", "segment", "expected evidence at")
def _segment_is_missing(run: Run) -> int:
    entry = run.get("SamplesRewarded", 1)
    entry.rows = None
    entry.change(
        segment=Segment(sha256="a" * 64, rows=1, columns=("uid",), bytes=1),
        count=15,
        digest="0" * 64,
    )
    return run.at("SamplesRewarded", 1)


@case("evidence", "segment", "no column logp_digest")
def _segment_without_a_column(run: Run) -> int:
    entry = run.get("SamplesGenerated", 1)
    assert entry.rows is not None
    del entry.rows["logp_digest"]
    entry.filled = False
    return run.at("SamplesGenerated", 1)


# -- helpers of the cases ------------------------------------------------------------------


def ranks(run: Run, *groups: int) -> tuple:
    """Virtual ranks as an update reports them, with these numbers of groups."""
    one = run.get("UpdateApplied", 1).event.virtual_ranks[0]
    return tuple(
        one.model_copy(update={"virtual_rank": rank, "groups": count})
        for rank, count in enumerate(groups)
    )


def fix_tokens(run: Run, number: int) -> None:
    """Make an update's tokens those of its batch, so that only the loss of the sample shows."""
    total = sum(rows(run, "BatchConsumed", number)["tokens"])
    change(run, "UpdateApplied", number, tokens=total, divisor=float(total))


# -- what the recorder adds ------------------------------------------------------------------


def nested(run: Run, name: str, number: int, field: str, value: object) -> int:
    """Replace one field of an update."""
    return change(run, name, number, **{field: value})


@case("I1b", "in the file, as at the save", "differing: masters")
def _file_of_a_later_state(run: Run) -> int:
    found = {**run.get("CheckpointSaved", 1).event.file_parts, "masters": h128("later")}
    return change(run, "CheckpointSaved", 1, file_parts=found)


@case("I4", "as the plan declares", "data set", "replay")
def _another_data_set(run: Run) -> int:
    columns = rows(run, "DataBuilt")
    columns["digest"][3] = h128("edited")
    digests = "\n".join(columns["digest"])
    whole = hashlib.sha256(digests.encode()).hexdigest()
    return change(run, "DataBuilt", dataset_digest=whole)


@case("I4", "index", "prompt")
def _another_prompt_drawn(run: Run) -> int:
    found = run.get("SamplesDrawn", 1).event.prompt_digests
    return change(run, "SamplesDrawn", 1, prompt_digests=(h128("stale"), *found[1:]))


@case("I4", "000004/0 generated from prompt", "1 samples")
def _another_prompt_fed(run: Run) -> int:
    rows(run, "SamplesGenerated", 1)["prompt_digest"][0] = h128("other")
    return run.at("SamplesGenerated", 1)


@case("I7", "cached values of version 1 or newer", "values of version 0 under weights 1")
def _prefix_of_old_weights(run: Run) -> int:
    rows(run, "SamplesGenerated", 1)["cache_version_min"][2] = 0
    return run.at("SamplesGenerated", 1)


@case("I7", "flush", "no cache flushed")
def _cache_never_flushed(run: Run) -> int:
    return change(run, "WeightSyncCommitted", 1, caches_flushed=())


@case("I9", "a random state of its own for rank/1", "rank/1 and rank/0", "I9b")
def _streams_collapse(run: Run) -> int:
    states = run.get("RandomStatesRecorded", 1).event.states
    return change(run, "RandomStatesRecorded", 1, states=dict.fromkeys(states, states["rank/0"]))


@case("I9", "randomness of its own", "the same as")
def _two_samples_one_stream(run: Run) -> int:
    streams = rows(run, "SamplesGenerated", 1)["stream"]
    streams[1] = streams[0]
    return run.at("SamplesGenerated", 1)


@case("I9b", "as it was left", "differing: rank/0")
def _reseeded_before_the_update(run: Run) -> int:
    states = run.get("RandomStatesRecorded", 3).event.states
    assert run.get("RandomStatesRecorded", 3).event.moment == "before"
    return change(run, "RandomStatesRecorded", 3, states={**states, "rank/0": h128("seed")})


@case("I11", "those that were sampled", "trained tokens")
def _tool_text_trained(run: Run) -> int:
    rows(run, "BatchConsumed", 0)["mask_digest"][1] = h128("all ones")
    return run.at("BatchConsumed", 0)


@case("I16", "rounding of float32; nothing was calibrated", "mean gap 0.01")
def _log_probabilities_do_not_replay(run: Run) -> int:
    return change(run, "LogProbsReplayed", 1, mean_gap=0.01, largest_gap=0.03)


@case("I16", "drawn as the declared randomness and transform say", "3 drawn otherwise")
def _tokens_drawn_otherwise(run: Run) -> int:
    return change(run, "LogProbsReplayed", 0, other_tokens=3)


@case("I16", "temperature 1.0", "temperature 0.6")
def _another_temperature(run: Run) -> int:
    hot = run.get("SamplesGenerated", 0).event.transform.model_copy(update={"temperature": 0.6})
    return change(run, "SamplesGenerated", 0, transform=hot)


@case("I16", "the engine's own", "1 samples")
def _behaviour_values_recomputed(run: Run) -> int:
    rows(run, "BatchConsumed", 0)["logp_digest"][0] = h128("the trainer's")
    return run.at("BatchConsumed", 0)


@case("I18", "a schedule at 2", "at 3")
def _schedule_counts_micro_batches(run: Run) -> int:
    return change(run, "UpdateApplied", 1, scheduler_step=3)


@case("I19", "of every parameter on every rank", "counters from 0 to 2")
def _one_counter_not_restored(run: Run) -> int:
    return change(run, "UpdateApplied", 1, optimizer_step_least=0)


def other_rank(run: Run, **fields: object) -> int:
    ranks = run.get("UpdateApplied", 1).event.ranks
    return change(run, "UpdateApplied", 1, ranks=(ranks[0], ranks[1].model_copy(update=fields)))


@case("I20", "on all ranks", "on rank 1")
def _ranks_drift(run: Run) -> int:
    return other_rank(run, params=h128("drifted"))


@case("I20", "gradient", "on rank 1")
def _gradient_not_reduced(run: Run) -> int:
    return other_rank(run, gradient=h128("local"))


@case("I20", "loss scale 1.0", "0.5 on rank 1")
def _scales_differ(run: Run) -> int:
    return other_rank(run, scale=0.5)


def other_member(run: Run, **fields: object) -> int:
    first, second = run.get("UpdateApplied", 1).event.model_parallel
    members = (second.members[0], second.members[1].model_copy(update=fields))
    other = second.model_copy(update={"members": members})
    return change(run, "UpdateApplied", 1, model_parallel=(first, other))


@case("I20", "on all ranks of group tp/1", "on rank 3: norm.weight, router.weight")
def _copies_of_a_group_drift(run: Run) -> int:
    names = ("norm.weight", "router.weight")
    return other_member(run, copies=h128("drifted"), differing=names)


@case("I5", "on all ranks of group tp/1", "on rank 3")
def _a_group_is_fed_apart(run: Run) -> int:
    return other_member(run, fed=h128("of another data rank"))


@case("I20", "each rank of group tp/1 once", "ranks 2, 2", "I5")
def _a_member_reports_for_another(run: Run) -> int:
    return other_member(run, rank=2)


@case("I21", "like all of them", "by 9")
def _mean_of_means(run: Run) -> int:
    first, *rest = run.get("UpdateApplied", 0).event.micro_batches
    micro = (first.model_copy(update={"divisor": 9.0}), *rest)
    return change(run, "UpdateApplied", 0, micro_batches=micro)


@case("I21", "in the micro batches", "8 samples")
def _micro_batch_left_out(run: Run) -> int:
    first, *_ = run.get("UpdateApplied", 0).event.micro_batches
    return change(run, "UpdateApplied", 0, micro_batches=(first,))


@case("I22", "before the update, its masters in its dtype", "model")
def _masters_not_refreshed(run: Run) -> int:
    return change(run, "UpdateApplied", 2, cast_before=h128("old masters"))


@case("I23", "every parameter moved", "not so: norm")
def _a_parameter_stands_still(run: Run) -> int:
    return change(run, "UpdateApplied", 0, unmoved=("norm",))


def controlled(run: Run, number: int, **fields: object) -> int:
    value = run.get("UpdateApplied", number).event.controllers["kl_coefficient"]
    changed = {"kl_coefficient": value.model_copy(update=fields)}
    return change(run, "UpdateApplied", number, controllers=changed)


@case("I24", "kl_coefficient before the update: 0.0105", "0.01", "I26")
def _controller_not_restored(run: Run) -> int:
    return controlled(run, 1, before=0.01, after=0.01 * 1.05)


@case("I24", "after it, by adaptive-kl", "0.02")
def _controller_moves_otherwise(run: Run) -> int:
    return controlled(run, -1, after=0.02)


@case("I24", "kl that kl_coefficient read: 0.01", "0.3")
def _controller_fed_otherwise(run: Run) -> int:
    return controlled(run, 0, inputs={"kl": 0.3})


@case("I25", "micro batch 1 of rank 1", "")
def _another_mask_in_the_recompute(run: Run) -> int:
    first, second = run.get("UpdateApplied", 0).event.micro_batches
    micro = (first, second.model_copy(update={"recomputed_mask": h128("another")}))
    return change(run, "UpdateApplied", 0, micro_batches=micro)


def term(run: Run, number: int, name: str, **fields: object) -> int:
    terms = run.get("UpdateApplied", number).event.loss_terms
    changed = {**terms, name: terms[name].model_copy(update=fields)}
    return change(run, "UpdateApplied", number, loss_terms=changed)


@case("I26", "to have a part in the gradient", "a part of norm 0")
def _dead_term(run: Run) -> int:
    return term(run, 0, "kl", gradient_norm=0.0)


@case("I26", "coefficient 0.01 of kl", "0.5")
def _another_coefficient(run: Run) -> int:
    return term(run, 0, "kl", coefficient=0.5)


@case("I27", "long samples dropped as often as others", "16 of 16 drops", "I10", "I10b", "I12b")
def _slow_samples_are_dropped(run: Run) -> int:
    columns = rows(run, "SamplesGenerated", 1)
    columns["tokens"][:] = [500] * len(columns["tokens"])
    uids = tuple(f"{draw:06d}/{member}" for draw in range(4, 8) for member in range(4))
    missing = [uid for uid in uids if uid not in columns["uid"]]
    for name, values in columns.items():
        values.extend([*missing] if name == "uid" else [values[-1]] * len(missing))
    columns["stream"][-len(missing) :] = [h128("stream", uid) for uid in missing]
    fed = [prompt(index_of(int(uid[:6]))) for uid in missing]
    columns["prompt_digest"][-len(missing) :] = fed
    return change(run, "SamplesDropped", uids=uids)


@case("recomputed", "step as declared, within", "0.5 off")
def _another_step_than_declared(run: Run) -> int:
    found = run.get("UpdateApplied", 0).event.recomputed
    wrong = {**found, "step": found["step"].model_copy(update={"largest": 0.5})}
    return change(run, "UpdateApplied", 0, recomputed=wrong)


@case("shadow", "a static schedule runs them again", "iteration 2, component trainer: number loss")
def _shadow_disagreed(run: Run) -> int:
    found = ShadowDifference(
        iteration=2, component="trainer", kind="number", name="loss", what="value",
        live="0.25", shadow="0.5",
    )  # fmt: skip
    return change(run, "ShadowCompared", agreed=False, difference=found)


@case("legality", "a bundle saved at iteration 2", "ShadowCompared while one that nobody saved")
def _shadow_of_another_bundle(run: Run) -> int:
    return change(run, "ShadowCompared", bundle="f" * 64)


@case("legality", "a window compared once", "ShadowCompared while 2 again")
def _shadow_told_twice(run: Run) -> int:
    at = run.at("ShadowCompared")
    run.entries.insert(at + 1, Entry(run.get("ShadowCompared").event))
    shift(run)
    return at + 1


def shift(run: Run) -> None:
    """Set the epochs of attempts and syncs to the present positions of their leases."""
    epoch = -1
    for at, entry in enumerate(run.entries):
        if entry.name == "LeaseGranted" and entry.job == JOB:
            epoch = at
        elif entry.name in ("AttemptStarted", "WeightSyncStarted"):
            entry.change(epoch=epoch)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.invariant}-{c.name}")
def test_the_fault_is_named(case: Case, run: Run, judge: Callable[[Run], Verdict]) -> None:
    at = case.put_in(run)
    verdict = judge(run)
    assert verdict.exit_code == 1
    told = [(f.invariant, f.position, f.expected, f.found) for f in verdict.findings]
    match = [
        f
        for f in verdict.findings
        if f.invariant == case.invariant and case.expected in f.expected and case.found in f.found
    ]
    assert match, told
    assert match[0].position == at, told
    assert at in match[0].positions
    assert match[0].cause
    assert match[0].action
    spoke = {f.invariant for f in verdict.findings}
    assert spoke <= {case.invariant} | case.also, told
    assert verdict.coverage.row(case.invariant).status == "broken"


def test_each_invariant_has_a_fault() -> None:
    from shiftbook.verify.invariants import INVARIANTS

    assert {i.id for i in INVARIANTS} | {"evidence"} == {c.invariant for c in CASES}
    assert {*MOVED} == {*PLACES}
