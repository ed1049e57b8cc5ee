"""The Ray cluster as a process of its own: start a head, connect within a bound, stop it.

A cluster that ``ray.init()`` starts dies with its driver, and with it every actor. Here the head is
started on its own, so the training loop, the worker groups and the controller outlive whoever
started them, and each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shiftbook.ledger.dialect import side_path
from shiftbook.ledger.errors import MissingExtra
from shiftbook.ledger.stop_signals import handlers_kept
from shiftbook.scheduler.errors import ClusterError

NAMESPACE = "shiftbook"
SLOT_RESOURCE = "shiftbook_slot"
CLUSTER_VARIABLE = "SHIFTBOOK_CLUSTER"
"""Environment variable by which the processes of a cluster are known."""
NODE_PREFIX = "shiftbook_node_"
FOLDERS, FOLDER_PREFIX = Path("/tmp"), "sb-"
"""Where clusters have their folders: the paths of Ray's sockets must be short."""
HEAD_NODE = "n0"
"""Name of the head's node in the names of its slots."""
CONNECT_LIMIT_S = 20.0
START_LIMIT_S = 60.0
STOP_LIMIT_S = 2.0
"""A raylet takes 10 s to say goodbye to a head that is gone; nothing is lost by not waiting."""
OBJECT_STORE_BYTES = 256 * 2**20

# One thread everywhere: two threads add in another order than one, and the bits differ.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class ClusterFile:
    """Where a running cluster is: address, the file of its token, its folder, its head's pids."""

    address: str
    token_path: str
    temp_dir: str
    slots: int

    def save(self, path: Path) -> None:
        """Write beside the ledger; the token itself stays in its own file."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ClusterFile:
        """Read; ClusterError where there is none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(
                f"expected the address of a running cluster in {path}, found none ({error}); "
                "start the job again, or pass the address of its cluster"
            ) from error


def cluster_path(ledger_url: str) -> Path:
    """The file beside a ledger that says where its cluster is."""
    return side_path(ledger_url, ".cluster.json")


def left_behind(ledger_url: str) -> ClusterFile | None:
    """The cluster that a ledger's last run did not stop, as far as its processes are here."""
    try:
        found = ClusterFile.load(cluster_path(ledger_url))
    except ClusterError:
        return None
    # What is stopped and removed by it must be what `start_head` makes, whoever wrote the file.
    folder = Path(str(found.temp_dir))
    ours = folder.parent == FOLDERS and folder.name.startswith(FOLDER_PREFIX)
    return found if ours and any(True for _ in processes(found)) else None


def import_ray() -> Any:
    """Import Ray, or say which extra brings it."""
    # Ray reads these once, at import.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(token_file()))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A call without a connection is an error; Ray would start a cluster of its own for it.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtra("job", "ray") from error
    return ray


