"""Maps of fingerprints: differences by name, one root, and no torch, numba or numpy needed.

Method: hypothesis edits maps; a child process with those modules blocked imports what a verifier
reads of this package.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftbook.checkpoint.compare import Difference, FingerprintMap, root
from shiftbook.checkpoint.errors import FingerprintError

values = st.integers(0, 2**128 - 1).map(lambda n: f"{n:032x}")
maps = st.dictionaries(st.text(max_size=8), values, max_size=8)


@given(maps, maps)
def test_differences_name_each_tensor(left: dict[str, str], right: dict[str, str]) -> None:
    found = FingerprintMap(left).compare(right)
    assert set(found.missing) == set(left) - set(right)
    assert set(found.extra) == set(right) - set(left)
    assert set(found.changed) == {n for n in left if n in right and left[n] != right[n]}
    assert found.equal == (left == right)
    assert (root(left) == root(right)) == (left == right)


@given(maps)
def test_root_does_not_depend_on_order(values: dict[str, str]) -> None:
    assert root(dict(reversed(values.items()))) == root(values) == FingerprintMap(values).root
    assert len(root(values)) == 32


def test_names_that_run_into_each_other_give_other_roots() -> None:
    zero, one = "0" * 32, "1" * 32
    seen = {root({"ab": zero, "c": one}), root({"a": zero, "bc": one}), root({"abc": zero}),
            root({"a": zero, "b": one}), root({"a": one, "b": zero}), root({})}  # fmt: skip
    assert len(seen) == 6


def test_golden_root_pins_the_format() -> None:
    assert root({"weight": "0" * 32, "bias": "f" * 32}) == "e9f4f83120db9428c08c6b545c8c46da"


def test_description_is_short() -> None:
    names = tuple(f"t{k}" for k in range(8))
    said = Difference(missing=names, changed=("w",)).describe(limit=2)
    assert said == "missing: t0, t1 and 6 more; changed: w"
    assert Difference().describe() == "equal"


@pytest.mark.parametrize("broken", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, 7, None])
def test_what_is_no_fingerprint_is_refused(broken: object) -> None:
    with pytest.raises(FingerprintError, match=r"'w'.*32 lower-case hex digits"):
        FingerprintMap({"w": broken})  # type: ignore[dict-item]
    with pytest.raises(FingerprintError, match="'w'"):
        root({"w": broken})  # type: ignore[dict-item]


def test_a_verifier_needs_no_torch_numba_or_numpy() -> None:
    program = """
import sys
for name in ("torch", "numba", "numpy", "ray", "safetensors"):
    sys.modules[name] = None
import shiftbook.checkpoint.compare, shiftbook.checkpoint.manifest, shiftbook.checkpoint.sampler
import shiftbook.checkpoint.shelf, shiftbook.checkpoint.commands, shiftbook.checkpoint.errors
from shiftbook.checkpoint.sampler import expected_draws
print(len(expected_draws("hash-sort-v1", 1, 10, 5, 10)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "10"
