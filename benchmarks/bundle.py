"""Time the save of a bundle against a plain save of the same tensors.

Run: ``python -m benchmarks.state bundle``, or ``python benchmarks/bundle.py [--rounds 5] [--folder
DIR]``. The state is a bfloat16 policy in the shapes of a 135 M-parameter model with its fp32
masters (807 MB). The plain save is ``torch.distributed.checkpoint.save`` by one process as torch
ships it, its files synced. The bundle takes fingerprints of the live tensors, hashes the files,
syncs files and folders, and is complete on return. Both write to the same disk in turns; at most
1.3 times the plain save's seconds (medians: a disk has good moments). Exit code 1 on a miss.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result import Result
from benchmarks.state import full_bytes, model_state
from shiftbook.checkpoint.bundle import save_bundle
from shiftbook.checkpoint.manifest import BundleFields

SAVE_BOUND = 1.3

FIELDS = BundleFields(
    job="benchmark",
    attempt="a0",
    iteration=1,
    policy_version=1,
    rng={"trainer/0": "00"},
    sampler={"epoch": 0, "position": 0},
    scheduler={"step": 1.0},
)


def plain_save(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """What anyone writes; the writer syncs its files."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=True)


def main() -> int:
    """Save in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be timed (default: temporary)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = model_state()
    parts = {"model": policy, "masters": {name: t.float() for name, t in policy.items()}}
    flat = {f"{part}/{name}": t for part, members in parts.items() for name, t in members.items()}
    times: dict[str, list[float]] = {"plain": [], "bundle": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds + 1):
            for what, seconds in times.items():
                target = Path(folder) / what
                begun_s = time.perf_counter()
                if what == "plain":
                    plain_save(target, flat)
                else:
                    save_bundle(target, FIELDS, parts)
                if number:  # the first one warms up
                    seconds.append(time.perf_counter() - begun_s)
                shutil.rmtree(target)
    plain_s, bundle_s = (statistics.median(each) for each in times.values())
    low, high = min(times["bundle"]), max(times["bundle"])
    result = Result(
        "bundle save / plain save with fsync",
        bundle_s / plain_s,
        SAVE_BOUND,
        False,
        "x",
        f"{full_bytes(flat) / 1e6:.0f} MB; bundle {bundle_s:.2f} s ({low:.2f} to {high:.2f}), "
        f"plain {plain_s:.2f} s ({min(times['plain']):.2f} to {max(times['plain']):.2f})",
    )
    print(result.line())
    return 0 if result.met else 1


if __name__ == "__main__":
    sys.exit(main())
