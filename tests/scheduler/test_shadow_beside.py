"""Goal: a static run beside a job on Ray agrees with it, whatever moves in between.

Method: the reference job runs on a cluster with moves drawn at random, every second iteration is
run again beside it by a shadow that follows the ledger, and both are judged.
"""

from __future__ import annotations

import pytest

from shiftbook.jobs.beside import Beside, shadow_text
from tests.scheduler.conftest import JOB_LIMIT_S, OnRay

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_shadow_follows_a_job_on_ray_and_agrees(on_ray: OnRay) -> None:
    running = on_ray.start(
        "live", iterations=4, groups=4, random_moves=5, shadow_every=2, shadow_iterations=2
    )
    beside = Beside(on_ray.place.ledger_url, "live")
    beside.start()
    try:
        running.wait(JOB_LIMIT_S)
        running.end()
        outcomes = beside.finish()
    finally:
        beside.stop()
    print(shadow_text(outcomes))
    assert [(one.window, one.word) for one in outcomes] == [
        (range(0, 2), "agreed"),
        (range(2, 4), "agreed"),
    ]
    assert all(one.compared is not None and one.compared.method == "bits" for one in outcomes)
    verdict = on_ray.verdict("live")
    assert verdict.findings == ()
    assert (verdict.coverage.row("shadow").status, verdict.coverage.row("shadow").required) == (
        "checked",
        True,
    )
    assert on_ray.ledger.state().job("live").safe_mode is None
