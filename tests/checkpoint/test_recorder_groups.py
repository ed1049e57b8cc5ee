"""Goal: copies that drift apart in a model-parallel group are found and named, whoever tells them.

Method: the norm, router and tied embedding that each rank of a group holds whole are told to an
update's record as tensors, or as the digests that another process would send, equal and with one
bit, one name or one row of tokens otherwise, and the ledger is judged.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.recorder import Recorder, fed_digest, value_digest
from shiftbook.ledger.ledger import Ledger
from shiftbook.verify.verdict import Verdict, verify
from tests.checkpoint.test_recorder import plan

ROWS = [[3, 4, 5], [6, 7, 8]]
STATE = {"model": {"w": 1.0}, "masters": {"w": 1.0}, "optimizer": {"step": 0}}
Copies = dict[str, Any]


def held() -> Copies:
    """What each rank holds whole."""
    torch.manual_seed(1)
    return {
        "embedding.weight": torch.randn(8, 4).bfloat16(),
        "norm.weight": torch.ones(4),
        "router.weight": torch.randn(3, 4),
    }


def judged(folder: Path, *members: tuple[str, int, Copies | None, Any]) -> tuple[Verdict, Any]:
    """The verdict on a ledger with one update, and its groups as they stand there."""
    url = f"sqlite:///{folder}/l.db"
    with Recorder.open(url, "job", plan(), policy="0" * 32) as record:
        with record.update(0, STATE) as update:
            for group, rank, copies, fed in members:
                update.member(group, rank, copies=copies, fed=fed)
            update.applied(
                version=1,
                optimizer_step=1,
                learning_rate=1.0,
                loss=0.0,
                grad_norm=1.0,
                tokens=1,
                divisor=1.0,
            )
        record.flush()
    with Ledger.open(url, read_only=True) as ledger:
        (event,) = ledger.read(types={"UpdateApplied"})
    return verify(url), event.parsed().model_parallel  # type: ignore[attr-defined]


def told(verdict: Verdict, invariant: str) -> list[str]:
    return [f.found for f in verdict.findings if f.invariant == invariant and "on rank" in f.found]


def test_equal_members_are_no_finding_whoever_reports_them(tmp_path: Path) -> None:
    """One gives tensors, one those with other strides, one the digests that it computed itself."""
    mine = held()
    other = {name: torch.stack((tensor, tensor), -1)[..., 0] for name, tensor in held().items()}
    sent = {name: value_digest(tensor) for name, tensor in held().items()}
    verdict, (group,) = judged(
        tmp_path,
        ("tp/0", 0, mine, ROWS),
        ("tp/0", 1, other, torch.tensor(ROWS)),
        ("tp/0", 2, sent, fed_digest(iter(ROWS))),
    )
    assert told(verdict, "I20") == told(verdict, "I5") == []
    assert [member.differing for member in group.members] == [()] * 3
    for name in ("I20.copies", "I5.fed"):
        row = verdict.coverage.row(name)
        assert (row.status, row.checks) == ("checked", 2), row  # each rank once, and all equal


@pytest.mark.parametrize("name", sorted(held()))
def test_a_copy_that_drifts_by_one_bit_is_named(tmp_path: Path, name: str) -> None:
    mine, other = held(), copy.deepcopy(held())
    other[name].view(-1).view(torch.uint8)[4] ^= 1
    verdict, _ = judged(tmp_path, ("tp/0", 0, mine, None), ("tp/0", 1, other, None))
    (found,) = told(verdict, "I20")
    assert f"on rank 1: {name} (differing: 1)" in found
    assert told(verdict, "I5") == []


def test_what_members_hold_of_different_names_is_named(tmp_path: Path) -> None:
    less = {name: tensor for name, tensor in held().items() if name != "norm.weight"}
    verdict, _ = judged(tmp_path, ("tp/0", 0, held(), None), ("tp/0", 1, less, None))
    assert "on rank 1: norm.weight" in told(verdict, "I20")[0]


@pytest.mark.parametrize(
    "rows", [[[3, 4, 5]], [[6, 7, 8], [3, 4, 5]], [[3, 4, 5, 6], [7, 8]], [[3, 4, 5], [6, 7, 9]]]
)
def test_other_rows_in_one_group_are_found(tmp_path: Path, rows: list[list[int]]) -> None:
    """Fewer, in another order, cut elsewhere, one token otherwise; another group is free."""
    verdict, _ = judged(
        tmp_path,
        ("tp/0", 0, None, ROWS),
        ("tp/0", 1, None, rows),
        ("tp/1", 2, None, rows),
        ("tp/1", 3, None, rows),
    )
    (found,) = told(verdict, "I5")
    assert "on rank 1 (differing: 1)" in found
    assert told(verdict, "I20") == []


def test_names_that_differ_are_few_in_a_record_of_many(tmp_path: Path) -> None:
    many = {f"layers.{n}.norm": torch.full((2,), float(n)) for n in range(500)}
    moved = {name: tensor + 1 for name, tensor in many.items()}
    verdict, (group,) = judged(tmp_path, ("tp/0", 0, many, None), ("tp/0", 1, moved, None))
    assert len(group.members[1].differing) == 8
    assert (
        "on rank 1: layers.0.norm, layers.1.norm, layers.10.norm and 5 more"
        in (told(verdict, "I20")[0])
    )


def test_a_job_of_many_groups_fits_in_its_evidence(tmp_path: Path) -> None:
    """2,000 ranks in groups of eight have no room in an event."""
    digests = {"norm": "ab" * 16}
    wrong = {"norm": "cd" * 16}
    members = [(f"tp/{n // 8}", n, wrong if n == 1999 else digests, "ef" * 16) for n in range(2000)]
    verdict, groups = judged(tmp_path, *members)
    assert groups is None  # they stand in the segment
    (found,) = told(verdict, "I20")
    assert "on rank 1999: norm" in found
    assert told(verdict, "I5") == []


def test_a_member_with_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecorderMisuse, match=r"copies that rank 3 of group tp/0 holds"):
        judged(tmp_path, ("tp/0", 3, None, None))
    with pytest.raises(Exception, match="fingerprint of norm"):
        judged(tmp_path, ("tp/0", 3, {"norm": "no digest"}, None))
