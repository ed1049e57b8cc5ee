"""Goal: the recorder records what a plain loop does, and says so when it is called wrongly.

Method: small loops are recorded into real ledgers and judged; the probes are compared with torch's
own optimizer and autograd, right and with one thing changed; the ledger is taken away for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from shiftbook.checkpoint.errors import RecorderMisuse
from shiftbook.checkpoint.patch import Lossy, apply_patch, encode_patch, read_patch
from shiftbook.checkpoint.recorder import (
    Consumed,
    Generated,
    Recorder,
    data_digests,
    dataset_digest,
    optimizer_part,
    rng_parts,
    uid,
)
from shiftbook.checkpoint.recorder_loss import PolicyLoss
from shiftbook.checkpoint.recorder_samples import consumed_event, generated_rows
from shiftbook.checkpoint.recorder_state import part_root, value_digest
from shiftbook.checkpoint.recorder_step import Adam, StepProbe
from shiftbook.ledger.errors import LedgerUnreachable
from shiftbook.ledger.events.training import BatchConsumed
from shiftbook.ledger.ledger import Ledger
from shiftbook.ledger.plan import DataPlan, Plan, SamplingPlan, SyncPlan, UpdatePlan
from shiftbook.verify.verdict import Verdict, verify

DATA = [[n, n + 1, n + 2] for n in range(6)]
ROWS, RATE = 3, 0.01


def plan(**changes: Any) -> Plan:
    """Supervised fine-tuning of a linear layer."""
    made = Plan(
        seed=1,
        iterations=4,
        objective="sft",
        data=DataPlan(
            dataset_digest=dataset_digest(data_digests(DATA)),
            tokenizer_digest="t",
            dataset_size=len(DATA),
            sampler_rule="sequential-v1",
            seed=1,
        ),
        sampling=SamplingPlan(),
        update=UpdatePlan(
            prompts_per_update=ROWS, group_size=1, virtual_ranks=1, learning_rate=RATE
        ),
        required_invariants=("I2", "I3", "I4", "I10", "I10b", "I11", "I12", "I17", "I18", "I21"),
    )
    return made.model_copy(update=changes)


Change = Callable[[int, list[list[int]]], list[list[int]]]


def fine_tune(url: str, *, change: Change = lambda step, rows: rows, steps: int = 4) -> None:
    """A loop; ``change`` stands between the draw and the batch."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    names = dict(layer.named_parameters())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=RATE)

    def state() -> dict[str, Any]:
        return {"model": names, "masters": names, "optimizer": optimizer_part(optimizer, names)}

    with Recorder.open(url, "sft", plan(), policy=names) as record:
        record.data(data_digests(DATA), tokenizer="t")
        for step in range(steps):
            with record.iteration(step):
                start = step * ROWS
                indices = [(start + n) % len(DATA) for n in range(ROWS)]
                rows = [DATA[i] for i in indices]
                record.drawn(
                    step, start=start, indices=indices, epoch=start // len(DATA), prompts=rows
                )
                rows = change(step, rows)
                record.consumed(
                    step,
                    [Consumed(uid(start + n), row) for n, row in enumerate(rows)],
                    version=step,
                )
                with record.update(step, state) as update:
                    batch = torch.tensor(rows, dtype=torch.float32)
                    loss = layer(batch).square().sum() / batch.numel()
                    optimizer.zero_grad()
                    loss.backward()
                    norm = float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9))
                    optimizer.step()
                    update.micro_batch(
                        tokens=batch.numel(),
                        samples=len(rows),
                        divisor=batch.numel(),
                        groups=[uid(start + n)[:6] for n in range(ROWS)],
                    )
                    update.applied(
                        version=step + 1,
                        optimizer_step=step + 1,
                        learning_rate=RATE,
                        loss=float(loss.detach()),
                        grad_norm=norm,
                    )
        record.finish(iterations=steps, version=steps, policy=names)


