"""Times small evidence segments against the same rows compressed with zstd; prints both ratios.

A training step leaves about three segments. What a recorder and a judge pay for one is mostly what
the columns cost each by itself, and zstd begins anew for each of them. Neither side touches a disk:
the rows are turned into the bytes of a Parquet file, and these into rows again. Both run in turn.

Usage: python -m benchmarks.evidence [--rows N ...]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shiftbook.ledger import evidence

ROUNDS = 200


def rows(count: int, seed: int = 0) -> dict[str, list[Any]]:
    """Columns as a recorder writes them for generated samples."""
    draw = random.Random(seed)

    def digests() -> list[str]:
        return [f"{draw.getrandbits(256):064x}" for _ in range(count)]

    return {
        "uid": [f"{n // 8:06d}/{n % 8}" for n in range(count)],
        "group": [f"{n // 8:06d}" for n in range(count)],
        "turns": [1] * count,
        "tokens": [draw.randrange(20, 900) for _ in range(count)],
        "token_digest": digests(),
        "logp_digest": digests(),
        "version_min": [4] * count,
        "version_max": [5] * count,
        "replica": ["rollout-0"] * count,
        "incarnation": ["rollout-0#1"] * count,
    }


def read(data: bytes) -> pa.Table:
    """The rows of a segment's bytes."""
    return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)


def best_us(acts: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Least microseconds of each act, all in turn."""
    found = dict.fromkeys(acts, float("inf"))
    for _ in range(ROUNDS):
        for name, act in acts.items():
            start = time.perf_counter()
            act()
            found[name] = min(found[name], (time.perf_counter() - start) * 1e6)
    return found


def main() -> None:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 512])
    for count in parser.parse_args().rows:
        table = evidence.as_table(rows(count))
        ours, packed = evidence.segment_bytes(table), evidence.segment_bytes(table, "zstd")
        took = best_us(
            {
                "write": partial(evidence.segment_bytes, table),
                "write zstd": partial(evidence.segment_bytes, table, "zstd"),
                "read": partial(read, ours),
                "read zstd": partial(read, packed),
            }
        )
        print(
            f"{count:5d} rows: zstd / ours  write {took['write zstd'] / took['write']:.2f} x "
            f"({took['write']:.0f} µs), read {took['read zstd'] / took['read']:.2f} x "
            f"({took['read']:.0f} µs); bytes {len(packed) / len(ours):.2f} x ({len(ours)})"
        )


if __name__ == "__main__":
    main()
