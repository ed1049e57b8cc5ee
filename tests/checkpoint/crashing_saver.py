"""A saver that is killed, or runs out of disk, at a chosen point; run as a program by tests.

`crashing_saver.py FOLDER kill`: for k = 1, 2, ... a child saves a bundle and is killed (SIGKILL)
right before its k-th act on the folder (open, mkdir, rename, fsync, removal), until one child gets
through; a JSON line for each child says where it died and what the folder shows then.
`crashing_saver.py FOLDER full`: saves with a limit on the size of files (RLIMIT_FSIZE), a JSON
line says how that ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from shiftbook.checkpoint import shelf
from shiftbook.checkpoint.bundle import latest_bundle, restore_bundle, save_bundle
from shiftbook.checkpoint.errors import BundleWriteFailed
from tests.checkpoint.bundle_states import fields, state

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def die_before(act: int, folder: Path) -> None:
    """Arrange that this process kills itself right before its `act`-th act on the folder."""
    left = [act]

    def count(name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.write(1, json.dumps({"died_before": name}).encode() + b"\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(folder) in str(arguments[0]):
            count(f"{event} {Path(str(arguments[0])).name}")

    original = os.fsync

    def counted_fsync(descriptor: int) -> None:
        count("fsync")
        original(descriptor)

    sys.addaudithook(hook)
    os.fsync = counted_fsync


def kill_everywhere(folder: Path) -> None:
    previous = save_bundle(folder, fields(1), state(1)).bundle_id
    for act in range(1, 200):
        child = os.fork()
        if child == 0:
            die_before(act, folder)
            save_bundle(folder, fields(2), state(2))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        latest = latest_bundle(folder)
        assert latest is not None
        restore_bundle(latest.path)
        killed = os.WIFSIGNALED(status)
        told = {"act": act, "killed": killed, "new": latest.bundle_id != previous,
                "iteration": latest.manifest.iteration}  # fmt: skip
        print(json.dumps(told), flush=True)
        if not killed:
            with shelf.shelf_lock(folder):
                left = sorted(p.name for p in folder.iterdir() if p.name.startswith(".inc"))
            print(json.dumps({"left_over": left, "exit": os.WEXITSTATUS(status)}), flush=True)
            return
        if latest.bundle_id != previous:  # killed after the rename: start again from before
            save_bundle(folder, fields(1), state(1))


def fill_the_disk(folder: Path) -> None:
    good = save_bundle(folder, fields(1), state(1)).bundle_id
    for limit_bytes in (0, 100, 4_000, 40_000, 400_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
        try:
            save_bundle(folder, fields(2), state(2, width=4096))
            said = "saved"
        except BundleWriteFailed as error:
            said = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        latest = latest_bundle(folder)
        names = sorted(path.name for path in folder.iterdir())
        told = {"limit_bytes": limit_bytes, "said": said, "names": names,
                "latest_is_good": latest is not None and latest.bundle_id == good}  # fmt: skip
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"kill": kill_everywhere, "full": fill_the_disk}[sys.argv[2]](Path(sys.argv[1]))
