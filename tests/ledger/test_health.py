"""The doctor finds each fault where the fault really is, and stays silent where it is not.

Method: the condition is made, not said, wherever a test may: clocks that run backwards write a
ledger, a full disk is a small file system of its own, a missing extra is an installation without
it, a damaged companion of torch is an installed distribution. What no test can make (a network
file system, another build of SQLite) is told by the table that the kernel would show, or by number.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shiftbook.ledger import health
from shiftbook.ledger.events.safety import SafeModeLeft
from shiftbook.ledger.head_signer import HeadSigner
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.signing_keys import Ed25519Signer

KEY = Ed25519Signer("example.com/runs", bytes(range(32)))
EVENT = SafeModeLeft(by="operator", reason="test")
CODE = "import sys; from shiftbook.ledger.cli import main; sys.argv[0] = 'shiftbook'; main()"


def doctor(ledger: Path | str, *before: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Checks by name, from a process of its own that ``before`` starts."""
    done = subprocess.run(
        [
            *(before or (sys.executable,)),
            "-c",
            CODE,
            "doctor",
            "--ledger",
            str(ledger),
            "--format",
            "json",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    return {row["check"]: row for row in json.loads(done.stdout)}


def write(url: str, times_s: list[float]) -> None:
    """A ledger whose events were recorded at these seconds, in this order."""
    ticks = iter(times_s)
    with Ledger.open(url, now_ns=lambda: int(next(ticks) * 1e9)) as ledger:
        for _ in times_s:
            ledger.append("job", EVENT)


def test_a_clock_that_ran_backwards_within_the_ledger(store_urls: Callable[[str], str]) -> None:
    write(store_urls("good"), [100.0, 101.0, 100.5, 102.0])
    assert "clock steps" not in doctor(store_urls("good"))
    write(store_urls("bad"), [100.0, 4000.0, 400.0, 401.0])
    found = doctor(store_urls("bad"))["clock steps"]
    assert found["status"] == "warning"
    assert "3600 s at position 2" in found["found"]
    assert "shiftbook show 2" in found["fix"]


def test_a_clock_behind_the_last_event(store_url: str) -> None:
    write(store_url, [4e9])
    found = doctor(store_url)["clock"]
    assert found["status"] == "wrong"
    assert "behind the ledger's last event" in found["found"]
    assert "set-ntp" in found["fix"]


def test_sqlite_as_it_runs_here(tmp_path: Path) -> None:
    import sqlite3

    found = doctor(tmp_path / "none.db")
    bad = health.FIRST_BAD_SQLITE <= sqlite3.sqlite_version_info < health.FIRST_GOOD_SQLITE
    assert found["sqlite"]["status"] == ("warning" if bad else "ok")
    assert sqlite3.sqlite_version in found["sqlite"]["found"]


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ((3, 6, 23), "ok"),
        ((3, 7, 0), "warning"),
        ((3, 40, 1), "warning"),
        ((3, 51, 2), "warning"),
        ((3, 51, 3), "ok"),
        ((3, 52, 0), "ok"),
    ],
)
def test_sqlite_versions_that_lose_commits(version: tuple[int, ...], status: str) -> None:
    check = health.check_sqlite(version)
    assert check.status == status
    assert bool(check.fix) == (status != "ok")


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/team rw,relatime - nfs4 server:/team rw,vers=4.2
31 22 0:41 / /mnt/my\\040disk rw - cifs //server/share rw
32 30 0:42 / /mnt/team/local rw - xfs /dev/vdb rw
33 22 0:43 / /mnt/données rw - nfs4 server:/données rw
34 22 0:44 / /mnt/back\\134slash rw - nfs4 server:/b rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/mnt", "ext4"),
        ("/mnt/team", "nfs4"),
        ("/mnt/team/a/b", "nfs4"),
        ("/mnt/my disk/x", "cifs"),
        ("/mnt/team/local/x", "xfs"),
        ("/mnt/teamwork", "ext4"),
        ("/mnt/données/x", "nfs4"),
        ("/mnt/back\\slash/x", "nfs4"),
    ],
)
def test_network_file_systems_by_the_longest_mount(
    folder: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS, encoding="utf-8")
    monkeypatch.setattr(health, "MOUNTS", table)
    assert health.mount_kind(Path(folder)) == kind
    check = health.check_file_system(Path(folder))
    assert check.status == ("wrong" if kind in ("nfs4", "cifs") else "ok")
    assert bool(check.fix) == (check.status == "wrong")


