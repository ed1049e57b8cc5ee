"""How long a tool call waits: the published law of tool latencies, scaled to this job.

Law: lognormal with median 0.3 s and σ 2.85 of the logarithm (p90 13.6 s, mean 16.8 s), cut at a
timeout of 120 s. The job multiplies every wait by ``LATENCY_SCALE``, so that a call at the timeout
waits 0.6 s, a seventh of an iteration, and the median one 1.5 ms. As in real jobs most calls are
short and a few hold up the end of the rollout.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from shiftbook.jobs.keyed_rng import hash64, parse_uid, uniform_at

MEDIAN_S = 0.3
SIGMA = 2.85
TIMEOUT_S = 120.0
LATENCY_SCALE = 0.005
_LATENCY_STREAM = 0x7001


def tool_latency_s(seed: int, uid: str, turn: int) -> float:
    """Scaled wait in seconds of the call that ends ``turn`` of sample ``uid``; keyed, so every
    schedule and every repetition of the call waits equally long."""
    draw, member = parse_uid(uid)
    point = uniform_at(hash64(seed, _LATENCY_STREAM, draw, member, turn), 0)
    normal = NormalDist().inv_cdf(min(max(point, 1e-12), 1.0 - 1e-12))
    return min(MEDIAN_S * math.exp(SIGMA * normal), TIMEOUT_S) * LATENCY_SCALE
