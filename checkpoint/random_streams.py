"""Named random streams: whose generator stands where, saved, restored and checked at first use.

An owner (``rank/0/torch``, ``augment``, ``loader``) has one generator of Python, numpy or torch, on
the host or on a GPU. States are bytes in hex, as bundles and live snapshots carry them. Where a
draw must not depend on who makes it, its generators are seeded from a key instead
(``keyed_streams``): then there is no state to save.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from shiftbook.checkpoint.errors import RandomStreamChanged, RandomStreamError
from shiftbook.checkpoint.recorder_state import RNG, Part

Generator: TypeAlias = (
    "random.Random | np.random.Generator | np.random.RandomState | torch.Generator"
)

_DOMAIN = b"shiftbook-random-stream-v1"


def key_of(seed: int, owner: str, *place: int) -> int:
    """A 64-bit key of a stream: SHA-256 over domain, seed, owner and place, its first 8 bytes."""
    text = json.dumps([seed, owner, *place], separators=(",", ":")).encode()
    return int.from_bytes(hashlib.sha256(_DOMAIN + b":" + text).digest()[:8], "big")


def process_generators() -> dict[str, Generator]:
    """The process's own generators by kind: python, numpy, torch, and cuda/N where there are GPUs.

    These are the objects that ``random.random``, ``numpy.random.rand``, ``torch.rand`` and dropout
    draw from.
    """
    found: dict[str, Generator] = {
        "python": random._inst,  # type: ignore[attr-defined]
        "numpy": np.random.mtrand._rand,
        "torch": torch.default_generator,
    }
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for number, generator in enumerate(torch.cuda.default_generators):
            found[f"cuda/{number}"] = generator
    return found


def seed_generator(generator: Generator, key: int) -> None:
    """Begin a generator at a 64-bit key."""
    if isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, np.random.RandomState):
        generator.seed([key >> 32, key & 0xFFFF_FFFF])
    elif isinstance(generator, np.random.Generator):
        fresh = type(generator.bit_generator)(key)
        generator.bit_generator.state = fresh.state
    else:
        generator.manual_seed(key >> 1)  # torch takes seeds below 2⁶³
        if generator.device.type == "cpu":
            _fill(generator, key)


_WORDS_AT, _WORDS = 24, 624
"""Where torch's CPU state has the words of its Mersenne twister, eight bytes each."""


def _fill(generator: torch.Generator, key: int) -> None:
    """Let all 64 bits of a key count: torch's CPU generator seeds itself from the lowest 32."""
    state = generator.get_state()
    twister = np.random.RandomState([key >> 32, key & 0xFFFF_FFFF]).get_state(legacy=False)
    words = twister["state"]["key"]
    wide = torch.from_numpy(np.asarray(words).astype("<u8").view(np.uint8))
    state[_WORDS_AT : _WORDS_AT + 8 * _WORDS] = wide
    generator.set_state(state)


def get_state(generator: Generator) -> bytes:
    """The whole state of a generator, as bytes."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate()).encode()
    if isinstance(generator, np.random.RandomState):
        return json.dumps(_plain(generator.get_state(legacy=False)), sort_keys=True).encode()
    return json.dumps(_plain(generator.bit_generator.state), sort_keys=True).encode()


def set_state(generator: Generator, state: bytes) -> None:
    """Put a generator where ``get_state`` found one of the same kind.

    Raises RandomStreamError for the state of another kind; the generator is unchanged then.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            version, words, gauss = json.loads(state)
            generator.setstate((version, tuple(words), gauss))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(_arrays(json.loads(state)))
        else:
            generator.bit_generator.state = _arrays(json.loads(state))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise RandomStreamError(
            f"expected the state of a {type(generator).__name__}, found {len(state)} bytes of "
            f"another kind ({error}); restore each owner's state to a generator of the same kind"
        ) from error