def test_a_mount_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(MOUNTS.encode() + b"35 22 0:45 / /mnt/\xff rw - nfs server:/b rw\n")
    monkeypatch.setattr(health, "MOUNTS", table)
    assert health.mount_kind(Path(os.fsdecode(b"/mnt/\xff/x"))) == "nfs"
    assert health.mount_kind(Path("/mnt/team")) == "nfs4"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *((kind, "ok") for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk")),
        *((kind, "ok") for kind in ("fuse.fuse-overlayfs", "fuse.mergerfs")),
        *((kind, "wrong") for kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre")),
        *((kind, "wrong") for kind in ("gpfs", "beegfs", "wekafs", "vboxsf")),
        *((kind, "wrong") for kind in ("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs")),
        *((kind, "wrong") for kind in ("fuse.juicefs", "fuse.gcsfuse", "fuse.ceph")),
        *((kind, "warning") for kind in ("fuse", "fuse.lately")),
    ],
)
def test_kinds_of_file_systems(
    kind: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mountinfo").write_text(f"22 1 0:1 / / rw - {kind} none rw\n", encoding="utf-8")
    monkeypatch.setattr(health, "MOUNTS", tmp_path / "mountinfo")
    check = health.check_file_system(tmp_path)
    assert (check.status, bool(check.fix)) == (status, status != "ok")


def test_commands_that_mend_name_a_path_with_blanks_as_one_word(tmp_path: Path) -> None:
    folder = tmp_path / "my runs; x"
    folder.mkdir()
    path = folder / "book.db"
    path.write_bytes(b"no ledger")
    look, _, log = doctor(path)["ledger"]["fix"].partition("; shiftbook")
    assert shlex.split(look) == ["ls", "-l", str(path)]
    assert str(path) in shlex.split(log)[-1]
    assert health.check_disk(folder).status in ("ok", "warning", "wrong")


def test_a_link_is_followed_to_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(f"sqlite:///{tmp_path}/real/book.db", [100.0])
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "book.db")
    assert str(tmp_path / "real") in doctor(tmp_path / "link.db")["file system"]["found"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], tuple[str, ...]]]:
    """A command prefix under which ``tmp_path/disk`` is a file system of a given size."""
    (tmp_path / "disk").mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")

    def under(size: str) -> tuple[str, ...]:
        mount = f"mount -t tmpfs -o size={size} none {tmp_path / 'disk'}"
        return ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable)

    probe = subprocess.run([*under("1m"), "-c", "pass"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"this user may not mount: {probe.stderr.strip()}")
    return under


@pytest.mark.parametrize(("size", "status"), [("40m", "wrong"), ("600m", "warning"), ("3g", "ok")])
def test_disk_space_of_a_real_small_disk(
    size: str, status: str, tmp_path: Path, small_disk: Callable[[str], tuple[str, ...]]
) -> None:
    found = doctor(tmp_path / "disk" / "book.db", *small_disk(size))
    assert found["disk space"]["status"] == status
    assert ("du -xsh" in found["disk space"]["fix"]) == (status != "ok")
    assert "tmpfs" in found["file system"]["found"]


def installation(folder: Path, *without: str) -> str:
    """All that is installed here, but for some distributions; a PYTHONPATH."""
    dropped = tuple(name.replace("-", "_") for name in without)
    for place in (Path(p) for p in sys.path if p.endswith("site-packages")):
        for entry in place.iterdir():
            name = entry.name.lower()
            mine = any(name == d or name.startswith((f"{d}-", f"{d}.")) for d in dropped)
            target = folder / entry.name
            if not mine and not entry.name.endswith(".pth") and not target.exists():
                target.symlink_to(entry)
    import shiftbook.ledger

    beside = Path(next(iter(shiftbook.ledger.__path__))).parent
    (folder / "shiftbook").unlink(missing_ok=True)
    (folder / "shiftbook").mkdir()
    for room in ("ledger", "checkpoint", "scheduler", "verify", "jobs"):
        (folder / "shiftbook" / room).symlink_to(beside / room)
    return str(folder)


@pytest.mark.skipif(
    not [p for p in sys.path if p.endswith("site-packages")] or not site, reason="no site-packages"
)
def test_an_installation_without_an_extra(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    path = installation(folder, "torch", "ray")
    found = doctor(tmp_path / "none.db", sys.executable, "-S", PYTHONPATH=path)
    assert found["extra job"]["status"] == "warning"
    assert "torch, ray" in found["extra job"]["found"]
    assert found["extra job"]["fix"] == "pip install 'shiftbook[job]'"
    assert found["ray"]["status"] == "warning"
    assert "torch" not in found


def test_which_build_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text, build in (
        ("cpu", "cuda: Optional[str] = None\nhip = None\n", "CPU"),
        ("gpu", "__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\n", "CUDA 12.8"),
    ):
        folder = tmp_path / name / "torch"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise ImportError('the doctor imports no torch')")
        (folder / "version.py").write_text(text)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from shiftbook.ledger import health; print(health.torch_build())",
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path / name)},
            check=True,
        )
        assert done.stdout.strip() == build


