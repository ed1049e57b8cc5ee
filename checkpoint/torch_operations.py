"""Writes down what goes into each torch operation and what comes out, by digest."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from shiftbook.checkpoint.operation_trace import OVERWRITTEN, UNSET, source_of

_Mode: Any = TorchDispatchMode  # its constructor has no types


class Operations(_Mode):  # type: ignore[misc]
    """While it is entered, each operation but views is written: name, inputs, outputs, module."""

    def __init__(
        self, write: Callable[[dict[str, Any]], None], component: Callable[[], str]
    ) -> None:
        super().__init__()
        self._write = write
        self._component = component
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        register_module_forward_pre_hook(self._entered)
        register_module_forward_hook(self._left, always_call=True)

    def _entered(self, module: torch.nn.Module, args: Any) -> None:
        if not self._modules:
            kind = type(module).__name__
            self._names = {
                id(one): f"{kind}.{name}" if name else kind for name, one in module.named_modules()
            }
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _left(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if _is_view(func):
            return func(*args, **kwargs)
        inputs = [_digest(one) for one in _read(func, name, args, kwargs)]
        output = func(*args, **kwargs)
        if name in UNSET:
            for tensor in _tensors(output):
                tensor.zero_()
        self._write(
            {
                "kind": "operation",
                "name": str(func).replace(".", "::", 1),
                "inputs": inputs,
                "outputs": [_digest(one) for one in _tensors(output)] or [repr(output)[:80]],
                "form": [f"{_dtype(one)}{list(one.shape)}" for one in _tensors(output)],
                "random": torch.Tag.nondeterministic_seeded in func.tags,
                "module": self._modules[-1] if self._modules else "",
                "component": self._component(),
                "source": source_of(sys._getframe(1)),
            }
        )
        return output


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def _read(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that an operation reads; what it only writes is none of them."""
    for index, value in enumerate(args):
        if not (index == 0 and name in OVERWRITTEN):
            yield from _tensors(value)
    written = {one.name for one in func._schema.arguments if one.is_out}
    for key, value in kwargs.items():
        if key not in written:
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(tensor: torch.Tensor) -> str:
    """16 hex digits over the bits; the dtype alone for what is not dense."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return str(tensor.dtype)
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = dense.view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=8).hexdigest()
