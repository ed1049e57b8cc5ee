"""Goal: a state that was registered is an origin that the ledger knows, for the gate, the reader
and the verifier; what the ledger refuses leaves no bundle behind.

Method: real safetensors files are registered by the command, on both stores, before a job is
opened; a small recorded job warm-starts from one, honestly and with other weights. The events, the
fold, every view of them and the verdicts are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from shiftbook.checkpoint.manifest import BundleFields
from shiftbook.checkpoint.recorder import Recorder, data_digests
from shiftbook.checkpoint.register import register_in_ledger
from shiftbook.checkpoint.restore import restore_bundle
from shiftbook.checkpoint.retention import needed_bundles
from shiftbook.checkpoint.shelf import latest_bundle, list_bundles
from shiftbook.ledger.cli import main
from shiftbook.ledger.errors import IllegalStep, LedgerUnreachable
from shiftbook.ledger.events.job import JobClosed
from shiftbook.ledger.events.state import CheckpointRegistered
from shiftbook.ledger.gate import Gate
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.mirror import Mirror
from shiftbook.ledger.summary import summary
from shiftbook.verify.verdict import Verdict, verify
from tests.checkpoint.bundle_states import fields
from tests.checkpoint.test_first_use import DATA, LAST, PLAN, Job
from tests.checkpoint.test_stored_state import in_dcp, in_hugging_face_shards
from tests.ledger.gate_cases import FINGERPRINT, bundle, running
from tests.ledger.stores import STORES, new_url

JOB = "tune"


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    made = new_url(request.param, tmp_path)
    Ledger.open(made).close()
    return made


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def register(folder: Path, url: str, **options: object) -> Result:
    chosen = {"job": JOB, "part": "model", "ledger": url} | options
    words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
    return run("checkpoint", "register", folder / "model.safetensors", folder / "shelf", *words)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    made = {name: tensor.clone() for name, tensor in Job.make().trainer.parts()["model"].items()}
    for tensor in made.values():
        tensor += 0.25
    save_file(made, tmp_path / "model.safetensors")
    return made


def tuned(
    folder: Path, url: str, restored: dict[str, torch.Tensor], *, version: int = 0
) -> Verdict:
    """A job that warm-starts from the folder's last bundle, with what it says it restored."""
    made = latest_bundle(folder / "shelf")
    assert made is not None
    job = Job.make()
    masters = {name: tensor.float() for name, tensor in restored.items()}
    job.trainer.load({"masters": masters, "model": restored}, 0)
    with Recorder.open(
        url, JOB, PLAN, policy=restored, version=version, bundle=made.bundle_id,
        evidence=folder / "evidence", spool=folder / "spool",
    ) as record:  # fmt: skip
        record.data(data_digests(DATA), tokenizer="t")
        record.restored(
            made.bundle_id, job.state(), iteration=0, version=version, cursor=0, kind="warm-start"
        )
        for _ in range(LAST):
            job.train(record, lambda draws: draws)
        record.finish(iterations=LAST, version=LAST, policy=job.trainer.parts()["model"])
    return verify(url, evidence=str(folder / "evidence"))


def named(verdict: Verdict) -> set[str]:
    return {finding.invariant for finding in verdict.findings}


def test_a_warm_start_has_an_origin_that_the_ledger_knows(
    tmp_path: Path, url: str, weights: dict[str, torch.Tensor]
) -> None:
    done = register(tmp_path, url)
    assert done.exit_code == 0, done.output
    made = latest_bundle(tmp_path / "shelf")
    assert made is not None
    verdict = tuned(tmp_path, url, restore_bundle(made.path)["model"])
    assert (named(verdict), verdict.could_not) == (set(), ())
    for invariant in ("I1", "I1b", "I15"):
        assert verdict.coverage.row(invariant).status == "checked", invariant
    with Ledger.open(url, create=False, read_only=True) as ledger:
        first = next(ledger.read())
        assert (first.type, first.job, first.version) == ("CheckpointRegistered", JOB, 0)
        job = ledger.state().job(JOB)
        (attempt,) = [e.parsed() for e in ledger.read(types={"AttemptStarted"})]
        assert attempt.bundle in job.registered  # type: ignore[attr-defined]


