"""A torch optimizer's state by parameter name: checked, read and put into live objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shiftbook.checkpoint.recorder_state import optimizer_part
from shiftbook.checkpoint.virtual_ranks import VirtualRankError


def check_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> None:
    """Raise VirtualRankError unless the optimizer has exactly these tensors, each once."""
    held = [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]
    lacking = [name for name, tensor in names.items() if held.count(id(tensor)) != 1]
    if lacking or len(held) != len(names):
        raise VirtualRankError(
            f"expected an optimizer of exactly the {len(names)} trained tensors, each once, found "
            f"{len(held)} in it and {lacking[:4]} not or twice; make it from the parameters that "
            "are trained, or from their masters where there are some"
        )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state's tensors, ``name/key``; empty before the first step.

    Raises VirtualRankError for state that is neither a tensor nor None.
    """
    part = optimizer_part(optimizer, names)
    other = [key for key, value in part.items() if not isinstance(value, Tensor | None)]
    if other:
        raise VirtualRankError(
            f"expected optimizer state of tensors, found {type(part[other[0]]).__name__} at "
            f"{other[0]}; keep it as a tensor of no dimensions, as torch's own optimizers do"
        )
    return {key: value for key, value in part.items() if value is not None}


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the whole state by copies of ``tensors``; what they do not name is gone."""
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        if name not in names:
            raise VirtualRankError(
                f"expected optimizer state of {len(names)} named parameters, found {full}; load "
                "the state of the same model"
            )
        if tensor.dim() and tensor.shape != names[name].shape:
            raise VirtualRankError(
                f"optimizer state {full}: expected shape {tuple(names[name].shape)}, found "
                f"{tuple(tensor.shape)}; load the state of the same model"
            )
        # A counter of no dimensions stays on the host, where torch's optimizers keep it.
        device = names[name].device if tensor.dim() else tensor.device
        states.setdefault(name, {})[key] = tensor.detach().to(device, copy=True)
    optimizer.state.clear()
    for name, state in states.items():
        optimizer.state[names[name]] = dict(state)


def optimizer_hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Settings of each parameter group that are numbers, flags or tuples of them."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
        for group in optimizer.param_groups
    ]


def load_hyper_parameters(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Take over what ``optimizer_hyper_parameters`` gave."""
    if len(settings) != len(optimizer.param_groups):
        raise VirtualRankError(
            f"expected settings of {len(optimizer.param_groups)} parameter groups, found "
            f"{len(settings)}; make the optimizer alike in all processes"
        )
    for group, found in zip(optimizer.param_groups, settings, strict=True):
        group.update(found)


def load_tensors(
    part: str,
    live: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    *,
    write: bool = True,
    cast: bool = False,
) -> None:
    """Copy ``tensors`` into the live ones of the same names; all names must be there.

    With ``write=False`` only names, shapes and (unless ``cast``) dtypes are checked.
    """
    if live.keys() != tensors.keys():
        raise VirtualRankError(
            f"part {part}: expected the {len(live)} tensors of this model, found missing "
            f"{sorted(live.keys() - tensors.keys())[:4]}, unknown "
            f"{sorted(tensors.keys() - live.keys())[:4]}"
        )
    for name, tensor in tensors.items():
        here = live[name]
        if here.shape != tensor.shape or not (cast or here.dtype == tensor.dtype):
            raise VirtualRankError(
                f"part {part}, tensor {name}: expected {here.dtype} of shape {tuple(here.shape)}, "
                f"found {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if write:
        with torch.no_grad():
            for name, tensor in tensors.items():
                live[name].copy_(tensor)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(member) for member in value)
    return value is None or isinstance(value, bool | int | float) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
