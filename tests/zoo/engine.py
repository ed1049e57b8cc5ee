"""Rollout engines: numpy code of their own, tensor-parallel shards, a prefix cache, a buffer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.zoo.model import END, HIDDEN, TOOL, VOCABULARY, WIDTH, Tensors, positions

RANKS = 2
TOOL_AFTER = 2
MOST = 5
CACHES = ("prefix", "first-token")


@dataclass
class Made:
    """One sample as an engine made it."""

    uid: str
    prompt: list[int]
    tokens: list[int]
    sampled: list[bool]
    logps: list[float]
    versions: list[int]
    replica: str
    incarnation: str
    stream: str
    cache_version: int


def keyed_uniform(seed: int, uid: str, place: int) -> float:
    """Number in [0, 1) from the declared key: job seed, uid, position."""
    key = hashlib.sha256(f"{seed}|{uid}|0|{place}".encode()).digest()
    return int.from_bytes(key[:7], "big") / 2**56


def stream_of(seed: int, uid: str) -> str:
    """Name of a sample's randomness."""
    return hashlib.sha256(f"stream|{seed}|{uid}".encode()).hexdigest()[:32]


@dataclass
class Engine:
    """One replica; its resident weights are what its arithmetic reads."""

    name: str
    incarnation: str
    seed: int
    version: int = -1
    shards: list[dict[str, torch.Tensor]] = field(default_factory=list)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    cache: dict[tuple[int, ...], tuple[np.ndarray, int]] = field(default_factory=dict)
    first: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, int]] = field(default_factory=dict)
    temperature: float = 1.0
    fresh: bool = False
    """True from a load until the first generation."""

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take weights (logical names) and cut them for the tensor-parallel ranks."""
        self.whole = {name: weights[name].clone() for name in ("embed", "rec", "norm")}
        self.whole["head"] = self.tie(weights)
        self.whole["positions"] = positions()
        self.shards = [self.cut(weights, rank) for rank in range(RANKS)]
        self.stamp(version)
        self.fresh = True

    def tie(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The head is the embedding: one memory."""
        return self.whole["embed"]

    def cut(self, weights: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Rank's rows of gate and up, fused, and its columns of down."""
        part = HIDDEN // RANKS
        rows = slice(rank * part, (rank + 1) * part)
        fused = torch.cat([weights["gate"][rows], weights["up"][rows]])
        return {"gate_up": fused, "down": weights["down"][:, rows].clone()}

    def stamp(self, version: int) -> None:
        """Set the version that tokens are stamped with."""
        self.version = version

    def flush(self) -> list[str]:
        """Empty all caches; their names."""
        self.cache.clear()
        self.first.clear()
        return list(CACHES)

    def resident(self) -> Tensors:
        """What the arithmetic reads, as logical tensors."""
        part = HIDDEN // RANKS
        return {
            **self.whole,
            "gate": torch.cat([shard["gate_up"][:part] for shard in self.shards]),
            "up": torch.cat([shard["gate_up"][part:] for shard in self.shards]),
            "down": torch.cat([shard["down"] for shard in self.shards], dim=1),
        }

    def weights(self) -> dict[str, np.ndarray]:
        """float32 copies for the arithmetic."""
        return {name: tensor.float().numpy() for name, tensor in self.resident().items()}

    def step(self, w: dict[str, np.ndarray], h: np.ndarray, token: int, place: int) -> Any:
        """One token: (new state, log-probabilities over the vocabulary)."""
        h = np.tanh(h @ w["rec"].T + w["embed"][token] + w["positions"][place])
        y = h * w["norm"]
        gate = y @ w["gate"].T
        z = gate / (1 + np.exp(-gate)) * (y @ w["up"].T)
        logits = ((h + z @ w["down"].T) @ w["head"].T) / self.temperature
        top = logits - logits.max()
        return h, (top - np.log(np.exp(top).sum())).astype(np.float32)

    def choose(self, logp: np.ndarray, uid: str, place: int) -> int:
        """The token that the declared randomness draws."""
        edges = np.cumsum(np.exp(logp.astype(np.float64)))
        u = keyed_uniform(self.seed, uid, place) * edges[-1]
        return min(int(np.searchsorted(edges, u, side="right")), VOCABULARY - 1)

    def prefix(self, w: dict[str, np.ndarray], prompt: list[int]) -> tuple[np.ndarray, int]:
        """State after all but the last prompt token, from the cache where it has it."""
        key = tuple(prompt[:-1])
        if key not in self.cache:
            h = np.zeros(WIDTH, dtype=np.float32)
            for place, token in enumerate(key):
                h, _ = self.step(w, h, token, place)
            self.cache[key] = (h, self.version)
        return self.cache[key]

    def first_token(
        self, w: dict[str, np.ndarray], prompt: list[int]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """State and log-probabilities after a prompt, and the oldest weights in them."""
        key = tuple(prompt)
        if key not in self.first:
            h, cached = self.prefix(w, prompt)
            h, logp = self.step(w, h, prompt[-1], len(prompt) - 1)
            self.first[key] = (h, logp, min(cached, self.version))
        return self.first[key]

    def generate(self, uid: str, prompt: list[int]) -> Made:
        """Sample one completion, with the tool's text after its second token."""
        w = self.weights()
        h, logp, cached = self.first_token(w, prompt)
        tokens, sampled = list(prompt), [False] * len(prompt)
        logps, versions = [0.0] * len(prompt), [self.version] * len(prompt)
        count, place = 0, len(prompt) - 1
        while count < MOST:
            if count:
                h, logp = self.step(w, h, tokens[-1], place)
            token = self.choose(logp, uid, place + 1)
            tokens.append(token)
            sampled.append(True)
            logps.append(float(logp[token]))
            versions.append(self.version)
            count, place = count + 1, place + 1
            if token == END:
                break
            if count == TOOL_AFTER:
                h, _ = self.step(w, h, tokens[-1], place)
                tokens.append(TOOL)
                sampled.append(False)
                logps.append(0.0)
                versions.append(self.version)
                place += 1
        self.fresh = False
        return Made(
            uid=uid,
            prompt=list(prompt),
            tokens=tokens,
            sampled=sampled,
            logps=logps,
            versions=versions,
            replica=self.name,
            incarnation=self.incarnation,
            stream=stream_of(self.seed, uid),
            cache_version=cached,
        )
