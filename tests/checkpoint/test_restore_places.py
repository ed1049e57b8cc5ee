"""Goal: what cannot hold a bundle is refused before a single tensor is written, and so is what no
bundle can hold.

Method: places that are no tensors, or whose writes would fail or be lost, each last in the order of
the restore, so that a check that came too late would find the others overwritten; saves of what
torch would pickle; places that are one tensor under two names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shiftbook.checkpoint.bundle import SavedBundle, save_bundle
from shiftbook.checkpoint.errors import BundleError, PartMismatch
from shiftbook.checkpoint.pending_bundle import save_bundle_async, save_sharded_async
from shiftbook.checkpoint.sharded_bundle import restore_into, save_sharded
from shiftbook.checkpoint.shelf import list_bundles
from tests.checkpoint.bundle_states import fields

PLACES: dict[str, Callable[[], Any]] = {
    "ndarray": lambda: np.zeros((4, 3), np.float32),
    "str": lambda: "zeros",
    "NoneType": lambda: None,
    "share memory": lambda: torch.zeros(4, 1).expand(4, 3),
    "meta device": lambda: torch.zeros(4, 3, device="meta"),
    "sparse": lambda: torch.zeros(4, 3).to_sparse(),
}


@pytest.fixture
def saved(tmp_path: Path) -> SavedBundle:
    state = {"model": {"a": torch.ones(5), "z": torch.ones(4, 3)}}
    return save_bundle(tmp_path / "shelf", fields(3), state)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("what", PLACES)
def test_a_place_that_cannot_be_written_leaves_all_as_they_were(
    saved: SavedBundle, what: str, in_place: bool
) -> None:
    places: dict[str, Any] = {"a": torch.zeros(5), "z": PLACES[what]()}
    with pytest.raises(PartMismatch, match=f"tensor z: .*{what}.*nothing was changed"):
        restore_into(saved.path, {"model": places}, in_place=in_place)
    assert not places["a"].any()


@pytest.mark.parametrize("in_place", [False, True])
def test_one_tensor_under_two_names_needs_one_content(tmp_path: Path, in_place: bool) -> None:
    state = {"model": {"a": torch.ones(5), "b": torch.full((5,), 2.0), "c": torch.ones(5)}}
    saved = save_bundle(tmp_path, fields(3), state)
    tied = torch.zeros(5)
    places = {"model": {"a": tied, "b": tied, "c": torch.zeros(5)}}
    with pytest.raises(PartMismatch, match="model/a and model/b are one tensor here"):
        restore_into(saved.path, places, in_place=in_place)
    assert not tied.any()
    restore_into(
        saved.path,
        {"model": {"a": tied, "c": tied}},
        kind="transfer",
        in_place=in_place,
    )
    assert tied.tolist() == [1.0] * 5


def test_tensors_that_are_made_for_inference_are_filled(saved: SavedBundle) -> None:
    with torch.inference_mode():
        places = {"a": torch.zeros(5), "z": torch.zeros(4, 3)}
    restore_into(saved.path, {"model": places})
    assert all(bool((tensor == 1).all()) for tensor in places.values())


def test_a_kind_of_restore_that_is_none_is_refused(saved: SavedBundle) -> None:
    kind: Any = "resum"
    places = {"a": torch.zeros(5), "z": torch.zeros(4, 3)}
    with pytest.raises(BundleError, match="resume, warm-start, transfer, found 'resum'"):
        restore_into(saved.path, {"model": places}, kind=kind)
    assert not places["a"].any()


@pytest.mark.parametrize("save", [save_bundle, save_sharded, save_bundle_async, save_sharded_async])
@pytest.mark.parametrize("what", [np.ones(3), "text", 1.5, None])
def test_what_is_no_tensor_is_not_saved(tmp_path: Path, save: Any, what: Any) -> None:
    """As a pickle it would make a bundle that exists and cannot be restored."""
    with pytest.raises(BundleError, match=f"part p: tensor w: .*found {type(what).__name__}"):
        save(tmp_path, fields(1), {"p": {"w": what}})
    assert list_bundles(tmp_path) == []
