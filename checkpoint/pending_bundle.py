"""A save that goes on while training does: the state of the call, written by another thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

from torch import Tensor

from shiftbook.checkpoint.bundle import Parts, bundle_fields, save_bundle
from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.manifest import BundleFields
from shiftbook.checkpoint.shelf import SavedBundle


class PendingBundle:
    """A bundle under way. It exists when `result` returns, not before."""

    def __init__(self, future: Future[SavedBundle]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """True when `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> SavedBundle:
        """Wait for the bundle. Raises what the save raised, TimeoutError while it goes on."""
        return self._future.result(timeout_s)


def save_bundle_async(
    root_dir: str | os.PathLike[str],
    fields: BundleFields | Mapping[str, Any],
    parts: Parts,
    **how: Any,
) -> PendingBundle:
    """`save_bundle` (`how` are its other parameters) that returns when the state is copied.

    The tensors may change as soon as it returns. The fingerprints are those of the live tensors at
    the call, and the copy must have them: a copy that something wrote into meanwhile is no state,
    and its save fails. Holds one copy of the state in host memory until it is written. The process
    does not end before that. Raises BundleError at once for unfit fields.
    """
    checked = bundle_fields(fields)
    live = {part: fingerprint_tensors(members) for part, members in parts.items()}
    copied = {part: _copied(members) for part, members in parts.items()}
    future: Future[SavedBundle] = Future()

    def save() -> None:
        try:
            for part, members in copied.items():
                if fingerprint_tensors(members) != live[part]:
                    raise BundleError(
                        f"part {part}: expected the tensors of the call, found a copy that was "
                        "written into while it was made; save between updates",
                        part=part,
                    )
            future.set_result(save_bundle(root_dir, checked, copied, **how))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=save, name="bundle-save", daemon=False).start()
    return PendingBundle(future)


def _copied(members: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in members.items()}