def test_other_weights_than_were_registered_are_named(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    url = new_url("sqlite", tmp_path)
    Ledger.open(url).close()
    assert register(tmp_path, url).exit_code == 0
    other = {name: tensor + 1 for name, tensor in weights.items()}
    verdict = tuned(tmp_path, url, other)
    (finding,) = [f for f in verdict.findings if f.invariant == "I1"]
    assert 0 in finding.positions
    assert "as the bundle has it" in finding.expected


def test_another_version_than_was_registered_is_named(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    url = new_url("sqlite", tmp_path)
    Ledger.open(url).close()
    assert register(tmp_path, url, **{"policy-version": 5}).exit_code == 0
    assert "I15" in named(tuned(tmp_path, url, weights))


def test_every_view_shows_it(tmp_path: Path, url: str, weights: dict[str, torch.Tensor]) -> None:
    assert register(tmp_path, url, **{"policy-version": 3, "iteration": 7}).exit_code == 0
    made = latest_bundle(tmp_path / "shelf")
    assert made is not None
    with Ledger.open(url, create=False, read_only=True) as ledger:
        (stored,) = ledger.read()
        event = stored.parsed()
        assert isinstance(event, CheckpointRegistered)
        assert event.parts == {"model": made.manifest.parts["model"].root}
        assert (event.source, event.form) == (str(tmp_path / "model.safetensors"), "safetensors")
        assert (event.path, event.bundle) == (str(made.path), made.bundle_id)
        assert stored.actor.startswith("operator")
        assert summary(stored).startswith(f"model of {event.source} (safetensors), ")
        assert ledger.state().job(JOB).registered == {made.bundle_id: event}
        with Mirror.open(ledger, in_memory=True) as mirror:
            (row,) = mirror.rows(
                "select act, kind, bundle, iteration, policy_version, bytes from checkpoints"
            )
        assert row == {
            "act": "registered", "kind": "safetensors", "bundle": made.bundle_id,
            "iteration": 7, "policy_version": 3, "bytes": event.bytes,
        }  # fmt: skip
    standing = json.loads(run("state", JOB, "--ledger", url, "--format", "json").stdout)
    (shown,) = standing["registered_bundles"]
    assert (shown["bundle"], shown["policy_version"]) == (made.bundle_id, 3)
    assert f"registered   {made.bundle_id[:12]}" in run("state", JOB, "--ledger", url).stdout
    (line,) = run("log", "--ledger", url, "--format", "jsonl").stdout.splitlines()
    assert json.loads(line)["type"] == "CheckpointRegistered"
    (listed,) = json.loads(run("jobs", "--ledger", url, "--format", "json").stdout)
    assert (listed["job"], listed["status"], listed["events"]) == (JOB, "unopened", 1)


def test_registrations_alone_are_nothing_to_judge_and_disturb_no_other_job(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    url = new_url("sqlite", tmp_path)
    Ledger.open(url).close()
    assert register(tmp_path, url, job="later").exit_code == 0
    alone = verify(url)
    assert alone.exit_code == 2
    assert alone.could_not == (
        "no job has begun, bundles were registered and nothing else; run one first",
    )
    assert register(tmp_path, url).exit_code == 0
    verdict = tuned(tmp_path, url, weights)
    assert (named(verdict), verdict.could_not) == (set(), ())


def test_retention_keeps_what_a_job_may_begin_from(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    url = new_url("sqlite", tmp_path)
    Ledger.open(url).close()
    for job in (JOB, "closed", JOB):
        assert register(tmp_path, url, job=job).exit_code == 0
    first, second, third = (one.bundle_id for one in list_bundles(tmp_path / "shelf"))
    with Ledger.open(url) as ledger:
        assert needed_bundles(ledger) == {first, second, third}
        gate = Gate(ledger)
        running(gate, "closed")
        gate.close_job(
            "closed",
            JobClosed(
                outcome="cancelled", iterations=0, policy_version=0, policy_fingerprint=FINGERPRINT
            ),
        )
        assert needed_bundles(ledger) == {first, third}
    words = ("retain", tmp_path / "shelf", "--keep", 1, "--ledger", url, "--no-golden")
    kept = run("checkpoint", *words)
    assert kept.exit_code == 0
    assert [one.bundle_id for one in list_bundles(tmp_path / "shelf")] == [first, third]


@pytest.mark.parametrize(
    ("make", "form"), [(in_dcp, "dcp"), (in_hugging_face_shards, "safetensors")]
)
def test_folders_are_recorded_and_a_ledger_is_made_where_that_is_asked(
    tmp_path: Path, make: Any, form: str
) -> None:
    source, url = make(tmp_path), f"sqlite:///{tmp_path}/first.db"
    words = ("checkpoint", "register", source, tmp_path / "shelf", "--job", JOB, "--ledger", url)
    missing = run(*words)
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert not (tmp_path / "first.db").exists()
    done = run(*words, "--new-ledger")
    assert done.exit_code == 0, done.output
    with Ledger.open(url, create=False) as ledger:
        (stored,) = ledger.read()
        event = stored.parsed()
        assert isinstance(event, CheckpointRegistered)
        assert (event.form, event.source) == (form, str(source))
        with pytest.raises(IllegalStep, match="never opened, bundles were registered"):
            Gate(ledger).freeze(JOB, by="operator", reason="x")
    alone = run("checkpoint", "register", source, tmp_path / "shelf", "--job", JOB, "--new-ledger")
    assert alone.exit_code == 2


def test_what_the_ledger_refuses_leaves_no_bundle(
    tmp_path: Path,
    url: str,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, shelf = tmp_path / "model.safetensors", tmp_path / "shelf"
    with Ledger.open(url) as ledger:
        gate = Gate(ledger)
        running(gate, "done")
        ledger.append("done", bundle())
        gate.close_job(
            "done",
            JobClosed(
                outcome="finished", iterations=0, policy_version=0, policy_fingerprint=FINGERPRINT
            ),
        )
    closed = register(tmp_path, url, job="done")
    assert (closed.exit_code, closed.stdout) == (2, "")
    assert "expected a job done that is not closed" in closed.stderr
    own = register(tmp_path, url, job="shiftbook")
    assert own.exit_code == 2
    assert "the ledger's own events" in own.stderr
    nowhere = register(tmp_path, f"sqlite:///{tmp_path}/none.db")
    assert nowhere.exit_code == 2
    for name in ("job", "attempt"):
        empty = register(tmp_path, url, **{name: " "})
        assert empty.exit_code == 2
        assert f"expected a name of the {name}" in empty.stderr
    assert not list(shelf.glob("bundle-*"))

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnreachable("expected the ledger, found it away")

    with Ledger.open(url) as ledger:
        gate = Gate(ledger)
        monkeypatch.setattr(ledger, "decide", away)
        with pytest.raises(LedgerUnreachable):
            register_in_ledger(gate, source, shelf, BundleFields(**fields(1)))
    assert not list(shelf.iterdir()) or [p.name for p in shelf.iterdir()] == [".shelf.lock"]


def test_a_bundle_is_new_to_its_job(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with Ledger.open(new_url("sqlite", tmp_path)) as ledger:
        gate = Gate(ledger)
        made = register_in_ledger(
            gate, tmp_path / "model.safetensors", tmp_path / "shelf", BundleFields(**fields(1))
        )
        (stored,) = ledger.read()
        event = stored.parsed()
        assert isinstance(event, CheckpointRegistered)
        assert event.bundle == made.bundle_id
        with pytest.raises(IllegalStep, match="registered before"):
            gate.register(stored.job, event)
        running(gate)
        ledger.append("j", bundle())
        with pytest.raises(IllegalStep, match="saved by an attempt"):
            gate.register("j", event.model_copy(update={"bundle": bundle().bundle}))
