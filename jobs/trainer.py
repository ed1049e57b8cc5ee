"""The reference job's trainer: one physical rank, which owns a block of virtual ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shiftbook.checkpoint.bundle import external_part, restore_bundle, save_bundle
from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.live import LiveSnapshot
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.checkpoint.virtual_ranks import (
    GradientAccumulator,
    VirtualRankPlan,
    all_reduce_tree,
)
from shiftbook.jobs.components import one_thread
from shiftbook.jobs.errors import JobError, TrainingError
from shiftbook.jobs.grpo import GroupBatch, GrpoConfig, group_gradient
from shiftbook.jobs.model import ModelConfig, parameter_shapes
from shiftbook.jobs.optimizer import AdamState, apply_update, publish
from shiftbook.scheduler.workers.component import Answer, Drained, Layout, Loaded
from shiftbook.scheduler.workers.host import HostSpec
from shiftbook.scheduler.workers.transfer import fetch, offer

GROUP_LIMIT_S = 8.0
"""How long a rank waits for the others; a peer that never comes costs this once."""


def optimizer_tensors(adam: AdamState) -> dict[str, Tensor]:
    """Moments by ``exp_avg.NAME`` and ``exp_avg_sq.NAME``."""
    return {
        **{f"exp_avg.{name}": tensor for name, tensor in adam.exp_avg.items()},
        **{f"exp_avg_sq.{name}": tensor for name, tensor in adam.exp_avg_sq.items()},
    }


def adam_from(tensors: Mapping[str, Tensor], step: int) -> AdamState:
    """The optimizer state that ``optimizer_tensors`` laid out, with tensors of its own."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }

    return AdamState(step, part("exp_avg."), part("exp_avg_sq."))


@dataclass
class TrainerState:
    """All that one rank holds."""

    masters: dict[str, Tensor]
    adam: AdamState
    policy: dict[str, Tensor]
    version: int
    iteration: int
    accumulator: GradientAccumulator
    layout: Layout
    group: Any
    """Process group; None for a world of one."""

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by part, as a bundle has them."""
        return {
            "model": self.policy,
            "masters": self.masters,
            "optimizer": optimizer_tensors(self.adam),
        }

    def roots(self) -> dict[str, str]:
        """Root fingerprint of each part, from the live tensors."""
        return {part: root(fingerprint_tensors(ts)) for part, ts in self.parts().items()}


def _accumulator_snapshots(accumulator: GradientAccumulator) -> dict[int, LiveSnapshot]:
    """A live snapshot of each virtual rank's half-done sum."""
    whole = accumulator.snapshot()
    rest = {name: value for name, value in whole.items() if name != "ranks"}
    return {
        rank: LiveSnapshot.take(
            policy_version=0,
            iteration=0,
            tensors={},
            accumulators={**rest, "ranks": {rank: content}},
            uids=tuple(content["uids"]),
        )
        for rank, content in whole["ranks"].items()
    }


