"""Goal: the page on the judge lists what is judged, and every named fault of the zoo.

Method: the tables of docs/judge.md are compared with the code that they describe.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from shiftbook.verify.invariants import INVARIANTS
from tests.zoo import __main__ as zoo
from tests.zoo.faults import TRIGGERS, load_all
from tests.zoo.legitimate import VARIANTS

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
    block = PAGE.split("The full form prints")[1].split("### What it misses")[0]
    listed = {line.split()[1] for line in block.splitlines() if re.match(r"[A-K]\d+ ", line)}
    assert listed == {name[:33] for name in load_all()}


def test_what_the_forms_run_is_what_the_page_says() -> None:
    """Numbers of faults, moments, variants, mutations and runs, without running any."""
    section = PAGE.split("### What is run")[1].split("\n### ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if re.match(r"\| [\w-]", line)]
    listed = {name.strip(): (quick.strip(), full.strip()) for name, quick, full in rows}
    faults = load_all().values()
    quick, full = (Counter(kind for kind, *_ in zoo.tasks(full=f)) for f in (False, True))

    def pair(first: int, second: int) -> tuple[str, str]:
        return f"{first:,}", f"{second:,}"

    assert listed == {
        "seeds": pair(1, len(zoo.SEEDS)),
        "named faults": pair(len(faults), len(faults)),
        "of one iteration": pair(*[sum(f.when == "step" for f in faults)] * 2),
        "of a save or restore": pair(*[sum(f.when == "restore" for f in faults)] * 2),
        "of the whole run": pair(*[sum(f.when == "run" for f in faults)] * 2),
        "moments of a fault": pair(1, len(TRIGGERS)),
        "runs with a fault": pair(quick["fault"], full["fault"]),
        "mutations drawn": pair(zoo.MUTATIONS, zoo.MUTATIONS),
        "runs with a mutation": pair(quick["mutation"], full["mutation"]),
        "honest variants": pair(len(VARIANTS), len(VARIANTS)),
        "honest runs": pair(quick["variant"], full["variant"]),
        "all runs": pair(sum(quick.values()), sum(full.values())),
    }


def test_the_table_adds_up() -> None:
    """Runs in the rows are those of the line below them, and so are the ones that were caught."""
    block = PAGE.split("```text\n")[1].split("```")[0]
    rows = re.findall(r"^[A-K]\d+ .*?(\d+)/(\d+) .*?(\d+)/(\d+) ", block, re.MULTILINE)
    told = re.search(r"in every one of (\d+) runs with an effect \((\d+) had none\)", block)
    assert told is not None
    assert sum(int(counted) for _, counted, _, _ in rows) == int(told[1])
    assert sum(int(runs) for *_, runs in rows) == int(told[1]) + int(told[2])
    assert sum(int(caught) for caught, *_ in rows) == int(told[1])
