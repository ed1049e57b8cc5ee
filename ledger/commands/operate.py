"""Commands that act on a job through the gate: propose, freeze, thaw, recover."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from shiftbook.ledger.cli_options import (
    Format,
    actor,
    emit,
    emit_document,
    evidence_option,
    format_option,
    known_job,
    ledger_option,
    one_job,
    open_book,
)
from shiftbook.ledger.cli_types import Finite, NamedPath
from shiftbook.ledger.errors import InvalidInput, LedgerUnreachable, Rejected

if TYPE_CHECKING:
    from shiftbook.ledger.events.reallocation import Strategy
    from shiftbook.ledger.job_state import JobState
    from shiftbook.ledger.ledger import Ledger
    from shiftbook.ledger.proposal import Proposal
    from shiftbook.ledger.topology import Topology

EXIT_BAD = 1
EXIT_WAITING = 2
DEFAULT_MOVER = "ray"
"""Mover of a move that names none, unless the user says that there is none."""


@click.command()
@ledger_option
@click.option("--job", help="The job; may be left out where the ledger has only one.")
@click.option(
    "--after",
    required=True,
    help='Where components shall stand: "rollout=n/0,n/1 trainer=n/1", or a JSON file of a '
    "topology. Components that are not named stay; an empty list takes all devices away.",
)
@click.option(
    "--strategy",
    type=click.Choice(["pause", "reshard", "reboot"]),
    required=True,
    help="pause hands over requests, reshard moves training state, reboot restarts.",
)
@click.option(
    "--gain", "gain_s", type=Finite(), default=0.0, show_default=True, help="Seconds won."
)
@click.option(
    "--cost", "cost_s", type=Finite(), default=0.0, show_default=True, help="Seconds lost."
)
@click.option(
    "--owed",
    default="",
    help='Units that a component still owes, such as "inference=0": the gate wants to know it for '
    "a component that is left without a device, and refuses unless it is 0.",
)
@click.option(
    "--restoring", is_flag=True, help="A move back to a valid topology, as safe mode allows."
)
@click.option("--wait", "wait_s", type=Finite(min=0), help="Wait so many seconds for the end.")
@click.option(
    "--format", "format_", type=click.Choice(["table", "json"]), default="table", show_default=True
)
def propose(
    ledger_url: str,
    job: str | None,
    after: str,
    strategy: str,
    gain_s: float,
    cost_s: float,
    owed: str,
    restoring: bool,
    wait_s: float | None,
    format_: str,
) -> int:
    """Propose a move of one's own through the gate.

    The gate applies its rules at once; a rejection is recorded and exits with 1. An operator's
    move owes no predicted gain and waits for no cooldown. Nothing moves by this command itself:
    the controller of the running job finds the open proposal in the ledger, asks the gate for the
    grant, and carries it out. Without a running controller it stays proposed until one starts and
    decides it. A weight sync, a new attempt and `shiftbook recover` abandon what was not granted.
    """
    from shiftbook.ledger.gate import Gate

    with open_book(ledger_url, write=True) as ledger:
        name = one_job(ledger, job)
        state = _require_open(ledger, name)
        proposal = _proposal(
            state, read_topology(after, state.topology), cast("Strategy", strategy), gain_s, cost_s
        )
        proposal = replace(proposal, owed=read_owed(owed), restoring=restoring)
        try:
            operation = Gate(ledger, by=actor()).propose(name, proposal)
        except Rejected as rejected:
            _tell(rejected.operation, "rejected", rejected.rule, rejected.reason, format_)
            return EXIT_BAD
        status, reason = "proposed", None
        if wait_s is not None:
            status, reason = _wait(ledger, name, operation, wait_s)
        _tell(operation, status, None, reason, format_)
        return 0 if status in ("proposed", "committed") else EXIT_BAD


def _require_open(ledger: Ledger, job: str) -> JobState:
    """The job's state; raise InvalidInput where it is over, and nothing of it can be operated."""
    state = ledger.state().job(job)
    if state.status == "closed":
        raise InvalidInput(
            f"expected an open job, found {job} closed: it moves nothing any more; "
            "`shiftbook jobs` lists those that are open"
        )
    return state


def _tell(operation: str, status: str, rule: str | None, reason: str | None, format_: str) -> None:
    if format_ == "json":
        emit_document({"operation": operation, "status": status, "rule": rule, "reason": reason})
        return
    why = f" by rule {rule}" if rule else ""
    click.echo(f"{operation} {status}{why}" + (f": {reason}" if reason else ""))


