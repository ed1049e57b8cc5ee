"""Goal: a job that gives no bits is not replayed as if it did.

Method: a job on vLLM is opened in a ledger, as the job itself would open it, and what would run it
again is called on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shiftbook.jobs.config import opened
from shiftbook.jobs.replay import reference_job
from shiftbook.jobs.runner import Place
from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger


def test_a_job_on_vllm_has_no_shadow(tmp_path: Path) -> None:
    place = Place(tmp_path)
    values = {"engine": "vllm", "tolerance": 2e-5, "shadow_every": 1}
    declared = opened(place.config("on-vllm", **values), ("local/0", "local/1"))
    with Ledger.open(place.ledger_url) as ledger:
        Gate(ledger).open_job("on-vllm", declared)
    done = CliRunner().invoke(main, ["shadow", "on-vllm", "--ledger", place.ledger_url])
    assert done.exit_code == 2, done.output
    assert "expected job on-vllm to name a program that can run again, found none" in done.output


def test_its_configuration_is_refused_where_it_is_named_by_hand() -> None:
    with pytest.raises(InvalidInput, match="engine torch, found 'vllm'"):
        reference_job({"engine": "vllm"})
    assert reference_job({"engine": "torch"}).equality == "bits"
