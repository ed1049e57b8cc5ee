"""Goal: what the documents show runs, and what they point to is there.

Method: every Python block is run as a program in an empty folder; every relative link and every
file named in code marks is looked up; the rules, invariants and fields that a page lists are
compared with the code that it describes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shiftbook.ledger.envelope import ENVELOPE_FIELDS
from shiftbook.ledger.rules import RULES
from shiftbook.verify.invariants import INVARIANTS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = "ledger|checkpoint|scheduler|verify|jobs"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
NAMED = re.compile(rf"`((?:{ROOMS})/[\w./]*)`")
TRL = re.compile(r"^```python trl\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(PYTHON.findall(page.read_text(encoding="utf-8")))
]


def run_block(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("program", BLOCKS)
def test_python_blocks_run(program: str, tmp_path: Path) -> None:
    done = run_block(program, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.vllm
@pytest.mark.first
def test_blocks_that_need_trl_run_where_it_is(tmp_path: Path) -> None:
    """And the record that the block makes is judged: one with another rate in it is not clean."""
    pytest.importorskip("trl")
    (program,) = TRL.findall((ROOT / "docs" / "recording.md").read_text(encoding="utf-8"))
    done = run_block(program, tmp_path)
    assert done.returncode == 0, done.stderr
    wrong = program.replace("learning_rate=self.rate", "learning_rate=2 * self.rate")
    assert wrong != program
    (tmp_path / "wrong").mkdir()
    done = run_block(wrong, tmp_path / "wrong")
    assert done.returncode == 1
    assert "AssertionError" in done.stderr
    assert "I18" in done.stderr


def test_the_recorder_has_about_15_calls_in_a_loop() -> None:
    text = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8")
    loop = PYTHON.findall(text)[0]
    calls = re.findall(r"\b(?:Recorder\.open|(?:record|sync|update)\.\w+)\(", loop)
    assert f"{len(calls)} calls" in text.replace("\n", " ")
    assert len(calls) <= 17


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in linked if not (page.parent / link).exists()]
    missing += [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    assert not missing, missing


def first_column(page: str, heading: str) -> list[str]:
    """Names in code marks in the first column of the table under a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]


def test_the_rules_are_those_of_the_gate_in_their_order() -> None:
    assert first_column("gate.md", "Rules") == list(RULES)


def test_the_fields_are_those_of_the_envelope() -> None:
    assert first_column("ledger.md", "Envelope") == [*ENVELOPE_FIELDS, "body"]


def test_the_invariants_are_those_that_are_judged() -> None:
    first_pass = {"integrity", "evidence", "heads", "outside"}
    judged = first_pass | {invariant.id for invariant in INVARIANTS}
    listed = first_column("verify.md", "Invariants")
    assert len(listed) == len(set(listed))
    assert set(listed) == judged
