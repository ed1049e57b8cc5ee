"""Time to sync an engine over links of given rates, with whole weights and with patches.

Run: ``python -m benchmarks.transfer [--mb 32] [--share 0.004] [--rates 4 16 64 256 0] [--out
FILE]``. Two trainer ranks serve a float16 model over Arrow Flight with TLS; a proxy (slow_link.py)
gives the way to the engine a rate in megabytes a second in all (0: none). For each rate a version
is pulled whole, and then one in which ``--share`` of the elements moved by one in the last place,
as a patch. Printed: bytes, seconds, and what the bytes take at that rate. With ``--out`` (.svg,
.png or .html) both are drawn as curves over the rate.

Bounds, at rates of up to 64 MB/s: whole weights take at most 1.25 times their bytes at that rate
and 0.5 s; a patch is synced at least 10 times as fast where it has at most 2 % of the bytes and the
link is the slow part (whole weights take 4 s or more). Exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result import Result
from benchmarks.slow_link import SlowLink
from shiftbook.checkpoint.layouts import split
from shiftbook.checkpoint.transfer.catalogue import Catalogue, Shard, join_catalogues
from shiftbook.checkpoint.transfer.certificates import make_certificates
from shiftbook.checkpoint.transfer.desk import Desk
from shiftbook.checkpoint.transfer.flight import FlightLink, FlightSource
from shiftbook.checkpoint.transfer.offers import Offers
from shiftbook.checkpoint.transfer.plan import Stored
from shiftbook.checkpoint.transfer.receiver import Receiver, Synced
from shiftbook.checkpoint.transfer.source import Source
from shiftbook.checkpoint.transfer.tokens import issue_token

RANKS = 2
ROWS = 1024
LAYERS = 8
SECRET = b"b" * 32
BOUND_RATE_MB_S = 64.0
SLOW_S = 4.0

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One sync."""

    rate_mb_s: float
    encoding: str
    moved_mb: float
    sync_s: float

    @property
    def line_s(self) -> float:
        """What its bytes take at the rate; 0 without one."""
        return self.moved_mb / self.rate_mb_s if self.rate_mb_s else 0.0


def model(mb: float, seed: int) -> Weights:
    """Random float16 matrices of so many megabytes in all."""
    rng = np.random.default_rng(seed)
    columns = max(1, round(mb * 1e6 / (2 * ROWS * LAYERS)))
    return {
        f"layer.{n}": (rng.standard_normal((ROWS, columns)) * 0.05).astype(np.float16)
        for n in range(LAYERS)
    }


def stepped(old: Weights, share: float, seed: int) -> Weights:
    """A share of the elements moves by one in the last place."""
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in old.items()}
    for array in new.values():
        bits = array.view(np.uint16).reshape(-1)
        where = rng.integers(0, bits.size, size=round(bits.size * share))
        bits[where] += rng.choice(np.array([1, 65_535], dtype=np.uint16), size=where.size)
    return new


class Trainer:
    """Two ranks that serve, each behind a line of half the rate."""

    def __init__(self, folder: Path) -> None:
        self.desk = Desk()
        self.offers = [Offers(rank) for rank in range(RANKS)]
        self.files = make_certificates(folder, ["127.0.0.1"])
        self.served = [
            FlightSource(Source(o, self.desk if o.rank == 0 else None), self.files, SECRET)
            for o in self.offers
        ]

    def publish(self, version: int, weights: Weights) -> Catalogue:
        """Rows of each tensor by rank."""
        each = ROWS // RANKS
        base = self.offers[0].newest()
        local = [
            offers.stage(
                version,
                [
                    Shard(name, a[r * each : (r + 1) * each], (r * each, 0), a.shape)
                    for name, a in weights.items()
                ],
            )
            for r, offers in enumerate(self.offers)
        ]
        catalogue = join_catalogues(local, base=base)
        for offers in self.offers:
            offers.open(catalogue)
        return catalogue

    def links(self, target: str, rate_mb_s: float, stack: ExitStack) -> list[FlightLink]:
        """Through lines that have the rate together."""
        each = rate_mb_s * 1e6 / RANKS if rate_mb_s else None
        lines = [
            stack.enter_context(SlowLink("127.0.0.1", served.port, rate_bytes_s=each))
            for served in self.served
        ]
        token = issue_token(SECRET, target, 3600)
        return [
            FlightLink(rank, "127.0.0.1", line.port, authority=self.files.authority, token=token)
            for rank, line in enumerate(lines)
        ]


