"""Goal: an engine that a move takes away in mid-generation loses no token, nor its version.

Method: the job's rollout worker with the reference engine, driven as a move drives it; tokens are
computed again under the versions that they carry. The same on vLLM stands in `tests/engines`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs.components import RolloutWorker
from shiftbook.jobs.keyed_rng import format_uid
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.probe import TOLERANCE, Probe, expected_logps
from shiftbook.jobs.task import new_episode
from tests.engines.away import SPEC, away_and_back, check_away

CONFIG = ModelConfig()


def policy(version: int) -> dict[str, Tensor]:
    """The base policy, and one near it."""
    draw = torch.Generator().manual_seed(version)
    return {
        name: (t.float() * (1 + 0.05 * version * torch.rand(t.shape, generator=draw))).bfloat16()
        for name, t in load_policy().items()
    }


def offered(version: int) -> dict[str, Any]:
    """A version as the job sends it to an engine."""
    weights = policy(version)
    prints = {f"model/{name}": value for name, value in fingerprint_tensors(weights).items()}
    probe = Probe(expected_logps(weights, CONFIG))
    return {"weights": weights, "version": version, "fingerprints": prints, "probe": probe}


def test_turns_that_a_move_interrupts_go_on_under_a_later_version() -> None:
    worker = RolloutWorker(SPEC, {"lanes": 4})
    wanted = [new_episode(0, format_uid(n, 0), n, CONFIG.context).next_request() for n in range(8)]
    check_away(away_and_back(worker, wanted, offered(0), offered(1)), wanted, policy, TOLERANCE)
