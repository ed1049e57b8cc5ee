"""What every test with a real vLLM is marked with."""

from importlib.util import find_spec

import pytest

VLLM = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("vllm") is None,
        reason="vLLM is not installed: docs/engines.md says how, in an environment of its own",
    ),
]
