"""Rows of the training record: samples as they were made and as an update consumed them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Any

from shiftbook.checkpoint.recorder_state import digest, floats_bytes, ids_bytes
from shiftbook.ledger.digests import consumed_digest, generated_digest, rewarded_digest
from shiftbook.ledger.events.base import Segment
from shiftbook.ledger.events.training import (
    BatchConsumed,
    SamplesGenerated,
    SamplesRewarded,
    Transform,
)

NO_SEGMENT = Segment(sha256="0" * 64, rows=0, columns=(), bytes=0)
"""Stands in an event until its rows are written."""


@dataclass(slots=True)  # not frozen: that makes one in a third of the time
class Generated:
    """One sample as its engine made it.

    ``tokens`` are all token ids, prompt and tool text included; ``sampled`` marks those that the
    policy drew (None: all); ``logps`` has one log-probability for each token, of any value where
    none was sampled, and is None where the engine gave none. ``version`` is the policy version, or
    the version of each token. ``stream`` names the randomness it was drawn with, ``cache_version``
    the oldest weights whose cached values it was computed from. ``incarnations`` names the engine
    process that made each token, where several did; ``incarnation`` is then the last of them.
    ``begun`` and ``ended`` are ``Recorder.moment()`` as its first request was sent and its last
    answer came.
    """

    uid: str
    tokens: Any
    logps: Any
    version: int | Sequence[int]
    replica: str
    incarnation: str
    sampled: Any = None
    prompt: Any = None
    stream: str | None = None
    cache_version: int | None = None
    turns: int = 1
    incarnations: Sequence[str] | None = None
    begun: int | None = None
    ended: int | None = None


@dataclass(slots=True)
class Consumed:
    """One sample as an update used it; ``trained`` marks the tokens inside the loss (None: all)."""

    uid: str
    tokens: Any
    reward: float = 0.0
    advantage: float = 0.0
    trained: Any = None
    logps: Any = None
    """Behaviour log-probabilities that the loss used, one for each token; None: it used none."""
    virtual_rank: int = 0
    version_min: int | None = None
    """Oldest weights in its tokens, where an earlier life generated it (a restored buffer)."""
    old: Any = None
    """Proximal log-probabilities, which the ratio is taken against, one for each token; None: the
    loss has no ratio, or makes them itself."""


Columns = dict[str, list[Any]]


def _optional(columns: Columns, **values: list[Any]) -> None:
    """Add columns that some row has; rows that lack a value have null there."""
    for name, column in values.items():
        if column.count(None) < len(column):
            columns[name] = column


def oldest_version(samples: Sequence[Consumed], generated: Mapping[str, int], version: int) -> int:
    """Oldest weights in a batch: of samples that this life generated, and of those that say so."""

    def oldest(sample: Consumed) -> int:
        stated = version if sample.version_min is None else sample.version_min
        return generated.get(sample.uid, stated)

    return min(map(oldest, samples), default=version)


def group_of(uid: str) -> str:
    """Group of a sample: its draw."""
    return uid.partition("/")[0]


@dataclass(frozen=True, slots=True)
class _Mask:
    """Which tokens of a sample count, read once for all samples whose masks are alike."""

    on: bytes
    """One byte for each token, 0 or 1."""
    digest: str
    count: int
    first: int
    """The first that counts."""
    run: bool
    """Whether all that count follow one another, as those of one answer do."""

    def kept(self, values: Any) -> Any:
        """The values of tokens that count."""
        if self.count == len(self.on):
            return values
        if self.run and len(values) == len(self.on):
            return values[self.first : self.first + self.count]
        import numpy as np

        return np.asarray(values)[np.frombuffer(self.on, dtype=bool)]


def _mask_bytes(mask: Any) -> bytes:
    """A mask, one byte for each token."""
    if type(mask) is list:
        try:
            on = bytes(mask)
        except (TypeError, ValueError):
            on = b"\2"
        if not on.strip(b"\0\1"):
            return on
    import numpy as np

    return bytes(np.asarray(mask).astype(bool, copy=False).tobytes())


def _masks(masks: Sequence[Any]) -> list[_Mask | None]:
    """Masks of samples in order; None where there is none."""
    read: dict[int, bytes] = {}
    known: dict[bytes, _Mask] = {}
    out: list[_Mask | None] = []
    for mask in masks:
        if mask is None:
            out.append(None)
            continue
        on = read.get(id(mask))
        if on is None:
            on = read[id(mask)] = _mask_bytes(mask)
        found = known.get(on)
        if found is None:
            count, first = on.count(1), max(0, on.find(1))
            run = on[first : first + count].count(1) == count
            found = known[on] = _Mask(on, digest(on), count, first, run)
        out.append(found)
    return out


def _logp_digest(values: Any, mask: _Mask | None) -> str:
    if values is None:
        return digest(b"")
    return digest(floats_bytes(values if mask is None else mask.kept(values)))


def drawn_otherwise(logps: Any, token: int, uniform: float, margin: float = 1e-5) -> bool:
    """True where inverse-transform sampling with ``uniform`` in [0, 1) gives another token.

    ``logps`` are log-probabilities over the vocabulary. A draw within ``margin`` of the token's
    own interval is no other: both sides round its edges. Give several times the gap of the
    log-probabilities where the two stacks differ by more than float32 does.
    """
    import numpy as np

    edges = np.cumsum(np.exp(np.asarray(logps, dtype=np.float64)))
    below = edges[token - 1] if token else 0.0
    place = uniform * edges[-1]
    return bool(place < below - margin or place > edges[token] + margin)


def _prompt_digests(samples: Sequence[Generated]) -> list[str | None]:
    """Token digest of each sample's prompt, read once where a group shares the object."""
    known = {id(s.prompt): s.prompt for s in samples if s.prompt is not None}
    digests = {name: digest(ids_bytes(prompt)) for name, prompt in known.items()}
    return [digests.get(id(s.prompt)) for s in samples]


