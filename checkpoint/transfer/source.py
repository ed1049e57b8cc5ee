"""A source: what a rank offers and, on one of them, the desk; every transport asks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiftbook.checkpoint.errors import TransferDamaged, TransferRefused
from shiftbook.checkpoint.transfer.desk import Desk
from shiftbook.checkpoint.transfer.offers import Offers

MOST_WAIT_S = 10.0
"""A question is answered after this time at the latest, if only with `wait`."""


class Source:
    """Answers the questions of receivers; parcels come from `offers` directly."""

    def __init__(self, offers: Offers, desk: Desk | None = None) -> None:
        self.offers, self.desk = offers, desk

    def answer(self, kind: str, body: Mapping[str, Any], *, peer: str) -> dict[str, Any]:
        """The answer to one question of a receiver that is known to be `peer`."""
        wait_s, newer_than = body.get("wait_s", 0.0), body.get("newer_than")
        if not isinstance(wait_s, int | float) or not isinstance(newer_than, int | None):
            raise TransferDamaged(f"expected numbers, found {wait_s!r} and {newer_than!r}")
        wait_s = min(float(wait_s), MOST_WAIT_S)
        if kind == "catalogue":
            found = self.offers.catalogue(newer_than=newer_than, wait_s=wait_s)
            return {"catalogue": found.model_dump(mode="json") if found else None}
        if kind not in ("report", "confirm", "failed"):
            raise TransferRefused(
                f"expected a question among catalogue, report, confirm and failed, found {kind}"
            )
        if self.desk is None:
            raise TransferRefused(
                f"expected the desk at rank {self.offers.rank}, found none; report to the source "
                "that has it (the first link)"
            )
        said = {key: value for key, value in body.items() if key != "wait_s"}
        if kind == "report":
            return self.desk.report(said, peer=peer, wait_s=wait_s)
        if kind == "confirm":
            return self.desk.confirm(said, peer=peer, wait_s=wait_s)
        return self.desk.failed(said, peer=peer)
