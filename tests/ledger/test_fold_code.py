"""Goal: a snapshot is used by the code that folded it, and by no other.

Method: the imports of the fold are walked in the source, from the two modules where it begins, and
what they reach must be what the snapshots' hash covers; then one module after the other is changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shiftbook.ledger import folding, snapshots
from shiftbook.ledger.fold_rules import RULES
from shiftbook.ledger.snapshots import FOLDING_MODULES, Snapshots, fold_code
from tests.ledger.sample_ledger import write_sample

LEDGER = Path(snapshots.__file__).parent
PACKAGE = "shiftbook.ledger"
BEGINNINGS = (f"{PACKAGE}.state", f"{PACKAGE}.folding")


def source_of(module: str) -> Path | None:
    """File of a module of this project; None for a name that is none, such as a class."""
    path = LEDGER.parent.joinpath(*module.split(".")[1:])
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)


def imported(file: Path) -> Iterator[str]:
    """Names of this project that a module imports, wherever in it, and the packages around them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports by a relative name"
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "shiftbook":
                yield from (".".join(parts[:end]) for end in range(2, len(parts) + 1))


def closure() -> set[Path]:
    """Every source file that the fold reaches by imports."""
    waiting, found = list(BEGINNINGS), set[Path]()
    while waiting:
        file = source_of(waiting.pop())
        if file is not None and file not in found:
            found.add(file)
            waiting += imported(file)
    return found


def test_the_hash_covers_all_that_the_fold_imports() -> None:
    reached = closure()
    assert LEDGER / "fold_moves.py" in reached, "the walk finds what the fold was split into"
    covered = {Path(str(source)) for source in snapshots._sources()}
    assert reached <= covered, sorted(path.name for path in reached - covered)
    named = {LEDGER / f"{name}.py" for name in FOLDING_MODULES}
    assert named <= reached, sorted(path.name for path in named - reached)


def test_every_rule_of_the_fold_stands_in_a_module_that_is_covered() -> None:
    """However a rule is registered: what changes a state is hashed."""
    homes = {rule.__module__ for rule in RULES.values()}
    assert homes <= {f"{PACKAGE}.{name}" for name in FOLDING_MODULES}


def test_a_snapshot_of_another_fold_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each module in turn is another one: no snapshot that this code wrote is read."""
    monkeypatch.setattr(folding, "SNAPSHOT_EVENTS", 2)
    monkeypatch.setattr(folding, "SHARED_EVENTS", 3)
    path = tmp_path / "book.db"
    with write_sample(path) as ledger:
        name = next(iter(ledger.jobs()))
        assert ledger.state().job(name).version
    kept = Snapshots(path.with_name(path.name + ".snapshots"))
    assert kept.job(name) is not None
    real = snapshots._sources()
    try:
        for number, source in enumerate(real):
            changed = tmp_path / source.name
            changed.write_bytes(source.read_bytes() + b"# another fold\n")
            others = [*real[:number], changed, *real[number + 1 :]]
            monkeypatch.setattr(snapshots, "_sources", lambda others=others: others)
            fold_code.cache_clear()
            assert kept.job(name) is None, source.name
            assert kept.shared() is None, source.name
    finally:
        monkeypatch.undo()
        fold_code.cache_clear()
    assert kept.job(name) is not None


def test_a_file_in_the_place_of_their_folder_turns_snapshots_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docs/proofs.md says to whoever trusts no folder on this machine."""
    monkeypatch.setattr(folding, "SNAPSHOT_EVENTS", 2)
    off = tmp_path / "book.db.snapshots"
    off.touch()
    with write_sample(tmp_path / "book.db") as ledger:
        name = next(iter(ledger.jobs()))
        assert ledger.state().job(name).version
        assert ledger.state().job(name).name == name
    assert off.is_file()
    assert Snapshots(off).job(name) is None
