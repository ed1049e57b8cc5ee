"""The record of one update: what went into it, what came out, and what was computed again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder_gap import LogProbGap
from shiftbook.checkpoint.recorder_groups import GroupRecords
from shiftbook.checkpoint.recorder_state import State, roots, value_digest
from shiftbook.ledger.events.training import (
    Controller,
    LossTerm,
    MicroBatch,
    RankState,
    Residual,
    UpdateApplied,
    VirtualRank,
)

if TYPE_CHECKING:
    from shiftbook.checkpoint.recorder_loss import PolicyLoss
    from shiftbook.checkpoint.recorder_loss_supervised import SupervisedLoss
    from shiftbook.checkpoint.recorder_step import StepProbe

LiveState = State | Callable[[], State]
"""Parts of the live state, or what gives them: it is read before and after the update."""

REQUIRED = ("model", "masters", "optimizer")


def read(state: LiveState) -> dict[str, str]:
    """Roots of the live state, now."""
    return roots(state() if callable(state) else state)


def _mask_digest(mask: Any) -> str | None:
    return mask if mask is None or isinstance(mask, str) else value_digest(mask)


class UpdateRecord:
    """Collects one update; ``Recorder.update`` makes it and writes it when its block ends.

    ``probe`` recomputes the optimizer's arithmetic on sampled elements, ``loss`` the declared loss
    from its inputs; both are optional and attested by the job.
    """

    def __init__(
        self,
        attempt: str,
        iteration: int,
        state: LiveState,
        *,
        probe: StepProbe | None,
        loss: PolicyLoss | SupervisedLoss | None,
        virtual_ranks: int = 0,
    ) -> None:
        self.before = read(state)
        missing = [name for name in REQUIRED if name not in self.before]
        if missing:
            raise RecorderMisuse(
                f"expected parts {', '.join(REQUIRED)} in the state of an update, found no "
                f"{missing[0]}; name the parameters twice where there are no separate masters"
            )
        self.probe = probe
        self.loss = loss
        self._attempt = attempt
        self._iteration = iteration
        self._state = state
        self._micro: list[MicroBatch] = []
        # A rank without a group in this batch takes part all the same.
        self._places: dict[int, set[str]] = {v: set() for v in range(virtual_ranks)}
        self._ranks: list[RankState] = []
        self._controllers: dict[str, Controller] = {}
        self._residuals: dict[str, Residual] = {}
        self._gap = LogProbGap()
        self._groups = GroupRecords()
        self._fields: dict[str, Any] | None = None
        self.after: dict[str, str] = {}

    def micro_batch(
        self,
        *,
        tokens: int,
        divisor: float,
        samples: int,
        rank: int = 0,
        virtual_rank: int | None = None,
        groups: int | Collection[str] = 1,
        gradient: Mapping[str, Any] | None = None,
        first_mask: Any = None,
        recomputed_mask: Any = None,
    ) -> None:
        """One accumulation: trained tokens inside its loss, and what the loss was divided by.

        ``groups`` are those of ``virtual_rank`` (default: the rank) that it held: their names, or
        how many where none is split over micro batches. ``gradient`` is this micro batch's own
        gradient by parameter name, for the probe. The masks are dropout's, zero where it left
        something out (tensors, or their digests).
        """
        size = int(first_mask.numel()) if hasattr(first_mask, "numel") else None
        self._micro.append(
            MicroBatch(
                rank=rank,
                samples=samples,
                tokens=tokens,
                divisor=divisor,
                first_mask=_mask_digest(first_mask),
                recomputed_mask=_mask_digest(recomputed_mask),
                mask_size=size,
                masked=None if size is None else size - int((first_mask != 0).sum()),
            )
        )
        place = rank if virtual_rank is None else virtual_rank
        held = self._places.setdefault(place, set())
        names = range(len(held), len(held) + groups) if isinstance(groups, int) else groups
        held.update(str(name) for name in names)
        if gradient is not None and self.probe is not None:
            self.probe.contribution(gradient)

    def rank(
        self,
        rank: int,
        params: Mapping[str, Any] | str,
        *,
        gradient: Mapping[str, Any] | str | None = None,
        scale: float | None = None,
    ) -> None:
        """What one physical rank holds after the step, and the gradient that it applied."""
        self._ranks.append(
            RankState(
                rank=rank,
                params=roots({"params": params})["params"],
                gradient=None if gradient is None else roots({"gradient": gradient})["gradient"],
                scale=scale,
            )
        )

    def member(
        self,
        group: str,
        rank: int,
        *,
        copies: Mapping[str, Any] | None = None,
        fed: Iterable[Any] | str | None = None,
    ) -> None:
        """One rank of a model-parallel group, such as ``tp/0``, after the step.

        ``copies`` are the tensors that every rank of the group holds whole (norms, router weights,
        tied embeddings, biases), as this rank holds them: tensors, or their fingerprints as
        ``value_digest`` gives them on another process. ``fed`` are the rows of token ids that it
        computed, or their ``fed_digest``. A rank may be in several groups.
        """
        self._groups.add(group, rank, copies, fed)

    def controller(self, name: str, before: float, after: float, **inputs: float) -> None:
        """A value that a rule of the plan moved, with what the rule read."""
        self._controllers[name] = Controller(before=before, after=after, inputs=inputs)

    def gap(self, trainer: Any, engine: Any, trained: Any) -> None:
        """Log-probabilities of one micro batch: the trainer's and the engine's, in one shape.

        The trainer's are those under the weights that sampled: of the loss itself where a batch is
        consumed once and by the next update, else of the pass that is made before the first one.
        ``trained`` is true where a token counts. The mean |trainer - engine| in nats over all calls
        is recorded, which a shadow compares.
        """
        self._gap.add(trainer, engine, trained)

    def recomputed(self, what: str, largest: float, *, allowed: float, compared: int) -> None:
        """A computation of the job done again by other code: how far the two lie apart."""
        known = self._residuals.get(what)
        if known is not None:
            largest, allowed = max(largest, known.largest), max(allowed, known.allowed)
            compared += known.compared
        self._residuals[what] = Residual(largest=largest, allowed=allowed, compared=compared)

    def applied(
        self,
        *,
        version: int,
        optimizer_step: int,
        learning_rate: float,
        loss: float,
        grad_norm: float,
        kl: float = 0.0,
        clipped: bool = False,
        skipped: bool = False,
        tokens: int | None = None,
        divisor: float | None = None,
        step_range: tuple[int, int] | None = None,
        scheduler_step: int | None = None,
        unmoved: tuple[str, ...] | None = None,
        moved_frozen: tuple[str, ...] | None = None,
    ) -> None:
        """The step was taken, or skipped; state is read here. ``version`` is the one it makes."""
        if not self._micro and (tokens is None or divisor is None):
            raise RecorderMisuse(
                "expected micro_batch() before applied(), or tokens and divisor with it, found "
                "neither; say what the gradient is made of"
            )
        self.after = read(self._state)
        self._fields = {
            "policy_version": version,
            "optimizer_step": optimizer_step,
            "learning_rate": learning_rate,
            "loss": loss,
            "kl": kl,
            "grad_norm": grad_norm,
            "clipped": clipped,
            "skipped": skipped,
            "tokens": sum(m.tokens for m in self._micro) if tokens is None else tokens,
            "divisor": self._micro[0].divisor if divisor is None else divisor,
            "optimizer_step_least": None if step_range is None else step_range[0],
            "optimizer_step_most": None if step_range is None else step_range[1],
            "scheduler_step": scheduler_step,
            "unmoved": unmoved,
            "moved_frozen": moved_frozen,
        }
        if self.probe is not None and not skipped:
            for what, residual in self.probe.residuals(learning_rate, optimizer_step).items():
                self._residuals[what] = residual

    def event(self, pid: int, device: str) -> UpdateApplied:
        """UpdateApplied; RecorderMisuse where ``applied`` was not called."""
        if self._fields is None:
            raise RecorderMisuse(
                "expected applied() inside the block of an update, found that it ended without; "
                "call it right after the optimizer's step, with skipped=True where there was none"
            )
        terms: dict[str, LossTerm] | None = None
        if self.loss is not None:
            terms = self.loss.terms()
            if not self._fields["skipped"]:  # what is no number is why it was skipped
                self._residuals |= self.loss.residuals()
        return UpdateApplied(
            attempt=self._attempt,
            iteration=self._iteration,
            params_before=self.before["model"],
            params_after=self.after["model"],
            masters_before=self.before["masters"],
            masters_after=self.after["masters"],
            optimizer_before=self.before["optimizer"],
            optimizer_after=self.after["optimizer"],
            cast_before=self.before.get("cast"),
            cast_after=self.after.get("cast"),
            ema_before=self.before.get("ema"),
            ema_after=self.after.get("ema"),
            micro_batches=tuple(self._micro) or None,
            ranks=tuple(self._ranks) or None,
            model_parallel=self._groups.groups(),
            controllers=self._controllers or None,
            recomputed=self._residuals or None,
            loss_terms=terms,
            logp_gap=self._gap.mean,
            virtual_ranks=tuple(
                VirtualRank(virtual_rank=place, pid=pid, device=device, groups=len(groups))
                for place, groups in sorted(self._places.items())
            ),
            **self._fields,
        )
