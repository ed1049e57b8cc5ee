"""The demonstration: the same job under several schedules, verified and compared."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from shiftbook.jobs.beside import Beside, shadow_text
from shiftbook.jobs.chaos import Chaos
from shiftbook.jobs.config import JobConfig, Schedule, SyncEncoding, start_topology
from shiftbook.jobs.engines import EngineName, check_engine
from shiftbook.jobs.noise import Calibration, Noise
from shiftbook.jobs.runner import Cluster, Place, RunningJob
from shiftbook.jobs.same_policy import Likeness, first_tokens, likeness
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.job_state import JobState
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.report import write_report
from shiftbook.verify.coverage import Row
from shiftbook.verify.shadowing import Outcome as ShadowOutcome
from shiftbook.verify.verdict import Verdict, verify

SCHEDULES: tuple[Schedule, ...] = ("dynamic", "static", "timeshared")
ITERATION_LIMIT_S = 90.0
START_LIMIT_S = 120.0
MAX_ERROR = 1e-4
"""What a lossy weight sync of the demo may be off; its learning rate is three times that."""
WARM_UP = 1
"""Iterations at the start that the comparison of times leaves out."""

Tell = Callable[[str], None]


@dataclass
class Run:
    """One schedule's run, as the ledger has it."""

    schedule: str
    job: str
    walls_s: list[float]
    rewards: list[float]
    fingerprint: str
    samples: int
    device_s: float
    how: str
    """``run`` in this session, or ``read`` where it stood in the ledger."""

    @property
    def wall_s(self) -> float:
        """Median wall time of an iteration, the warm-up left out."""
        steady = self.walls_s[WARM_UP:] or self.walls_s
        return median(steady) if steady else 0.0


@dataclass
class Outcome:
    """Everything that the demo shows and decides on."""

    runs: dict[str, Run]
    verdict: Verdict
    moves: dict[str, Any]
    wanted: tuple[str, ...]
    faults: list[str] = field(default_factory=list)
    noise: Noise | None = None
    """Of the engine, where it gives no bits; the tolerance of the plan follows from it."""
    likenesses: list[Likeness] = field(default_factory=list)
    """The first schedule beside each other one, where the engine gives no bits."""
    shadows: list[ShadowOutcome] = field(default_factory=list)
    """Windows of the dynamic run that a static one ran again."""

    def failures(self) -> list[str]:
        """What was promised and does not hold; empty where all is well."""
        found = []
        if self.verdict.exit_code != 0:
            found.append(f"the verdict is: {self.verdict.word}")
        prints = {run.fingerprint for run in self.runs.values()}
        if self.noise is None and len(prints) > 1:
            found.append("the schedules end with different policies")
        found += [f"other than chance allows: {a.text()}" for a in self.likenesses if not a.alike]
        if any(window.word != "agreed" for window in self.shadows):
            found.append(f"the shadow: {shadow_text(self.shadows)}")
        counts = {run.schedule: run.samples for run in self.runs.values()}
        if len(set(counts.values())) > 1:
            found.append(f"samples were lost: {counts}")
        if "dynamic" in self.runs and not self.faults:
            for strategy in ("pause", "reshard"):
                if not self.moves["committed_with_bytes"].get(strategy):
                    found.append(f"no {strategy} with moved bytes was committed")
        return found


