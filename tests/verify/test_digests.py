"""Goal: digests of the training record mean the same to the loop that writes and to the judge.

Method: values worked out by hand from the definitions, and properties (order does not enter, any
changed field does, log-probabilities count by their float32 bits).
"""

from __future__ import annotations

import hashlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftbook.ledger.digests import (
    consumed_digest,
    generated_digest,
    logp_digest,
    rewarded_digest,
    token_digest,
)


def test_values_from_the_definitions() -> None:
    tokens = hashlib.sha256(b"\x01\x00\x00\x00\x00\x01\x00\x00").hexdigest()
    assert token_digest([1, 256]) == tokens[:32]
    assert logp_digest([-0.5]) == hashlib.sha256(b"\x00\x00\x00\xbf").hexdigest()[:32]
    lines = b"000001/0 aa bb\n000001/1 cc dd\n"
    rows = [("000001/1", "cc", "dd"), ("000001/0", "aa", "bb")]
    assert generated_digest(rows) == hashlib.sha256(lines).hexdigest()
    scored = [("000001/0", "aa", 1), ("000001/1", "cc", 0.1)]
    assert (
        rewarded_digest(scored) == hashlib.sha256(b"000001/0 aa 1.0\n000001/1 cc 0.1\n").hexdigest()
    )
    assert consumed_digest([("u", "aa")]) == hashlib.sha256(b"u aa\n").hexdigest()
    assert consumed_digest([]) == hashlib.sha256(b"").hexdigest()


@given(st.lists(st.tuples(st.text("0123456789/", min_size=1), st.text("abcdef")), unique=True))
def test_order_does_not_enter(rows: list[tuple[str, str]]) -> None:
    shuffled = rows[:]
    random.Random(len(rows)).shuffle(shuffled)
    assert consumed_digest(rows) == consumed_digest(shuffled)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.data())
def test_log_probabilities_count_by_their_bits(values: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    (bits,) = struct.unpack("<I", struct.pack("<f", values[at]))
    (other,) = struct.unpack("<f", struct.pack("<I", bits ^ 1))
    changed = [*values[:at], other, *values[at + 1 :]]
    if struct.pack("<f", other) != struct.pack("<f", values[at]):
        assert logp_digest(changed) != logp_digest(values)
    assert logp_digest([0.0]) != logp_digest([-0.0])


@pytest.mark.parametrize("field", [0, 1, 2])
def test_every_field_enters(field: int) -> None:
    row = ["000001/0", "aa", "bb"]
    changed = row[:]
    changed[field] += "c"
    assert generated_digest([tuple(row)]) != generated_digest([tuple(changed)])  # type: ignore[list-item]