def judged(tmp_path: Path, **options: Any) -> Verdict:
    url = f"sqlite:///{tmp_path}/ledger.db"
    fine_tune(url, **options)
    return verify(url)


def test_a_supervised_loop_is_clean(tmp_path: Path) -> None:
    verdict = judged(tmp_path)
    assert verdict.word == "clean", (verdict.findings, verdict.could_not)
    assert verdict.coverage.row("I12").status == "nothing to check"


def test_another_sequence_than_the_drawn_one_is_found(tmp_path: Path) -> None:
    verdict = judged(tmp_path, change=lambda step, rows: rows[::-1] if step == 2 else rows)
    assert {f.invariant for f in verdict.findings} == {"I11"}


def test_an_outage_spools_and_the_order_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, append = [True], Ledger.append

    def refuse(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        if away[0]:
            raise LedgerUnreachable("expected a ledger, found none")
        return append(self, *args, **kwargs)

    def back(step: int, rows: list[list[int]]) -> list[list[int]]:
        away[0] = step < 2
        return rows

    monkeypatch.setattr(Ledger, "append", refuse)
    verdict = judged(tmp_path, change=back)
    assert verdict.word == "clean", (verdict.findings, verdict.could_not)
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", read_only=True) as ledger:
        types = [event.type for event in ledger.read()]
    assert types.count("LedgerUnreachable") == types.count("LedgerRestored") == 1
    assert types.count("UpdateApplied") == 4
    assert not list((tmp_path / "ledger.db.spool").iterdir())


def test_versions_are_those_of_sampled_tokens_alone() -> None:
    sampled = [False, True, True, False]
    rows, count = generated_rows(
        [
            Generated("000000/0", [1, 2, 3, 4], [0.0] * 4, [0, 6, 7, 9], "e", "e#1", sampled),
            Generated("000000/1", [1, 2], [0.0] * 2, 5, "e", "e#1"),
        ]
    )
    assert (rows["version_min"], rows["version_max"]) == ([6, 5], [7, 5])
    assert count == 4
    assert [digest is None for digest in rows["mask_digest"]] == [False, True]


def test_a_long_loop_remembers_no_more_than_may_be_used(tmp_path: Path) -> None:
    """1,000 iterations; each trains on the samples of ``bound`` iterations before."""
    bound = 3
    declared = plan(sampling=SamplingPlan(staleness_bound=bound), iterations=1_000)
    entries, least = [], []
    with Recorder.open(f"sqlite:///{tmp_path}/l.db", "job", declared, policy="0" * 32) as record:
        for step in range(1_000):
            samples = [Generated(uid(step, n), [n], None, step, "e", "e#1") for n in range(2)]
            record.generated(step, samples, version=step)
            if step >= bound:
                record.consumed(step, [Consumed(uid(step - bound, 0), [0])], version=step)
                least.append(cast("BatchConsumed", record._pending[-1].event).version_min)
            if step % 2:  # with either call alone
                with record.update(step, STATE) as update:
                    update.applied(
                        version=step + 1,
                        optimizer_step=step + 1,
                        learning_rate=RATE,
                        loss=0.0,
                        grad_norm=1.0,
                        tokens=1,
                        divisor=1.0,
                    )
            else:
                with record.iteration(step):
                    pass
            entries.append(sum(len(made) for made in record._versions.values()))
    assert least == list(range(1_000 - bound))
    assert max(entries) <= 2 * (bound + 2)


@pytest.mark.parametrize("shape", ["all", "none", "run", "holes", "numbers"])
def test_lists_arrays_and_tensors_have_the_same_digests(shape: str) -> None:
    """Seed 6; lists take a shorter way than arrays, runs of a mask than scattered ones."""
    random = np.random.default_rng(6)
    tokens, logps = random.integers(0, 2**32, 40, dtype=np.uint32), random.random(40, np.float32)
    place = np.arange(40)
    mask = {
        "all": place >= 0,
        "none": place < 0,
        "run": (place > 7) & (place < 31),
        "holes": place % 3 == 0,
        "numbers": place > 5,
    }[shape]
    versions = np.where(place > 20, 4, 3)
    rows = []
    for form in (list, np.asarray, lambda values: torch.tensor(np.asarray(values).astype("i8"))):
        on = [2.5 * n for n in mask] if shape == "numbers" else form(mask.tolist())
        floats = logps.tolist() if form is list else logps
        some = Generated("000000/0", form(tokens.tolist()), floats, 3, "e", "e#1", on)
        some.version = versions.tolist() if form is list else versions
        used = Consumed("000000/0", some.tokens, trained=some.sampled, logps=floats)
        rows.append((generated_rows([some]), consumed_event("a", 0, [used], 0, 0)[1]))
    assert rows[0] == rows[1] == rows[2]
    assert rows[0][0][1] == rows[0][1]["tokens"][0] == mask.sum()


def test_samples_of_an_engine_without_log_probabilities() -> None:
    on = [False, True]
    some = [Generated("000000/0", [1, 2], None, 0, "e", "e#1", on)]
    none = [Generated("000000/0", [1, 2], [], 0, "e", "e#1")]
    assert generated_rows(some)[0]["logp_digest"] == generated_rows(none)[0]["logp_digest"]


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    layer = torch.nn.Linear(2, 2)
    with Recorder.open(
        f"sqlite:///{tmp_path}/l.db", "job", plan(), policy=dict(layer.named_parameters())
    ) as made:
        yield made


STATE = {"model": {"w": 1.0}, "masters": {"w": 1.0}, "optimizer": {"step": 0}}


def test_a_job_that_goes_on_with_another_plan_is_told_the_field(tmp_path: Path) -> None:
    url, made = f"sqlite:///{tmp_path}/l.db", plan()
    other = made.model_copy(
        update={"update": made.update.model_copy(update={"learning_rate": 0.5, "clip_norm": 3.0})}
    )
    Recorder.open(url, "job", made, policy={"w": 1}).close()
    with pytest.raises(
        RecorderMisuse, match=r"found update\.learning_rate 0\.5 where it has 0\.01, and 1 more"
    ):
        Recorder.open(url, "job", other, policy={"w": 1})


def test_an_amended_plan_may_be_given_as_it_stood_and_as_it_stands(tmp_path: Path) -> None:
    url, made = f"sqlite:///{tmp_path}/l.db", plan()
    with Recorder.open(url, "job", made, policy={"w": 1}) as record:
        record.amend("update.learning_rate", 0.5, "the loss stood still")
        amended = record.plan
    for given in (made, amended):
        with Recorder.open(url, "job", given, policy={"w": 1}) as record:
            assert record.plan == amended != made


def test_an_update_without_applied_is_refused(recorder: Recorder) -> None:
    with pytest.raises(RecorderMisuse, match=r"expected applied\(\)"), recorder.update(0, STATE):
        pass


def test_an_update_without_optimizer_is_refused(recorder: Recorder) -> None:
    state = {name: part for name, part in STATE.items() if name != "optimizer"}
    with (
        pytest.raises(RecorderMisuse, match="found no optimizer"),
        recorder.update(0, state),
    ):
        pass


def test_an_update_of_nothing_is_refused(recorder: Recorder) -> None:
    with (
        pytest.raises(RecorderMisuse, match="what the gradient is made of"),
        recorder.update(0, STATE) as update,
    ):
        update.applied(version=1, optimizer_step=1, learning_rate=1.0, loss=0.0, grad_norm=0.0)


def test_replays_of_other_lengths_are_refused(recorder: Recorder) -> None:
    with pytest.raises(RecorderMisuse, match="compare the same tokens"):
        recorder.replayed(0, "behaviour", [1.0], [1.0, 2.0], replica="r", version=0)


def test_a_part_of_objects_is_refused() -> None:
    with pytest.raises(RecorderMisuse, match="found object"):
        part_root({"sampler": object()})


def test_optimizer_state_of_unnamed_parameters_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    assert sorted(optimizer_part(optimizer, dict(layer.named_parameters())))[:2] == [
        "bias/exp_avg",
        "bias/exp_avg_sq",
    ]
    with pytest.raises(RecorderMisuse, match="no name has"):
        optimizer_part(optimizer, {"weight": layer.weight})


def test_digests_tell_values_apart() -> None:
    values = [1, 1.0, True, "1", b"1", None, [1], {"a": 1}, torch.ones(1), torch.ones(1, 1)]
    digests = [value_digest(v) for v in values]
    assert digests[0] == digests[2]  # a flag is a number, as in Python
    assert len(set(digests)) == len(values) - 1
    generator = torch.Generator().manual_seed(3)
    (name,) = rng_parts({"rank/0": generator.get_state()})
    assert name == "rng:rank/0"


@pytest.mark.parametrize(
    ("rate", "decay", "clip", "wrong"),
    [
        (0.1, 0.01, 1.0, set()),
        (0.11, 0.01, 1.0, {"step"}),
        (0.1, 0.02, 1.0, {"step"}),
        (0.1, 0.01, 0.5, {"gradient", "norm"}),
    ],
)
def test_the_step_probe_agrees_with_adamw(
    rate: float, decay: float, clip: float, wrong: set[str]
) -> None:
    """Rate, decay and clip as the probe believes them; the loop has 0.1, 0.01 and 1."""
    torch.manual_seed(2)
    layer = torch.nn.Linear(30, 20)
    names = dict(layer.named_parameters())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(1, 4):
        kept = optimizer.state
        first = {n: kept[t].get("exp_avg", torch.zeros_like(t)) for n, t in names.items()}
        second = {n: kept[t].get("exp_avg_sq", torch.zeros_like(t)) for n, t in names.items()}
        if step == 1:
            for n, t in names.items():
                kept[t].update(step=torch.tensor(0.0), exp_avg=first[n], exp_avg_sq=second[n])
        probe = StepProbe(Adam(weight_decay=decay), clip_norm=clip)
        probe.begin(names, first, second)
        optimizer.zero_grad()
        layer(torch.randn(8, 30)).square().sum().backward()
        probe.contribution({n: t.grad for n, t in names.items()})
        norm = float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0))
        probe.reduced({n: t.grad for n, t in names.items()}, norm)
        optimizer.step()
        found = probe.residuals(rate, step)
        assert {n for n, r in found.items() if r.largest > r.allowed} == wrong, found


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda terms: terms["policy"] + 0.1 * terms["kl"], set()),
        (lambda terms: terms["policy"] - 0.1 * terms["kl"], {"loss", "loss gradient"}),
        (lambda terms: terms["policy"] + 0.1 * terms["kl"].detach(), {"loss gradient"}),
        (lambda terms: terms["policy"], {"loss", "loss gradient"}),
        (lambda terms: 1.01 * (terms["policy"] + 0.1 * terms["kl"]), {"loss", "loss gradient"}),
    ],
)
@pytest.mark.parametrize("high", [None, 0.28])
def test_the_loss_probe_agrees_with_autograd(
    change: Callable[[dict[str, torch.Tensor]], torch.Tensor], wrong: set[str], high: float | None
) -> None:
    generator = torch.Generator().manual_seed(5)
    print("seed 5")

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    leaf = draw(4, 6).requires_grad_(True)
    new = leaf * 1.0
    old, engine, reference = (new.detach() + 0.3 * draw(4, 6) for _ in range(3))
    advantages, trained = draw(4), draw(4, 6) > -0.5
    ratio, weight = torch.exp(new - old), torch.exp(old - engine).clamp(max=1.5)
    gap = reference - new
    clipped = ratio.clamp(0.8, 1.2 if high is None else 1 + high)
    side = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    terms = {
        "policy": torch.where(trained, -side * weight, 0.0).sum() / 17,
        "kl": torch.where(trained, torch.exp(gap) - gap - 1, 0.0).sum() / 17,
    }
    loss = change(terms)
    probe = PolicyLoss(kl_coefficient=0.1, clip_range_high=high, truncation=1.5)
    probe.watch(
        new=new,
        old=old,
        engine=engine,
        reference=reference,
        advantages=advantages,
        trained=trained,
        divisor=17,
        value=loss,
    )
    loss.backward()
    found = probe.residuals()
    assert {n for n, r in found.items() if r.largest > r.allowed} == wrong, found
    assert probe.terms()["kl"].value == pytest.approx(float(terms["kl"].detach()), rel=1e-5)


