"""The reference job's components as the scheduler hosts them: rollout, tool and inference."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import Any

import torch

from shiftbook.checkpoint.compare import root
from shiftbook.checkpoint.errors import PatchError
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.jobs.engine_types import Caches, TurnRequest
from shiftbook.jobs.engines import make_engine
from shiftbook.jobs.errors import EngineError, JobError
from shiftbook.jobs.grpo import GroupBatch, reference_logps
from shiftbook.jobs.model import ModelConfig, upcast
from shiftbook.jobs.policy_file import load_policy
from shiftbook.jobs.probe import Gap
from shiftbook.jobs.serving import After, ServedEngine, Taken
from shiftbook.jobs.sync_encoding import patched
from shiftbook.jobs.toolbox import Toolbox
from shiftbook.scheduler.errors import first_line
from shiftbook.scheduler.workers.component import Answer, Drained, Layout, Loaded
from shiftbook.scheduler.workers.host import HostSpec
from shiftbook.scheduler.workers.transfer import fetch

PREFETCH = 16
"""Turns that an engine takes ahead of need, so that no lane waits for a remote call."""
TOOL_CALLS = 512
FEW = 3
FEW_CALLS = 8
LINGER_S = 0.02
LONG_LINGER_S = 0.06
TOGETHER_S = 0.005
"""Tool results that fall due within this time leave together."""


def one_thread() -> None:
    """Compute in one thread and in one order: what bit equality rests on."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Compiled kernels are loaded before the first move, not in the middle of it.
    fingerprint_tensors({str(t): torch.zeros(4, dtype=t) for t in (torch.bfloat16, torch.float32)})


def token_bytes(requests: list[TurnRequest]) -> int:
    """Bytes of what a moved request carries: 8 a token, a log-probability and a version."""
    return sum(8 * (len(r.context) + 3 * len(r.partial)) for r in requests)


