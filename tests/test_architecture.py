"""Goal: the house keeps its plan: who may import whom, what imports without the heavy libraries.

Method: the syntax tree of every module is walked, so imports inside functions count too; what must
import in a base install is imported by a fresh interpreter that refuses torch, Ray and numba.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from shiftbook.ledger.errors import ShiftbookError

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "ledger": {"ledger"},
    "checkpoint": {"checkpoint", "ledger"},
    "scheduler": {"scheduler", "checkpoint", "ledger"},
    "verify": {"verify", "checkpoint", "ledger"},
    "jobs": {"jobs", "verify", "scheduler", "checkpoint", "ledger"},
}
ROOMS = tuple(MAY_IMPORT)
NEVER = {
    "ledger": {"torch", "ray", "numba"},
    "verify": {"torch", "ray", "numba"},
    "checkpoint": {"ray"},
}
"""Libraries that a room uses nowhere, not even inside a function."""
INSIDE_FUNCTIONS = {"checkpoint/transfer/object_store.py": {"ray"}}
"""But for these modules, which import them where they are called."""

BANNED_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
LIGHT_CHECKPOINT = (
    "compare",
    "errors",
    "feed",
    "manifest",
    "mixture",
    "sampler",
    "shelf",
    "commands",
    "recorder",
    "recorder_samples",
    "recorder_state",
    "recorder_sync",
    "recorder_update",
)
"""What an auditor reads of a bundle, without torch."""

REFUSING = """
import importlib, pkgutil, sys

HEAVY = {"torch", "ray", "numba"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"{name} is refused here", name=name)
        return None

sys.meta_path.insert(0, Refuse())
names = sys.argv[1:]
for room in ("shiftbook.ledger", "shiftbook.verify"):
    package = importlib.import_module(room)
    names += [found.name for found in pkgutil.walk_packages(package.__path__, room + ".")]
for name in names:
    importlib.import_module(name)
loaded = sorted(HEAVY & {name.split(".")[0] for name in sys.modules})
assert not loaded, loaded
print(len(names))
"""


def modules(*folders: str) -> list[Path]:
    """Every module under the folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; a relative one begins with a dot.

    ``from a import b`` gives ``a.b``, since b may be a module.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            for alias in node.names:
                yield node.lineno, f"{dots}{node.module or ''}.{alias.name}"


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_there_is_something_to_look_at() -> None:
    for room in ROOMS:
        assert len(modules(room)) > 5, room


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_downwards(room: str) -> None:
    wrong = []
    for path in modules(room):
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] == "shiftbook" and parts[1] not in MAY_IMPORT[room]:
                wrong.append(f"{where(path, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(NEVER))
def test_rooms_use_no_library_that_they_must_do_without(room: str) -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in modules(room)
        for line, name in imports(path)
        if name.split(".")[0]
        in NEVER[room] - INSIDE_FUNCTIONS.get(str(path.relative_to(ROOT)), set())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", sorted(INSIDE_FUNCTIONS))
def test_the_exceptions_import_where_they_are_called(module: str) -> None:
    found = [
        (node, alias.name)
        for node in ast.walk(tree(ROOT / module))
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] in INSIDE_FUNCTIONS[module]
    ]
    assert found, f"{module} needs no exception"
    top = set(tree(ROOT / module).body)
    assert not [name for node, name in found if node.col_offset == 0 or node in top], module


def test_the_base_install_imports_without_torch_ray_and_numba() -> None:
    light = [f"shiftbook.checkpoint.{name}" for name in LIGHT_CHECKPOINT]
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, *light],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The two packages themselves are imported and not counted.
    assert int(done.stdout) == len(modules("ledger", "verify")) - 2 + len(light)


def test_imports_are_absolute_and_name_the_installed_package() -> None:
    """pytest has the root on its path, so ``import ledger`` would work here and nowhere else."""
    wrong = []
    for path in modules(*ROOMS, "tests", "benchmarks"):
        for line, name in imports(path):
            first = name.split(".")[0]
            if first == "" or first in ROOMS:
                wrong.append(f"{where(path, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_neither_tests_nor_benchmarks() -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in modules(*ROOMS)
        for line, name in imports(path)
        if name.split(".")[0] in ("tests", "benchmarks")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_namespace_has_no_module_of_its_own() -> None:
    """An ``__init__.py`` at the root would end the namespace."""
    assert not (ROOT / "__init__.py").exists()


@pytest.mark.parametrize("folder", [*ROOMS, "tests", "benchmarks"])
def test_modules_open_with_a_sentence_and_have_a_name_that_says_something(folder: str) -> None:
    wrong = []
    for path in modules(folder):
        opening = ast.get_docstring(tree(path))
        if not opening:
            wrong.append(f"{where(path, 1)} has no docstring")
        elif not opening.split("\n\n")[0].rstrip().endswith((".", ":", "::")):
            wrong.append(f"{where(path, 1)} opens with no whole sentence")
        if path.stem in BANNED_NAMES or path.parent.name in BANNED_NAMES:
            wrong.append(f"{where(path, 1)} has a name that says nothing")
    assert not wrong, "\n".join(wrong)


def test_each_package_has_its_errors_and_one_base() -> None:
    """One ``errors.py`` in each package; every error in it derives from ShiftbookError."""
    for room in ROOMS:
        module = import_module(f"shiftbook.{room}.errors")
        own = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, BaseException)
            and value.__module__ == module.__name__
        ]
        assert own, room
        for error in own:
            assert issubclass(error, ShiftbookError), error
