"""Feeds the declared order through a data loader of torch or torchdata, group by group.

A batch is one group of the virtual ranks. Which samples it has is a function of the update and the
group; what a data set draws for a sample (augmentation) is keyed by the draw's ordinal. So neither
the number of processes nor that of workers, prefetching or a resume changes a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data import Sampler as TorchSampler

from shiftbook.checkpoint.elastic import Place
from shiftbook.checkpoint.errors import LoaderWorkerLost, SamplerStateError
from shiftbook.checkpoint.random_streams import keyed_streams
from shiftbook.checkpoint.sampler import Draw, Sampler
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan

_CAUGHT = "Caught "
"""How torch begins the text of what a data set raised in a worker."""
STREAM = "data-loader"
"""Owner of the random streams that samples are fetched with."""


class DrawnBatch(NamedTuple):
    """The samples of one group: their draws' ordinals, and what the data set and collate gave."""

    update: int
    group: int
    ordinals: tuple[int, ...]
    data: Any


class DrawnData(Dataset[tuple[int, Any]]):
    """A map-style data set, read by draws; gives (ordinal, sample).

    Whatever draws while a sample is fetched is seeded from (seed, ordinal), in any worker.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, draw: Draw) -> tuple[int, Any]:
        with keyed_streams(self.seed, STREAM, draw.ordinal):
            return draw.ordinal, self.dataset[draw.index]

    def __len__(self) -> int:
        return len(self.dataset)


class DeclaredBatches(TorchSampler[list[Draw]]):
    """A batch sampler: for each update the groups of one process, ``size`` draws each.

    ``stop`` is the number of updates after which it ends. Its iterators have ``state_dict`` and
    ``load_state_dict``, as torchdata's loader wants them.
    """

    def __init__(
        self,
        sampler: Sampler,
        plan: VirtualRankPlan,
        size: int,
        *,
        stop: int,
        place: Place | None = None,
    ) -> None:
        if size < 1:
            raise SamplerStateError(f"expected groups of at least 1 draw, found {size}")
        self.sampler, self.plan, self.size, self.stop = sampler, plan, size, stop
        self.begin(0, place or Place())

    def begin(self, update: int, place: Place, missing: Sequence[int] | None = None) -> None:
        """Where the next iterator begins: ``missing`` are the groups still to come of ``update``.

        Call it with ``trainer.updates``, ``trainer.place`` and ``trainer.missing()`` after a
        resize and after a restore, and make a new iterator.
        """
        self.place, self.update = place, update
        self.missing = None if missing is None else tuple(missing)

    def groups(self) -> list[int]:
        """Groups of this process, in declared order."""
        block = self.plan.block_of(self.place.rank, self.place.world)
        return [group for rank in block for group in self.plan.groups_of(rank)]

    def ordinal(self, update: int, group: int) -> int:
        """Ordinal of the first draw of a group."""
        return (update * self.plan.groups_per_iteration + group) * self.size

    def place_of(self, ordinal: int) -> tuple[int, int]:
        """(update, group) that a draw belongs to."""
        return divmod(ordinal // self.size, self.plan.groups_per_iteration)

    def collate(self, batch: Callable[[list[Any]], Any] = default_collate) -> Collate:
        """The ``collate_fn`` that makes a ``DrawnBatch``, around one of the user's."""
        return Collate(self.size, self.plan.groups_per_iteration, batch)

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)