def sync(trainer: Trainer, receiver: Receiver, catalogue: Catalogue) -> tuple[Synced, float]:
    """One sync and its seconds, from the first question to the confirmed version."""
    trainer.desk.open(catalogue, {receiver.target: 1}, limit_s=600)
    began_s = time.perf_counter()
    done = receiver.sync()
    took_s = time.perf_counter() - began_s
    (outcome,) = trainer.desk.outcomes()
    assert outcome.outcome == "serving", outcome
    return done, took_s


def measured(
    trainer: Trainer, weights: Weights, share: float, rate: float, number: int
) -> list[Row]:
    """Whole weights, then a patch, over links of one rate."""
    version = 10 * number
    target = f"engine-{number}"
    stored = {
        name: Stored("float16", split(name, array.shape, 0, 0, 1))
        for name, array in weights.items()
    }
    rows = []
    with ExitStack() as stack:
        links = trainer.links(target, rate, stack)
        receiver = Receiver(target, links, stored, verdict_s=600, limit_bytes=24 << 20)
        for step, new in enumerate((weights, stepped(weights, share, number)), 1):
            done, took_s = sync(trainer, receiver, trainer.publish(version + step, new))
            rows.append(Row(rate, done.encoding, done.moved_bytes / 1e6, took_s))
            for name, array in new.items():
                assert np.array_equal(receiver.tensors[name], array.view(np.uint16))
    return rows


def judged(rows: Sequence[Row]) -> list[Result]:
    """The bounds that apply to these rates."""
    results = []
    for whole, patch in zip(rows[::2], rows[1::2], strict=True):
        rate = whole.rate_mb_s
        if not 0 < rate <= BOUND_RATE_MB_S:
            continue
        over = (whole.sync_s - 0.5) / whole.line_s
        detail = f"{whole.sync_s:.2f} s for {whole.line_s:.2f} s of line"
        results.append(
            Result(f"whole at {rate:g} MB/s / its bytes", over, 1.25, False, "x", detail)
        )
        if whole.sync_s >= SLOW_S and patch.moved_mb <= 0.02 * whole.moved_mb:
            gain = whole.sync_s / patch.sync_s
            detail = f"{patch.sync_s:.2f} s"
            results.append(Result(f"whole / patch at {rate:g} MB/s", gain, 10.0, True, "x", detail))
    return results


def draw(rows: Sequence[Row], mb: float, out: Path) -> None:
    """Seconds over the rate, both logarithmic."""
    import altair as alt

    values: list[dict[str, Any]] = [
        {"rate": row.rate_mb_s, "seconds": row.sync_s, "sent": row.encoding}
        for row in rows
        if row.rate_mb_s
    ]
    axes = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("rate:Q", title="link, MB/s").scale(type="log"),
        y=alt.Y("seconds:Q", title="time to sync, s").scale(type="log"),
        color=alt.Color("sent:N", title="sent"),
    )
    title = f"A patch is synced sooner, the more so the slower the link ({mb:.0f} MB of weights)"
    chart = (axes.mark_line() + axes.mark_point(filled=True)).properties(
        title=title, width=520, height=320
    )
    chart.save(str(out))


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=32.0)
    parser.add_argument("--share", type=float, default=0.004)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 16.0, 64.0, 256.0, 0.0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    weights = model(options.mb, seed=0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder))
        measured(trainer, weights, options.share, 0.0, 0)  # compiles and warms up
        print(f"{'link':>10} {'sent':>6} {'moved':>10} {'time':>8} {'bytes at the rate':>18}")
        for number, rate in enumerate(options.rates, 1):
            for row in measured(trainer, weights, options.share, rate, number):
                rows.append(row)
                name = f"{rate:g} MB/s" if rate else "unbounded"
                line = f"{row.line_s:.2f} s" if rate else "-"
                print(
                    f"{name:>10} {row.encoding:>6} {row.moved_mb:>7.2f} MB {row.sync_s:>6.2f} s "
                    f"{line:>18}"
                )
        for served in trainer.served:
            served.close()
    results = judged(rows)
    for result in results:
        print(result.line())
    if options.out:
        draw(rows, sum(a.nbytes for a in weights.values()) / 1e6, options.out)
    sys.exit(0 if all(result.met for result in results) else 1)


if __name__ == "__main__":
    main()