class TrainerWorker:
    """One physical rank of the trainer."""

    urgent = False

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        one_thread()
        self._replica = spec.replica
        self._seed = int(config["seed"])
        self._model = ModelConfig(**config.get("model", {}))
        self._loss = GrpoConfig(**config.get("loss", {}))
        self._plan = VirtualRankPlan(config["virtual_ranks"], config["groups"])
        self._base = Path(config["base_policy"])
        self._state: TrainerState | None = None
        self._incoming: TrainerState | None = None
        self._groups: list[tuple[Hashable, GroupBatch]] = []
        self._loaded_after: str | None = None
        self._reference: Any = None

    @property
    def lanes(self) -> Collection[int] | None:
        """Virtual ranks whose groups come here."""
        state = self._state
        return () if state is None else self._block(state.layout)

    def _block(self, layout: Layout) -> range:
        return self._plan.block_of(layout.rank, layout.world)

    def prepare(self, layout: Layout, payload: dict[str, Any]) -> Loaded:
        """Join the layout's group and build the state for it from a bundle or live snapshots."""
        group = self._join(layout, payload["store"])
        accumulator = GradientAccumulator(self._plan, layout.world, layout.rank)
        if "bundle" in payload:
            state, moved = self._from_bundle(layout, group, accumulator, Path(payload["bundle"]))
            parts = {"bundle": moved}
            self._loaded_after = "move" if payload.get("reboot") else "restore"
        else:
            state, parts = self._from_snapshots(layout, group, accumulator, payload["snapshots"])
        self._incoming = state
        prints = state.roots()
        for rank, snapshot in _accumulator_snapshots(accumulator).items():
            prints[f"accumulator/{rank}"] = snapshot.root
        return Loaded(prints, sum(parts.values()), parts)

    def _join(self, layout: Layout, store: tuple[str, int]) -> Any:
        if layout.world == 1:
            return None
        host, port = store
        limit = timedelta(seconds=GROUP_LIMIT_S)
        shared = dist.TCPStore(host, port, is_master=False, timeout=limit)
        named = dist.PrefixStore(layout.generation, shared)
        return dist.ProcessGroupGloo(named, layout.rank, layout.world, limit)

    def _from_bundle(
        self, layout: Layout, group: Any, accumulator: GradientAccumulator, path: Path
    ) -> tuple[TrainerState, int]:
        manifest = load_manifest(path)
        parts = restore_bundle(path, ["model", "masters", "optimizer"])
        size = sum(t.nbytes for tensors in parts.values() for t in tensors.values())
        order = list(parameter_shapes(self._model))
        state = TrainerState(
            masters={name: parts["masters"][name] for name in order},
            adam=adam_from(parts["optimizer"], int(manifest.scheduler["step"])),
            policy={name: parts["model"][name] for name in order},
            version=manifest.policy_version,
            iteration=manifest.iteration,
            accumulator=accumulator,
            layout=layout,
            group=group,
        )
        return state, size

    def _from_snapshots(
        self,
        layout: Layout,
        group: Any,
        accumulator: GradientAccumulator,
        snapshots: Mapping[str, Mapping[str, Any]],
    ) -> tuple[TrainerState, dict[str, int]]:
        own = self._state
        moved = {"state": 0, "accumulators": 0}
        if own is not None:
            masters, adam, policy = own.masters, own.adam, own.policy
            version, iteration = own.version, own.iteration
        else:
            offered = next(iter(snapshots.values()))
            snapshot: LiveSnapshot = fetch(offered["state"])
            snapshot.check()
            moved["state"] = snapshot.nbytes
            order = list(parameter_shapes(self._model))
            masters = {n: snapshot.tensors["masters"][n].clone() for n in order}
            adam = adam_from(snapshot.tensors["optimizer"], offered["step"])
            policy = publish(masters)
            version, iteration = snapshot.policy_version, snapshot.iteration
            self._loaded_after = "move"
        held = own.accumulator.snapshot()["ranks"] if own is not None else {}
        pieces = []
        for rank in self._block(layout):
            if rank in held:
                assert own is not None
                whole = own.accumulator.snapshot()
                pieces.append({**whole, "ranks": {rank: whole["ranks"][rank]}})
                continue
            source = next(s for s in snapshots.values() if rank in s["ranks"])
            piece: LiveSnapshot = fetch(source["ranks"][rank])
            piece.check()
            moved["accumulators"] += piece.nbytes
            pieces.append(dict(piece.accumulators))
        accumulator.restore(pieces)
        state = TrainerState(masters, adam, policy, version, iteration, accumulator, layout, group)
        return state, moved

    def activate(self) -> None:
        """Use what was prepared."""
        if self._incoming is not None:
            self._state, self._incoming = self._incoming, None

    def discard(self) -> None:
        """Forget what was prepared; the present state and its group are as they were."""
        self._incoming = None

    def drop(self) -> None:
        """Hold no masters, no moments, no gradients."""
        self._state = self._incoming = self._loaded_after = None
        self._groups.clear()

    def snapshot(self) -> dict[str, Any]:
        """References to the live state and to each virtual rank's half-done sum."""
        state = self._held()
        live = LiveSnapshot.take(
            policy_version=state.version,
            iteration=state.iteration,
            tensors={"masters": state.masters, "optimizer": optimizer_tensors(state.adam)},
        )
        ranks = _accumulator_snapshots(state.accumulator)
        prints = state.roots() | {f"accumulator/{r}": s.root for r, s in ranks.items()}
        return {
            "state": offer(live),
            "step": state.adam.step,
            "ranks": {rank: offer(snapshot) for rank, snapshot in ranks.items()},
            "fingerprints": prints,
            "version": state.version,
        }

    def drain(self) -> Drained:
        """Groups that wait here; what has been added stays in the half-done update."""
        groups, self._groups = self._groups, []
        return Drained(list(groups), moved_bytes=sum(g.tokens.nbytes for _, g in groups))

    def submit(self, key: Hashable, item: Any) -> None:
        """Queue a group; one that is in already was delivered twice and is answered again."""
        self._groups.append((key, item))

    def step(self) -> list[Answer]:
        """Gradient of one group, added into its virtual rank."""
        state = self._held()
        key, batch = self._groups.pop(0)
        assert isinstance(key, tuple)
        index = int(key[1])
        if index not in state.accumulator.groups_in:
            one = group_gradient(
                state.policy, batch, state.iteration, self._seed, self._loss, self._model
            )
            state.accumulator.add(index, one.flat, one.tokens, one.stats, one.uids)
        return [Answer(key, {"replica": self._replica}, time.time())]

    def has_work(self) -> bool:
        """True while a group waits here."""
        return bool(self._groups)

    def room(self) -> int:
        """One group ahead of need."""
        return max(0, 2 - len(self._groups))

    def hungry(self) -> bool:
        """True when no group waits."""
        return not self._groups

    def linger_s(self) -> float:
        """A group is told at once."""
        return 0.0

    def wake_after_s(self) -> float | None:
        """Nothing becomes due by itself."""
        return None

    def resident_bytes(self) -> int:
        """Masters, moments, policy and gradients."""
        total = 0
        for state in (self._state, self._incoming):
            if state is not None:
                tensors = [t for part in state.parts().values() for t in part.values()]
                total += sum(t.nbytes for t in tensors) + state.accumulator.resident_bytes()
        return total

    def load(self) -> dict[str, float]:
        """Groups in hand and in the update."""
        state = self._state
        done = len(state.accumulator.groups_in) if state is not None else 0
        return {"running": 0, "waiting": len(self._groups), "groups_in": done}

    def first_use(self) -> dict[str, Any] | None:
        """Told with the update, which is the first use."""
        return None

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """``update``, ``save`` or ``forget`` (of the half-done update)."""
        if method == "update":
            return self._update(**arguments)
        if method == "save":
            return self._save(**arguments)
        if method == "forget":
            self._held().accumulator.reset()
            self._groups.clear()
            return None
        raise JobError(f"expected update, save or forget, found {method!r}")

    def _held(self) -> TrainerState:
        if self._state is None:
            raise TrainingError("expected a trainer with state, found none loaded")
        return self._state

    def _update(self, learning_rate: float, clip_norm: float, version: int) -> dict[str, Any]:
        """Reduce in the fixed tree, step, publish; the same bits on every rank."""
        state = self._held()
        if version != state.version + 1:
            raise TrainingError(f"expected an update to {state.version + 1}, asked for {version}")
        before = state.roots()
        total = all_reduce_tree(state.accumulator.local_sums(), state.group)
        info = apply_update(
            state.masters, state.adam, total.flat, total.tokens, learning_rate, clip_norm
        )
        state.policy = publish(state.masters)
        state.version = version
        state.iteration += 1
        state.accumulator.reset()
        after, self._loaded_after = self._loaded_after, None
        return {
            "before": before,
            "after": state.roots(),
            "step": state.adam.step,
            "tokens": total.tokens,
            "loss": total.stats["loss_sum"] / total.tokens,
            "kl": total.stats["kl_sum"] / total.tokens,
            "grad_norm": info.grad_norm,
            "clipped": info.grad_norm > clip_norm,
            "learning_rate": info.lr,
            "weights": state.policy if state.layout.rank == 0 else None,
            "block": list(self._block(state.layout)),
            "first_use_after": after,
        }

    def _save(self, root_dir: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Save a bundle of the present state; durable on return."""
        state = self._held()
        began_s = time.monotonic()
        if self._reference is None:
            self._reference = external_part(self._base, kind="reference", root_dir=root_dir)
        fields = fields | {
            "policy_version": state.version,
            "scheduler": {"step": state.adam.step},
        }
        saved = save_bundle(
            root_dir, fields, state.parts(), external={"reference": self._reference}
        )
        return {
            "bundle": saved.bundle_id,
            "path": str(saved.path),
            "parts": saved.manifest.part_roots,
            "bytes": saved.manifest.bytes,
            "save_s": time.monotonic() - began_s,
        }

    def close(self) -> None:
        """Nothing runs beside this process."""
