"""Goal: whatever an event can carry comes back as it went in, and the bytes stored are hashed.

Method: for every registered type, hypothesis builds events from the model (NaN, infinities, 2**63,
2**64 - 1, 128-bit hex, non-ASCII text in every field where they can occur) and appends them to a
real file; what is read back must give the same body, the same model and the stored leaf hash.
"""

from __future__ import annotations

import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shiftbook.ledger.canonical import encode, leaf_hash
from shiftbook.ledger.envelope import Draft, seal, unseal
from shiftbook.ledger.errors import InvalidEvent
from shiftbook.ledger.events import job as job_events
from shiftbook.ledger.events import life, reallocation, state, training
from shiftbook.ledger.events.base import REGISTRY, UnknownEvent, parse
from shiftbook.ledger.ledger import Ledger
from tests.strategies import LARGEST_INT, TEXTS, events, known_types, models

FINGERPRINT = "0f" * 16
SHARED_FOLDER = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def ledger(store_url: str):
    with Ledger.open(store_url) as opened:
        yield opened


@pytest.mark.parametrize("name", sorted(known_types()))
def test_every_type_comes_back(name: str, ledger: Ledger) -> None:
    @SHARED_FOLDER
    @given(batch=st.lists(models(REGISTRY[name]), min_size=1, max_size=6))
    def check(batch: list) -> None:
        receipt = ledger.append("job", batch)
        stored = list(ledger.read(receipt.first - 1, until=receipt.last))
        assert [s.position for s in stored] == list(receipt.positions)
        for event, found in zip(batch, stored, strict=True):
            assert found.type == name
            assert leaf_hash(found.data) == found.leaf
            again = found.parsed()
            assert type(again) is type(event)
            assert encode(again.plain()) == encode(event.plain()) == encode(found.body)

    check()


@given(event=events(), text=TEXTS, ns=st.integers(-(2**63), LARGEST_INT))
@settings(max_examples=60, deadline=None)
def test_every_envelope_field_comes_back_and_is_hashed(event, text: str, ns: int) -> None:
    draft = Draft(event, operation=text, cause=7, occurred_ns=ns)
    sealed = seal(
        draft,
        position=LARGEST_INT,
        job=text,
        version=3,
        recorded_ns=ns,
        writer=text or "w",
        sequence=2**63,
        actor=text,
        key=text,
    )
    assert unseal(sealed.data) == sealed
    assert pickle.loads(pickle.dumps(sealed)) == sealed
    for name in ("position", "job", "version", "occurred_ns", "sequence", "actor", "key"):
        value = sealed.plain()
        value[name] = value[name] + 1 if isinstance(value[name], int) else value[name] + "x"
        if isinstance(value[name], int) and value[name] > LARGEST_INT:
            continue
        assert leaf_hash(encode(value)) != sealed.leaf, name


@given(drafts=st.lists(events().map(Draft), max_size=3))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_drafts_can_be_sent_to_another_process(drafts: list[Draft]) -> None:
    again = pickle.loads(pickle.dumps(drafts))
    assert [encode(d.event.plain()) for d in again] == [encode(d.event.plain()) for d in drafts]


def test_named_values_stand_readable_in_the_bytes(ledger: Ledger) -> None:
    event = training.UpdateApplied(
        attempt="versuch-é",
        iteration=2**63,
        policy_version=LARGEST_INT,
        params_before=FINGERPRINT,
        params_after=FINGERPRINT,
        masters_before=FINGERPRINT,
        masters_after=FINGERPRINT,
        optimizer_before=FINGERPRINT,
        optimizer_after=FINGERPRINT,
        optimizer_step=0,
        learning_rate=float("inf"),
        tokens=0,
        divisor=float("-inf"),
        loss=float("nan"),
        kl=-0.0,
        grad_norm=5e-324,
        clipped=False,
        skipped=True,
        virtual_ranks=(),
    )
    receipt = ledger.append("jöb 数", event, key="ключ")
    stored = ledger.event(receipt.first)
    for piece in (
        '"loss":"NaN"',
        '"learning_rate":"Infinity"',
        '"divisor":"-Infinity"',
        '"kl":-0.0',
        f'"policy_version":{LARGEST_INT}',
        f'"iteration":{2**63}',
        '"job":"jöb 数"',
        '"key":"ключ"',
        FINGERPRINT,
    ):
        assert piece.encode() in stored.data, piece


def test_a_wider_integer_is_refused_with_advice(ledger: Ledger) -> None:
    with pytest.raises(ValidationError):
        life.LedgerUnreachable(since_ns=2**64, spooled=0, cause="")
    for value in (2**64, -(2**63) - 1, {"deep": [2**200]}):
        with pytest.raises(InvalidEvent, match="hex"):
            ledger.append("job", job_events.PlanAmended(field="x", after=value, reason=""))
    assert ledger.head().size == 0


def test_text_that_is_no_unicode_is_refused(ledger: Ledger) -> None:
    with pytest.raises(InvalidEvent):
        ledger.append("job", reallocation.ReallocationAbandoned.model_construct(reason="\ud800"))
    with pytest.raises(InvalidEvent):
        ledger.append("\ud800", reallocation.ReallocationAbandoned(reason="x"))
    assert ledger.head().size == 0


def test_an_event_beyond_the_limit_names_the_way_out(ledger: Ledger) -> None:
    fits = reallocation.ReallocationAbandoned(reason="x" * 59_000)
    assert ledger.append("job", fits).first == 0
    with pytest.raises(InvalidEvent, match="evidence segment"):
        ledger.append("job", [fits, reallocation.ReallocationAbandoned(reason="x" * 60_001)])
    assert ledger.head().size == 1


def test_unknown_types_and_newer_schemas_are_kept(ledger: Ledger) -> None:
    unknown = parse("SomethingLater", 1, {"a": [1, {"b": None}], "ü": "x"})
    newer = parse("ReplicaLost", 99, {"later": 1})
    assert isinstance(unknown, UnknownEvent)
    assert isinstance(newer, UnknownEvent)
    ledger.append("job", [unknown, newer])
    first, second = ledger.read()
    assert first.body == {"a": [1, {"b": None}], "ü": "x"}
    assert second.body == {"later": 1}
    assert isinstance(first.parsed(), UnknownEvent)
    assert ledger.state().size == 2


def test_a_model_that_gains_a_field_is_covered() -> None:
    """The strategies come from the models, so a field without one fails loudly."""
    assert len(known_types()) >= 35
    assert state.CheckpointSaved.__name__ in known_types()
