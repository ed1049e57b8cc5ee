"""Digests of the training record: what the loop writes into its events and the judge recomputes.

A digest over samples is SHA-256 over one line for each sample, in the order of their uids as text,
so the order in which workers answered does not enter it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence


def token_digest(tokens: Sequence[int]) -> str:
    """32 hex digits: SHA-256 over token ids as little-endian unsigned 32-bit integers, halved."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()[:32]


def logp_digest(logps: Sequence[float]) -> str:
    """32 hex digits: SHA-256 over log-probabilities as little-endian float32 bits, halved.

    Values must come from float32 for the bits to be theirs; wider ones are rounded to float32.
    """
    return hashlib.sha256(struct.pack(f"<{len(logps)}f", *logps)).hexdigest()[:32]


def _over_lines(lines: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(line for _, line in sorted(lines)).encode("utf-8")).hexdigest()


def generated_digest(rows: Iterable[tuple[str, str, str]]) -> str:
    """SamplesGenerated.digest over (uid, token digest, log-probability digest), in any order."""
    return _over_lines((uid, f"{uid} {tokens} {logps}\n") for uid, tokens, logps in rows)


def rewarded_digest(rows: Iterable[tuple[str, str, float]]) -> str:
    """SamplesRewarded.digest over (uid, token digest, reward), in any order.

    The reward stands in its line as the shortest text that gives the same float64 (``repr``).
    """
    return _over_lines((uid, f"{uid} {tokens} {float(reward)!r}\n") for uid, tokens, reward in rows)


def consumed_digest(rows: Iterable[tuple[str, str]]) -> str:
    """BatchConsumed.digest over (uid, token digest), in any order."""
    return _over_lines((uid, f"{uid} {tokens}\n") for uid, tokens in rows)