def run_demo(
    out: Path,
    *,
    iterations: int,
    schedules: Sequence[str],
    seed: int,
    slots: int,
    chaos: int | None,
    tell: Tell,
    seen: Callable[[str, dict[str, Any]], None],
    engine: EngineName = "torch",
    shadow: int | None = None,
    sync_encoding: SyncEncoding = "full",
    start_limit_s: float | None = None,
) -> Outcome:
    """Run what is not in the folder's ledger yet, verify everything, and write the report.

    A folder whose run was cut short is taken up again: each job continues from its last bundle.
    An engine that gives no bits is calibrated first, in a process of its own. With ``shadow`` every
    so many iterations of the dynamic run one is run again beside it. An engine may take
    ``start_limit_s`` to start; None takes what is usual for it.
    """
    check_engine(engine)
    if shadow is not None and (engine != "torch" or "dynamic" not in schedules):
        raise InvalidInput(
            "expected --shadow with the dynamic schedule and the engine torch, whose replay gives "
            "the same bits; leave --shadow away"
        )
    cores = len(os.sched_getaffinity(0))
    if cores < 2 or slots < 2:
        raise InvalidInput(
            f"expected at least 2 slots and 2 cores to move devices between components, found "
            f"{slots} slots and {cores} cores; run it on a larger machine"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidInput(
            f"expected a folder that can be written at {out}, found: {error.strerror}; "
            "name another one with --out"
        ) from error
    place = Place(out)
    faults: list[str] = []
    how: dict[str, str] = {}
    shadows: list[ShadowOutcome] = []
    calibration = Calibration(out, engine, JobConfig.model_fields["lanes"].default)
    with Cluster(place, slots) as cluster:
        tell(f"Ray head up, slots {' '.join(cluster.devices)}; starting the workers")
        cluster.warm()
        noise = calibration.result()
        if noise is not None:
            tell(noise.text())
        for schedule in schedules:
            config = _config(place, schedule, iterations, seed, engine, noise)
            loss = {"max_error": MAX_ERROR} if sync_encoding == "lossy" else {}
            given = {"sync_encoding": sync_encoding, "start_limit_s": start_limit_s, **loss}
            config = config.model_copy(update=given)
            if schedule == "dynamic":
                config = config.model_copy(update={"shadow_every": shadow})
            if schedule == "static":
                chosen = _best_split(place, config, cluster.devices)
                config = config.model_copy(update={"rollout_slots": chosen})
                if chosen is not None and len(cluster.devices) > 2:
                    how[schedule] = "run, split chosen from measured stage times"
            if _closed(place, config.job):
                how[schedule] = "read"
                continue
            how[schedule] = "run"
            tell(f"{schedule}: {iterations} iterations")
            job = RunningJob(config, cluster.devices)
            limit_s = START_LIMIT_S + config.engine_start_s + ITERATION_LIMIT_S * iterations
            trouble = Chaos(job, chaos, cluster.devices) if chaos is not None else None
            beside = Beside(place.ledger_url, config.job)
            try:
                if trouble is not None and schedule == "dynamic":
                    trouble.start()
                if config.shadow_every is not None:
                    beside.start()
                job.wait(limit_s, lambda status, name=schedule: seen(name, status))  # type: ignore[misc]
                if config.shadow_every is not None:
                    tell("waiting for the shadow")
                    shadows = beside.finish()
            finally:
                beside.stop()
                if trouble is not None:
                    faults += trouble.stop()
                job.end()
    tell("verifying")
    verdict = verify(place.ledger_url)
    with Ledger.open(place.ledger_url, create=False, read_only=True) as ledger:
        runs = {name: read_run(ledger, f"demo-{name}", name, how[name]) for name in schedules}
        moves = read_moves(ledger)
        write_report(ledger, out / "report.html", verdict=verdict.plain())
        alike = [] if noise is None else _likenesses(ledger, list(runs.values()))
    return Outcome(runs, verdict, moves, tuple(schedules), faults, noise, alike, shadows)


def _config(
    place: Place,
    schedule: str,
    iterations: int,
    seed: int,
    engine: EngineName,
    noise: Noise | None,
) -> JobConfig:
    return place.config(
        f"demo-{schedule}",
        iterations=iterations,
        seed=seed,
        schedule=schedule,
        engine=engine,
        tolerance=None if noise is None else noise.tolerance,
    )


def _likenesses(ledger: Ledger, runs: Sequence[Run]) -> list[Likeness]:
    """The first run beside each other one."""
    tokens = {run.job: first_tokens(ledger, run.job) for run in runs}
    first = runs[0]
    return [
        likeness(
            (first.schedule, run.schedule),
            (tokens[first.job], tokens[run.job]),
            (first.rewards, run.rewards),
            first.samples / max(1, len(first.rewards)),
        )
        for run in runs[1:]
    ]


def _best_split(place: Place, config: JobConfig, devices: tuple[str, ...]) -> int | None:
    """Slots of rollout in the static split that ends an iteration soonest, from the core-seconds
    that each stage of the dynamic run took; None where there is no such run to measure."""
    with Ledger.open(place.ledger_url, create=False, read_only=True) as ledger:
        events = list(ledger.read(job="demo-dynamic", types={"IterationCompleted"}))
    if not events:
        return None

    def stage_s(component: str) -> float:
        parts = [e.body["components"].get(component, {}) for e in events]
        return float(median(part.get("busy_s", 0.0) for part in parts))

    def iteration_s(rollout: int) -> float:
        topology = start_topology(config.model_copy(update={"rollout_slots": rollout}), devices)
        trainers = len(topology.replicas("trainer"))
        followers_s = stage_s("inference") + stage_s("trainer") / trainers
        return max(stage_s("rollout") / rollout, followers_s)

    return min(range(1, len(devices)), key=iteration_s)


def _closed(place: Place, job: str) -> bool:
    with Ledger.open(place.ledger_url, create=False, read_only=True) as ledger:
        return ledger.state().job(job).status == "closed"


def read_run(ledger: Ledger, job: str, schedule: str, how: str) -> Run:
    """A finished run, from its events."""
    state: JobState = ledger.state().job(job)
    events = [stored.parsed() for stored in ledger.read(job=job, types={"IterationCompleted"})]
    # After a crash an iteration may have been recorded by the attempt that did not go on.
    last = {event.iteration: event for event in events}  # type: ignore[attr-defined]
    done = [last[number] for number in sorted(last)]
    return Run(
        schedule=schedule,
        job=job,
        walls_s=[e.wall_s for e in done],  # type: ignore[attr-defined]
        rewards=[e.reward_mean for e in done],  # type: ignore[attr-defined]
        fingerprint=state.policy_fingerprint or "",
        samples=sum(e.samples_verified for e in done),  # type: ignore[attr-defined]
        device_s=sum(e.device_s for e in done),  # type: ignore[attr-defined]
        how=how,
    )


def read_moves(ledger: Ledger) -> dict[str, Any]:
    """Counts, bytes, stall and gains of the moves, from the mirror."""
    tables = ("reallocations", "weight_syncs")
    with Mirror.open(ledger, tables, in_memory=True) as mirror:
        rows = mirror.rows(
            "select status, strategy, moved_bytes, stall_s, predicted_gain_s - predicted_cost_s "
            "as net_gain_s, realised_gain_s from reallocations"
        )
        syncs = mirror.rows(
            "select count(*) as syncs, coalesce(sum(moved_bytes), 0) as bytes, "
            "coalesce(sum(stall_s), 0) as stall_s from weight_syncs"
        )[0]
    committed = [row for row in rows if row["status"] == "committed"]
    with_bytes: dict[str, int] = {}
    for row in committed:
        if (row["moved_bytes"] or 0) > 0:
            with_bytes[row["strategy"]] = with_bytes.get(row["strategy"], 0) + 1
    return {
        "proposed": len(rows),
        "committed": len(committed),
        "rejected": sum(row["status"] == "rejected" for row in rows),
        "abandoned": sum(row["status"] == "abandoned" for row in rows),
        "rolled_back": sum(row["status"] == "rolled_back" for row in rows),
        "poisoned": sum(row["status"] == "poisoned" for row in rows),
        "committed_with_bytes": with_bytes,
        "moved_bytes": sum(row["moved_bytes"] or 0 for row in committed),
        "stall_s": sum(row["stall_s"] or 0.0 for row in committed),
        "predicted_gain_s": sum(row["net_gain_s"] or 0.0 for row in committed),
        "realised_gain_s": sum(row["realised_gain_s"] or 0.0 for row in committed),
        "sync_bytes": syncs["bytes"],
        "sync_stall_s": syncs["stall_s"],
        "syncs": syncs["syncs"],
    }


def paired_gain_s(dynamic: Run, other: Run) -> float | None:
    """Mean seconds by which an iteration of the dynamic schedule was shorter than the same
    iteration of another, warm-up left out. The samples are the same, so the pairs are true."""
    pairs = list(zip(dynamic.walls_s, other.walls_s, strict=False))[WARM_UP:]
    return mean(b - a for a, b in pairs) if pairs else None


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """The table, a fact a row."""
    runs, moves = outcome.runs, outcome.moves
    names = {
        "dynamic": "dynamic: moved through the ledger",
        "static": "best static split",
        "timeshared": "time-shared phases",
    }
    rows: list[dict[str, Any]] = []

    def add(what: str, value: str) -> None:
        rows.append({"what": what, "value": value})

    for name, run in runs.items():
        per_device = run.samples / run.device_s if run.device_s else 0.0
        add(
            f"iteration, {names[name]}",
            f"{run.wall_s:.2f} s (median, {run.how}); {per_device:.1f} verified samples/device-s",
        )
    dynamic = runs.get("dynamic")
    if dynamic is not None:
        for other in ("static", "timeshared"):
            if other in runs and dynamic.wall_s:
                gain_s = paired_gain_s(dynamic, runs[other])
                paired = "" if gain_s is None else f"; true paired gain {gain_s:+.2f} s/iteration"
                add(
                    f"speed-up over {names[other]}",
                    f"{runs[other].wall_s / dynamic.wall_s:.2f} x{paired}",
                )
        add(
            "moves",
            f"{moves['proposed']} proposed, {moves['committed']} committed, "
            f"{moves['rejected']} rejected, {moves['abandoned']} abandoned, "
            f"{moves['rolled_back']} rolled back",
        )
        add(
            "moved",
            f"{moves['moved_bytes'] / 1e6:.1f} MB by moves, "
            f"{moves['sync_bytes'] / 1e6:.1f} MB by {moves['syncs']} weight syncs",
        )
        add("stall", f"{moves['stall_s']:.2f} s in moves, {moves['sync_stall_s']:.2f} s in syncs")
        add(
            "gain of moves",
            f"predicted {moves['predicted_gain_s']:+.2f} s, "
            f"realised {moves['realised_gain_s']:+.2f} s against the model's counterfactual",
        )
    for name, run in runs.items():
        if run.rewards:
            add(f"reward, {name}", f"{run.rewards[0]:.3f} first, {run.rewards[-1]:.3f} last")
    prints = {run.fingerprint for run in runs.values()}
    add(
        "policy",
        f"{next(iter(prints))}" + (", the same in every schedule" if len(runs) > 1 else "")
        if len(prints) == 1
        else ", ".join(f"{run.schedule} {run.fingerprint[:12]}" for run in runs.values()),
    )
    if outcome.noise is not None:
        add("engine", outcome.noise.text())
    for compared in outcome.likenesses:
        add("compared in distribution", compared.text())
    if outcome.shadows:
        add("shadow of the dynamic run", shadow_text(outcome.shadows))
    if outcome.faults:
        add("faults injected", "; ".join(outcome.faults))
    add("verdict", _verdict_line(outcome.verdict))
    return rows


def _verdict_line(verdict: Verdict) -> str:
    """The verdict in a line: what is required, what is not, and how far either was checked."""
    required = [row for row in verdict.coverage.rows if row.required]
    others = [row for row in verdict.coverage.rows if not row.required]
    return (
        f"{verdict.word}: {len(verdict.findings)} findings; {len(required)} invariants required: "
        f"{_statuses(required)}; {len(others)} others: {_statuses(others)}"
    )


def _statuses(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none"
