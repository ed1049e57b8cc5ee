"""Goal: the page on the judge lists what is judged, and every named fault of the zoo.

Method: the tables of docs/judge.md are compared with the code that they describe.
"""

from __future__ import annotations

import re
from pathlib import Path

from shiftbook.verify.invariants import INVARIANTS
from tests.zoo.faults import load_all

PAGE = (Path(__file__).parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
NOT_OF_THE_CATALOGUE = {
    "legality", "lease", "operations", "move-equality", "record", "replay", "shadow",
}  # fmt: skip
"""What docs/verify.md explains alone."""


def test_every_invariant_of_the_catalogue_is_explained() -> None:
    section = PAGE.split("## Invariants")[1].split("\n## ")[0]
    listed = re.findall(
        r"`([\w-]+)`", "".join(r.split("|")[1] for r in section.splitlines()[2:] if r[:1] == "|")
    )
    assert set(listed) == {i.id for i in INVARIANTS} - NOT_OF_THE_CATALOGUE


def test_every_named_fault_stands_in_the_figures() -> None:
    block = PAGE.split("```text\n")[1].split("```")[0]
    listed = {line.split()[1] for line in block.splitlines() if re.match(r"[A-K]\d+ ", line)}
    assert listed == {name[:33] for name in load_all()}
