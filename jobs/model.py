"""A small decoder-only transformer in torch: its parameters, training pass and decode kernel.

The policy that is published is bfloat16; both passes compute in float32 on the upcast values, on
one thread. Pre-norm blocks (LayerNorm with weight and bias, causal attention with learned absolute
positions, a ReLU feed-forward of four times the width), no biases in the linear maps, and a head
that is **not** tied to the embedding. Parameters have one declared order, ``parameter_shapes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiftbook.jobs.errors import ModelError
from shiftbook.jobs.keyed_rng import hash64
from shiftbook.jobs.tokenizer import VOCABULARY_SIZE

_MASKED = -1e30  # added to scores of positions not yet written; exp of it is exactly zero


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the decoder; the defaults are the reference job's (0.8 M parameters)."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: int = VOCABULARY_SIZE
    context: int = 104

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ModelError(
                f"expected a width divisible by the heads, found width {self.width} and "
                f"{self.heads} heads; choose another pair"
            )

    @property
    def head_width(self) -> int:
        """Features per attention head."""
        return self.width // self.heads


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by name, in the declared order. Linear weights are [out, in]."""
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocabulary, width),
        "position.weight": (config.context, width),
    }
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        shapes[prefix + "norm1.weight"] = (width,)
        shapes[prefix + "norm1.bias"] = (width,)
        shapes[prefix + "attention.qkv.weight"] = (3 * width, width)
        shapes[prefix + "attention.out.weight"] = (width, width)
        shapes[prefix + "norm2.weight"] = (width,)
        shapes[prefix + "norm2.bias"] = (width,)
        shapes[prefix + "feedforward.up.weight"] = (4 * width, width)
        shapes[prefix + "feedforward.down.weight"] = (width, 4 * width)
    shapes["norm.weight"] = (width,)
    shapes["norm.bias"] = (width,)
    shapes["head.weight"] = (config.vocabulary, width)
    return shapes