class RolloutWorker:
    """One engine on one slot: the reference one, or vLLM."""

    lanes: Collection[int] | None = None
    urgent = True

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        self._model = ModelConfig(**config.get("model", {}))
        self._make: tuple[str, ModelConfig, int, Caches] = (
            str(config.get("engine", "torch")),
            self._model,
            int(config["lanes"]),
            config.get("caches", "flush"),
        )
        # The engine comes first: vLLM does not start in a process that has compiled kernels.
        self._serving = ServedEngine(make_engine(*self._make), self._model)
        one_thread()
        self._max_error: float | None = config.get("max_error")
        self._incoming: ServedEngine | None = None
        self._staged: dict[str, Any] | None = None
        self._untold: Gap | None = None
        """Of the probe at a move, which has no record of its own: told with the first use."""

    def prepare(self, layout: Layout, payload: dict[str, Any]) -> Loaded:
        """Take ``weights`` of ``version`` (payload) with a new engine; it serves after activate.

        An engine of which a process has only one takes them now where it serves nothing, and at
        activate where it does. Raises ``EngineError`` where they are not taken.
        """
        weights = fetch(payload["weights"])
        beside = self._serving.engine.beside
        if not beside and self._serving.version >= 0:
            self._staged = payload
            prints = fingerprint_tensors(weights)
            size = sum(t.nbytes for t in weights.values())
            named = {f"model/{k}": v for k, v in prints.items()}
            return Loaded(named, size, {"weights": size}, {"fingerprint_of": "handed_over"})
        serving = self._serving
        if beside:
            serving = ServedEngine(make_engine(*self._make), self._model)
        taken = self._take(serving, payload, "move")
        if taken.failure is not None:
            raise EngineError(f"version {taken.version} was not taken: {taken.failure}")
        self._incoming = serving
        self._moved(payload, taken)
        return Loaded(
            {f"model/{k}": v for k, v in taken.fingerprints.items()},
            taken.moved_bytes,
            {"weights": taken.moved_bytes},
            taken.said(),
        )

    def _take(self, serving: ServedEngine, payload: dict[str, Any], after: After) -> Taken:
        source = payload.get("fingerprints")
        if source is not None:
            source = {name.removeprefix("model/"): value for name, value in source.items()}
        version, size = int(payload["version"]), None
        if "patch" in payload:
            try:
                weights, size = patched(serving.held, payload["patch"], self._max_error)
            except PatchError as error:
                return Taken(version, {}, base_refused=first_line(error))
        else:
            weights = fetch(payload["weights"])
        return serving.take(weights, version, payload.get("probe"), source, after, size)

    def activate(self) -> None:
        """Serve with the engine that was prepared."""
        if self._incoming is not None:
            self._serving, self._incoming = self._incoming, None
        if self._staged is not None:
            payload, self._staged = self._staged, None
            taken = self._take(self._serving, payload, "move")
            if taken.failure is not None:
                raise EngineError(f"version {taken.version} was not taken: {taken.failure}")
            self._moved(payload, taken)

    def _moved(self, payload: dict[str, Any], taken: Taken) -> None:
        # Only a move says whether it is a reboot; other bringing up is a sync, which tells.
        self._untold = taken.gap if "reboot" in payload else None

    def discard(self) -> None:
        """Forget the prepared engine."""
        if self._incoming is self._serving:
            self._serving.unload()
        self._incoming = self._staged = None

    def drop(self) -> None:
        """Hold no weights and no KV."""
        self._incoming = self._staged = None
        self._serving.drain()
        self._serving.unload()

    def snapshot(self) -> dict[str, Any]:
        """Engines carry nothing but their requests, which go back to the channel."""
        return {}

    def drain(self) -> Drained:
        """All turns in hand, running ones with their partial tokens."""
        requests = self._serving.drain()
        begun = [r for r in requests if r.partial]
        return Drained(
            [((r.uid, r.turn), r) for r in requests],
            partial_tokens=sum(len(r.partial) for r in begun),
            replay_tokens=sum(len(r.context) + len(r.partial) for r in begun),
            moved_bytes=token_bytes(requests),
        )

    def submit(self, key: Hashable, item: Any) -> None:
        """Queue a turn."""
        self._serving.submit(item)

    def step(self) -> list[Answer]:
        """One decode step of all lanes."""
        now = time.time()
        return [Answer((r.uid, r.turn), r, now) for r in self._serving.step()]

    def has_work(self) -> bool:
        """True while a lane could decode."""
        engine = self._serving.engine
        return engine.running > 0 or engine.waiting > 0

    def room(self) -> int:
        """Turns that it would take now: its free lanes and a few ahead."""
        engine = self._serving.engine
        return max(0, engine.lanes + PREFETCH - engine.running - engine.waiting)

    def hungry(self) -> bool:
        """True when few turns wait behind the running ones."""
        return self._serving.engine.waiting < FEW

    def linger_s(self) -> float:
        """Turns leave together, the longer the more wait here: each call costs the cores time."""
        if self.hungry():
            return 0.0
        return LINGER_S if self._serving.engine.waiting < PREFETCH // 2 else LONG_LINGER_S

    def wake_after_s(self) -> float | None:
        """Nothing becomes due by itself."""
        return None

    def resident_bytes(self) -> int:
        """Weights, KV and buffers."""
        engines = [self._serving.engine]
        if self._incoming is not None and self._incoming is not self._serving:
            engines.append(self._incoming.engine)
        return sum(engine.resident_bytes() for engine in engines)

    def load(self) -> dict[str, float]:
        """Lanes in use, turns that wait here, and decode counters."""
        engine = self._serving.engine
        return {
            "running": engine.running,
            "waiting": engine.waiting,
            "kv_use": engine.running / engine.lanes,
            "tokens": engine.sampled_tokens,
            "replayed_tokens": engine.replayed_tokens,
            "steps": engine.steps,
            "lane_steps": engine.lane_steps,
            "version": engine.version,
        }

    def first_use(self) -> dict[str, Any] | None:
        """What the engine read at its first generation after each load, once; after a move with
        the ``gap`` of its probe."""
        first = self._serving.first_use()
        if first is None:
            return None
        untold, self._untold = self._untold, None
        if untold is not None and first["after"] == "move":
            first.setdefault("gap", untold)
        return first

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """``sync``: take another version in place; answers how that went, a ``Taken``."""
        if method != "sync":
            raise JobError(f"expected the method sync, found {method!r}")
        return self._take(self._serving, arguments, "sync")

    def close(self) -> None:
        """Nothing runs beside this process."""


