"""The policy: a small recurrent network with a tied head, fused gate and up, and a position buffer.

The trainer computes it here with autograd; engines have code of their own (``engine.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

VOCABULARY, WIDTH, HIDDEN, LONGEST = 12, 16, 16, 12
PAD, END, TOOL = 0, 1, 10
DROPOUT = 0.1

Tensors = dict[str, torch.Tensor]


def digest_of(*parts: object) -> str:
    """32 hex digits over the parts' texts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def first_parameters(seed: int) -> Tensors:
    """fp32 masters at the start; gate and up are one fused tensor."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    return {
        "embed": draw(VOCABULARY, WIDTH, scale=0.5),
        "rec": draw(WIDTH, WIDTH, scale=0.2),
        "gate_up": draw(2 * HIDDEN, WIDTH, scale=0.4),
        "down": draw(WIDTH, HIDDEN, scale=0.3),
        "norm": torch.ones(WIDTH),
    }


def positions() -> torch.Tensor:
    """The position buffer: derived, in no checkpoint."""
    t = torch.arange(LONGEST, dtype=torch.float32)[:, None]
    f = torch.arange(WIDTH, dtype=torch.float32)[None, :]
    return (0.3 * torch.sin(t / (1.0 + f))).bfloat16()


def logical(tensors: Mapping[str, torch.Tensor], *, tied: bool = False) -> Tensors:
    """Tensors under their logical names: gate and up apart, the tied head beside the embedding."""
    named = {name: tensor for name, tensor in tensors.items() if name != "gate_up"}
    if "gate_up" in tensors:
        named["gate"], named["up"] = tensors["gate_up"][:HIDDEN], tensors["gate_up"][HIDDEN:]
    if tied:
        named["head"] = named["embed"]
    return named


def distribution(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities over the vocabulary."""
    return torch.log_softmax(logits, dim=-1)


def forward(
    model: Mapping[str, torch.Tensor],
    buffer: torch.Tensor,
    tokens: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities of the tokens (samples, tokens); of the first token they are 0.

    ``model`` holds bf16 tensors, arithmetic is float32. ``keep`` are dropout masks already scaled,
    (samples, tokens, hidden).
    """
    w = {name: tensor.float() for name, tensor in model.items()}
    place = buffer.float()
    h = torch.zeros(tokens.shape[0], WIDTH)
    columns = [torch.zeros(tokens.shape[0])]
    x = w["embed"][tokens]
    for t in range(tokens.shape[1] - 1):
        h = torch.tanh(h @ w["rec"].T + x[:, t] + place[t])
        both = (h * w["norm"]) @ w["gate_up"].T
        z = torch.nn.functional.silu(both[:, :HIDDEN]) * both[:, HIDDEN:]
        if keep is not None:
            z = z * keep[:, t]
        logits = (h + z @ w["down"].T) @ w["embed"].T
        logp = distribution(logits)
        columns.append(logp.gather(1, tokens[:, t + 1 : t + 2])[:, 0])
    return torch.stack(columns, dim=1)