class Entered(Exception):
    """The block of an update was entered."""


def test_a_loss_without_a_kl_term_needs_no_reference() -> None:
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    near, on = new.detach() + 0.1, torch.ones(1, 2)
    given = {"new": new, "old": near, "engine": near, "advantages": torch.ones(1), "trained": on}
    loss = -torch.exp(new - near).sum() / 2
    probe = PolicyLoss(kl_coefficient=0.0)
    probe.watch(**given, divisor=2, value=loss)
    loss.backward()
    found = probe.residuals()
    assert {n for n, r in found.items() if r.largest > r.allowed} == set(), found
    with pytest.raises(RecorderMisuse, match="expected the reference's log-probabilities"):
        PolicyLoss(kl_coefficient=0.1).watch(**given, divisor=2, value=loss)


@pytest.mark.parametrize(
    ("declared", "loss", "clip_norm", "wrong"),
    [
        ({}, {"clip_range": 0.3, "truncation": 2.0}, 5.0, ""),
        ({"clip_range": 0.2}, {}, 1.0, ""),
        ({"clip_range": 0.2}, {"clip_range": 0.3}, 1.0, "clip_range 0.2"),
        ({"clip_range": 0.2}, {"clip_range_high": 0.28}, 1.0, "clip_range_high 0.2"),
        ({"clip_range": 0.2, "clip_range_high": 0.28}, {}, 1.0, "clip_range_high 0.28"),
        ({"clip_range": 0.2, "clip_range_high": 0.28}, {"clip_range_high": 0.28}, 1.0, ""),
        ({"truncation": 1.5}, {}, 1.0, "truncation 1.5, .* found none"),
        ({"truncation": 1.5}, {"truncation": 1.5}, 1.0, ""),
        ({"clip_norm": 1.0}, {}, 1.0, ""),
        ({"clip_norm": 1.0}, {}, 2.0, "clip_norm 1, .* found 2"),
        ({"clip_norm": 1.0}, {}, None, "clip_norm 1, .* found none"),
    ],
)
def test_probes_compute_with_the_declared_constants(
    declared: dict[str, float],
    loss: dict[str, float],
    clip_norm: float | None,
    wrong: str,
    tmp_path: Path,
) -> None:
    """Else a loop would be held against itself. An amendment of the plan allows another one."""
    update = plan().update.model_copy(update=declared)
    weights = {"w": torch.zeros(2)}
    with Recorder.open(
        f"sqlite:///{tmp_path}/l.db", "job", plan(update=update), policy=weights
    ) as record:
        probes: dict[str, Any] = {
            "probe": StepProbe(Adam(), clip_norm=clip_norm),
            "loss": PolicyLoss(kl_coefficient=0.0, **loss),
        }

        def begin() -> None:
            state = {"model": weights, "masters": weights, "optimizer": {"step": 0}}
            with pytest.raises(Entered), record.update(0, lambda: state, **probes):
                raise Entered

        if not wrong:
            begin()
            return
        with pytest.raises(RecorderMisuse, match=f"expected {wrong}"):
            begin()
        field = wrong.split()[0]
        found = clip_norm if field == "clip_norm" else getattr(probes["loss"], field)
        record.amend(f"update.{field}", found, "another is meant")
        if found is not None:
            begin()