def _proposal(
    job: JobState, after: Topology, strategy: Strategy, gain_s: float, cost_s: float
) -> Proposal:
    from shiftbook.ledger.events.reallocation import Candidate, Interval
    from shiftbook.ledger.proposal import Proposal

    if job.plan is None:
        raise InvalidInput(f"job {job.name!r} was never opened, so nothing of it can be moved")
    return Proposal(
        after=after,
        strategy=strategy,
        sees=job.plan.view(),
        candidates=(
            Candidate(
                after=after,
                strategy=strategy,
                predicted_end_s=0.0,
                predicted_gain_s=gain_s,
                predicted_cost_s=cost_s,
                probability=1.0,
                chosen=True,
            ),
        ),
        bottleneck_before="unknown",
        bottleneck_after="unknown",
        predicted_throughput=0.0,
        predicted_gain_s=gain_s,
        gain_interval=Interval(low=gain_s, high=gain_s),
        predicted_cost_s=cost_s,
        horizon_s=0.0,
        model_version=0,
        restoring=False,
        proposer="operator",
    )


def read_topology(text: str, now: Topology) -> Topology:
    """Read ``component=device,device ...`` or a JSON file; raise InvalidInput.

    A component that keeps its devices keeps its replicas, with their names and layout; one that
    changes gets a replica of one device for each device. A JSON file says it all itself.
    """
    from pydantic import ValidationError

    from shiftbook.ledger.topology import Topology

    try:
        if "=" not in text:
            return _topology_file(Path(text.removeprefix("@")), now)
        named = [_assignment(word) for word in text.split()]
        placement = dict(named)
        if len(placement) < len(named):
            raise InvalidInput(
                f"expected each component once in --after, found {text!r}; "
                "join its devices with commas: rollout=n/0,n/1"
            )
        made = Topology.of(placement)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            f"expected devices named node/index, such as n/0, found {first['input']!r} in --after"
        ) from error
    kept = {
        name: replicas
        for name, replicas in now.components.items()
        if name not in placement or now.placement()[name] == placement[name]
    }
    return Topology(components={**now.components, **made.components, **kept})


def read_owed(text: str) -> dict[str, int]:
    """Read ``component=units ...``; raise InvalidInput."""
    owed = {}
    for word in text.split():
        component, _, units = word.partition("=")
        if not component or not (units.isascii() and units.isdigit()):
            raise InvalidInput(f'expected --owed "inference=0 tool=0", found {word!r}')
        owed[component] = int(units)
    return owed


def _assignment(word: str) -> tuple[str, list[str]]:
    component, sign, devices = word.partition("=")
    if not component or not sign:
        raise InvalidInput(
            f'expected --after "rollout=n/0,n/1 trainer=n/1" or a JSON file, found {word!r}'
        )
    return component, [device for device in devices.split(",") if device]


def _topology_file(path: Path, now: Topology) -> Topology:
    from shiftbook.ledger.topology import Topology

    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f'expected --after "rollout=n/0,n/1 trainer=n/1" or a JSON file, found {str(path)!r} '
            f"({error})"
        ) from error
    if not isinstance(value, dict):
        raise InvalidInput(f"expected a JSON object with components in {path}, found another value")
    given = Topology.model_validate(value if "components" in value else {"components": value})
    return Topology(components={**now.components, **given.components})


def _wait(ledger: Ledger, job: str, operation: str, wait_s: float) -> tuple[str, str | None]:
    """Look at the ledger until the operation is closed; its status and what ended it."""
    deadline = time.monotonic() + wait_s
    while True:
        known = ledger.state().job(job).operations[operation]
        if not known.open:
            last = list(ledger.read(job=job, operation=operation))[-1].body
            return known.status, last.get("reason") or last.get("cause")
        if time.monotonic() >= deadline:
            raise LedgerUnreachable(
                f"expected {operation} to be closed within {wait_s:g} s, found it {known.status}; "
                "see that the job's controller runs: `shiftbook follow --job " + job + "`"
            )
        time.sleep(0.05)


def _reason_option(command: Any) -> Any:
    return click.option("--reason", required=True, help="Why; it stands in the ledger.")(command)


@click.command()
@ledger_option
@click.argument("job")
@_reason_option
def freeze(ledger_url: str, job: str, reason: str) -> None:
    """Enter safe mode: JOB keeps its topology, and its training goes on.

    Proposed and granted moves that have not begun are abandoned; a move that has quiesced ends.
    """
    from shiftbook.ledger.gate import Gate

    with open_book(ledger_url, write=True) as ledger:
        _require_open(ledger, known_job(ledger, job))
        receipt = Gate(ledger, by=actor()).freeze(job, by=actor(), reason=reason)
        state = ledger.state().job(job)
    if receipt is None:
        click.echo(f"{job} is in safe mode already: {state.safe_mode}")
    else:
        click.echo(f"{job} is in safe mode since position {receipt.last}: {state.topology.text()}")


