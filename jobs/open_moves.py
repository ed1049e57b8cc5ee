"""Ends the moves that the attempt before left open, before the next attempt starts."""

from __future__ import annotations

from shiftbook.jobs.config import COMPONENTS, JobConfig
from shiftbook.jobs.standing import Standing
from shiftbook.jobs.start import resume_point
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.recovery import recover
from shiftbook.ledger.topology import Topology
from shiftbook.scheduler.supervision import Supervisor


def close_open_moves(
    ledger: Ledger, config: JobConfig, supervisor: Supervisor, standing: Standing, by: str
) -> None:
    """End what is open in the job, with all processes brought up anew from the last bundle.

    ``by`` names the actor in the records. Does nothing where nothing is open.
    """
    job = ledger.state().job(config.job)
    attempt = job.current_attempt()
    if attempt is None or not any(operation.open for operation in job.operations.values()):
        return
    lease = ledger.event(attempt.epoch)
    old = Grant(job.name, attempt.attempt, tuple(lease.body["devices"]), attempt.epoch)
    start = resume_point(ledger, config)
    if start.saved is not None:
        standing.take_saved(start.saved)
    standing.publish(start)
    recover(
        ledger,
        config.job,
        _FreshMover(supervisor, old, COMPONENTS),
        by=by,
        reason="the attempt before ended",
    )


class _FreshMover:
    """Ends a move of a dead attempt: everything is brought up anew from the last bundle."""

    def __init__(self, supervisor: Supervisor, grant: Grant, components: tuple[str, ...]) -> None:
        self._supervisor, self._grant, self._components = supervisor, grant, components

    def inspect(self) -> Topology:
        """Where the processes stand."""
        return self._supervisor.inspect(self._components)

    def restore(self, topology: Topology, grant: Grant) -> None:
        """All processes in a topology, from the last bundle."""
        self._supervisor.living()
        self._supervisor.repair(topology, self._grant, fresh=True, move=grant)

    def finish(self, topology: Topology, grant: Grant) -> None:
        """The same: what was moved in memory died with its attempt."""
        self._supervisor.living()
        self._supervisor.repair(topology, self._grant, fresh=True, move=grant, forward=True)

    def close(self) -> None:
        """Nothing to let go."""