@pytest.mark.parametrize("packed", ["rows", "flat"])
def test_the_loss_probe_takes_packed_samples(packed: str) -> None:
    """Each token has its sample's advantage, in one row or flat."""
    new = torch.tensor([[-1.0, -2.0, -0.5, -1.5]], requires_grad=True)
    near = new.detach() + 0.1
    advantages, trained = torch.tensor([[1.0, 1.0, -2.0, -2.0]]), torch.tensor([[1, 1, 0, 1]])
    shape = (1, 4) if packed == "rows" else (4,)
    probe = PolicyLoss(kl_coefficient=0.0)
    ratio = torch.exp(new - near)
    side = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -(side * trained).sum() / 3
    flat = new.reshape(shape)
    probe.watch(
        new=flat,
        old=near.reshape(shape),
        engine=near.reshape(shape),
        reference=near.reshape(shape),
        advantages=advantages.reshape(shape),
        trained=trained.reshape(shape),
        divisor=3,
        value=loss,
    )
    assert (residual := probe.residuals()["loss"]).largest <= residual.allowed


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("advantages", (3,)),
        ("advantages", (2, 3)),
        ("advantages", (1, 2, 4)),
        ("old", (2,)),
        ("engine", (1, 4)),
        ("reference", (2, 1)),
        ("trained", (4,)),
    ],
)
def test_inputs_of_a_loss_that_would_be_broadcast_are_refused(
    name: str, shape: tuple[int, ...]
) -> None:
    inputs = {n: torch.zeros(2, 4) for n in ("new", "old", "engine", "reference", "trained")}
    inputs |= {"advantages": torch.zeros(2), name: torch.zeros(shape)}
    with pytest.raises(RecorderMisuse, match=f"expected {name} of shape"):
        PolicyLoss(kl_coefficient=0.0).watch(**inputs, divisor=1, value=0.0)


