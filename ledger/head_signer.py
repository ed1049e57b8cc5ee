"""The one signer of a ledger: signs its head, remembers what it signed, and publishes it.

It runs in the process that holds the key, which no writer does. Before it signs anything it holds
the ledger against every head that it knows: its own memory, the last head in the database and the
last one at each place of publication. A ledger that is no continuation of all of them is refused,
so that one key never signs two histories.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shiftbook.ledger.canonical import leaf_hash
from shiftbook.ledger.durable import replace_file, sync_path
from shiftbook.ledger.errors import (
    AppendInDoubt,
    InvalidNote,
    LedgerUnreachable,
    PublicationFailed,
    ShiftbookError,
    SigningFailed,
    SigningRefused,
)
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.merkle import CompactRange
from shiftbook.ledger.publication import Outlet
from shiftbook.ledger.signed_note import SignedHead, head_text, parse_head_text
from shiftbook.ledger.signing_keys import Signer, Verifier
from shiftbook.ledger.tree import Node

EVERY_EVENTS = 1000
"""Events after which a head is signed, by default."""

EACH_S = 10.0
"""Seconds after which a head is signed where anything was added, by default."""

POLL_S = 0.1
"""Pause between two looks at a ledger that is signed as it grows."""

PASSING = (PublicationFailed, SigningFailed, LedgerUnreachable, AppendInDoubt)
"""What a signer that follows tells of and outlives: a place, a disk or a server may come back."""


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head that the ledger must continue, and where it is known from."""

    size: int
    root: bytes
    whence: str


class SignerMemory:
    """A file beside the key with the last head that was about to be signed.

    Written before each signature, in one step: whatever a crash leaves, the key has signed nothing
    beyond it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def last(self, origin: str) -> KnownHead | None:
        """What it holds; raises SigningRefused where that is damaged or another ledger's."""
        try:
            text = self.path.read_bytes().decode("utf-8")
            found, size, root, _ = parse_head_text(text)
        except FileNotFoundError:
            return None
        except (InvalidNote, UnicodeDecodeError) as error:
            raise SigningRefused(
                f"expected the last head that this key signed in {self.path}, found other content "
                f"({error}); restore the file from a copy: without it a second history could be "
                "signed"
            ) from error
        if found != origin:
            raise SigningRefused(
                f"expected the memory of {origin} in {self.path}, found that of {found}; keep each "
                "key with its own file"
            )
        return KnownHead(size, root, f"the signer's memory {self.path}")

    def keep(self, origin: str, size: int, root: bytes) -> None:
        """Replace the content, durable on return; raises SigningFailed."""
        try:
            replace_file(self.path, head_text(origin, size, root).encode())
            sync_path(self.path.parent)
        except OSError as error:
            raise SigningFailed(
                f"expected to keep the head of {size} events in {self.path} before it is signed, "
                f"found: {error.strerror or error}; nothing was signed; make its folder writable "
                "and give it space"
            ) from error


