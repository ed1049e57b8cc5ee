"""Records of data and samples: built, drawn, made, rewarded, dropped, used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from shiftbook.checkpoint.recorder_book import Book
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


def data_digests(prompts: Sequence[Any]) -> list[str]:
    """Token digest of each prompt of a data set, in order."""
    return [digest(ids_bytes(prompt)) for prompt in prompts]


def dataset_digest(digests: Sequence[str]) -> str:
    """One digest of a data set from those of its prompts: what a plan declares."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


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
        self._add(
            SamplesDrawn(
                attempt=self.attempt,
                iteration=iteration,
                rule=data.sampler_rule if rule is None else rule,
                seed=data.seed if seed is None else seed,
                epoch=epoch,
                start=start,
                indices=tuple(int(i) for i in indices),
                group_size=update.group_size if group_size is None else group_size,
                prompt_digests=None if prompts is None else tuple(data_digests(prompts)),
            )
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
        lows = zip(rows["uid"], rows["version_min"], strict=True)
        self._versions.update(lows)
        self._add(event, rows=rows)

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
        self._add(
            SamplesDropped(
                attempt=self.attempt, iteration=iteration, uids=tuple(uids), reason=reason
            )
        )

    def consumed(self, iteration: int, samples: Sequence[Consumed], *, version: int) -> None:
        """Samples as the next update uses them, by the policy of ``version``."""
        least = oldest_version(samples, self._versions, version)
        event, rows = consumed_event(self.attempt, iteration, samples, version, least)
        self._add(event, rows=rows)