def test_a_lossy_sync_is_recorded_with_its_bound(tmp_path: Path) -> None:
    """Engines are compared with what the patch leads to, not with the tensors it came from."""
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(4096, generator=generator)}
    new = {"w": base["w"] + 0.01 * torch.randn(4096, generator=generator)}
    data = encode_patch(base, new, base_version=0, version=1, lossy=Lossy(max_error=1e-3))
    patch = read_patch(data)
    assert patch.loss is not None
    assert 0 < patch.loss.largest_error <= patch.loss.max_error == 1e-3
    engine = {"w": base["w"].clone()}
    apply_patch(data, engine, version=0, accept_error=1e-3)

    url = f"sqlite:///{tmp_path}/l.db"
    syncs = SyncPlan(encoding="int8-difference", max_error=1e-3)
    with Recorder.open(url, "job", plan(syncs=syncs), policy=base) as record:
        record.started("rollout", "engine", "one")
        with record.sync(1, new, ["engine", "other"], encoding="patch", patch=patch) as sync:
            sync.delivered("engine", "one", engine)
            sync.delivered("other", "two", base)
    with Ledger.open(url) as ledger:
        events = list(ledger.read(job="job"))
    (started,) = [e.body for e in events if e.type == "WeightSyncStarted"]
    assert started["lossy"] == patch.loss.model_dump(exclude_none=True)
    assert started["lossy"]["root"] != started["source_root"]
    differing = {
        e.body["target"]: (e.body["root"], e.body.get("differing", []))
        for e in events
        if e.type == "WeightSyncDelivered"
    }
    assert differing["engine"] == (patch.loss.root, [])
    assert differing["other"][1] == ["w"]
    lossless = read_patch(encode_patch(base, new, base_version=0, version=1))
    assert lossless.loss is None