class HeadSigner:
    """Signs the heads of one ledger; one of these for a ledger, in one process.

    ``publish`` are the places outside the database. ``memory`` is the file that keeps the last
    signed head, beside the key; without it only heads in the database and at those places are held
    against the ledger. ``predecessors`` are keys that signed this ledger before. Safe to share
    between threads.
    """

    def __init__(
        self,
        ledger: Ledger,
        signer: Signer,
        publish: Sequence[Outlet] = (),
        *,
        memory: Path | None = None,
        predecessors: Sequence[Verifier] = (),
    ) -> None:
        self.ledger = ledger
        self.signer = signer
        self.outlets = tuple(publish)
        self._memory = None if memory is None else SignerMemory(memory)
        self._verifiers = (signer.verifier, *predecessors)
        self._tree = ledger.tree()
        self._lock = threading.Lock()

    @property
    def signed_size(self) -> int:
        """Events under the last head in the database."""
        head = self._tree.last_head()
        return 0 if head is None else head.size

    def sign(self) -> SignedHead | None:
        """Sign the head of the ledger as it is, store it, and publish what is not published yet.

        The last head, new or not; None in an empty ledger. Raises SigningRefused where nothing was
        signed since the ledger is no continuation of what was signed before, SigningFailed where
        the memory could not be written, NotALedger where a table has lost its key, and
        PublicationFailed where the head stands in the ledger
        and did not reach some place; it is offered there again with the next call.
        """
        with self._lock:
            self.ledger.require_keys()
            stored = self._stored()
            size = self.ledger.head().size
            base = 0
            if stored is not None:
                base = stored.size
                if size < base:
                    raise self._rolled_back(size, _known(stored, "the table of heads"))
                self._tree.complete(base)
            root, nodes = self._extend(base, size, self._known_heads(stored, size))
            if size > base:
                if self._memory is not None:
                    self._memory.keep(self.signer.name, size, root)
                head = SignedHead.sign(size, root, self.signer)
                self._tree.add_head(head, base, nodes)
                stored = head
            if stored is not None:
                self._publish(stored)
            return stored

    def run(
        self,
        *,
        every: int = EVERY_EVENTS,
        each_s: float = EACH_S,
        stop: threading.Event,
        poll_s: float = POLL_S,
        on_head: Callable[[SignedHead], None] | None = None,
        on_problem: Callable[[ShiftbookError], None] | None = None,
    ) -> None:
        """Sign after ``every`` events, or ``each_s`` seconds after something came, until ``stop``.

        At the stop the last head is signed too. A place, a disk or a ledger that is out of reach is
        told to ``on_problem`` and tried again ``each_s`` later; at the stop that is raised. A
        ledger that is refused ends it at once.
        """
        since: float | None = None
        again_s = 0.0
        unpublished = True  # of an earlier life, perhaps
        while True:
            stopping = stop.is_set()
            now = time.monotonic()
            try:
                if stopping or now >= again_s:
                    before = self.signed_size
                    new = self.ledger.head().size - before
                    since = (now if since is None else since) if new or unpublished else None
                    late = since is not None and now - since >= each_s
                    # A rolled-back ledger has less than nothing new: sign, which refuses it.
                    if stopping or new < 0 or new >= every or late:
                        since = None
                        head = self.sign()
                        unpublished = False
                        if head is not None and head.size > before and on_head is not None:
                            on_head(head)
            except PASSING as error:
                if stopping:
                    raise
                unpublished = True
                # A head that only a place lacks is signed: what comes next is signed in time.
                if not isinstance(error, PublicationFailed):
                    again_s = now + each_s
                if on_problem is not None:
                    on_problem(error)
            if stopping:
                return
            stop.wait(poll_s)

    def _stored(self) -> SignedHead | None:
        """The last head in the database, signed by this key or one before it."""
        try:
            head = self._tree.last_head()
            if head is not None:
                self._verify(head, "the table of heads")
        except InvalidNote as error:
            raise SigningRefused(
                f"expected a signed head at the end of the table of heads, found damage ({error}); "
                "run `shiftbook verify` and restore the ledger from a copy"
            ) from error
        return head

    def _verify(self, head: SignedHead, where: str) -> None:
        try:
            head.note.verify(self._verifiers)
        except ShiftbookError as error:
            raise SigningRefused(
                f"expected heads signed by {self.signer.verifier.text()} in {where}, found another "
                f"of {head.origin} with {head.size} events; sign with that ledger's own key, or "
                "name the key before it as predecessor"
            ) from error

    def _known_heads(self, stored: SignedHead | None, size: int) -> list[KnownHead]:
        """Every head that the ledger must continue; raises SigningRefused for a rollback."""
        known = [] if stored is None else [_known(stored, "the table of heads")]
        if self._memory is not None:
            remembered = self._memory.last(self.signer.name)
            known += [] if remembered is None else [remembered]
        for outlet in self.outlets:
            try:
                last = outlet.last()
            except PublicationFailed:
                continue  # said when it is published to; the others still hold
            if last is not None:
                self._verify(last, outlet.name)
                known.append(_known(last, outlet.name))
        for head in known:
            if head.size > size:
                raise self._rolled_back(size, head)
        return known

    def _rolled_back(self, size: int, head: KnownHead) -> SigningRefused:
        return SigningRefused(
            f"expected at least {head.size} events, as under the head in {head.whence}, found "
            f"{size}: the ledger was rolled back or cut; nothing was signed; restore the newer copy"
        )

    def _extend(self, base: int, size: int, known: Sequence[KnownHead]) -> tuple[bytes, list[Node]]:
        """Root over ``size`` events and the nodes after ``base``, held against known heads."""
        nodes: list[Node] = []
        tree = CompactRange(
            base,
            self._tree.edge(base),
            lambda level, number, value: nodes.append((level, number, value)),
        )
        roots = {head.size: self._tree.root(head.size) for head in known if head.size < base}
        roots[base] = tree.root()
        wanted = {head.size for head in known}
        for row in self.ledger.rows(base - 1, until=size - 1):
            if row.position != tree.size or leaf_hash(row.data) != row.leaf:
                found = "other bytes" if row.position == tree.size else f"position {row.position}"
                raise SigningRefused(
                    f"expected an event with its hash at position {tree.size}, found {found}; "
                    "nothing was signed; run `shiftbook verify`"
                )
            tree.append(row.leaf)
            if tree.size in wanted:
                roots[tree.size] = tree.root()
        for head in known:
            if roots[head.size] != head.root:
                raise SigningRefused(
                    f"expected the root {head.root.hex()} at {head.size} events, as in "
                    f"{head.whence}, found {roots[head.size].hex()}: the history before was "
                    "rewritten or forked; nothing was signed; run `shiftbook verify`"
                )
        return tree.root(), nodes

    def _publish(self, stored: SignedHead) -> None:
        """Bring every place up to the last head; raise for the first that failed, after all."""
        failed: list[PublicationFailed] = []
        for outlet in self.outlets:
            try:
                last = outlet.last()
                if last is None:
                    outlet.publish(stored)  # a new place starts with the newest head
                elif last.size < stored.size:
                    for head in self._tree.heads(after=last.size):
                        outlet.publish(head)
            except PublicationFailed as error:
                failed.append(error)
        if failed:
            raise failed[0]


def _known(head: SignedHead, whence: str) -> KnownHead:
    return KnownHead(head.size, head.root, whence)
