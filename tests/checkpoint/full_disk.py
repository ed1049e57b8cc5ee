"""Saves on a file system that is too small, alone and by two processes; run as a program by tests.

`full_disk.py FOLDER` runs where FOLDER is a small file system. It saves a small bundle, then tries
a large one by `save_bundle`, and by `save_sharded` from two processes, and saves a small one again.
`full_disk.py FOLDER rank N` is one of the two.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shiftbook.checkpoint.bundle import latest_bundle, save_bundle
from shiftbook.checkpoint.errors import BundleWriteFailed
from shiftbook.checkpoint.restore import restore_bundle
from shiftbook.checkpoint.sharded_bundle import save_sharded
from tests.checkpoint.bundle_states import fields, state
from tests.checkpoint.process_end import end_process

LARGE_ROWS = 60_000
"""32 bytes of float32 in each of some ten tensors: more than the disk has."""


def said(act: Any, *arguments: Any) -> str:
    """What the refusal says."""
    try:
        act(*arguments)
    except BundleWriteFailed as error:
        return str(error)
    return ""


def shows(folder: Path) -> dict[str, Any]:
    """What is there: which iteration the latest bundle is of, restored, and what else."""
    latest = latest_bundle(folder)
    assert latest is not None
    restore_bundle(latest.path)
    left = [path.name for path in folder.iterdir() if path.name.startswith(".incoming")]
    return {"latest": latest.manifest.iteration, "left": left}


def rank(number: int, folder: Path) -> None:
    """One of two processes, each with half of the rows."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=number, world_size=2, store=store)
    mesh = init_device_mesh("cpu", (2,))
    large = distribute_tensor(torch.ones(LARGE_ROWS, 100), mesh, [Shard(0)])
    print(json.dumps(said(save_sharded, folder, fields(3), {"model": {"w": large}})))
    dist.destroy_process_group()
    end_process()


def main() -> None:
    """A JSON line for each step."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        rank(int(sys.argv[3]), folder)
    save_bundle(folder, fields(1), state(1))
    alone = said(save_bundle, folder, fields(2), state(2, width=LARGE_ROWS))
    print(json.dumps({"said": [alone], **shows(folder)}), flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.full_disk", str(folder)]
    ranks = [
        subprocess.Popen([*command, "rank", str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    answers = [process.communicate(timeout=200)[0] for process in ranks]
    words = [json.loads(answer) for answer in answers if answer]
    print(json.dumps({"said": words, **shows(folder)}), flush=True)
    save_bundle(folder, fields(4), state(4))
    print(json.dumps({"said": [], **shows(folder)}), flush=True)


if __name__ == "__main__":
    main()