def generated_rows(samples: Sequence[Generated]) -> tuple[Columns, int]:
    """Columns of the segment of SamplesGenerated, and how many tokens were sampled."""
    masks = _masks([s.sampled for s in samples])
    spans = [_spans(s, mask) for s, mask in zip(samples, masks, strict=True)]
    several = [span if len(span) > 1 else None for span in spans]
    columns: Columns = {
        "uid": [s.uid for s in samples],
        "group": [group_of(s.uid) for s in samples],
        "turns": [s.turns for s in samples],
        "tokens": [len(s.tokens) for s in samples],
        "token_digest": [digest(ids_bytes(s.tokens)) for s in samples],
        "logp_digest": [
            _logp_digest(s.logps, mask) for s, mask in zip(samples, masks, strict=True)
        ],
        "version_min": _versions(min, spans),
        "version_max": _versions(max, spans),
        "replica": [s.replica for s in samples],
        "incarnation": [s.incarnation for s in samples],
    }
    _optional(
        columns,
        mask_digest=[None if mask is None else mask.digest for mask in masks],
        prompt_digest=_prompt_digests(samples),
        stream=[s.stream for s in samples],
        cache_version_min=[s.cache_version for s in samples],
        span_versions=[span and [version for version, _, _ in span] for span in several],
        span_tokens=[span and [count for _, count, _ in span] for span in several],
        span_incarnations=[
            span and [made_by for _, _, made_by in span] if s.incarnations is not None else None
            for s, span in zip(samples, several, strict=True)
        ],
        begun=[s.begun for s in samples],
        ended=[s.ended for s in samples],
    )
    sampled = sum(
        len(s.tokens) if mask is None else mask.count
        for s, mask in zip(samples, masks, strict=True)
    )
    return columns, sampled


Spans = list[tuple[int, int, str]]
"""Sampled tokens of a sample by what made them, in order: version, how many, incarnation."""


def _versions(of: Callable[[Iterable[int]], int], samples: Sequence[Spans]) -> list[int]:
    """The least or largest version of each sample; most have one."""
    return [s[0][0] if len(s) == 1 else of(version for version, _, _ in s) for s in samples]


