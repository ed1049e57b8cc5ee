"""Goal: batches are the declared ones whatever loads them: any number of processes and of workers,
prefetched, cut and resumed, by torch's loader or by torchdata's.

Method: a data set that draws noise from every generator for each sample. What real workers deliver
is compared with what this process computes from the plan, sample by sample, noise included.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shiftbook.checkpoint.data_loader import (
    BatchIterator,
    DeclaredBatches,
    DrawnBatch,
    DrawnData,
    ResumableLoader,
    stateful_loader,
)
from shiftbook.checkpoint.elastic import Place
from shiftbook.checkpoint.errors import LoaderWorkerLost, SamplerStateError
from shiftbook.checkpoint.sampler import Sampler
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan

SIZE, SEED, GROUPS, ROWS, UPDATES = 13, 21, 8, 3, 3
PLAN = VirtualRankPlan(4, GROUPS)

needs_torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed (extra test)"
)


class Noisy:
    """Samples with an augmentation that draws from torch, numpy and Python."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise])


def batches(place: Place | None = None, seed: int = SEED, size: int = ROWS) -> DeclaredBatches:
    return DeclaredBatches(Sampler(SIZE, seed), PLAN, size, stop=UPDATES, place=place)


def wanted(place: Place | None = None) -> list[tuple[int, int, list[list[float]]]]:
    """(update, group, samples), computed from the declaration alone."""
    data, found = DrawnData(Noisy(), SEED), []
    for update in range(UPDATES):
        for group in batches(place).groups():
            start = (update * GROUPS + group) * ROWS
            draws = Sampler(SIZE, SEED).at(start, ROWS)
            found.append((update, group, [data[draw][1].tolist() for draw in draws]))
    return found


def plain(batch: DrawnBatch) -> tuple[int, int, list[list[float]]]:
    return batch.update, batch.group, batch.data.tolist()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_and_processes_change_no_sample(workers: int) -> None:
    torch.manual_seed(workers)
    for world in (1, 4):
        found = []
        for rank in range(world):
            place = Place(rank, world)
            loader = ResumableLoader(Noisy(), batches(place), seed=SEED, num_workers=workers)
            found += [plain(batch) for batch in loader]
        assert sorted(found) == wanted()


def test_the_noise_differs_between_draws_of_one_prompt() -> None:
    samples = [sample for _, _, rows in wanted() for sample in rows]
    assert len({tuple(sample[1:]) for sample in samples}) == len(samples) > SIZE


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cut_run_goes_on_after_the_last_batch_that_was_taken(workers: int) -> None:
    """Two workers have four more batches ready when the run is cut; they are fetched again."""
    options = {"num_workers": workers, "seed": SEED}
    loader = ResumableLoader(Noisy(), batches(), **options)
    iterator = iter(loader)
    found = [plain(next(iterator)) for _ in range(5)]
    assert len(loader.in_flight) == (4 * ROWS if workers else 0)
    saved = json.loads(json.dumps(loader.state_dict()))
    del iterator, loader
    again = ResumableLoader(Noisy(), batches(), **options)
    again.load_state_dict(saved)
    assert found + [plain(batch) for batch in again] == wanted()


class Unreadable(Noisy):
    """A data set with a sample that cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise RuntimeError(f"no sample {index}")
        return super().__getitem__(index)


@pytest.fixture
def torchs_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Whether torch's handler of SIGCHLD is there; it raises wherever the main thread stands."""
    before = signal.getsignal(signal.SIGCHLD)

    def put(there: bool) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        monkeypatch.setattr(
            torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", not there
        )

    yield put
    signal.signal(signal.SIGCHLD, before)


def kill_the_workers(batches: Iterable[DrawnBatch], at: int, found: list[Any]) -> None:
    """Up to 4 batches may have arrived before the kill, and are handed out after it."""
    for taken, batch in enumerate(batches, start=1):
        found.append(plain(batch))
        if taken == at:
            for worker in multiprocessing.active_children():
                worker.kill()
                worker.join()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize("raised_by", ["loader", "torch"])
