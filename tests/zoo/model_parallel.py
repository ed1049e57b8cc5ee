"""Model parallelism: each rank of the zoo becomes a group of two members that share one model.

Gate, up and down are cut over the hidden units; each member computes its half and their outputs are
summed. Embedding, recurrence and norm are whole on both: the second member has copies of its own,
with masters and moments, of which it gets a gradient from its half alone. The gradients of both are
summed over the group, and both take the same step, so honest copies stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.zoo.model import HIDDEN, WIDTH, Tensors
from tests.zoo.now import NOW
from tests.zoo.trainer import Rank

COPIED = ("embed", "rec", "norm")
"""What every member holds whole."""
HALF = HIDDEN // 2


def second_member(rank: Rank) -> Rank:
    """The other member of a rank's group, made as a copy of what the rank holds now."""
    kept: dict[int, tuple[Rank, Rank]] = NOW.notes.setdefault("members", {})
    if id(rank) not in kept:  # the rank is kept too, so that no other one gets its id
        kept[id(rank)] = rank, copy_of(rank)
    return kept[id(rank)][1]


def copy_of(rank: Rank) -> Rank:
    """Copies of what is not cut: model, masters, moments and average."""

    def copied(tensors: Tensors) -> Tensors:
        return {name: tensors[name].detach().clone() for name in COPIED}

    model = {name: tensor.requires_grad_(True) for name, tensor in copied(rank.model).items()}
    kinds = {kind: copied(getattr(rank, kind)) for kind in ("masters", "first", "second", "ema")}
    return Rank(number=rank.number, model=model, step=rank.step, scale=rank.scale, **kinds)


def fed(member: int, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens (samples, tokens) that a member of the group computes: those of the group."""
    return tokens


def forward(
    original: Any,
    model: Mapping[str, torch.Tensor],
    buffer: torch.Tensor,
    tokens: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stands in for the trainer's forward; models of no group are computed as they are."""
    kept = NOW.notes.get("members", {}).values()
    second = next((second for rank, second in kept if rank.model is model), None)
    if second is None:
        return original(model, buffer, tokens, keep)  # type: ignore[no-any-return]
    return computed((model, second.model), buffer, (fed(0, tokens), fed(1, tokens)), keep)


def computed(
    members: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    buffer: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor],
    keep: torch.Tensor | None,
) -> torch.Tensor:
    """Log-probabilities of the tokens; the first member's head reads them."""
    whole = {name: tensor.float() for name, tensor in members[0].items()}
    both = tuple({name: w[name].float() for name in COPIED} for w in members)
    gate, up = whole["gate_up"][:HIDDEN], whole["gate_up"][HIDDEN:]
    place, rows = buffer.float(), tokens[0]
    states = [torch.zeros(rows.shape[0], WIDTH) for _ in both]
    columns = [torch.zeros(rows.shape[0])]
    inputs = [w["embed"][t] for w, t in zip(both, tokens, strict=True)]
    for t in range(rows.shape[1] - 1):
        out = 0.0
        for n, w in enumerate(both):
            part = slice(n * HALF, (n + 1) * HALF)
            h = states[n] = torch.tanh(states[n] @ w["rec"].T + inputs[n][:, t] + place[t])
            read = h * w["norm"]
            z = torch.nn.functional.silu(read @ gate[part].T) * (read @ up[part].T)
            if keep is not None:
                z = z * keep[:, t, part]
            out = out + z @ whole["down"][:, part].T
        logp = torch.log_softmax((states[0] + out) @ whole["embed"].T, dim=-1)
        columns.append(logp.gather(1, rows[:, t + 1 : t + 2])[:, 0])
    return torch.stack(columns, dim=1)


def reduce_copies(rank: Rank, second: Rank) -> None:
    """Sum the gradients of what both members hold whole, and give both the sum."""
    for name in COPIED:
        mine, other = rank.model[name].grad, second.model[name].grad
        if mine is not None and other is not None:
            total = mine + other
            rank.model[name].grad, second.model[name].grad = total, total.clone()


def take_copies(second: Rank, virtual_rank: int) -> None:
    """Add the second member's gradients to its accumulator of a virtual rank."""
    held = second.gradients.setdefault(virtual_rank, {})
    for name, tensor in second.model.items():
        grad = tensor.grad
        own = torch.zeros(tensor.shape) if grad is None else grad.float() / second.scale
        held[name] = held[name] + own if name in held else own
        tensor.grad = None


def sum_copies(ranks: list[Rank]) -> None:
    """Sum over virtual ranks in their order, and hand the sum to each group's second member."""
    seconds = [second_member(rank) for rank in ranks]
    by_virtual = {v: g for second in seconds for v, g in second.gradients.items()}
    total: Tensors = {}
    for virtual_rank in sorted(by_virtual):
        for name, tensor in by_virtual[virtual_rank].items():
            total[name] = total[name] + tensor if name in total else tensor
    for second in seconds:
        second.reduced = {name: tensor.clone() for name, tensor in total.items()}


def step_copies(adam: Any, rank: Rank, rate: float) -> None:
    """The second member's own step on its copies."""
    second = second_member(rank)
    adam(second, rate)
    second.refresh_model()