def _spans(sample: Generated, mask: _Mask | None) -> Spans:
    count = len(sample.tokens) if mask is None else mask.count
    made_by = sample.incarnations
    if isinstance(sample.version, int) and made_by is None:
        return [(sample.version, count, sample.incarnation)]
    if made_by is None and type(sample.version) is list and sample.version:
        kept = sample.version if mask is None else mask.kept(sample.version)
        if type(kept) is list and kept and kept.count(kept[0]) == len(kept):
            return [(int(kept[0]), count, sample.incarnation)]
    whole = [sample.version] * len(sample.tokens)
    stamps: Sequence[Any] = whole if isinstance(sample.version, int) else sample.version
    versions = stamps
    if mask is not None:
        versions = mask.kept(versions)
        made_by = None if made_by is None else mask.kept(made_by)
    engines = repeat(sample.incarnation) if made_by is None else made_by
    runs = groupby(zip(map(int, versions), map(str, engines), strict=False))
    found = [(version, len(list(run)), engine) for (version, engine), run in runs]
    # Of a sample without sampled tokens the stamp of its prompt is left.
    return found or [(int(stamps[-1]) if len(stamps) else 0, 0, sample.incarnation)]


def generated_event(
    attempt: str,
    iteration: int,
    samples: Sequence[Generated],
    version: int,
    transform: Transform | None,
) -> tuple[SamplesGenerated, Columns]:
    """SamplesGenerated, its segment still to be written, and the rows of it."""
    columns, sampled = generated_rows(samples)
    triples = zip(columns["uid"], columns["token_digest"], columns["logp_digest"], strict=True)
    event = SamplesGenerated(
        attempt=attempt,
        iteration=iteration,
        count=len(samples),
        tokens=sum(columns["tokens"]),
        sampled_tokens=sampled,
        policy_version=version,
        digest=generated_digest(triples),
        segment=NO_SEGMENT,
        transform=transform,
    )
    return event, columns


def rewarded_event(
    attempt: str, iteration: int, rewards: Mapping[str, float], tokens: Mapping[str, Any], by: str
) -> tuple[SamplesRewarded, Columns]:
    """SamplesRewarded and its rows; ``tokens`` are those that the scorer looked at, by uid."""
    uids = list(rewards)
    columns: Columns = {
        "uid": uids,
        "token_digest": [digest(ids_bytes(tokens[uid])) for uid in uids],
        "reward": [float(rewards[uid]) for uid in uids],
        "scorer": [by] * len(uids),
    }
    scored = zip(uids, columns["token_digest"], columns["reward"], strict=True)
    event = SamplesRewarded(
        attempt=attempt,
        iteration=iteration,
        count=len(uids),
        reward_mean=sum(columns["reward"]) / max(1, len(uids)),
        digest=rewarded_digest(scored),
        segment=NO_SEGMENT,
    )
    return event, columns


def consumed_event(
    attempt: str, iteration: int, samples: Sequence[Consumed], version: int, version_min: int
) -> tuple[BatchConsumed, Columns]:
    """BatchConsumed and its rows."""
    masks = _masks([s.trained for s in samples])
    columns: Columns = {
        "uid": [s.uid for s in samples],
        "token_digest": [digest(ids_bytes(s.tokens)) for s in samples],
        "reward": [float(s.reward) for s in samples],
        "advantage": [float(s.advantage) for s in samples],
        "group": [group_of(s.uid) for s in samples],
        "virtual_rank": [s.virtual_rank for s in samples],
        "tokens": [
            len(s.tokens) if mask is None else mask.count
            for s, mask in zip(samples, masks, strict=True)
        ],
    }
    _optional(
        columns,
        mask_digest=[None if mask is None else mask.digest for mask in masks],
        logp_digest=[
            None if s.logps is None else _logp_digest(s.logps, mask)
            for s, mask in zip(samples, masks, strict=True)
        ],
        proximal_digest=[
            None if s.old is None else _logp_digest(s.old, mask)
            for s, mask in zip(samples, masks, strict=True)
        ],
    )
    event = BatchConsumed(
        attempt=attempt,
        iteration=iteration,
        count=len(samples),
        tokens=sum(columns["tokens"]),
        policy_version=version,
        version_min=version_min,
        digest=consumed_digest(zip(columns["uid"], columns["token_digest"], strict=True)),
        segment=NO_SEGMENT,
    )
    return event, columns
