"""The declared, resumable order of prompts: a pure function of rule, seed, size and ordinal.

One data set goes through permutations, epoch after epoch; several are mixed in declared shares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from shiftbook.checkpoint.errors import SamplerStateError
from shiftbook.checkpoint.mixture import mixture_draws, offsets, source_seed
from shiftbook.ledger.canonical import encode
from shiftbook.ledger.plan import DataPlan, MixturePlan

HASH_SORT = "hash-sort-v1"
SEQUENTIAL = "sequential-v1"
MIXTURE = "mixture-v1"
_DOMAIN = b"shiftbook-sampler-hash-sort-v1"


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn prompt: its place in the whole run, its epoch, its index in the data set.

    The epoch counts passes over as many draws as the data set has prompts; a source of a mixture
    has passes of its own.
    """

    ordinal: int
    epoch: int
    index: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """Where a sampler stands; the cursor counts samples, so no batch or world size enters."""

    rule: str
    seed: int
    size: int
    epoch: int
    position: int
    unit: str = "samples"
    mixture: str = ""
    """SHA-256 of the declared mixture."""

    @property
    def ordinal(self) -> int:
        """Ordinal of the next draw in the whole run."""
        return self.epoch * self.size + self.position

    def plain(self) -> dict[str, Any]:
        """As plain values, for a manifest or an event."""
        return asdict(self)


def _hash_sort(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """Indices 0..size-1 sorted by SHA-256(domain, seed, epoch, index): a keyed shuffle.

    Sorting by independent uniform keys gives each permutation with equal probability; SHA-256
    stands in for them. It needs nothing but the standard library, so that whoever verifies a run
    computes the order anew on any machine and any version of any array library.
    """
    prefix = hashlib.sha256(_DOMAIN + b":%d:%d:" % (seed, epoch))

    def key(index: int) -> bytes:
        digest = prefix.copy()
        digest.update(b"%d" % index)
        return digest.digest()

    return tuple(sorted(range(size), key=key))


def _sequential(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """The data set's own order in each epoch; the seed has no effect."""
    return tuple(range(size))


RULES: Mapping[str, Callable[[int, int, int], tuple[int, ...]]] = {
    HASH_SORT: _hash_sort,
    SEQUENTIAL: _sequential,
}
"""Order of one epoch by rule id: f(seed, epoch, size). A changed rule gets a new id."""


@lru_cache(maxsize=8)  # the running epoch and its neighbour, for a few samplers
def epoch_order(rule: str, seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """Data set indices of one epoch in the order in which they are drawn."""
    _check(rule, size)
    return RULES[rule](seed, epoch, size)


@lru_cache(maxsize=64)  # sources of a mixture, each in an epoch of its own
def _source_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    return _hash_sort(seed, epoch, size)


def expected_draws(
    rule: str, seed: int, size: int, start: int, n: int, mixture: MixturePlan | None = None
) -> list[Draw]:
    """The `n` draws from ordinal `start` on; an epoch ends after `size` draws.

    Pure and free of state: a verifier compares it with what a run recorded. Raises
    SamplerStateError for an unknown rule, an empty data set or negative numbers.
    """
    _check(rule, size, mixture)
    if start < 0 or n < 0:
        raise SamplerStateError(f"expected start and n of at least 0, found {start} and {n}")
    draws = []
    if mixture is not None:
        begin = offsets(mixture)
        for ordinal, source, count, own in mixture_draws(mixture, seed, start, n):
            epoch, position = divmod(count, own)
            order = _source_order(source_seed(seed, source), epoch, own)
            index = begin[source] + order[position]
            draws.append(Draw(ordinal, ordinal // size, index, source))
        return draws
    for ordinal in range(start, start + n):
        epoch, position = divmod(ordinal, size)
        draws.append(Draw(ordinal, epoch, epoch_order(rule, seed, epoch, size)[position]))
    return draws


class Sampler:
    """Draws prompts in the declared order and can go on from any saved state."""

    def __init__(
        self, size: int, seed: int, *, rule: str = HASH_SORT, mixture: MixturePlan | None = None
    ) -> None:
        _check(rule, size, mixture)
        self._rule, self._seed, self._size = rule, seed, size
        self._mixture = mixture
        self._ordinal = 0

    @classmethod
    def declared(cls, data: DataPlan) -> Sampler:
        """As a plan declares it."""
        return cls(data.dataset_size, data.seed, rule=data.sampler_rule, mixture=data.mixture)

    def at(self, start: int, n: int) -> list[Draw]:
        """The `n` draws from ordinal `start` on; the sampler stays where it stands."""
        return expected_draws(self._rule, self._seed, self._size, start, n, self._mixture)

    def draw(self, n: int) -> list[Draw]:
        """The next `n` prompts, over epoch boundaries."""
        draws = self.at(self._ordinal, n)
        self._ordinal += n
        return draws

    def state(self) -> SamplerState:
        """Where the sampler stands: the draw that comes next."""
        epoch, position = divmod(self._ordinal, self._size)
        declared = "" if self._mixture is None else _digest(self._mixture)
        return SamplerState(self._rule, self._seed, self._size, epoch, position, mixture=declared)

    def restore(self, state: SamplerState | Mapping[str, Any]) -> None:
        """Go on from a saved state of the same rule, seed and size; else SamplerStateError."""
        try:
            wanted = state if isinstance(state, SamplerState) else SamplerState(**state)
        except TypeError as error:
            raise SamplerStateError(
                f"expected a sampler state with rule, seed, size, epoch and position: {error}"
            ) from error
        for name, mine in (
            ("rule", self._rule),
            ("seed", self._seed),
            ("size", self._size),
            ("unit", "samples"),
            ("mixture", self.state().mixture),
        ):
            found = getattr(wanted, name)
            if found != mine:
                raise SamplerStateError(
                    f"sampler state of another order: expected {name} {mine!r}, found {found!r}; "
                    "build the sampler from the plan under which the state was saved"
                )
        self.seek(wanted.epoch, wanted.position)

    def seek(self, epoch: int, position: int) -> None:
        """Go on from `position` samples into `epoch`, as a manifest's cursor says it."""
        if epoch < 0 or not 0 <= position < self._size:
            raise SamplerStateError(
                f"expected an epoch of at least 0 and a position from 0 to {self._size - 1}, "
                f"found epoch {epoch}, position {position}"
            )
        self._ordinal = epoch * self._size + position


def _digest(mixture: MixturePlan) -> str:
    return hashlib.sha256(encode(mixture.model_dump(mode="json"))).hexdigest()


def _check(rule: str, size: int, mixture: MixturePlan | None = None) -> None:
    if rule not in RULES and rule != MIXTURE:
        raise SamplerStateError(
            f"expected a sampler rule among {', '.join(sorted(RULES))}, {MIXTURE}, found {rule!r}"
        )
    if (rule == MIXTURE) != (mixture is not None):
        raise SamplerStateError(
            f"expected a mixture with rule {MIXTURE} and with no other, found rule {rule!r} "
            f"{'without' if mixture is None else 'with'} one; declare sources and shares"
        )
    found = size if mixture is None else sum(source.size for source in mixture.sources)
    if found != size:
        raise SamplerStateError(
            f"expected sources of {size} prompts together, found {found}; correct the sizes"
        )
    if size < 1:
        raise SamplerStateError(f"expected a data set of at least 1 prompt, found {size}")
