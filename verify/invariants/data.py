"""I4: what is fed is the declared data set, prompt by prompt."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from shiftbook.ledger.events.job import AttemptStarted
from shiftbook.ledger.events.probes import DataBuilt
from shiftbook.ledger.events.training import SamplesDrawn, SamplesGenerated
from shiftbook.verify.invariants.base import End, Invariant, Step, short

MAX_PROMPTS = 2_000_000
"""Digests that are kept; of larger data sets the first that were seen."""


class DataIdentity(Invariant):
    """I4: the data set of every attempt has the declared digest, and prompts are fed from it.

    The digest of the data set is recomputed from those of its prompts; the digest of each drawn
    prompt, and of what its engine was given, is that of its index. An attempt that draws has said
    what its data set is.
    """

    id = "I4"
    title = "data fed equals the declared data set"
    needs = "DataBuilt with rows, SamplesDrawn.prompt_digests, prompt_digest in generated rows"
    sees = (
        AttemptStarted,
        DataBuilt,
        SamplesDrawn,
        SamplesGenerated,
    )

    def begin(self) -> None:
        self._known: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """Index to the digest of its prompt, and the position that says so."""
        self._drawn: OrderedDict[int, str] = OrderedDict()
        """Ordinal to the digest that was drawn."""
        self._said = self._drew = False
        """Whether the attempt said what its data set is, early or late, and whether it drew."""

    def feed(self, step: Step) -> None:
        match step.event:
            case AttemptStarted():
                self._attempt_over()
            case DataBuilt():
                self._said = True
                self._built(step, step.event)
            case SamplesDrawn():
                self._drawn_prompts(step, step.event)
            case SamplesGenerated():
                self._fed(step)
            case _:
                pass

    def _attempt_over(self) -> None:
        if self._drew and not self._said:
            self.missing("an attempt drew and did not say what its data set is")
        self._said = self._drew = False

    def close(self, end: End) -> None:
        self._attempt_over()

    def _built(self, step: Step, event: DataBuilt) -> None:
        data = step.plan.data if step.plan else None
        for name, expected, found in (
            ("data set", data and data.dataset_digest, event.dataset_digest),
            ("tokenizer", data and data.tokenizer_digest, event.tokenizer_digest),
            ("size", data and data.dataset_size, event.size),
        ):
            self.expect(
                expected is None or expected == found,
                step.at,
                expected=f"{name} {short(expected)}, as the plan declares",
                found=f"{name} {short(found)}",
                cause="another file, an old cache, or another tokenizer or template",
                action="Build the data set anew from its declared inputs, or declare the change.",
            )
        if step.rows is None or step.rows.problem or step.rows.get("digest") is None:
            self.missing("rows of DataBuilt cannot be read")
            return
        digests = step.rows["digest"]
        whole = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        self.expect(
            whole == event.dataset_digest,
            step.at,
            expected=f"data set {short(event.dataset_digest)} from the digests of its prompts",
            found=short(whole),
            cause="the digest was taken of other data than what is fed",
            action="Digest what the sampler indexes, after all preparation.",
        )
        for index, digest in zip(step.rows["index"], digests, strict=True):
            if index not in self._known and len(self._known) < MAX_PROMPTS:
                self._known[index] = (digest, step.at)

    def _drawn_prompts(self, step: Step, event: SamplesDrawn) -> None:
        self._drew = True
        if event.prompt_digests is None:
            self.missing("draws carry no digests of their prompts")
            return
        if len(event.prompt_digests) != len(event.indices):
            self.missing("a draw has not one digest for each of its prompts")
        for place, (index, digest) in enumerate(
            zip(event.indices, event.prompt_digests, strict=False)
        ):
            self._drawn[event.start + place] = digest
            if len(self._drawn) > MAX_PROMPTS:
                self._drawn.popitem(last=False)
            known = self._known.setdefault(index, (digest, step.at))
            self.expect(
                known[0] == digest,
                step.at,
                expected=f"index {index} is prompt {short(known[0])}",
                found=f"prompt {short(digest)}",
                cause="the data set was built again from other inputs, or a cache is stale",
                action="Key the cache by content: text, template and tokenizer.",
                others=(known[1],),
            )

    def _fed(self, step: Step) -> None:
        if step.rows is None or step.rows.problem:
            self.missing("rows of SamplesGenerated cannot be read")
            return
        fed = step.rows.get("prompt_digest")
        if fed is None:
            self.missing("generated rows carry no digest of their prompt")
            return
        wrong = []
        for uid, digest in zip(step.rows["uid"], fed, strict=True):
            head = uid.partition("/")[0]
            drawn = self._drawn.get(int(head)) if head.isdecimal() else None
            if digest is None:
                self.missing("some generated rows carry no digest of their prompt")
                continue
            if drawn is None:
                self.missing("samples belong to draws that carry no digest of their prompt")
                continue
            self.passed()
            if drawn != digest:
                wrong.append((uid, drawn, digest))
        if wrong:
            uid, drawn, digest = wrong[0]
            sample = step.track.samples.get(uid)
            self.flag(
                step.at,
                expected=f"{uid} generated from prompt {short(drawn)}, as drawn",
                found=f"from prompt {short(digest)} ({len(wrong)} samples)",
                cause="requests and prompts were matched by place, and the order changed",
                action="Send the prompt with its uid, and answer by uid.",
                others=(sample.drawn if sample else None,),
            )
