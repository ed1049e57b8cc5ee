"""Saves that go on while training does: the state of the call, written by another thread."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from shiftbook.checkpoint.bundle import (
    NOT_BEGUN,
    Parts,
    bundle_fields,
    check_part_names,
    write_bundle,
)
from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.failed_saves import SaveUnderWay, tell_failed
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.group_agreement import on_all
from shiftbook.checkpoint.manifest import BundleFields
from shiftbook.checkpoint.sharded_bundle import describe, flat, write_described
from shiftbook.checkpoint.shards import local_fingerprints
from shiftbook.checkpoint.shelf import SavedBundle


class PendingBundle:
    """A bundle under way. It exists when `result` returns, not before.

    Where the save fails and nobody asks for its result, the next save, `Recorder.close` or the end
    of the interpreter raises EarlierSaveFailed.
    """

    def __init__(self, future: Future[SavedBundle], root_dir: Path, fields: BundleFields) -> None:
        self._future = future
        self.root_dir = root_dir
        """The shelf on which it will stand."""
        self.fields = fields
        """What was said of the state."""
        self.save_s: float | None = None
        """From the call until it ended."""
        self._began_s = time.monotonic()
        self._save = SaveUnderWay(f"the save of iteration {fields.iteration} into {root_dir}")
        future.add_done_callback(self._ended)

    @property
    def done(self) -> bool:
        """True when `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> SavedBundle:
        """Wait for the bundle. Raises what the save raised, TimeoutError while it goes on."""
        try:
            return self._future.result(timeout_s)
        except BaseException as error:  # its own, or that the wait was too long or interrupted
            if self._future.done() and self._future.exception() is error:
                self._save.heard()
            raise

    def failure(self, timeout_s: float | None = None) -> BaseException | None:
        """What the save raised, or None; waits as `result` does. Whoever only looks has not been
        told: the failure is still raised later."""
        return self._future.exception(timeout_s)

    def _ended(self, future: Future[SavedBundle]) -> None:
        self.save_s = time.monotonic() - self._began_s
        self._save.ended(future.exception())


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
    does not end before that. Raises at once BundleError for unfit fields, and EarlierSaveFailed
    where a save before failed and nobody asked for its result.
    """
    tell_failed(NOT_BEGUN)
    checked = bundle_fields(fields)
    check_part_names(parts, how.get("external") or {})
    live = {part: fingerprint_tensors(members) for part, members in parts.items()}
    copied = {part: _copied(members) for part, members in parts.items()}
    future: Future[SavedBundle] = Future()
    pending = PendingBundle(future, Path(root_dir), checked)

    def save() -> None:
        try:
            _check_whole(copied, live)
            saved = write_bundle(root_dir, checked, copied, **how)
        except BaseException as error:
            copied.clear()
            future.set_exception(error)
        else:
            future.set_result(saved)

    Thread(target=save, name="bundle-save", daemon=False).start()
    return pending


def save_sharded_async(
    root_dir: str | os.PathLike[str],
    fields: BundleFields | Mapping[str, Any],
    parts: Parts,
    *,
    group: dist.ProcessGroup | None = None,
    **how: Any,
) -> PendingBundle:
    """`save_sharded` (`how` are its other parameters) that returns when the shards are copied.

    All processes of the group call it. It takes the fingerprints of the live tensors together and
    copies this process's share to host memory; what is unfit is raised here, on every process. The
    rest happens in the background on a gloo group of its own, which the first call makes, so that
    it meets no collective of training; saves of one group are written one after the other. Each
    process waits for its `result` before it leaves the group.
    """
    on_all(partial(tell_failed, NOT_BEGUN), group)
    described = describe(fields, parts, group=group, **how)
    copied: dict[str, dict[str, Tensor]] = {}

    def copy() -> None:
        copied.update({part: _copied(members) for part, members in parts.items()})

    on_all(copy, group)
    writer = _writer_of(group)

    def check() -> None:
        for name, found in local_fingerprints(flat(copied), writer.group).items():
            if found != described.own[name]:
                raise _torn(name.partition("/")[0])

    def save() -> SavedBundle:
        on_all(check, writer.group)
        return write_described(root_dir, described, copied, writer.group)

    def lightly() -> SavedBundle:
        try:
            return save()
        except BaseException:
            copied.clear()  # the error may be kept for long
            raise

    return PendingBundle(writer.thread.submit(lightly), Path(root_dir), described.fields)


@dataclass(frozen=True)
class _Writer:
    """What writes in the background for the processes of one group, a save at a time."""

    group: dist.ProcessGroup | None
    """Of the same processes; nobody else uses it."""
    thread: ThreadPoolExecutor


# One thread for each group: two saves whose collectives interleave would wait for each other.
_writers: WeakKeyDictionary[dist.ProcessGroup, _Writer] = WeakKeyDictionary()
_making = Lock()


def _writer_of(group: dist.ProcessGroup | None) -> _Writer:
    """Made by all processes of the group at its first save in the background."""
    if not dist.is_initialized():
        return _Writer(None, ThreadPoolExecutor(1, "bundle-save"))
    training = group if group is not None else dist.group.WORLD
    assert training is not None
    with _making:
        if training not in _writers:
            ranks = dist.get_process_group_ranks(training)
            own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            _writers[training] = _Writer(own, ThreadPoolExecutor(1, "bundle-save"))
        return _writers[training]


def _check_whole(
    copied: Mapping[str, Mapping[str, Tensor]], live: Mapping[str, Mapping[str, str]]
) -> None:
    for part, members in copied.items():
        if fingerprint_tensors(members) != live[part]:
            raise _torn(part)


def _torn(part: str) -> BundleError:
    return BundleError(
        f"part {part}: expected the tensors of the call, found a copy that was written into while "
        "it was made; save between updates",
        part=part,
    )


def _copied(members: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in members.items()}
