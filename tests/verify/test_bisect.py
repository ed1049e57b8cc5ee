"""Goal: ``--bisect`` names the cause of a job that differs from itself, and where it acts.

Method: one small job for each cause is run in processes of its own, watched and under the
interventions; the cause, the line that drew, and the operation and module are compared with what
the job does. An honest job that reads clocks and entropy without using them is accused of nothing.
"""

from __future__ import annotations

import json

import pytest

from shiftbook.verify.replay.bisect import bisect, report_lines
from tests.verify.test_replay import call

JOBS = "tests.verify.bisect_jobs:"
LIGHT = "tests.verify.bisect_jobs_light:"
"""Jobs without torch, whose import takes most of the time of a run."""


@pytest.fixture(autouse=True)
def _free_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.parametrize(
    ("name", "cause", "drawn"),
    [
        ("python_random", "python-random", "random.random at "),
        ("hash_order", "hash-order", ""),
        pytest.param("clock", "clock", "time.time at ", marks=pytest.mark.slow),
        pytest.param("entropy", "entropy", "uuid.uuid4 at ", marks=pytest.mark.slow),
    ],
)
def test_the_cause_outside_torch_is_named_with_its_line(name: str, cause: str, drawn: str) -> None:
    report = bisect(JOBS + name)
    text = "\n".join(report_lines(report))
    print(text)
    assert report.exit_code == 1
    assert report.cured_by == (cause,), text
    assert report.component == "reward"
    if drawn:
        assert report.suspects[0].startswith(drawn), text
        assert "bisect_jobs.py:" in report.suspects[0], text


@pytest.mark.parametrize(
    ("name", "cause"),
    [("arrival", "one-thread"), ("dict_order", "hash-order"), ("numpy_random", "numpy-random")],
)
def test_an_order_or_a_draw_of_a_light_job_is_named(name: str, cause: str) -> None:
    """A sum in the order of arrival, a dict in the order of a set, an unseeded generator."""
    report = bisect(LIGHT + name)
    text = "\n".join(report_lines(report))
    print(text)
    assert report.exit_code == 1
    assert report.cured_by == (cause,), text
    assert report.component == "reward"


@pytest.mark.slow
def test_an_honest_job_is_accused_of_nothing() -> None:
    report = bisect(JOBS + "honest")
    assert report.exit_code == 0
    assert "8 runs of one seed showed the same" in "\n".join(report_lines(report))


@pytest.mark.slow
def test_the_old_generator_of_numpy_is_named_too() -> None:
    report = bisect(JOBS + "legacy_numpy")
    text = "\n".join(report_lines(report))
    print(text)
    assert report.cured_by == ("numpy-random",), text


@pytest.mark.slow
def test_two_causes_at_once_are_both_named() -> None:
    report = bisect(JOBS + "both")
    assert set(report.cured_by) == {"python-random", "numpy-random"}, report


@pytest.mark.slow
def test_an_operation_of_torch_is_named_with_module_and_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, JOBS + "torch_random", "--bisect", "--format", "json")
    report = json.loads(out)
    assert code == report["exit_code"] == 1
    assert report["cured_by"] == ["torch-random"], out
    assert report["module"] == "Tower.noise", out
    assert report["operation"].startswith("aten::"), out
    assert "dropout" in report["operation"] or "bernoulli" in report["operation"], out
    assert report["inputs_equal"] is True
    assert (report["component"], report["step"]) == ("trainer", 0)
    assert "bisect_jobs.py:" in report["source"], out


@pytest.mark.slow
def test_a_kernel_that_adds_without_an_order_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, JOBS + "kernel", "--bisect")
    assert code == 1
    assert "aten::index_put_" in out, out
    assert "its inputs are equal: it makes the difference itself" in out
    assert "under the intervention deterministic-kernels" in out, out
