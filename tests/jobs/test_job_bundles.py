"""Goal: the reference job's bundles hold what it declares, and come back whole into any tensors.

Method: two iterations of the job in this process; manifests are read, and the last bundle, whose
reference policy stands in a file of its own, is restored in one piece.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shiftbook.checkpoint.errors import BundleError
from shiftbook.checkpoint.fingerprint import fingerprint_tensors
from shiftbook.checkpoint.sharded_bundle import restore_into
from shiftbook.checkpoint.shelf import list_bundles
from shiftbook.jobs.config import bundle_digests, plan_of
from tests.jobs.live_run import LiveRun


def test_bundles_hold_what_is_declared_and_come_back_with_their_reference(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    run.train(2)
    saved = list_bundles(run.bundles)
    digests = bundle_digests(run.config)
    assert digests["data_digest"] == plan_of(run.config).data.dataset_digest
    other = run.config.model_copy(update={"learning_rate": 1e-5})
    assert bundle_digests(other)["config_digest"] != digests["config_digest"]
    for before, bundle in zip([None, *saved], saved, strict=False):
        manifest = bundle.manifest
        assert manifest.config_digest == digests["config_digest"]
        assert manifest.data_digest == digests["data_digest"]
        assert manifest.in_flight_uids == ()
        assert manifest.parent == (None if before is None else before.bundle_id)
    places = {
        part: {
            name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for name, tensor in record.tensors.items()
        }
        for part, record in saved[-1].manifest.parts.items()
    }
    assert saved[-1].manifest.parts["reference"].external
    restore_into(saved[-1].path, places, kind="resume")
    for part, members in places.items():
        assert fingerprint_tensors(members) == saved[-1].manifest.parts[part].fingerprints
    fields = {"job": "j", "attempt": "a", "parent": saved[-1].bundle_id, "iteration": 3}
    with pytest.raises(BundleError, match=r"absent \['config_digest', 'data_digest', 'in_flight"):
        run._trainer.call("save", {"root_dir": str(run.bundles), "fields": fields})
    run.close()
