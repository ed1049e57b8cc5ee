"""The half-done update of a trainer as a move carries it: its sums, by whoever owns each of them.

In the fixed tree a sum belongs to a virtual rank and goes to the process that owns it next. In the
unordered mode each process has one sum; that of process r goes to process r mod world, where sums
that meet are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shiftbook.checkpoint.elastic import VirtualRanks
from shiftbook.checkpoint.live import LiveSnapshot
from shiftbook.scheduler.workers.component import Layout
from shiftbook.scheduler.workers.transfer import fetch


def half_done(ranks: VirtualRanks) -> dict[int, LiveSnapshot]:
    """A live snapshot of each sum here, by its owner's number."""
    whole = ranks.accumulator.snapshot()
    if ranks.reduction == "unordered":
        return {int(whole["rank"]): _live(whole, whole["uids"])}
    rest = {name: value for name, value in whole.items() if name != "ranks"}
    return {
        rank: _live({**rest, "ranks": {rank: content}}, content["uids"])
        for rank, content in whole["ranks"].items()
    }


def prints_of(snapshots: Mapping[int, LiveSnapshot]) -> dict[str, str]:
    """Root of each sum, by the name that a move's fingerprints give it."""
    return {f"accumulator/{rank}": snapshot.root for rank, snapshot in snapshots.items()}


def _live(content: Mapping[str, Any], uids: Any) -> LiveSnapshot:
    return LiveSnapshot.take(
        policy_version=0, iteration=0, tensors={}, accumulators=content, uids=tuple(uids)
    )


@dataclass(frozen=True)
class Gathered:
    """The sums that a process takes part with in its new world."""

    pieces: list[dict[str, Any]]
    """As an accumulator's ``restore`` takes them."""
    moved_bytes: int
    prints: dict[str, str] | None
    """Of the sums as they came, where they are added on arrival; None where they stay apart, and
    can be read again where they are used."""


def gather(
    own: VirtualRanks | None,
    snapshots: Mapping[str, Mapping[str, Any]],
    block: range,
    layout: Layout,
    reduction: str,
) -> Gathered:
    """Take the sums for ``layout`` from what this process has, and else from ``snapshots``.

    Raises LiveSnapshotDamaged for one that did not arrive as it was sent.
    """
    held = {} if own is None else half_done(own)
    offered = {rank: ref for sent in snapshots.values() for rank, ref in sent["ranks"].items()}
    wanted = sorted(offered) if reduction == "unordered" else list(block)
    pieces: dict[int, LiveSnapshot] = {}
    moved = 0
    for rank in wanted:
        if rank in held:
            pieces[rank] = held[rank]
            continue
        piece: LiveSnapshot = fetch(offered[rank])
        piece.check()
        moved += piece.nbytes
        pieces[rank] = piece
    prints = None
    if reduction == "unordered":
        prints = prints_of({r: p for r, p in pieces.items() if r % layout.world == layout.rank})
    return Gathered([dict(piece.accumulators) for piece in pieces.values()], moved, prints)
