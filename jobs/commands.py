"""The command ``demo``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from shiftbook.ledger.cli_options import emit, emit_document, format_option
from shiftbook.ledger.cli_types import Finite, NamedPath, Whole


@click.command()
@click.option(
    "--out",
    type=NamedPath(file_okay=False, path_type=Path),
    required=True,
    help="Folder for ledger.db, bundles/ and report.html. A run that was cut short goes on there.",
)
@click.option("--iterations", type=Whole(min=2), default=7, show_default=True)
@click.option(
    "--schedule",
    type=click.Choice(["all", "dynamic", "static", "timeshared"]),
    default="all",
    show_default=True,
    help="Which schedules to run; all compares them.",
)
@click.option("--seed", type=Whole(min=0), default=0, show_default=True)
@click.option(
    "--slots",
    type=Whole(min=2),
    default=None,
    help="Slots to use; all cores by default. More than there are cores is for tests.",
)
@click.option(
    "--chaos",
    type=Whole(min=0),
    default=None,
    metavar="SEED",
    help="Kill processes of the dynamic run at random, drawn by SEED.",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    show_default=True,
    help="Engine of rollout. With vllm, schedules are compared within a calibrated tolerance.",
)
@click.option(
    "--shadow",
    type=Whole(min=1),
    default=None,
    metavar="N",
    help="Run every Nth iteration of the dynamic run again beside it, and compare bit for bit.",
)
@click.option(
    "--sync-encoding",
    type=click.Choice(["full", "patch", "lossy"]),
    default="full",
    show_default=True,
    help="How weight syncs send a version: whole, as a lossless patch on the one before, or as one "
    "that may lose up to 0.0001 of each element, which the plan declares.",
)
@click.option(
    "--start-limit",
    "start_limit_s",
    type=Finite(min=1),
    default=None,
    metavar="SECONDS",
    help="How long an engine may take to start; 60 s with torch, 900 s with vllm.",
)
@format_option()
def demo(
    out: Path,
    iterations: int,
    schedule: str,
    seed: int,
    slots: int | None,
    chaos: int | None,
    engine: Any,
    shadow: int | None,
    sync_encoding: Any,
    start_limit_s: float | None,
    format_: Any,
) -> int:
    """Train a small policy with RL on this machine while its devices move through the ledger.

    Runs the reference job (GRPO on arithmetic questions with a calculator tool) under the dynamic
    schedule, under the best static split and with time-shared phases, verifies the ledger, writes
    report.html and compares. Exits with 0 only if the verdict is clean, every schedule ended with
    the same policy (with --engine vllm: one that differs by no more than chance), no sample was
    lost, and moves with bytes were committed.
    """
    from shiftbook.jobs.demo import SCHEDULES, rows_of, run_demo

    schedules = SCHEDULES if schedule == "all" else (schedule,)
    shown: dict[str, int] = {}

    def tell(text: str) -> None:
        click.echo(text, err=True)

    waited: dict[str, str] = {}

    def seen(name: str, status: dict[str, Any]) -> None:
        waits_for = status["waits_for"]
        if waits_for is not None and waited.get(name) != waits_for:
            waited[name] = waits_for
            tell(f"  {name}: {waits_for}")
        done = status["iterations"]
        if len(done) > shown.get(name, 0):
            shown[name] = len(done)
            last = done[-1]
            tell(
                f"  {name} {last['iteration'] + 1}/{iterations}: {last['wall_s']:.2f} s, reward "
                f"{last['reward_mean']:.3f}, {last['moves']} moves, policy "
                f"{last['fingerprint'][:12]}"
            )

    outcome = run_demo(
        out,
        iterations=iterations,
        schedules=schedules,
        seed=seed,
        slots=slots or len(os.sched_getaffinity(0)),
        chaos=chaos,
        tell=tell,
        seen=seen,
        engine=engine,
        shadow=shadow,
        sync_encoding=sync_encoding,
        start_limit_s=start_limit_s,
    )
    failures = outcome.failures()
    if format_ == "json":
        emit_document(
            {
                "rows": rows_of(outcome),
                "moves": outcome.moves,
                "faults": outcome.faults,
                "runs": {name: vars(run) for name, run in outcome.runs.items()},
                "verdict": outcome.verdict.plain(),
                "shadows": [window.plain() for window in outcome.shadows],
                "failures": failures,
            }
        )
    else:
        emit([(row["what"], row["value"]) for row in rows_of(outcome)], ["what", "value"], format_)
    for failure in failures:
        click.echo(f"not as promised: {failure}", err=True)
    click.echo(f"ledger {out / 'ledger.db'}, report {out / 'report.html'}", err=True)
    return 1 if failures else 0
