"""The weights that vLLM's layers compute with, read back in the policy's own names.

On CPUs vLLM packs the matrix of a linear layer for its kernels and keeps no tensor that could be
read. But a linear layer says what its matrix is: applied to the rows of the identity it answers the
columns, bit for bit, since each sum has one term that is not zero. That takes ``in`` vectors a
layer, which is little for a small model and much for a large one: above ``MOST_BYTES`` nothing is
read, and a fingerprint is of what was handed over. (A negative zero reads as a positive one.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiftbook.jobs.hf_policy import from_hf
from shiftbook.jobs.model import ModelConfig, parameter_shapes

MOST_BYTES = 256 << 20
"""Weights above this size are not read back."""


def packed_bytes(config: ModelConfig) -> int:
    """Bytes of the policy's parameters as float32."""
    return 4 * sum(int(np.prod(shape)) for shape in parameter_shapes(config).values())


def read_resident(worker: Any, config: ModelConfig) -> dict[str, Tensor] | None:
    """What the model of a vLLM worker computes with, as bfloat16 in declared names and order.

    None where a layer is of a kind that does not say, or the model is too large. Values that are
    no bfloat16 values stay float32, so that they are seen to differ.
    """
    if packed_bytes(config) > MOST_BYTES:
        return None
    found: dict[str, Tensor] = {}
    with torch.inference_mode():
        for name, module in worker.model_runner.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            method = getattr(module, "quant_method", None)
            if name.endswith("embed_tokens"):
                found[f"{name}.weight"] = own["weight"].detach()[: config.vocabulary].clone()
            elif method is not None and name == "lm_head":
                matrix = _by_identity(module, method, config.width)
                found["lm_head.weight"] = matrix[: config.vocabulary]
            elif method is not None and hasattr(module, "input_size_per_partition"):
                matrix = _by_identity(module, method, int(module.input_size_per_partition))
                _put_linear(found, name, matrix)
            else:
                found |= {f"{name}.{key}": value.detach().clone() for key, value in own.items()}
    params = from_hf(found, config)
    return {name: _as_bfloat16(tensor) for name, tensor in params.items()}


def close_reload(worker: Any) -> None:
    """End a reload that failed half-way, so that the next one begins with every layer closed.

    What the layers hold afterwards is in doubt: load a whole policy.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    runner = worker.model_runner
    finalize_layerwise_reload(runner.model, runner.model_config)  # type: ignore[no-untyped-call]


def _by_identity(module: Any, method: Any, width: int) -> Tensor:
    """Matrix [out, in] of a layer, from its answers to the rows of the identity."""
    # Prepacked weights on a CPU may be no parameters any more.
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    rows = torch.eye(width, dtype=torch.float32, device=device)
    answer: Tensor = method.apply(module, rows, bias=None)
    return answer.t().contiguous()


def _put_linear(found: dict[str, Tensor], name: str, matrix: Tensor) -> None:
    if not name.endswith("qkv_proj"):
        found[f"{name}.weight"] = matrix
        return
    prefix = name.removesuffix("qkv_proj")
    for piece, rows in zip(("q_proj", "k_proj", "v_proj"), matrix.chunk(3), strict=True):
        found[f"{prefix}{piece}.weight"] = rows.contiguous()


def _as_bfloat16(tensor: Tensor) -> Tensor:
    rounded = tensor.to("cpu", torch.bfloat16).contiguous()
    same = torch.equal(rounded.to(torch.float32), tensor.to("cpu", torch.float32))
    return rounded if same else tensor.to("cpu", torch.float32)