class Collate:
    """Samples with their ordinals to a ``DrawnBatch``; travels to workers."""

    def __init__(self, size: int, groups: int, batch: Callable[[list[Any]], Any]) -> None:
        self.size, self.groups, self.batch = size, groups, batch

    def __call__(self, items: list[tuple[int, Any]]) -> DrawnBatch:
        ordinals = tuple(ordinal for ordinal, _ in items)
        update, group = divmod(ordinals[0] // self.size, self.groups)
        return DrawnBatch(update, group, ordinals, self.batch([sample for _, sample in items]))


class BatchIterator(Iterator[list[Draw]]):
    """Goes through the batches of one process; its state is the update and the groups to come."""

    def __init__(self, batches: DeclaredBatches) -> None:
        self.batches = batches
        self.update = batches.update
        self.left = list(batches.groups() if batches.missing is None else batches.missing)

    def __next__(self) -> list[Draw]:
        batches = self.batches
        while not self.left and self.update < batches.stop:
            self.update += 1
            self.left = batches.groups()
        if self.update >= batches.stop:
            raise StopIteration
        first = batches.ordinal(self.update, self.left.pop(0))
        return batches.sampler.at(first, batches.size)

    def state_dict(self) -> dict[str, Any]:
        """The declaration, the update and the groups of it that are still to come."""
        return {
            "sampler": self.batches.sampler.state().plain(),
            "size": self.batches.size,
            "groups": self.batches.plan.groups_per_iteration,
            "rank": self.batches.place.rank,
            "world": self.batches.place.world,
            "update": self.update,
            "left": list(self.left),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same declaration; else SamplerStateError."""
        mine = {**self.state_dict(), "update": None, "left": None}
        found = {**state, "update": None, "left": None}
        for name in ("rule", "seed", "size", "mixture"):
            if state["sampler"].get(name) != mine["sampler"][name]:
                raise SamplerStateError(
                    f"loader state of another order: expected {name} {mine['sampler'][name]!r}, "
                    f"found {state['sampler'].get(name)!r}; build it from the same plan"
                )
        for name in ("size", "groups"):
            if found[name] != mine[name]:
                raise SamplerStateError(
                    f"loader state of other groups: expected {name} {mine[name]}, found "
                    f"{found[name]}; build it from the same plan"
                )
        for name in ("rank", "world"):
            if found.get(name) != mine[name]:
                raise SamplerStateError(
                    f"loader state of another place: expected {name} {mine[name]}, found "
                    f"{found.get(name)}; it does not know which groups the others took, so after a "
                    "resize use begin(trainer.updates, trainer.place, trainer.missing())"
                )
        self.update = int(state["update"])
        self.left = [int(group) for group in state["left"]]


class ResumableLoader:
    """A ``torch.utils.data.DataLoader`` whose state is what its consumer took, batch by batch.

    Batches that workers fetched ahead are not in the state: they are fetched again, also after a
    worker died (LoaderWorkerLost): the next iteration has new ones and goes on there. ``options``
    are those of ``DataLoader`` (num_workers, prefetch_factor, pin_memory, …) but
    ``in_order=False``: which batch comes next would depend on which worker is faster.
    """

    def __init__(
        self,
        dataset: Any,
        batches: DeclaredBatches,
        *,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        _check_in_order(options)
        self.batches = batches
        self._ahead = _Ahead(batches)
        self._workers = int(options.get("num_workers", 0))

        def make() -> DataLoader[Any]:
            return DataLoader(
                DrawnData(dataset, seed),
                batch_sampler=self._ahead,
                collate_fn=batches.collate(collate_fn),
                **options,
            )

        self._make = make
        self._loader = make()
        self._in_midst = False
        self._taken = BatchIterator(batches)

    def __iter__(self) -> Iterator[DrawnBatch]:
        """From where the state stands; a batch counts as taken when it is handed out.

        Raises LoaderWorkerLost where a worker ended, and what the data set raises. Torch may raise
        its own RuntimeError for a worker that was killed, between two batches; iterate again then.
        """
        if self._in_midst:
            # Kept workers may be why it was left: torch raises that one ended wherever its main
            # thread stands, in the consumer as well.
            self._loader = self._make()
        self._in_midst = True
        self._ahead.start = self._taken.state_dict()
        self._ahead.given = []
        for batch in self._batches():
            next(self._taken)
            self._ahead.given.remove(batch.ordinals)
            yield batch
        self._in_midst = False

    def _batches(self) -> Iterator[DrawnBatch]:
        fetched = iter(self._loader)
        while True:
            try:
                batch = next(fetched)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not self._workers or str(error).startswith(_CAUGHT):
                    raise  # the data set's own
                self._ahead.given = []
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                raise LoaderWorkerLost(
                    f"expected {self._workers} workers to fetch samples, found one that ended "
                    f"({said}); see whether the system killed it for its memory, and iterate "
                    "again: that goes on after the last batch that was taken"
                ) from error
            yield batch

    @property
    def in_flight(self) -> list[int]:
        """Ordinals drawn for the workers and not handed out."""
        return [ordinal for ordinals in self._ahead.given for ordinal in ordinals]

    def begin(self, update: int, place: Place, missing: Sequence[int] | None = None) -> None:
        """As ``DeclaredBatches.begin``; begin a new iteration afterwards."""
        self.batches.begin(update, place, missing)
        self._taken = BatchIterator(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands."""
        return self._taken.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; takes effect with the next iteration."""
        self._taken.load_state_dict(state)


def _check_in_order(options: Mapping[str, Any]) -> None:
    if not options.get("in_order", True):
        raise SamplerStateError(
            "expected batches in their declared order, found in_order=False; leave it out, or what "
            "was taken cannot be told from what is still to come"
        )


class _Ahead(TorchSampler[list[Draw]]):
    """The batches as the loader draws them, ahead of its consumer."""

    def __init__(self, batches: DeclaredBatches) -> None:
        self.batches = batches
        self.start: Mapping[str, Any] | None = None
        self.given: list[tuple[int, ...]] = []

    def __iter__(self) -> Iterator[list[Draw]]:
        batches = BatchIterator(self.batches)
        if self.start is not None:
            batches.load_state_dict(self.start)
        for draws in batches:
            self.given.append(tuple(draw.ordinal for draw in draws))
            yield draws


def stateful_loader(
    dataset: Any,
    batches: DeclaredBatches,
    *,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> Any:
    """The same batches through torchdata's ``StatefulDataLoader`` (extra package ``torchdata``).

    Its ``state_dict`` is restored with the same number of workers only, which is torchdata's rule.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    _check_in_order(options)
    return StatefulDataLoader(
        DrawnData(dataset, seed),
        batch_sampler=batches,
        collate_fn=batches.collate(collate_fn),
        **options,
    )