def test_an_unsigned_tail_that_is_too_long() -> None:
    promised = health.PROMISED_EVENTS
    assert health.check_unsigned(5_000, 5_000 - promised, 1.0).status == "ok"
    late = health.check_unsigned(5_001, 5_000 - promised, 1.0)
    assert late.status == "wrong"
    assert f"{promised + 1} events" in late.found
    assert late.fix.startswith("shiftbook sign")
    old = health.check_unsigned(5_000, 4_999, health.PROMISED_S + 1)
    assert (old.status, "waited for 61 s" in old.found) == ("warning", True)
    assert health.check_unsigned(5_000, 5_000, 0.0).status == "ok"


def test_an_event_that_nobody_signed_for_long(store_url: str) -> None:
    write(store_url, [100.0])
    with Ledger.open(store_url) as ledger:
        HeadSigner(ledger, KEY).sign()
    assert doctor(store_url)["unsigned tail"]["status"] == "ok"
    write(store_url, [101.0])
    found = doctor(store_url)["unsigned tail"]
    assert (found["status"], found["fix"][:14]) == ("warning", "shiftbook sign")


def test_signed_heads_are_asked_where_there_are_any(store_url: str) -> None:
    with Ledger.open(store_url) as ledger:
        ledger.append("job", EVENT)
        assert health.signed_events(ledger) is None
        HeadSigner(ledger, KEY).sign()
        assert health.signed_events(ledger) == 1
        assert doctor(store_url)["unsigned tail"]["status"] == "ok"
        ledger.append("job", [EVENT] * (health.PROMISED_EVENTS + 1))
    found = doctor(store_url)["unsigned tail"]
    assert found["status"] == "wrong"
    assert f"{health.PROMISED_EVENTS + 1} events after the last signed head" in found["found"]
    assert "shiftbook sign" in found["fix"]


def test_every_fault_has_a_command(store_url: str) -> None:
    write(store_url, [100.0, 4e9, 400.0])
    for check in doctor(store_url).values():
        assert bool(check["fix"]) == (check["status"] != "ok"), check