class InferenceWorker:
    """Reference log-probabilities of complete groups, under the frozen base policy."""

    lanes: Collection[int] | None = None
    urgent = False

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        one_thread()
        self._model = ModelConfig(**config.get("model", {}))
        self._base = Path(config["base_policy"])
        self._reference: dict[str, torch.Tensor] | None = None
        self._incoming: dict[str, torch.Tensor] | None = None
        self._groups: list[tuple[Hashable, GroupBatch]] = []
        self._first: dict[str, Any] | None = None

    def prepare(self, layout: Layout, payload: dict[str, Any]) -> Loaded:
        """Read the base policy from its file."""
        self._incoming = load_policy(self._base, self._model)
        prints = fingerprint_tensors(self._incoming)
        size = sum(t.nbytes for t in self._incoming.values())
        return Loaded({f"reference/{k}": v for k, v in prints.items()}, size, {"weights": size})

    def activate(self) -> None:
        """Use what was prepared."""
        if self._incoming is not None:
            self._reference = upcast(self._incoming)
            prints = fingerprint_tensors(
                {name: tensor.to(torch.bfloat16) for name, tensor in self._reference.items()}
            )
            self._first = {
                "after": "start",
                "use": "reference log-probabilities",
                "version": 0,
                "parts": {"reference": root(prints)},
            }
            self._incoming = None

    def discard(self) -> None:
        """Forget what was prepared."""
        self._incoming = None

    def drop(self) -> None:
        """Hold no weights."""
        self._incoming = self._reference = self._first = None
        self._groups.clear()

    def snapshot(self) -> dict[str, Any]:
        """The base policy stands in its file; nothing else is carried."""
        return {}

    def drain(self) -> Drained:
        """Groups in hand."""
        groups, self._groups = self._groups, []
        return Drained(list(groups), moved_bytes=sum(g.tokens.nbytes for _, g in groups))

    def submit(self, key: Hashable, item: Any) -> None:
        """Queue a group."""
        self._groups.append((key, item))

    def step(self) -> list[Answer]:
        """Log-probabilities of one group."""
        if self._reference is None:
            raise JobError("expected the reference policy, found none loaded")
        key, batch = self._groups.pop(0)
        logps = reference_logps(self._reference, batch, self._model)
        return [Answer(key, batch.with_reference(logps), time.time())]

    def has_work(self) -> bool:
        """True while a group waits here."""
        return bool(self._groups)

    def room(self) -> int:
        """A few groups ahead of need."""
        return max(0, 3 - len(self._groups))

    def hungry(self) -> bool:
        """True when at most one group waits."""
        return len(self._groups) < 2

    def linger_s(self) -> float:
        """A group leaves at once."""
        return 0.0

    def wake_after_s(self) -> float | None:
        """Nothing becomes due by itself."""
        return None

    def resident_bytes(self) -> int:
        """Bytes of the reference policy."""
        return sum(t.nbytes for t in (self._reference or {}).values())

    def load(self) -> dict[str, float]:
        """Groups in hand."""
        return {"running": 0, "waiting": len(self._groups)}

    def first_use(self) -> dict[str, Any] | None:
        """Fingerprint of the reference as it is read, once after a load."""
        first, self._first = self._first, None
        return first

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """There are no methods of its own."""
        raise JobError(f"expected no call, found {method!r}")

    def close(self) -> None:
        """Nothing runs beside this process."""


class ToolWorker:
    """The calculator: calls wait their latency here, without a slot."""

    lanes: Collection[int] | None = None
    urgent = False

    def __init__(self, spec: HostSpec, config: dict[str, Any]) -> None:
        self._toolbox = Toolbox(int(config["seed"]))
        self._expressions: dict[tuple[str, int], str] = {}

    def prepare(self, layout: Layout, payload: dict[str, Any]) -> Loaded:
        """A tool holds no state."""
        return Loaded({}, 0)

    def activate(self) -> None:
        """Nothing to switch."""

    def discard(self) -> None:
        """Nothing was prepared."""

    def drop(self) -> None:
        """Give up all calls; they are repeated elsewhere."""
        self._toolbox.drain()

    def snapshot(self) -> dict[str, Any]:
        """A tool holds no state."""
        return {}

    def drain(self) -> Drained:
        """Calls in hand; each may be repeated under its key (uid, turn)."""
        return Drained([(key, expression) for key, expression in self._toolbox.drain()])

    def submit(self, key: Hashable, item: Any) -> None:
        """Begin a call."""
        assert isinstance(key, tuple)
        self._toolbox.start_call((str(key[0]), int(key[1])), item)

    def step(self) -> list[Answer]:
        """Results that are due."""
        now = time.time()
        return [Answer(result.key, result.tokens, now) for result in self._toolbox.ready()]

    def has_work(self) -> bool:
        """True when a result is due or replies should be read."""
        due = self._toolbox.next_due()
        return due is not None and due <= time.monotonic() + 0.0005

    def room(self) -> int:
        """Many calls wait at once."""
        return TOOL_CALLS - len(self._toolbox.waiting)

    def hungry(self) -> bool:
        """Calls wait side by side, so there is always room for more."""
        return True

    def linger_s(self) -> float:
        """Results leave together, unless few calls are left to wait for."""
        return LINGER_S if len(self._toolbox.waiting) > FEW_CALLS else TOGETHER_S

    def wake_after_s(self) -> float | None:
        """Seconds until the next result is due."""
        due = self._toolbox.next_due()
        return None if due is None else max(TOGETHER_S, due - time.monotonic())

    def resident_bytes(self) -> int:
        """A tool holds no weights."""
        return 0

    def load(self) -> dict[str, float]:
        """Calls that wait."""
        return {"running": len(self._toolbox.waiting), "waiting": 0}

    def first_use(self) -> dict[str, Any] | None:
        """There is no state to use."""
        return None

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """There are no methods of its own."""
        raise JobError(f"expected no call, found {method!r}")

    def close(self) -> None:
        """End the child process."""
        self._toolbox.close()