def test_killed_workers_cost_no_sample(
    torchs_handler: Callable[[bool], None], persistent: bool, at: int, raised_by: str
) -> None:
    """All workers are killed, twice; the iteration says so, and the next one has the rest."""
    torchs_handler(raised_by == "torch")
    loader = ResumableLoader(
        Noisy(), batches(), seed=SEED, num_workers=2, persistent_workers=persistent
    )
    found: list[Any] = []
    for _ in range(2):
        if raised_by == "torch":
            with pytest.raises((RuntimeError, LoaderWorkerLost), match="worker"):
                kill_the_workers(loader, at, found)
        else:
            with pytest.raises(LoaderWorkerLost, match="expected 2 workers to fetch samples"):
                kill_the_workers(loader, at, found)
            assert loader.in_flight == []
    found += [plain(batch) for batch in loader]
    assert found == wanted()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_data_set_raises_is_its_own(workers: int) -> None:
    """Torch waits 5 s for each worker then."""
    with pytest.raises(RuntimeError, match="no sample 3") as raised:
        list(ResumableLoader(Unreadable(), batches(), seed=SEED, num_workers=workers))
    assert not isinstance(raised.value, LoaderWorkerLost)


def test_a_resize_in_the_middle_of_an_update_goes_on_with_what_is_missing() -> None:
    loader = ResumableLoader(Noisy(), batches(), seed=SEED)
    found = [plain(batch) for batch in islice(loader, GROUPS + 3)]
    done = {group for update, group, _ in found if update == 1}
    for rank in range(2):
        other = ResumableLoader(Noisy(), batches(), seed=SEED)
        place = Place(rank, 2)
        missing = [g for g in batches(place).groups() if g not in done]
        other.begin(1, place, missing)
        found += [plain(batch) for batch in other]
    assert sorted(found) == wanted()


@given(st.integers(0, 24), st.sampled_from([1, 2, 4]))
def test_the_iterators_state_is_its_whole_future(cut: int, world: int) -> None:
    for rank in range(world):
        whole = list(BatchIterator(batches(Place(rank, world))))
        iterator = BatchIterator(batches(Place(rank, world)))
        first = list(islice(iterator, cut // world))
        other = BatchIterator(batches(Place(rank, world)))
        other.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
        assert whole[: len(first)] == first
        assert list(other) == list(iterator)


@needs_torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_resumes_the_same_batches(workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "seed": SEED}
    loader = stateful_loader(Noisy(), batches(), **options)
    iterator = iter(loader)
    found = [plain(next(iterator)) for _ in range(5)]
    saved = loader.state_dict()
    again = stateful_loader(Noisy(), batches(), **options)
    again.load_state_dict(saved)
    assert found + [plain(batch) for batch in again] == wanted()


@needs_torchdata
def test_torchdatas_loader_refuses_the_state_of_another_order() -> None:
    loader = stateful_loader(Noisy(), batches(), seed=SEED)
    next(iter(loader))
    again = stateful_loader(Noisy(), batches(seed=SEED + 1), seed=SEED)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(SamplerStateError, match="seed"):
        iter(again)


@given(st.integers(0, 24), st.sampled_from([(4, 1), (4, 2), (2, 4), (1, 2), (2, 2)]))
def test_a_place_does_not_go_on_from_the_state_of_another(
    cut: int, worlds: tuple[int, int]
) -> None:
    """Which groups the others took is in no place's state: a resize says what is missing."""
    before, after = worlds
    for rank in range(before):
        iterator = BatchIterator(batches(Place(rank, before)))
        list(islice(iterator, cut // before))
        saved = json.loads(json.dumps(iterator.state_dict()))
        for other in range(after):
            if (rank, before) == (other, after):
                continue
            with pytest.raises(SamplerStateError, match=r"another place.* use begin"):
                BatchIterator(batches(Place(other, after))).load_state_dict(saved)


@needs_torchdata
def test_batches_out_of_order_are_refused() -> None:
    for make in (ResumableLoader, stateful_loader):
        with pytest.raises(SamplerStateError, match="in_order=False"):
            make(Noisy(), batches(), seed=SEED, num_workers=2, in_order=False)


def test_states_of_other_declarations_are_refused() -> None:
    saved = ResumableLoader(Noisy(), batches(), seed=SEED).state_dict()
    for other, said in (
        (batches(seed=3), "seed"),
        (batches(size=2), "size"),
        (DeclaredBatches(Sampler(SIZE, SEED), VirtualRankPlan(4, 4), ROWS, stop=1), "groups"),
    ):
        with pytest.raises(SamplerStateError, match=said):
            ResumableLoader(Noisy(), other, seed=SEED).load_state_dict(saved)
    with pytest.raises(SamplerStateError, match="at least 1 draw"):
        batches(size=0)