class RandomStreams:
    """The generators of named owners, saved and restored together."""

    def __init__(self, generators: Mapping[str, Generator] | None = None) -> None:
        self._generators = dict(generators or {})
        self._restored: dict[str, str] | None = None

    @classmethod
    def of_process(cls, owner: str) -> RandomStreams:
        """The process's own generators as ``OWNER/python``, ``OWNER/numpy``, ``OWNER/torch``, …"""
        return cls({f"{owner}/{kind}": g for kind, g in process_generators().items()})

    def own(self, owner: str, generator: Generator) -> Generator:
        """Register a generator under its owner's name; it is given back."""
        if owner in self._generators:
            raise RandomStreamError(
                f"expected a new owner, found {owner} registered already; one owner has one stream"
            )
        if any(generator is other for other in self._generators.values()):
            raise RandomStreamError(
                f"expected a generator of its own for {owner}, found one that another owner has"
            )
        self._generators[owner] = generator
        return generator

    def __getitem__(self, owner: str) -> Generator:
        return self._generators[owner]

    def seed(self, seed: int) -> None:
        """Begin every stream at the key of (seed, owner)."""
        for owner, generator in self._generators.items():
            seed_generator(generator, key_of(seed, owner))

    def states(self) -> dict[str, str]:
        """State of each owner's generator now, in hex; for a bundle's or a snapshot's ``rng``."""
        return {owner: get_state(g).hex() for owner, g in sorted(self._generators.items())}

    def values(self) -> dict[str, bytes]:
        """The same as bytes, for ``Recorder.random_states``."""
        return {owner: bytes.fromhex(state) for owner, state in self.states().items()}

    def parts(self) -> dict[str, Part]:
        """The same as parts ``rng:OWNER`` of a recorded state."""
        return {f"{RNG}{owner}": {"state": state} for owner, state in self.values().items()}

    def restore(self, states: Mapping[str, str]) -> None:
        """Put each owner's generator where ``states`` says; owners must be exactly those here."""
        if states.keys() != self._generators.keys():
            raise RandomStreamError(
                f"expected states of {sorted(self._generators)}, found missing "
                f"{sorted(self._generators.keys() - states.keys())}, unknown "
                f"{sorted(states.keys() - self._generators.keys())}; register the same owners "
                "before the restore, or leave out on purpose those that begin anew"
            )
        before = self.states()
        try:
            for owner, state in states.items():
                set_state(self._generators[owner], bytes.fromhex(state))
        except (RandomStreamError, ValueError):
            for owner, state in before.items():
                set_state(self._generators[owner], bytes.fromhex(state))
            raise
        self._restored = dict(states)

    def first_use(self) -> dict[str, str]:
        """Check, right before the first draw after a restore, that nobody drew or reseeded.

        Gives the states as they are now. Raises RandomStreamChanged with the owners that differ.
        Later calls check nothing, until the next restore.
        """
        found, expected, self._restored = self.states(), self._restored, None
        changed = [o for o, state in (expected or {}).items() if found.get(o) != state]
        if changed:
            raise RandomStreamChanged(
                f"expected the random streams as they were restored, found {', '.join(changed)} "
                "elsewhere at first use: reseeded or drawn from in between; restore generators "
                "last, and give logging and evaluation streams of their own",
                owners=tuple(changed),
            )
        return found


@contextmanager
def keyed_streams(seed: int, owner: str, *place: int) -> Iterator[None]:
    """The process's generators stand at the key of (seed, owner, place) inside the block.

    Afterwards they are where they were before: whatever else draws from them sees nothing of it.
    """
    generators = process_generators()
    put_back = [_keeper(generator) for generator in generators.values()]
    for kind, generator in generators.items():
        seed_generator(generator, key_of(seed, f"{owner}/{kind.partition('/')[0]}", *place))
    try:
        yield
    finally:
        for restore in put_back:
            restore()


def _keeper(generator: Generator) -> Callable[[], object]:
    """What puts a generator back to where it is now; without the detour over bytes."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state(legacy=False))
    return partial(set_state, generator, get_state(generator))


def _plain(value: Any) -> Any:
    """Numpy arrays and numbers as JSON values."""
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    """What ``_plain`` was given."""
    if isinstance(value, dict):
        if value.keys() == {"array", "dtype"}:
            return np.array(value["array"], dtype=value["dtype"])
        return {key: _arrays(member) for key, member in value.items()}
    return value
