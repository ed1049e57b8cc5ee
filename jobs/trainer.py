"""The reference job's trainer: one physical rank, which owns a block of virtual ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shiftbook.checkpoint.bundle import external_part, restore_bundle, save_bundle
from shiftbook.checkpoint.elastic import Place, Reduction, UpdateReport, VirtualRanks
from shiftbook.checkpoint.elastic_move import join_group
from shiftbook.checkpoint.live import LiveSnapshot
from shiftbook.checkpoint.manifest import load_manifest
from shiftbook.checkpoint.virtual_ranks import VirtualRankPlan
from shiftbook.jobs.components import one_thread
from shiftbook.jobs.config import BUNDLE_PARTS
from shiftbook.jobs.errors import JobError, TrainingError
from shiftbook.jobs.grpo import GroupBatch, GrpoConfig, GrpoLoss
from shiftbook.jobs.half_done import gather, half_done, prints_of
from shiftbook.jobs.lossy_sync import PART
from shiftbook.jobs.model import ModelConfig
from shiftbook.jobs.optimizer import publish
from shiftbook.jobs.trainer_state import TrainerState, make_trainer
from shiftbook.jobs.update_watch import UpdateWatch
from shiftbook.scheduler.workers.component import Answer, Drained, Layout, Loaded
from shiftbook.scheduler.workers.host import HostSpec
from shiftbook.scheduler.workers.transfer import fetch, offer

GROUP_LIMIT_S = 8.0
"""How long a rank waits for the others; a peer that never comes costs this once."""


class TrainerWorker:
    """One physical rank of the trainer."""

    urgent = False

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        one_thread()
        self._replica = spec.replica
        self._seed = int(config["seed"])
        self._model = ModelConfig(**config.get("model", {}))
        self._loss = GrpoLoss(GrpoConfig(**config.get("loss", {})), self._seed)
        self._plan = VirtualRankPlan(config["virtual_ranks"], config["groups"])
        self._reduction: Reduction = config.get("reduction", "tree")
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
        place = Place(layout.rank, layout.world, self._join(layout, payload["store"]))
        if "bundle" in payload:
            state, moved = self._from_bundle(layout, place, Path(payload["bundle"]))
            parts = {"bundle": moved}
            self._loaded_after = "move" if payload.get("reboot") else "restore"
            sums = None
        else:
            state, parts, sums = self._from_snapshots(layout, place, payload["snapshots"])
        self._incoming = state
        prints = state.roots() | (prints_of(half_done(state.ranks)) if sums is None else sums)
        return Loaded(prints, sum(parts.values()), parts)

    def _join(self, layout: Layout, store: tuple[str, int]) -> Any:
        if layout.world == 1:
            return None
        host, port = store
        limit = timedelta(seconds=GROUP_LIMIT_S)
        shared = dist.TCPStore(host, port, is_master=False, timeout=limit)
        return join_group(
            shared, layout.generation, layout.rank, layout.world, limit_s=GROUP_LIMIT_S
        )

    def _from_bundle(self, layout: Layout, place: Place, path: Path) -> tuple[TrainerState, int]:
        manifest = load_manifest(path)
        parts = restore_bundle(path, ["model", "masters", "optimizer"])
        size = sum(t.nbytes for tensors in parts.values() for t in tensors.values())
        ranks = self._made(
            place,
            policy=parts["model"],
            masters=parts["masters"],
            moments=parts["optimizer"],
            updates=int(manifest.scheduler["step"]),
        )
        return TrainerState(ranks, manifest.policy_version, manifest.iteration, layout), size

    def _made(self, place: Place, **state: Any) -> VirtualRanks:
        return make_trainer(
            state.pop("policy"),
            self._model,
            self._loss,
            virtual_ranks=self._plan.virtual_ranks,
            groups=self._plan.groups_per_iteration,
            place=place,
            reduction=self._reduction,
            **state,
        )

    def _from_snapshots(
        self, layout: Layout, place: Place, snapshots: Mapping[str, Mapping[str, Any]]
    ) -> tuple[TrainerState, dict[str, int], dict[str, str] | None]:
        own = self._state
        moved = {"state": 0}
        if own is not None:
            ranks, version, iteration = own.ranks, own.version, own.iteration
        else:
            offered = next(iter(snapshots.values()))
            snapshot: LiveSnapshot = fetch(offered["state"])
            snapshot.check()
            moved["state"] = snapshot.nbytes
            masters = snapshot.tensors["masters"]
            ranks = self._made(
                place,
                policy=publish(masters),
                masters=masters,
                moments=snapshot.tensors["optimizer"],
                updates=offered["step"],
            )
            version, iteration = snapshot.policy_version, snapshot.iteration
            self._loaded_after = "move"
        held = None if own is None else own.ranks
        sums = gather(held, snapshots, self._block(layout), layout, self._reduction)
        moved["accumulators"] = sums.moved_bytes
        state = TrainerState(ranks.at(place, sums.pieces), version, iteration, layout)
        return state, moved, sums.prints

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
        """References to the live state and to each half-done sum."""
        state = self._held()
        live = LiveSnapshot.take(
            policy_version=state.version,
            iteration=state.iteration,
            tensors={part: state.parts()[part] for part in ("masters", "optimizer")},
        )
        ranks = half_done(state.ranks)
        prints = state.roots() | prints_of(ranks)
        return {
            "state": offer(live),
            "step": state.adam.updates,
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
        sums = state.ranks.accumulator
        if not sums.owns(index) or index in sums.missing():
            state.ranks.add(index, (batch, state.iteration), batch.uids)
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
                total += sum(t.nbytes for t in tensors) + state.ranks.accumulator.resident_bytes()
        return total

    def load(self) -> dict[str, float]:
        """Groups in hand and in the update."""
        state = self._state
        done = len(state.ranks.accumulator.groups_in) if state is not None else 0
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
            self._held().ranks.accumulator.reset()
            self._groups.clear()
            return None
        raise JobError(f"expected update, save or forget, found {method!r}")

    def _held(self) -> TrainerState:
        if self._state is None:
            raise TrainingError("expected a trainer with state, found none loaded")
        return self._state

    def _update(self, learning_rate: float, clip_norm: float, version: int) -> dict[str, Any]:
        """Reduce as the plan declares it, step, publish; the same bits on every rank."""
        state = self._held()
        if version != state.version + 1:
            raise TrainingError(f"expected an update to {state.version + 1}, asked for {version}")
        before = state.roots()
        state.ranks.clip_norm = clip_norm
        lead = state.layout.rank == 0
        added = state.ranks.accumulator.added()
        with UpdateWatch(state, clip_norm, self._loss.config.kl_coefficient, lead) as watch:
            report = state.ranks.update(learning_rate)
        state.version = version
        state.iteration += 1
        after, self._loaded_after = self._loaded_after, None
        return {
            "before": before,
            "after": state.roots(),
            "step": state.adam.updates,
            "tokens": report.weight,
            "loss": report.loss,
            "kl": report.stats["kl_sum"] / report.weight,
            "logp_gap": self._gap(report),
            "grad_norm": report.grad_norm,
            "clipped": report.clipped,
            "learning_rate": learning_rate,
            "weights": state.parts()["model"] if lead else None,
            "watched": watch.said(report, learning_rate),
            "block": list(self._block(state.layout)),
            "added": added,
            "first_use_after": after,
        }

    def _gap(self, report: UpdateReport) -> float | None:
        """Mean |log-probability here - of the engine| by sampled token, in nats.

        The update's own pass is under the weights that sampled: each batch is consumed by the next
        update, once. With dropout it is not of that policy, and there is no gap to tell.
        """
        if self._loss.config.dropout > 0.0:
            return None
        return report.stats["logp_gap_sum"] / report.weight

    def _save(
        self,
        root_dir: str,
        fields: dict[str, Any],
        served: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Any]:
        """Save a bundle of the present state, with what engines hold where that is state of its own
        (``served``); durable on return."""
        state = self._held()
        began_s = time.monotonic()
        if self._reference is None:
            self._reference = external_part(self._base, kind="reference", root_dir=root_dir)
        fields = fields | {
            "policy_version": state.version,
            "scheduler": {"step": state.adam.updates},
        }
        saved = save_bundle(
            root_dir,
            fields,
            state.parts() | ({} if served is None else {PART: dict(served)}),
            external={"reference": self._reference},
            declared=(*BUNDLE_PARTS, *(() if served is None else (PART,)), "parent"),
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