@click.command()
@ledger_option
@click.argument("job")
@_reason_option
@click.option(
    "--lift",
    "operation",
    help="Also let the devices be used again that this operation poisoned.",
)
def thaw(ledger_url: str, job: str, reason: str, operation: str | None) -> None:
    """Leave safe mode: moves of JOB are allowed again. Who did it and why is recorded."""
    from shiftbook.ledger.gate import Gate

    with open_book(ledger_url, write=True) as ledger:
        known_job(ledger, job)
        gate = Gate(ledger, by=actor())
        if operation is None:
            _require_open(ledger, job)
        else:
            lifted = gate.lift_quarantine(job, operation, by=actor(), reason=reason)
            click.echo(
                f"no device is in quarantine for {operation}"
                if lifted is None
                else f"quarantine of {operation} lifted at position {lifted.last}"
            )
            if ledger.state().job(job).status == "closed":
                return  # what it poisoned outlives it; its safe mode does not
        receipt = gate.thaw(job, by=actor(), reason=reason)
    if receipt is None:
        click.echo(f"{job} is not in safe mode")
    else:
        click.echo(f"{job} left safe mode at position {receipt.last}")


@click.command()
@ledger_option
@format_option()
@click.argument("job", required=False)
@click.option("--mover", help="Entry point of shiftbook.movers, or module:function.")
@click.option(
    "--no-mover",
    is_flag=True,
    help="There is none: poison what cannot be abandoned, and quarantine its devices.",
)
@click.option("--reason", default="the controller is presumed dead", show_default=True)
@evidence_option
@click.option(
    "--spool",
    type=NamedPath(file_okay=False, path_type=Path),
    help="Folder of spools; default: the one beside the ledger.",
)
def recover(
    ledger_url: str,
    format_: Format,
    job: str | None,
    mover: str | None,
    no_mover: bool,
    reason: str,
    evidence: str | None,
    spool: Path | None,
) -> int:
    """End the open moves of JOB (of every job without one) after their controller died.

    What processes that ended had spooled in an outage is appended first, after the segments that it
    names. Exits with 2 where some of that has to wait still.

    A move before `verified` is undone, one after it is finished, one that was only proposed is
    abandoned. A controller that lives after all can do nothing more with them. The mover is the
    one given, else the one that the move or the job names, else `ray`. Exits with 1 where a move
    ended poisoned, or a spooled record could not be taken.
    """
    if mover and no_mover:
        raise click.UsageError("--mover and --no-mover exclude each other")
    with open_book(ledger_url, write=True, evidence=evidence) as ledger:
        names = [known_job(ledger, job)] if job else ledger.jobs()
        spooled = _append_spooled(ledger, spool or ledger.beside(".spool"))
        state = ledger.state()
        pending = [
            name for name in names if any(o.open for o in state.job(name).operations.values())
        ]
        rows = [row for name in pending for row in _recover(ledger, name, mover, no_mover, reason)]
    if not rows:
        where = job or "this ledger"
        click.echo(f"no open operation in {where}: nothing to recover", err=True)
        if format_ == "table":
            return spooled
    emit(rows, ("job", "operation", "found", "ended", "reason"), format_)
    return EXIT_BAD if any(row[3] == "poisoned" for row in rows) else spooled


def _append_spooled(ledger: Ledger, folder: Path) -> int:
    """Append what processes that ended left spooled, and say so; the exit code for it."""
    from shiftbook.ledger.evidence import writable_place
    from shiftbook.ledger.spool import drain_leftovers

    if not folder.is_dir():
        return 0
    code = 0
    for writer, left in drain_leftovers(ledger.append, folder, writable_place(ledger)).items():
        click.echo(f"{writer}: {left.appended} spooled records appended", err=True)
        for what in left.rejected:
            click.echo(f"{writer}: a record was not taken, see {folder}: {what}", err=True)
            code = max(code, EXIT_BAD)
        if left.waiting:
            click.echo(f"{writer}: {left.waiting} records have to wait: {left.cause}", err=True)
            code = EXIT_WAITING
    return code


def _recover(
    ledger: Ledger, job: str, mover: str | None, no_mover: bool, reason: str
) -> list[tuple[str, str, str, str, str]]:
    from shiftbook.ledger.mover import CONFIG_KEY, load_mover
    from shiftbook.ledger.recovery import recover as end_open_moves

    state = ledger.state().job(job)
    named = (state.opened.config.get(CONFIG_KEY) if state.opened else None) is not None
    # A move that was only proposed is abandoned without anybody touching a process.
    unnamed = [
        o
        for o in state.operations.values()
        if o.open and o.status != "proposed" and not named and o.mover is None
    ]
    chosen = mover or (DEFAULT_MOVER if unnamed and not no_mover else None)
    opened = load_mover(chosen)(ledger, job) if chosen else None
    try:
        outcomes = end_open_moves(ledger, job, opened, by=actor(), reason=reason)
    finally:
        if opened is not None:
            opened.close()
    return [(job, o.operation, o.found, o.ended, o.reason) for o in outcomes]