def token_file() -> Path:
    """The file of the token that this user's clusters ask for, made at the first use.

    One file for all of a user's clusters: Ray reads its token once in the life of a process.
    """
    path = Path.home() / ".cache" / "shiftbook" / "ray-token"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_hex(32), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)  # the first of several that start at once wins
        fresh.unlink()
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(token_path: Path, temp_dir: str) -> dict[str, str]:
    """What the processes of a cluster are started with."""
    return {
        **os.environ,
        CLUSTER_VARIABLE: temp_dir,
        **ONE_THREAD,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # Nobody looks at Ray's own task events and metrics; they cost the slots' cores time.
        "RAY_enable_metrics_collection": "0",
        "RAY_task_events_report_interval_ms": "0",
        "RAY_enable_timeline": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Each worker has a core of its own; Ray would let every other program go first.
        "RAY_worker_niceness": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        # A job that dies must not take the actors of others along, and a lost raylet must be
        # noticed before a step's time limit.
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_health_check_period_ms": "300",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }


def start_head(slots: int) -> ClusterFile:
    """Start a head with ``slots`` slots on this machine and wait until it answers.

    Raises ClusterError with the end of Ray's own output when it does not come up.
    """
    import_ray()
    temp_dir = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=FOLDERS))
    token_path = token_file()
    port = _free_port()
    resources = {SLOT_RESOURCE: slots, f"{NODE_PREFIX}{HEAD_NODE}": 1}
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--include-dashboard=false",
        f"--temp-dir={temp_dir / 'ray'}",
        f"--num-cpus={max(slots, 2) + 8}",
        "--num-gpus=0",
        f"--resources={json.dumps(resources)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
    ]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "ray.scripts.scripts"]
    cluster = ClusterFile(f"127.0.0.1:{port}", str(token_path), str(temp_dir), slots)
    try:
        done = subprocess.run(
            command,
            env=environment(token_path, str(temp_dir)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=START_LIMIT_S,
            check=False,
        )
    except BaseException as error:
        stop_head(cluster)  # what had come up by then would stay
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise ClusterError(
            f"expected a Ray node within {START_LIMIT_S:.0f} s, found none; "
            "free some memory, or stop other clusters with `ray stop`"
        ) from error
    if done.returncode != 0:
        stop_head(cluster)
        tail = done.stdout.decode(errors="replace").strip().splitlines()[-3:]
        raise ClusterError(f"the Ray head did not start: {' / '.join(tail)}")
    return cluster


def connect(cluster: ClusterFile, *, limit_s: float = CONNECT_LIMIT_S) -> Any:
    """Connect this process to a running cluster; returns the ray module.

    Ray itself retries for minutes when a head is gone, so the port is tried first, with a limit.
    Raises ClusterError where no head answers, and in a process that is connected to another one.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = cluster.token_path
    ray = import_ray()
    if ray.is_initialized():
        # What is asked of one cluster must not be done on another.
        found = str(ray.get_runtime_context().gcs_address)
        if not _same_head(found, cluster):
            raise ClusterError(
                f"expected a process that is not connected to Ray, or to the head at "
                f"{cluster.address}, found a connection to {found}; call ray.shutdown() first, "
                f"or use another process"
            )
        return ray
    host, port = cluster.address.rsplit(":", 1)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"expected a Ray head at {cluster.address}, found none within "
                    f"{limit_s:.0f} s ({error}); start the job again"
                ) from error
            # A head that is coming up refuses at once; this bounds the rate of asking.
            select_wait_s = 0.1
            time.sleep(select_wait_s)
    # Ray ends its drivers on the spot at SIGTERM: what they have started would stay.
    with handlers_kept():
        ray.init(
            address=cluster.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=True,
        )
    _keep_off_stdout()
    return ray


def _keep_off_stdout() -> None:
    """Ray prints on standard output that a process ended, even without ``log_to_driver``; what is
    printed there belongs to the command, and the job's own record says what ended."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def node_address() -> str:
    """Address of this process's node, as the others of the cluster reach it."""
    return str(import_ray().util.get_node_ip_address())


def stop_head(cluster: ClusterFile, *, limit_s: float = STOP_LIMIT_S) -> None:
    """Stop every process of this cluster, and of no other, and remove its folder."""
    with contextlib.suppress(MissingExtra):
        _disconnect(import_ray(), cluster)
    pids = list(processes(cluster))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + (limit_s if number == signal.SIGTERM else 2.0)
        while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
            time.sleep(0.05)
        if not any(_alive(pid) for pid in pids):
            break
    shutil.rmtree(cluster.temp_dir, ignore_errors=True)


def _disconnect(ray: Any, cluster: ClusterFile) -> None:
    """Leave a cluster; a connection to another one stays."""
    if ray.is_initialized() and _same_head(ray.get_runtime_context().gcs_address, cluster):
        ray.shutdown()


def _same_head(address: str, cluster: ClusterFile) -> bool:
    """Whether an address is that of the cluster's head: a machine has many names, so by port."""
    return str(address).rpartition(":")[2] == cluster.address.rpartition(":")[2]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return state.rsplit(")", 1)[-1].split()[0] != "Z"


def processes(cluster: ClusterFile) -> Iterator[int]:
    """Processes whose environment or command line names this cluster's folder, and what they
    started: some of Ray's write their title over both."""
    needle = cluster.temp_dir.encode()
    found: set[int] = set()
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if needle in text and _started_by_ray(entry):
            found.add(pid)
    while started := {p for p, parent in parents.items() if parent in found} - found:
        found |= started
    yield from sorted(found)


def _started_by_ray(entry: Path) -> bool:
    """True for Ray's own processes and workers, not for a driver that only connected."""
    try:
        command = (entry / "cmdline").read_bytes()
    except OSError:
        return False
    return b"ray" in command
