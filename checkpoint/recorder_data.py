"""Records of data and samples: built, drawn, made, rewarded, dropped, used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orjson import dumps

from shiftbook.checkpoint.recorder_book import Book, Held
from shiftbook.checkpoint.recorder_samples import (
    Consumed,
    Generated,
    consumed_event,
    generated_event,
    oldest_version,
    rewarded_event,
)
from shiftbook.checkpoint.recorder_state import digest, ids_bytes
from shiftbook.ledger.events.probes import DataBuilt, RewardsRescored
from shiftbook.ledger.events.training import SamplesDrawn, SamplesDropped, Transform

MOST_DRAWN = 960
"""Prompts of one SamplesDrawn event; at most 56 bytes each, with index and digest.

A number of prompts and not of bytes, so that a draw that is repeated is cut at the same places."""

MOST_UID_BYTES = 50_000
"""Of the uids in one SamplesDropped event, as they are written."""


def data_digests(prompts: Sequence[Any]) -> list[str]:
    """Token digest of each prompt of a data set, in order."""
    return [digest(ids_bytes(prompt)) for prompt in prompts]


def dataset_digest(digests: Sequence[str]) -> str:
    """One digest of a data set from those of its prompts: what a plan declares."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _parts(uids: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Uids in runs that an event has room for, in order; one run, empty, of none."""
    part: list[str] = []
    size = 0
    for uid in uids:
        length = len(dumps(uid)) + 1
        if part and size + length > MOST_UID_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(uid)
        size += length
    yield tuple(part)


class DataRecords(Book):
    """What the data and the samples of an attempt were."""

    def data(self, digests: Sequence[str], *, tokenizer: str) -> None:
        """The data set as it was built for this attempt: ``data_digests`` of its prompts."""
        event = DataBuilt(
            attempt=self.attempt,
            dataset_digest=dataset_digest(digests),
            tokenizer_digest=tokenizer,
            size=len(digests),
        )
        self._add(event, rows={"index": list(range(len(digests))), "digest": list(digests)})

    def drawn(
        self,
        iteration: int,
        *,
        start: int,
        indices: Sequence[int],
        epoch: int,
        prompts: Sequence[Any] | None = None,
        rule: str | None = None,
        seed: int | None = None,
        group_size: int | None = None,
    ) -> None:
        """Prompts were drawn: the ordinal of the first, their data set indices, their tokens.

        Rule, seed and group size are the plan's where the sampler has none of its own to say.
        """
        data, update = self.plan.data, self.plan.update
        digests = None if prompts is None else data_digests(prompts)
        # Of a draw that goes over the end of an epoch its later events lie in a later epoch.
        ahead = epoch - start // data.dataset_size
        self._add_all(
            [
                Held(
                    SamplesDrawn(
                        attempt=self.attempt,
                        iteration=iteration,
                        rule=data.sampler_rule if rule is None else rule,
                        seed=data.seed if seed is None else seed,
                        epoch=epoch if not first else ahead + (start + first) // data.dataset_size,
                        start=start + first,
                        indices=tuple(int(i) for i in indices[first : first + MOST_DRAWN]),
                        group_size=update.group_size if group_size is None else group_size,
                        prompt_digests=(
                            None if digests is None else tuple(digests[first : first + MOST_DRAWN])
                        ),
                    )
                )
                for first in range(0, max(1, len(indices), len(digests or ())), MOST_DRAWN)
            ]
        )

    def generated(
        self,
        iteration: int,
        samples: Sequence[Generated],
        *,
        version: int,
        transform: Transform | None = None,
    ) -> None:
        """Samples as their engines made them; ``transform`` is the one that the engines applied."""
        event, rows = generated_event(self.attempt, iteration, samples, version, transform)
        self._add(event, rows=rows)
        lows = dict(zip(rows["uid"], rows["version_min"], strict=True))
        # What an iteration made in parts is one; what was made again comes last.
        self._versions[iteration] = self._versions.pop(iteration, {}) | lows

    def rewarded(
        self, iteration: int, rewards: Mapping[str, float], tokens: Mapping[str, Any], *, by: str
    ) -> None:
        """Rewards by uid, with the tokens that scorer ``by`` looked at."""
        event, rows = rewarded_event(self.attempt, iteration, rewards, tokens, by)
        self._verified += len(rewards)
        self._reward_mean = event.reward_mean
        self._add(event, rows=rows)

    def rescored(
        self, iteration: int, used: Mapping[str, float], again: Mapping[str, float]
    ) -> None:
        """Rewards of some samples as they are used, and as each scored by itself gives them.

        For scorers that give the same reward twice; ``again`` names the samples.
        """
        gaps = {uid: abs(float(used.get(uid, float("nan"))) - again[uid]) for uid in again}
        worst = max(gaps, key=lambda uid: (gaps[uid] != gaps[uid], gaps[uid]), default=None)
        self._add(
            RewardsRescored(
                attempt=self.attempt,
                iteration=iteration,
                samples=len(again),
                largest_gap=gaps[worst] if worst is not None else 0.0,
                worst=worst,
            )
        )

    def dropped(self, iteration: int, uids: Sequence[str], reason: str) -> None:
        """Samples that will never be used; the reason begins with a drop rule of the plan."""
        self._add_all(
            [
                Held(
                    SamplesDropped(
                        attempt=self.attempt, iteration=iteration, uids=part, reason=reason
                    )
                )
                for part in _parts(uids)
            ]
        )

    def consumed(self, iteration: int, samples: Sequence[Consumed], *, version: int) -> None:
        """Samples as the next update uses them, by the policy of ``version``."""
        least = oldest_version(samples, self._made_by(), version)
        event, rows = consumed_event(self.attempt, iteration, samples, version, least)
        self._add(event, rows=rows)
