"""Goal: a chain of patches leads to the sender's bits, or is refused and leaves the receiver alone.

Method: a sender's series with an anchor in its middle; each of its messages in turn is lost, cut
off, flipped in one bit, doubled, exchanged with the next one, or taken from another series. A fault
before the last anchor must not matter; any other must be refused with the message named, and the
receiver must hold the bits that it held. Lossy series too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from shiftbook.checkpoint.errors import PatchDamaged, PatchError, PatchRefused, PatchUnencodable
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.patch import Lossy
from shiftbook.checkpoint.patch_chain import follow
from shiftbook.checkpoint.patch_series import PatchSender
from tests.checkpoint.patch_states import all_bits

torch.set_num_threads(1)
BOUND = 1e-2
COUNT, LAST_ANCHOR = 7, 4
Messages = list[bytes]


@cache
def series(seed: int, *, lossy: bool) -> tuple[Messages, PatchSender, dict[str, torch.Tensor]]:
    """Messages of versions 10 and up, their sender, its last weights: to be read alone."""
    rng = torch.Generator().manual_seed(seed)
    loss = Lossy(max_error=BOUND) if lossy else None
    sender = PatchSender(anchor_every=LAST_ANCHOR, lossy=loss)
    weights = {
        "w": torch.randn(60, 70, generator=rng),
        "b": torch.randn(9, generator=rng).bfloat16(),
        "step": torch.zeros((), dtype=torch.int64),
    }
    messages = []
    for number in range(COUNT):
        messages.append(sender.next(weights, version=10 + number))
        change = torch.rand(60, 70, generator=rng) < (1.0 if lossy else 0.02)
        weights["w"] = weights["w"] + change * 1e-3
        weights["step"] = weights["step"] + 1
    return messages, sender, weights


def lost(messages: Messages, at: int, other: Messages) -> Messages:
    return messages[:at] + messages[at + 1 :]


def cut_off(messages: Messages, at: int, other: Messages) -> Messages:
    return [*messages[:at], messages[at][:-40], *messages[at + 1 :]]


def flipped(messages: Messages, at: int, other: Messages) -> Messages:
    data = bytearray(messages[at])
    data[len(data) // 2] ^= 4
    return [*messages[:at], bytes(data), *messages[at + 1 :]]


def doubled(messages: Messages, at: int, other: Messages) -> Messages:
    return [*messages[: at + 1], *messages[at:]]


def swapped(messages: Messages, at: int, other: Messages) -> Messages:
    if at == COUNT - 1:
        return doubled(messages, at, other)
    return [*messages[:at], messages[at + 1], messages[at], *messages[at + 2 :]]


def of_another(messages: Messages, at: int, other: Messages) -> Messages:
    return [*messages[:at], other[at], *messages[at + 1 :]]


FAULTS: tuple[Callable[[Messages, int, Messages], Messages], ...] = (
    lost,
    cut_off,
    flipped,
    doubled,
    swapped,
    of_another,
)


def matters(fault: Any, at: int) -> bool:
    """Whether the fault is one of what is needed: the last anchor, and what comes after it."""
    if fault is lost and at == COUNT - 1:
        return False  # a chain may end anywhere
    if fault is doubled and at == LAST_ANCHOR:
        return False  # the second one begins anew
    return at >= LAST_ANCHOR or (fault is swapped and at == LAST_ANCHOR - 1)


def blank(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in weights.items()}


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", range(COUNT))
def test_each_fault_of_each_message(
    fault: Callable[[Messages, int, Messages], Messages], at: int, lossy: bool
) -> None:
    messages, sender, weights = series(1, lossy=lossy)
    other, _, _ = series(2, lossy=lossy)
    bad = fault(messages, at, other)
    receiver = blank(weights)
    before = all_bits(receiver)
    accepts = {"accept_error": BOUND} if lossy else {}
    if matters(fault, at):
        with pytest.raises(PatchError, match=r"message \d of \d|expected an anchor") as told:
            follow(bad, receiver, version=None, **accepts)
        assert isinstance(told.value, PatchDamaged | PatchRefused)
        assert all_bits(receiver) == before
        return
    done = follow(bad, receiver, version=None, **accepts)
    prints = fingerprint_tensors(receiver)
    assert prints == done.fingerprints
    if fault is lost and at == COUNT - 1:
        assert done.version == 15
    else:
        assert (done.version, prints) == (16, sender.fingerprints)


@pytest.mark.parametrize(
    ("fault", "at", "says"),
    [
        (lost, 5, r"message 6 of 6, version 16: expected a patch on version 14, found one on 15"),
        (cut_off, 5, r"message 6 of 7: expected a patch with SHA-256"),
        (doubled, 5, r"message 7 of 8, version 15: .* it is there twice"),
        (swapped, 5, r"message 6 of 7, version 16: .* what leads there is lost, or comes later"),
        (of_another, 5, r"message 6 of 7, version 15: .* with root .* it is of another series"),
        (swapped, 3, r"message 5 of 7, version 13: .* it comes too late"),
        (lost, 4, r"message 5 of 6, version 15: expected a patch on version 13"),
    ],
)
def test_the_cause_is_said(fault: Any, at: int, says: str) -> None:
    messages, _, weights = series(1, lossy=False)
    other, _, _ = series(2, lossy=False)
    with pytest.raises(PatchError, match=says):
        follow(fault(messages, at, other), blank(weights), version=None)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_receiver_within_the_chain_takes_what_it_lacks(lossy: bool) -> None:
    """Without an anchor, from the version that it has; what it had is not used again."""
    messages, sender, weights = series(3, lossy=lossy)
    accepts = {"accept_error": BOUND} if lossy else {}
    for have in range(1, 4):
        receiver = blank(weights)
        follow(messages[:have], receiver, version=None, **accepts)
        done = follow(messages[1:4], receiver, version=9 + have, **accepts)
        assert (done.version, done.first) == (13, have - 1)
        assert fingerprint_tensors(receiver) == done.fingerprints
    whole = blank(weights)
    assert follow(messages, whole, version=None, **accepts).first == LAST_ANCHOR
    assert fingerprint_tensors(whole) == sender.fingerprints


def test_what_does_not_lead_on_is_refused() -> None:
    messages, _, weights = series(4, lossy=False)
    receiver = blank(weights)
    cases: list[tuple[Messages, int | None, str]] = [
        ([], None, "expected an anchor to begin with, found none"),
        ([], 12, "lead on from version 12, found none"),
        (messages[1:4], None, "expected an anchor to begin with, found 3 messages"),
        (messages[2:4], 10, r"expected a message on version 10.*found some on \[11, 12\]"),
        (messages[1:4], 10, "found other contents"),  # the version is right, the bits are not
        (messages[:3], 99, r"lead on from version 99, found that they end at 12"),
        ([messages[4], messages[0]], None, "message 2 of 2, version 10: .* out of order"),
        ([b"", b"x" * 500], 12, "too few"),
    ]
    before = all_bits(receiver)
    for given, version, says in cases:
        with pytest.raises(PatchError, match=says):
            follow(given, receiver, version=version)
        assert all_bits(receiver) == before


def test_a_loss_that_was_not_declared_is_refused_before_anything_is_written() -> None:
    messages, _, weights = series(5, lossy=True)
    receiver = blank(weights)
    before = all_bits(receiver)
    with pytest.raises(PatchRefused, match="declare the loss"):
        follow(messages, receiver, version=None)
    assert all_bits(receiver) == before


def test_tied_tensors_get_one_content_or_none() -> None:
    """Two names of one tensor: a chain that gives them two contents writes nothing."""
    messages, _, weights = series(6, lossy=True)
    receiver = blank(weights)
    follow(messages, receiver, version=None, accept_error=BOUND)
    sender = PatchSender(lossy=Lossy(max_error=BOUND))
    one, two = torch.linspace(-1, 1, 5000), torch.linspace(-1, 1, 5000)
    chain = [sender.next({"one": one, "two": two}, version=1)]
    chain.append(sender.next({"one": one.sin(), "two": two.cos()}, version=2))
    tied = torch.zeros(5000)
    with pytest.raises(PatchRefused, match="one tensor here"):
        follow(chain, {"one": tied, "two": tied}, version=None, accept_error=BOUND)
    assert not tied.any()


def test_a_series_only_goes_up() -> None:
    """A version that was sent before would make two patches on one base."""
    sender = PatchSender()
    weights = {"w": torch.ones(8)}
    sender.next(weights, version=3)
    for version in (3, 2):
        with pytest.raises(PatchUnencodable, match="a series only goes up"):
            sender.next(weights, version=version)
    assert sender.version == 3
    sender.next(weights, version=4)
