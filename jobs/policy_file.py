"""Policy weights as safetensors files, and the base policy that the package carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shiftbook.jobs.errors import ModelError
from shiftbook.jobs.model import ModelConfig, check_params, parameter_shapes

BASE_POLICY = Path(__file__).parent / "assets" / "base_policy.safetensors"


def save_policy(path: Path, weights: Mapping[str, Tensor], made_by: str) -> None:
    """Write ``weights`` to ``path``; ``made_by`` is the file's only metadata, so that equal weights
    give equal bytes."""
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, path, {"made_by": made_by}
    )


def load_policy(path: Path = BASE_POLICY, config: ModelConfig | None = None) -> dict[str, Tensor]:
    """The bfloat16 weights in ``path``, in the declared order of ``config`` (default: the job's).

    Raises ``ModelError`` when the file is missing, damaged or made for another model.
    """
    config = config or ModelConfig()
    try:
        with safe_open(path, framework="pt") as stored:
            names = set(stored.keys())
            ordered = [name for name in parameter_shapes(config) if name in names]
            extra = sorted(names.difference(ordered))
            weights = {name: stored.get_tensor(name) for name in [*ordered, *extra]}
    except (OSError, SafetensorError) as cause:
        raise ModelError(
            f"expected a safetensors file at {path}, found: {cause}; "
            "make one with `python -m shiftbook.jobs.make_base_policy --out FILE`"
        ) from cause
    check_params(config, weights)
    # Fresh memory: tensors that share the file's buffer are not aligned alike in every process.
    return {name: tensor.to(torch.bfloat16).clone() for name, tensor in weights.items()}
