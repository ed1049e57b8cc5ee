"""State at rest and after: I1 restore, I14 the reference, I17b first use after a load or move."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from fnmatch import fnmatchcase

from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.state import CheckpointRestored, CheckpointSaved, StateFirstUsed
from shiftbook.ledger.events.sync import WeightSyncStarted
from shiftbook.ledger.events.training import UpdateApplied
from shiftbook.ledger.plan import Plan
from shiftbook.verify.invariants.base import End, Invariant, Step, listed, short
from shiftbook.verify.invariants.lossy import LossyRoots
from shiftbook.verify.lineage import MASTERS, MODEL, OPTIMIZER, REFERENCE, WINDOW


def _wrong(expected: dict[str, str], found: dict[str, str], exact: bool) -> list[str]:
    """Names that differ; with ``exact`` also those that only one side has."""
    names = expected.keys() | found.keys() if exact else expected.keys() & found.keys()
    return sorted(n for n in names if expected.get(n) != found.get(n))


def owner_matches(plan: Plan | None, owner: str) -> bool:
    """True where the plan lets the state of an owner be split or keyed anew at a resize."""
    patterns = plan.data.remapped_owners if plan is not None else ()
    return any(fnmatchcase(owner, pattern) for pattern in patterns)


def _remapped(plan: Plan | None, saved: Iterable[str], found: Iterable[str]) -> set[str]:
    """Parts of declared owners, of each kind (``rng:``, …) that has other owners than saved."""
    kinds: dict[str, tuple[set[str], set[str]]] = {}
    for place, names in enumerate((saved, found)):
        for name in names:
            kind, colon, owner = name.partition(":")
            if colon:
                kinds.setdefault(kind, (set(), set()))[place].add(owner)
    return {
        f"{kind}:{owner}"
        for kind, (before, after) in kinds.items()
        if before and after and before != after
        for owner in before | after
        if owner_matches(plan, owner)
    }


class RestoreEquality(Invariant):
    """I1: after a resume every part is what it was at the save, and there are the same parts.

    Where the number of owners changes, those that the plan names (``data.remapped_owners``) have
    other parts of that kind; all else stays, and so do they where their number does.

    A warm start or a transfer may leave parts out or make them anew; what it restores is the same.
    Of a state that was registered the parts are those that its files held then.
    """

    id = "I1"
    title = "restored state equals saved state, part by part"
    needs = (
        "parts in CheckpointSaved or CheckpointRegistered, and in CheckpointRestored, of each "
        "bundle that is restored"
    )
    sees = (
        AttemptStarted,
        UpdateApplied,
        CheckpointRestored,
    )

    def begin(self) -> None:
        self._restores_due = 0

    def feed(self, step: Step) -> None:
        event, track = step.event, step.track
        if isinstance(event, AttemptStarted):
            self._restores_due += event.bundle is not None
        elif isinstance(event, UpdateApplied):
            started = track.attempt
            if started is not None and started.bundle and track.restored is None:
                self.missing("an attempt names a bundle and no CheckpointRestored followed")
        elif isinstance(event, CheckpointRestored):
            self._restores_due += 1
            self._restored(step, event)

    def _restored(self, step: Step, event: CheckpointRestored) -> None:
        started = step.track.attempt
        if started is not None and started.bundle and step.track.restored is None:
            self.expect(
                event.bundle == started.bundle,
                step.at,
                expected=f"bundle {short(started.bundle)}, which the attempt names",
                found=f"bundle {short(event.bundle)}",
                cause="the newest folder was taken, not the bundle that was decided on",
                action="Restore the bundle that AttemptStarted names.",
                others=(step.track.attempt_position,),
            )
        origin = step.track.origin(event.bundle)
        if origin is None:
            self.missing("the restored bundle was neither saved nor registered in this ledger")
            return
        bundle, position = origin
        if not bundle.parts.keys() & event.parts.keys():
            self.missing("a restore names no part of its bundle")
        wrong = _wrong(bundle.parts, event.parts, exact=event.kind == "resume")
        if wrong and event.kind == "resume":
            remapped = _remapped(step.plan, bundle.parts, event.parts)
            wrong = [name for name in wrong if name not in remapped]
        first = wrong[0] if wrong else ""
        self.expect(
            not wrong,
            step.at,
            expected=f"part {first} {short(bundle.parts.get(first))}, as the bundle has it",
            found=f"{short(event.parts.get(first))} (differing: {listed(wrong)})",
            cause="a part was not loaded, loaded from another bundle, or changed right after",
            action="Load every part of one bundle, then fingerprint the live objects.",
            others=(position,),
        )
        self.expect(
            event.iteration == bundle.iteration,
            step.at,
            expected=f"iteration {bundle.iteration} of the bundle",
            found=f"iteration {event.iteration}",
            cause="a counter was not restored with the tensors",
            action="Take the iteration from the bundle's manifest.",
            others=(position,),
        )

    def idle_because(self, end: End) -> str | None:
        return None if self._restores_due else "nothing was restored"


class ReferenceConstant(Invariant):
    """I14: the reference policy is the same in every bundle, restore and use of the job.

    A declared refresh (``reference_refresh``: every so many updates) makes it the policy of its due
    version, bit for bit. That can be compared where the reference is fingerprinted under the names
    and in the dtype of the policy or of the masters, which the job shows where both are equal once,
    as at a start from the base policy. A restore goes back to the reference of its bundle.
    """

    id = "I14"
    title = "reference policy constant, or refreshed as declared"
    needs = f"a part named {REFERENCE} in CheckpointSaved.parts"
    sees = (
        AttemptStarted,
        UpdateApplied,
        CheckpointSaved,
        CheckpointRestored,
        StateFirstUsed,
    )

    def begin(self) -> None:
        self._anchor: tuple[str, int, int] | None = None
        """The reference, the position that says so, the version that it was refreshed from."""
        self._base: str | None = None
        """The reference before any refresh."""
        self._policies: OrderedDict[int, dict[str, int]] = OrderedDict()
        """By version: roots of the policy and of its masters, each with its position."""
        self._alike = False
        """Whether a reference was ever equal to a policy: their roots are of one form."""
        self._every: tuple[int | None, int, int] = (None, 0, 0)
        """The declared refresh, the version after which it holds, and the version that the
        reference was from until then."""

    def feed(self, step: Step) -> None:
        event = step.event
        self._declared(step)
        if isinstance(event, AttemptStarted):
            self._knows(step, event.policy_version, event.policy_fingerprint)
        elif isinstance(event, UpdateApplied):
            self._knows(step, event.policy_version - 1, event.params_before, event.masters_before)
            self._policies.pop(event.policy_version, None)  # of a lineage that was left
            self._knows(step, event.policy_version, event.params_after, event.masters_after)
        elif isinstance(event, CheckpointSaved | CheckpointRestored | StateFirstUsed):
            found = event.parts.get(REFERENCE)
            if found is not None:
                self._judge(step, found, event.policy_version)
            elif self._anchor is not None and not isinstance(event, StateFirstUsed):
                self.missing(f"a bundle or a restore names no part {REFERENCE}")

    def _knows(self, step: Step, version: int, *roots: str) -> None:
        known = self._policies.setdefault(version, {})
        for root in roots:
            known.setdefault(root, step.at)
        if len(self._policies) > WINDOW:
            self._policies.popitem(last=False)

    def _judge(self, step: Step, found: str, version: int) -> None:
        self._alike = self._alike or any(found in roots for roots in self._policies.values())
        due = self._due(found, version)
        if self._anchor is None:
            self._anchor, self._base = (found, step.at, due), found if due == 0 else None
            if due and due in self._policies:
                self._refreshed(step, found, due)
            else:
                self.passed()
            return
        anchor, position, refreshed = self._anchor
        if due != refreshed:
            self._refreshed(step, found, due)
            self._anchor = (found, step.at, due)
            return
        self.expect(
            found == anchor,
            step.at,
            expected=f"reference {short(anchor)}",
            found=f"reference {short(found)}",
            cause="the reference shares memory with the policy, or was loaded anew",
            action="Keep the reference in tensors of its own; restore it from the bundle.",
            others=(position,),
        )

    def _declared(self, step: Step) -> None:
        every = step.plan.update.reference_refresh if step.plan else None
        if every != self._every[0]:
            # A refresh that an amendment declares is due at later versions.
            since = step.track.chain.version if step.track.chain is not None else 0
            self._every = (every, since, self._anchor[2] if self._anchor is not None else 0)

    def _due(self, found: str, version: int) -> int:
        """The version whose policy the reference is to be; 0 before any refresh."""
        every, since, before = self._every
        last = version // every * every if every else 0
        now = last == since and found in self._policies.get(last, {})
        return last if last > since or now else before

    def _refreshed(self, step: Step, found: str, due: int) -> None:
        if due == 0:
            roots = {} if self._base is None else {self._base: step.at}
        else:
            roots = self._policies.get(due, {})
        if not roots:
            self.missing("the policy that the reference is refreshed from is not in this ledger")
        elif due and not self._alike:
            self.missing(
                "a refresh cannot be compared: the reference has other names or another dtype than "
                "the policy"
            )
        else:
            self.expect(
                found in roots,
                step.at,
                expected=f"the policy of version {due} as the reference, refreshed as declared",
                found=f"reference {short(found)}",
                cause="the refresh was left out, or copied other tensors than the policy's",
                action="Copy the policy, all names of it, right after the update that is due.",
                others=roots.values(),
            )

    def idle_because(self, end: End) -> str | None:
        terms = end.job.plan.update.loss_terms if end.job.plan else {}
        uses = end.job.plan is None or any("kl" in name.lower() for name in terms)
        return None if uses else "the plan's loss has no KL term"


class FirstUse(Invariant):
    """I17b: state is still what was loaded or moved when its consumer first reads it.

    After a restore the parts are those of the restore; after a start, a move, a sync or a restore
    that came before the last update those that this update left, or what a lossy sync says that an
    engine holds. Parts of which neither is known are not compared.
    """

    id = "I17b"
    title = "state at first use equals state as loaded or moved"
    needs = (
        "StateFirstUsed after each restore and committed move of the trainer, with parts "
        f"{MODEL}, {MASTERS}, {OPTIMIZER}"
    )
    sees = (
        AttemptStarted,
        CheckpointRestored,
        StateFirstUsed,
        UpdateApplied,
        WeightSyncStarted,
    )

    def begin(self) -> None:
        self._lossy = LossyRoots()
        self._due = 0
        self._unmet: int | None = None

    def feed(self, step: Step) -> None:
        event = step.event
        self._lossy.take(event)
        if isinstance(event, AttemptStarted):
            if event.bundle is not None:
                self._due += 1
                self._unmet = step.at
        elif isinstance(event, CheckpointRestored):
            self._due += 1
            self._unmet = step.at
        elif isinstance(event, StateFirstUsed):
            self._compare(step, event)
        elif isinstance(event, UpdateApplied) and self._unmet is not None:
            self.missing("an update after a restore and no StateFirstUsed between them")
            self._unmet = None

    def _compare(self, step: Step, event: StateFirstUsed) -> None:
        self._due += 1
        chain, restored = step.track.chain, step.track.restored
        expected: dict[str, str] = {}
        proof: list[int] = []
        at_restore = restored is not None and restored[0].policy_version == event.policy_version
        if event.after == "restore" and restored is not None and at_restore:
            expected, proof = dict(restored[0].parts), [restored[1]]
        elif chain is not None and chain.version == event.policy_version:
            known = {name: chain.part(name) for name in (MODEL, MASTERS, OPTIMIZER)}
            expected = {name: value for name, value in known.items() if value is not None}
            proof = [chain.position]
        common = sorted(expected.keys() & event.parts.keys())
        if not common:
            if event.after == "restore":
                self.missing("StateFirstUsed after a restore names no part of the bundle")
            return
        if MASTERS in common or OPTIMIZER in common or event.component == "trainer":
            self._unmet = None
            if expected.keys() & {MODEL, MASTERS, OPTIMIZER} - event.parts.keys():
                self.missing(f"a first use names not all of {MODEL}, {MASTERS} and {OPTIMIZER}")
        wrong = [name for name in common if event.parts[name] != expected[name]]
        if MODEL in wrong and self._lossy.explain(event):
            wrong.remove(MODEL)
        first = wrong[0] if wrong else ""
        self.expect(
            not wrong,
            step.at,
            expected=f"{first} {short(expected.get(first))} at first use by {event.replica}",
            found=f"{short(event.parts.get(first))} (differing: {listed(wrong)})",
            cause="state was overwritten after it had arrived: a reload, a reseed, a late init",
            action=f"Look at what runs between the {event.after} and '{event.use}'.",
            others=proof,
        )

    def idle_because(self, end: End) -> str | None:
        return None if self._due else "nothing was restored, and no first use was recorded"
