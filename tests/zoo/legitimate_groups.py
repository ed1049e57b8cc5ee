"""A legitimate variant: every rank is a model-parallel group of two members."""

from __future__ import annotations

from typing import Any

from tests.zoo import model_parallel as groups
from tests.zoo import trainer as trainer_module
from tests.zoo.job import Job
from tests.zoo.model import logical
from tests.zoo.now import NOW
from tests.zoo.patching import Patcher
from tests.zoo.trainer import Rank, Trainer
from tests.zoo.variants import variant


@variant(
    "each rank is a model-parallel group of two, with copies of what is not cut",
    plan={"update": {"model_parallel": True}},
)
def _model_parallel(p: Patcher) -> None:
    def accumulate(original: Any, self: Trainer, rank: Rank, virtual_rank: int, *rest: Any) -> Any:
        second = groups.second_member(rank)
        NOW.notes["computes"] = rank
        for member in range(2):
            rows = groups.fed(member, rest[0].tokens)
            NOW.notes["fed"].setdefault((rank.number, member), []).extend(rows.tolist())
        loss = original(self, rank, virtual_rank, *rest)
        groups.take_copies(second, virtual_rank)
        return loss

    def backward(original: Any, self: Trainer, loss: Any) -> None:
        original(self, loss)
        rank = NOW.notes["computes"]
        groups.reduce_copies(rank, groups.second_member(rank))

    def clear(original: Any, self: Trainer, rank: Rank) -> None:
        NOW.notes["fed"] = {}
        original(self, rank)
        original(self, groups.second_member(rank))

    def scatter(original: Any, self: Trainer, total: Any) -> None:
        original(self, total)
        groups.sum_copies(self.ranks)

    def clip(original: Any, self: Trainer, rank: Rank, norm: float) -> bool:
        original(self, groups.second_member(rank), norm)
        return original(self, rank, norm)  # type: ignore[no-any-return]

    def adam(original: Any, self: Trainer, rank: Rank, rate: float) -> None:
        original(self, rank, rate)
        groups.step_copies(lambda *given: original(self, *given), rank, rate)

    def tell(original: Any, self: Trainer, record: Any, rank: Rank, gradient: Any = None) -> None:
        second = groups.second_member(rank)
        for member, held in enumerate((rank, second)):
            number = 2 * rank.number + member
            # Both report the whole model that they share: its copies are the first one's.
            whole = {**logical(rank.model), "step": held.step}
            record.rank(number, whole, gradient=gradient, scale=held.scale)
            record.member(
                f"tp/{rank.number}",
                number,
                copies={name: held.model[name] for name in groups.COPIED},
                fed=NOW.notes["fed"].get((rank.number, member), []),
            )

    def begin(original: Any, self: Job) -> int:
        NOW.notes["members"] = {}
        return original(self)  # type: ignore[no-any-return]

    p.wrap(Job, "begin", begin)
    p.wrap(trainer_module, "forward", groups.forward)
    for name, wrapper in (
        ("accumulate", accumulate),
        ("backward", backward),
        ("clear", clear),
        ("scatter", scatter),
        ("clip", clip),
        ("adam", adam),
        ("tell", tell),
    ):
        p.wrap(Trainer, name, wrapper)
