"""What every test with a real vLLM is marked with."""

from importlib.util import find_spec

import pytest

WITHOUT_RAY = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None,
        reason="vLLM is not installed: docs/engines.md says how, in an environment of its own",
    ),
]
"""For tests of what comes with vLLM, in the test's own process and within a few seconds."""

VLLM = [
    *WITHOUT_RAY,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]
