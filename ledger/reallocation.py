"""A move as a context manager, for schedulers that want it recorded, fenced and undone.

::

    with gate.reallocation(
        job, after=topology, bottleneck="rollout", expected_gain_s=12.0, mover=mover
    ) as move:
        move.quiesced(custody)
        move.transferred(moved_bytes=n)
        move.verified(before, after)

Entering proposes the move and asks for its grant, so a rejection is raised there and nothing has
begun. Leaving the block after ``verified`` commits. An exception, or leaving early, undoes the
move through the mover; without a mover nobody can say where the processes stand, and the move is
poisoned. After ``verified`` nothing is undone: an exception finishes the move and goes on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypedDict

from shiftbook.ledger.errors import Poisoned, RolledBack, StaleGrant, StepTimeout, UnknownJob
from shiftbook.ledger.events.reallocation import Candidate, Custody, Interval, Strategy
from shiftbook.ledger.grant import Grant
from shiftbook.ledger.plan import TrainingView
from shiftbook.ledger.proposal import Proposal
from shiftbook.ledger.topology import Topology

if TYPE_CHECKING:
    from shiftbook.ledger.gate import Gate
    from shiftbook.ledger.mover import Mover

ANY_GAIN = Interval(low=float("-inf"), high=float("inf"))
STEPS = ("granted", "quiesced", "transferred", "verified")


class Move:
    """The steps of one granted move; each writes its event and gives the grant for the next."""

    def __init__(self, gate: Gate, grant: Grant) -> None:
        self.grant = grant
        self.status = "granted"
        self._gate = gate
        self._started_s = self._last_s = gate.boottime_s()
        self._moved_bytes = 0
        self._kv_tokens_lost = 0

    @property
    def operation(self) -> str:
        """Id of the operation."""
        return self.grant.operation

    def quiesced(
        self,
        custody: Sequence[Custody] = (),
        *,
        kv_tokens_lost: int = 0,
        quiesce_s: float | None = None,
    ) -> Grant:
        """The sources stopped and handed over what they owed; seconds are measured by default."""
        measured_s = self._lap_s()
        self._gate.quiesced(
            self.grant,
            custody,
            kv_tokens_lost=kv_tokens_lost,
            quiesce_s=measured_s if quiesce_s is None else quiesce_s,
        )
        self._kv_tokens_lost = kv_tokens_lost
        self.status = "quiesced"
        return self.grant

    def transferred(
        self,
        *,
        moved_bytes: int,
        transfer_s: float | None = None,
        parts: Mapping[str, int] | None = None,
    ) -> Grant:
        """State arrived at its new place; seconds are measured by default."""
        measured_s = self._lap_s()
        self._gate.transferred(
            self.grant,
            moved_bytes=moved_bytes,
            transfer_s=measured_s if transfer_s is None else transfer_s,
            parts=parts or {},
        )
        self._moved_bytes = moved_bytes
        self.status = "transferred"
        return self.grant

    def verified(self, before: Mapping[str, str], after: Mapping[str, str]) -> Grant:
        """Fingerprints (name to 32 hex digits) before and after agree: the point of no return."""
        self._gate.verified(self.grant, before, after)
        self.status = "verified"
        return self.grant

    def commit(self) -> None:
        """Write the end of the move; leaving the block does it.

        A verified move can only be finished, so a commit that comes too late takes the move over
        from itself, which fails where anybody else did so before.
        """
        try:
            self._commit()
        except StepTimeout as late:
            self.grant = self._gate.take_over(
                self.grant.job, self.operation, str(late), held=self.grant
            )
            self._commit()
        self.status = "committed"

    def _commit(self) -> None:
        self._gate.committed(
            self.grant,
            moved_bytes=self._moved_bytes,
            stall_s=self._gate.boottime_s() - self._started_s,
            kv_tokens_lost=self._kv_tokens_lost,
            stalls={},
        )

    def _lap_s(self) -> float:
        now_s = self._gate.boottime_s()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return lap_s


class Details(TypedDict, total=False):
    """What a proposal says beyond the least; each has a default."""

    mover_name: str
    """How recovery finds the mover after this process was killed (see ``mover.find_mover``)."""
    strategy: Strategy
    """``pause`` by default."""
    expected_cost_s: float
    gain_interval: Interval
    """As wide as can be by default."""
    bottleneck_after: str
    predicted_throughput: float
    """Verified samples a second after the move."""
    horizon_s: float
    sees: TrainingView
    """What the training sees after the move; by default what the plan declares."""
    owed: Mapping[str, int]
    """Units that each component owes; needed for a component that goes down to no replica."""
    restoring: bool
    operation: str


class Reallocation:
    """The context manager behind ``Gate.reallocation``."""

    def __init__(
        self,
        gate: Gate,
        job: str,
        *,
        after: Topology,
        bottleneck: str,
        expected_gain_s: float,
        mover: Mover | None = None,
        details: Details,
    ) -> None:
        self._gate, self._job, self._mover = gate, job, mover
        self._mover_name, self._operation = details.get("mover_name"), details.get("operation")
        self._move: Move | None = None
        plan = gate.ledger.state().job(job).plan
        if plan is None:
            raise UnknownJob(job, gate.ledger.jobs())
        strategy = details.get("strategy", "pause")
        cost_s, horizon_s = details.get("expected_cost_s", 0.0), details.get("horizon_s", 0.0)
        self._proposal = Proposal(
            after=after,
            strategy=strategy,
            sees=details.get("sees", plan.view()),
            candidates=(
                Candidate(
                    after=after,
                    strategy=strategy,
                    predicted_end_s=horizon_s,
                    predicted_gain_s=expected_gain_s,
                    predicted_cost_s=cost_s,
                    probability=1.0,
                    chosen=True,
                ),
            ),
            bottleneck_before=bottleneck,
            bottleneck_after=details.get("bottleneck_after", bottleneck),
            predicted_throughput=details.get("predicted_throughput", 0.0),
            predicted_gain_s=expected_gain_s,
            gain_interval=details.get("gain_interval", ANY_GAIN),
            predicted_cost_s=cost_s,
            horizon_s=horizon_s,
            model_version=0,
            owed=dict(details.get("owed", {})),
            restoring=details.get("restoring", False),
        )

    def __enter__(self) -> Move:
        operation = self._gate.propose(self._job, self._proposal, operation=self._operation)
        grant = self._gate.grant(self._job, operation, mover=self._mover_name)
        self._move = Move(self._gate, grant)
        return self._move

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._move is not None, "the block was entered"
        if error is None:
            self._leave(self._move)
            return
        try:
            ended = self._end(self._move, f"{type(error).__name__}: {error}")
        except StaleGrant as stale:
            ended = f"left as it is ({stale})"
        except Exception as second:  # the error of the block is the one that goes on
            ended = f"left open ({type(second).__name__}: {second}); run `shiftbook recover`"
        error.add_note(f"{self._move.operation}: {ended}")

    def _leave(self, move: Move) -> None:
        """The block came to its end: commit, or undo what was not done to its end."""
        if move.status == "verified":
            if self._mover is None or self._mover.inspect().matches(self._proposal.after):
                move.commit()
            elif self._end(move, "the mover does not confirm the new topology") == "poisoned":
                raise Poisoned(f"{move.operation} could not be finished; {_QUARANTINE}")
            return
        missing = STEPS[STEPS.index(move.status) + 1]
        cause = f"expected the step {missing} before the end of the block, found {move.status}"
        ended = self._end(move, cause)
        if ended == "poisoned":
            raise Poisoned(f"{move.operation} poisoned: {cause}; {_QUARANTINE}")
        raise RolledBack(f"{move.operation} {ended}: {cause}; call the steps in their order")

    def _end(self, move: Move, cause: str) -> str:
        """Undo the move, or finish it where it is verified; give the status it ended in.

        StaleGrant where another controller has it: then nothing is touched.
        """
        from shiftbook.ledger.recovery import end_or_poison

        known = self._gate.holds(move.grant)
        if not known.open:
            return known.status
        if self._mover is None:
            self._gate.poisoned(move.grant, f"{cause}; there is no mover to undo it")
            return "poisoned"
        return end_or_poison(self._gate, move.grant, self._mover, cause)


_QUARANTINE = "its devices are in quarantine until an operator lifts it"