def init_params(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Fresh float32 parameters: normal with deviation 0.02 (0.02/√(2·layers) into the residual).

    Each parameter has a generator of its own, keyed by (seed, index in the declared order).
    """
    params: dict[str, Tensor] = {}
    for index, (name, shape) in enumerate(parameter_shapes(config).items()):
        if len(shape) == 1:
            fill = 1.0 if name.endswith("weight") else 0.0
            params[name] = torch.full(shape, fill)
            continue
        deviation = 0.02
        if name.endswith(("attention.out.weight", "feedforward.down.weight")):
            deviation /= math.sqrt(2 * config.layers)
        generator = torch.Generator().manual_seed(hash64(seed, index) >> 1)
        params[name] = torch.randn(shape, generator=generator) * deviation
    return params


def check_params(config: ModelConfig, params: Mapping[str, Tensor]) -> None:
    """Raise ``ModelError`` unless names, order and shapes are the declared ones."""
    expected = parameter_shapes(config)
    if list(params) != list(expected):
        missing = [name for name in expected if name not in params]
        extra = [name for name in params if name not in expected]
        raise ModelError(
            f"expected {len(expected)} parameters in the declared order, found {len(params)} "
            f"(missing {missing[:3]}, unknown {extra[:3]}); load weights of this model"
        )
    for name, shape in expected.items():
        if tuple(params[name].shape) != shape:
            raise ModelError(
                f"{name}: expected shape {shape}, found {tuple(params[name].shape)}; "
                "load weights made with the same ModelConfig"
            )


def upcast(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fresh float32 copies of the parameters (exact for bfloat16), in the same order."""
    return {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in params.items()}


def forward_train(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    tokens: Tensor,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Logits [B, T, V] in float32 of token ids [B, T] (int64), differentiable in ``params``.

    ``params`` are float32. ``dropout`` is the probability on both residual branches; its masks
    come from ``generator`` alone.
    """
    batch, length = tokens.shape
    if length > config.context:
        raise ModelError(
            f"expected at most {config.context} tokens, found {length}; shorten the batch"
        )
    width, heads = config.width, config.heads
    x = F.embedding(tokens, params["embedding.weight"]) + params["position.weight"][:length]
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        h = _norm(x, params, prefix + "norm1")
        qkv = F.linear(h, params[prefix + "attention.qkv.weight"])
        q, k, v = qkv.view(batch, length, 3, heads, config.head_width).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        branch = F.linear(attended, params[prefix + "attention.out.weight"])
        x = x + _drop(branch, dropout, generator)
        h = _norm(x, params, prefix + "norm2")
        h = F.relu(F.linear(h, params[prefix + "feedforward.up.weight"]))
        branch = F.linear(h, params[prefix + "feedforward.down.weight"])
        x = x + _drop(branch, dropout, generator)
    return F.linear(_norm(x, params, "norm"), params["head.weight"])


class PolicyModel(nn.Module):
    """The decoder as a module: float32 parameters under their declared names, in their order."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor]) -> None:
        """``params`` may be bfloat16; raises ``ModelError`` for other names or shapes."""
        super().__init__()
        check_params(config, params)
        self.config = config
        for name, tensor in upcast(params).items():
            *path, last = name.split(".")
            at: nn.Module = self
            for step in path:
                if step not in at._modules:
                    at.add_module(step, nn.Module())
                at = at.get_submodule(step)
            at.register_parameter(last, nn.Parameter(tensor))

    def forward(
        self, tokens: Tensor, dropout: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Logits, as ``forward_train`` gives them."""
        params = dict(self.named_parameters())
        return forward_train(self.config, params, tokens, dropout, generator)


def _norm(x: Tensor, params: Mapping[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), params[name + ".weight"], params[name + ".bias"])


def _drop(x: Tensor, probability: float, generator: torch.Generator | None) -> Tensor:
    if probability == 0.0:
        return x
    keep = torch.rand(x.shape, generator=generator) >= probability
    return x * keep / (1.0 - probability)


class DecodeKernel:
    """One decode step for a fixed number of lanes, with a KV cache of fixed shape.

    Every call computes all lanes over the whole context length, whether they are in use or not:
    the shapes never change, so a lane's logits depend on its own tokens only, bit for bit. Linear
    weights are kept as [in, out] and keys as [head width, context], which is what the small
    matrix products read fastest. Call under ``torch.inference_mode``.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], lanes: int) -> None:
        """``params`` are bfloat16, names and order as declared; raises ``ModelError`` else."""
        check_params(config, params)
        wrong = [name for name, tensor in params.items() if tensor.dtype != torch.bfloat16]
        if wrong:
            raise ModelError(
                f"expected bfloat16 weights, found {params[wrong[0]].dtype} for {wrong[0]}; "
                "publish the masters first"
            )
        self.config = config
        self.lanes = lanes
        self._transposed = {n for n, t in params.items() if t.dim() == 2 and _is_linear(n)}
        self._weights = {
            name: (tensor.float().t().contiguous() if name in self._transposed else tensor.float())
            for name, tensor in params.items()
        }
        self._allocate()

    def _allocate(self) -> None:
        config, rows = self.config, self.lanes * self.config.heads
        head, context, width = config.head_width, config.context, config.width
        self._keys = [torch.zeros(rows, head, context) for _ in range(config.layers)]
        self._values = [torch.zeros(rows, context, head) for _ in range(config.layers)]
        self._bias = torch.full((self.lanes, config.heads, context), _MASKED)
        self._scores_bias = self._bias.view(rows, 1, context)
        self._row_base = torch.arange(rows) * context
        self._x = torch.empty(self.lanes, width)
        self._qkv = torch.empty(self.lanes, 3 * width)
        self._hidden = torch.empty(self.lanes, 4 * width)
        self._scores = torch.empty(rows, 1, context)
        self._attended = torch.empty(rows, 1, head)
        self._logits = torch.empty(self.lanes, config.vocabulary)

    def forget(self, lane: int) -> None:
        """Start ``lane`` anew: nothing that was written to its cache is visible any more."""
        self._bias[lane] = _MASKED

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed ``tokens`` [lanes] at ``positions`` [lanes] (int64); logits [lanes, V], reused.

        A lane's positions must run 0, 1, 2, … after ``forget``; an unused lane may be fed
        anything at position 0 as long as it is forgotten before it is used.
        """
        config, weights = self.config, self._weights
        rows, head, width = self.lanes * config.heads, config.head_width, config.width
        scale = 1.0 / math.sqrt(head)
        visible = positions.view(-1, 1, 1).expand(-1, config.heads, 1)
        self._bias.scatter_(2, visible, 0.0)
        row_position = visible.reshape(rows)
        column = row_position.view(rows, 1, 1).expand(rows, head, 1)
        flat_row = self._row_base + row_position
        x = torch.index_select(weights["embedding.weight"], 0, tokens, out=self._x)
        x.add_(torch.index_select(weights["position.weight"], 0, positions))
        for layer in range(config.layers):
            prefix = f"layers.{layer}."
            keys, values = self._keys[layer], self._values[layer]
            h = _norm(x, weights, prefix + "norm1")
            torch.mm(h, weights[prefix + "attention.qkv.weight"], out=self._qkv)
            q = self._qkv[:, :width].reshape(rows, 1, head)
            keys.scatter_(2, column, self._qkv[:, width : 2 * width].reshape(rows, head, 1))
            values.view(-1, head).index_copy_(
                0, flat_row, self._qkv[:, 2 * width :].reshape(rows, head)
            )
            torch.baddbmm(self._scores_bias, q, keys, alpha=scale, out=self._scores)
            torch.bmm(torch.softmax(self._scores, 2), values, out=self._attended)
            attended = self._attended.view(self.lanes, width)
            x.addmm_(attended, weights[prefix + "attention.out.weight"])
            h = _norm(x, weights, prefix + "norm2")
            torch.mm(h, weights[prefix + "feedforward.up.weight"], out=self._hidden).relu_()
            x.addmm_(self._hidden, weights[prefix + "feedforward.down.weight"])
        h = _norm(x, weights, "norm")
        return torch.mm(h, weights["head.weight"], out=self._logits)

    def resident(self) -> dict[str, Tensor]:
        """The weights that ``step`` reads, as bfloat16 in logical layout and declared order."""
        return {
            name: (tensor.t() if name in self._transposed else tensor)
            .to(torch.bfloat16)
            .contiguous()
            for name, tensor in self._weights.items()
        }

    def resident_bytes(self) -> int:
        """Bytes of weights, KV cache and buffers that this kernel holds."""
        held = [*self._weights.values(), *self._keys, *self._values, self._bias, self._row_base]
        held += [self._x, self._qkv, self._hidden, self._scores, self._attended, self._logits]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _is_linear(name: str) -> bool:
    return name == "head.weight" or ".attention." in name or ".feedforward." in name
