"""`shiftbook checkpoint list | show | verify`: JSON, exit codes 0, 1 and 2, and one clear line.

Method: the root command line runs in this process on real bundles, good, damaged and absent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shiftbook.checkpoint.bundle import SavedBundle, save_bundle
from shiftbook.ledger.cli import main
from tests.checkpoint.bundle_states import fields, state


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def bundles(tmp_path: Path) -> list[SavedBundle]:
    return [save_bundle(tmp_path, fields(k), state(k)) for k in (1, 2)]


def test_list(tmp_path: Path, bundles: list[SavedBundle]) -> None:
    rows = json.loads(run("list", tmp_path, "--format", "json").stdout)
    assert [row["bundle_id"] for row in rows] == [b.bundle_id for b in bundles]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert bundles[1].path.name in run("list", tmp_path).stdout
    empty = tmp_path / "empty"
    empty.mkdir()
    assert json.loads(run("list", empty, "--format", "json").stdout) == []


def test_show(tmp_path: Path, bundles: list[SavedBundle]) -> None:
    shown = json.loads(run("show", tmp_path, "--format", "json").stdout)
    assert shown["bundle_id"] == bundles[1].bundle_id
    assert shown["parts"]["model"]["kind"] == "model"
    assert "iteration 1, policy version 1" in run("show", bundles[0].path).stdout
    assert "40 samples in" in run("show", bundles[0].path / "manifest.json").stdout


def test_verify_a_good_bundle(bundles: list[SavedBundle]) -> None:
    done = run("verify", bundles[0].path, "--format", "json")
    assert done.exit_code == 0
    (row,) = json.loads(done.stdout)
    assert row["ok"] is True
    assert row["checked"] == ["manifest", "files", "tensors"]
    assert row["not_checked"] == []
    quick = run("verify", bundles[0].path, "--files-only")
    assert quick.exit_code == 0
    assert "not checked: tensors" in quick.stdout


def test_verify_a_damaged_bundle_exits_1_and_names_the_part(bundles: list[SavedBundle]) -> None:
    piece = bundles[0].manifest.parts["optimizer"].ranges[0]
    file = bundles[0].path / piece.file
    bad = bytearray(file.read_bytes())
    bad[piece.offset + 100] ^= 4
    file.write_bytes(bad)
    done = run("verify", bundles[0].path, "--format", "json")
    assert done.exit_code == 1
    (row,) = json.loads(done.stdout)
    assert (row["ok"], row["part"], row["not_checked"]) == (
        False,
        "optimizer",
        ["files", "tensors"],
    )
    (bundles[1].path / "manifest.json").unlink()
    gone = run("verify", bundles[1].path)
    assert gone.exit_code == 1
    assert "never completed" in gone.stdout


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_what_is_not_there_exits_2(tmp_path: Path, command: str) -> None:
    done = run(command, tmp_path / "absent")
    assert done.exit_code == 2
    assert "does not exist" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_folder_without_bundles_exits_2(tmp_path: Path, command: str) -> None:
    done = run(command, tmp_path)
    assert done.exit_code == 2
    assert "no complete bundle" in done.stderr


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_a_folder_of_folders_of_bundles_names_them(tmp_path: Path, command: str) -> None:
    """A demo's bundles lie in a folder for each job; the folder above holds none itself."""
    save_bundle(tmp_path / "job-a", fields(1), state(1))
    (tmp_path / "empty").mkdir()
    done = run(command, tmp_path)
    assert done.exit_code == (0 if command == "list" else 2)
    (line,) = done.stderr.splitlines()
    assert "job-a" in line
    assert "empty" not in line
