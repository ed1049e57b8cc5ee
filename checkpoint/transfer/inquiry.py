"""What a receiver asks of its sources: which version there is, and the desk's word on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shiftbook.checkpoint.errors import (
    SourceLost,
    TransferDamaged,
    TransferError,
    TransferRefused,
)
from shiftbook.checkpoint.transfer.catalogue import Catalogue, read_catalogue
from shiftbook.checkpoint.transfer.desk import Report
from shiftbook.checkpoint.transfer.link import Link

ASK_S = 5.0
"""A question that waits is asked again after this time."""
DESK_TRIES = 3


@dataclass(frozen=True)
class Asker:
    """One rank of a target, as it names itself."""

    target: str
    rank: int
    ranks: int
    incarnation: str

    def names(self, version: int) -> dict[str, Any]:
        """Who speaks, and of which version."""
        return {
            "target": self.target,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "version": version,
        }


class Inquiry:
    """Questions of one rank; the first link leads to the source with the desk.

    `verdict_s` bounds how long the desk may make it wait for the target's other ranks.
    """

    def __init__(self, asker: Asker, links: Sequence[Link], verdict_s: float) -> None:
        self._asker, self._links, self._verdict_s = asker, links, verdict_s

    def newest(self, newer_than: int | None, wait_s: float) -> Catalogue:
        """The newest version, from the first source who answers; waits for one that is newer.

        Raises SourceLost where none answers, TransferRefused where none came within `wait_s`.
        """
        target = self._asker.target
        deadline = time.monotonic() + wait_s
        lost: list[str] = []
        while True:
            lost.clear()
            for link in self._links:
                left_s = min(ASK_S, max(0.0, deadline - time.monotonic()))
                body = {"newer_than": newer_than, "wait_s": left_s}
                try:
                    found = link.ask("catalogue", body, wait_s=left_s)["catalogue"]
                except SourceLost as error:
                    link.close()
                    lost.append(f"rank {link.rank}: {error}")
                    continue
                if found is not None:
                    return read_catalogue(found)
                break
            if len(lost) == len(self._links):
                raise SourceLost(
                    f"{target}: expected one of {len(lost)} sources to answer, found none "
                    f"({'; '.join(lost)})",
                    where=target,
                )
            if time.monotonic() >= deadline:
                raise TransferRefused(
                    f"{target}: expected a version after {newer_than} within {wait_s:g} s, "
                    "found none; publish one, or wait longer",
                    where=target,
                )

    def agree(self, report: Report) -> None:
        """Hand in what was gathered, and wait for the verdict on the whole target.

        Raises TransferDamaged where the fingerprints are not those of the version.
        """
        answer = self._await("report", report.model_dump(mode="json"), "verdict", "wait")
        if answer["verdict"] != "commit":
            target = self._asker.target
            raise TransferDamaged(
                f"{target}: expected the fingerprints of version {report.version} on all "
                f"{self._asker.ranks} ranks, found otherwise: {answer.get('reason')}; it serves "
                "nothing until a sync succeeds",
                where=target,
            )

    def confirm(self, version: int, *, resident: bool) -> None:
        """Say that a version is loaded, and wait until all ranks of the target said so."""
        body = self._asker.names(version)
        if resident:
            body["resident"] = True
        self._await("confirm", body, "confirmed", False)

    def tell_failed(self, version: int, reason: str) -> None:
        """Say why this target does not take a version, if anybody still listens."""
        try:
            self._links[0].ask("failed", {**self._asker.names(version), "reason": reason})
        except TransferError:
            self._links[0].close()  # the desk finds out by its time limit

    def _await(
        self, kind: str, body: Mapping[str, Any], key: str, not_yet: Any
    ) -> Mapping[str, Any]:
        """Ask the desk until its answer depends on no other rank any more."""
        deadline = time.monotonic() + self._verdict_s
        while True:
            left_s = max(0.0, min(ASK_S, deadline - time.monotonic()))
            answer = self._ask_desk(kind, {**body, "wait_s": left_s}, wait_s=left_s)
            if answer.get(key) != not_yet:
                return answer
            if time.monotonic() >= deadline:
                target = self._asker.target
                raise SourceLost(
                    f"{target}: expected all {self._asker.ranks} ranks to {kind} within "
                    f"{self._verdict_s:g} s, found some silent; sync again when they are back",
                    where=target,
                )

    def _ask_desk(
        self, kind: str, body: Mapping[str, Any], *, wait_s: float = 0.0
    ) -> dict[str, Any]:
        """Ask the source with the desk; it is asked again when the link breaks, with one effect."""
        for tried in range(1, DESK_TRIES + 1):
            try:
                return self._links[0].ask(kind, body, wait_s=wait_s)
            except SourceLost:
                self._links[0].close()
                if tried == DESK_TRIES:
                    raise
                threading.Event().wait(0.1 * tried)
        raise AssertionError("unreachable")
