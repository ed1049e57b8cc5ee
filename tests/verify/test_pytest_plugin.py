"""Goal: the plugin fails a test so that a reviewer sees at once what is wrong, and disturbs nobody.

Method: small projects are made and run by pytester: in this process, in one of its own, under
xdist, with and without GitHub Actions; JUnit files and golden traces are read back.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from shiftbook.verify.replay.commands import replay as replay_command
from tests.verify.honest_run import Run, honest_run, policy

pytest_plugins = ["pytester"]

JOB = """
    import os
    from shiftbook.verify.replay.protocol import Job, Numbers, Sample, Samples, Step

    def run(conditions):
        for number in range(conditions.steps):
            wrong = conditions.moves is not None and number == 1
            sample = Sample(f"{number:06d}/0", "aa" if not wrong else "bb", reward=1.0)
            loss = float(os.environ.get("LOSS", "0.5"))
            yield Step(number, [Samples("rollout", [sample]), Numbers("trainer", {"loss": loss})])

    job = Job(run, movable=True)
"""
TESTS = """
    def test_same(shiftbook_replay):
        assert shiftbook_replay("small:job").exit_code == 0

    def test_moves(shiftbook_replay):
        shiftbook_replay("small:job", moves=7)

    def test_unchecked(shiftbook_replay):
        assert shiftbook_replay("small:job", moves=7, check=False).exit_code == 1
"""


LEDGER_TESTS = """
    def test_honest(shiftbook_verify):
        assert shiftbook_verify("honest.db").exit_code == 0

    def test_faulty(shiftbook_verify):
        shiftbook_verify("faulty.db")

    def test_absent(shiftbook_verify):
        shiftbook_verify("absent.db")
"""
"""Their ledgers lie in the project."""


def faulty_run() -> Run:
    """A run in which an engine holds other weights than those that were sent."""
    run = honest_run()
    run.get("WeightSyncDelivered", 2).change(root=policy(9), differing=("lm_head",))
    return run


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("LOSS", raising=False)
    pytester.makepyfile(small=JOB)
    pytester.syspathinsert()
    return pytester


def test_a_divergence_is_understood_at_first_sight(project: pytest.Pytester) -> None:
    project.makepyfile(test_job=TESTS)
    result = project.runpytest("-p", "no:cacheprovider", "-q")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "shiftbook replay: diverged",
            "first divergence: step 1, component rollout: sample 000001/0: its tokens came out *",
            "  expected: aa",
            "  found:    bb",
            "  before:   2 observations were the same",
            "diverged: small:job (seed=0 steps=2 * moves=random:7) against a run with *",
            "again:     shiftbook replay small:job --moves random:7",
            "why:       shiftbook replay small:job --bisect",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "pytest_plugin.py" not in result.stdout.str()
    assert "::error" not in result.stdout.str()


def properties(path: Path) -> dict[str, dict[str | None, str | None]]:
    """Properties of each test in a JUnit file."""
    return {
        str(case.get("name")): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in ET.parse(path).getroot().iter("testcase")
    }


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_junit_files_have_the_outcome_as_properties(
    workers: tuple[str, ...], project: pytest.Pytester
) -> None:
    """Under xdist, whose workers send what they found to the process that writes the file, too."""
    if workers:
        pytest.importorskip("xdist")
    honest_run().write(project.path / "honest.db")
    faulty_run().write(project.path / "faulty.db")
    project.makepyfile(test_job=TESTS, test_ledger=LEDGER_TESTS)
    words = ("-q", "--junitxml=out.xml", "-p", "no:cacheprovider", *workers)
    project.runpytest_subprocess(*words).assert_outcomes(passed=3, failed=3)
    found = properties(project.path / "out.xml")
    assert found["test_honest"]["shiftbook_verify_verdict"] == "clean"
    assert found["test_honest"]["shiftbook_verify_exit_code"] == "0"
    faulty = found["test_faulty"]
    assert faulty["shiftbook_verify_ledger"] == "sqlite:///faulty.db"
    assert faulty["shiftbook_verify_verdict"] == "findings"
    assert faulty["shiftbook_verify_findings"] == "2"
    assert str(faulty["shiftbook_headline"]).startswith("I6 broken at position ")
    assert str(found["test_absent"]["shiftbook_headline"]).startswith("could not verify: ")
    assert found["test_moves"]["shiftbook_headline"] is not None
    assert found["test_same"]["shiftbook_replay_outcome"] == "same"
    assert found["test_same"]["shiftbook_replay_target"] == "small:job"
    assert found["test_moves"]["shiftbook_replay_exit_code"] == "1"
    assert found["test_moves"]["shiftbook_replay_divergence"] == "1 rollout sample 000001/0"


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)])
def test_failures_are_annotated_in_github_actions_under_xdist_too(
    workers: tuple[str, ...], project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers:
        pytest.importorskip("xdist")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    project.makepyfile(test_job=TESTS)
    result = project.runpytest_subprocess("-q", "-p", "no:cacheprovider", *workers)
    result.assert_outcomes(passed=2, failed=1)
    lines = [line for line in result.stdout.lines if line.startswith("::error")]
    assert len(lines) == 1, result.stdout.str()
    assert lines[0].startswith("::error file=test_job.py,line=4,title=test_moves%3A not the same::")
    assert "replay diverged: step 1, component rollout: sample 000001/0" in lines[0]


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)])
def test_verdicts_are_annotated_in_github_actions_too(
    workers: tuple[str, ...], project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding, a ledger that is not there, and none for what is clean."""
    if workers:
        pytest.importorskip("xdist")
    honest_run().write(project.path / "honest.db")
    run = faulty_run()
    run.write(project.path / "faulty.db")
    project.makepyfile(test_ledger=LEDGER_TESTS)
    for actions in ("true", "false"):
        monkeypatch.setenv("GITHUB_ACTIONS", actions)
        result = project.runpytest_subprocess("-q", "-p", "no:cacheprovider", *workers)
        result.assert_outcomes(passed=1, failed=2)
        lines = sorted(line for line in result.stdout.lines if line.startswith("::error"))
        if actions == "false":
            assert lines == []
            continue
        finding, absent = lines
        at = run.at("WeightSyncDelivered", 2)
        assert finding.startswith(
            "::error file=test_ledger.py,line=4,title=test_faulty%3A not clean::"
            f"I6 broken at position {at}: expected "
        )
        assert absent.startswith(
            "::error file=test_ledger.py,line=7,title=test_absent%3A not clean::could not verify: "
        )
        assert "absent.db" in absent


def test_golden_traces_lie_beside_the_test_and_are_written_when_asked(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = project.mkdir("tests")
    (tests / "test_golden.py").write_text(
        "def test_golden(shiftbook_replay):\n"
        "    shiftbook_replay('small:job', golden='small.golden')\n",
        encoding="utf-8",
    )
    missing = project.runpytest("-q", "tests")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*small.golden: expected a golden trace, found no file; *"])
    project.runpytest("-q", "tests", "--shiftbook-update-golden").assert_outcomes(passed=1)
    golden = tests / "small.golden"
    assert golden.is_file()
    project.runpytest("-q", "tests").assert_outcomes(passed=1)
    monkeypatch.setenv("LOSS", "0.75")
    changed = project.runpytest("-q", "tests")
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "first divergence: step 0, component trainer: number loss: its value came out *",
            "  by: *0.25 (0.333 of it)",
            "meant so:  pytest --shiftbook-update-golden 'tests/test_golden.py::test_golden', *",
        ]
    )
    monkeypatch.delenv("LOSS")
    golden.write_text(golden.read_text("utf-8").replace("reward=1.0", "reward=0.0"), "utf-8")
    edited = project.runpytest("-q", "tests")
    edited.assert_outcomes(failed=1)
    edited.stdout.fnmatch_lines(["*the file was edited by hand or torn*"])


@pytest.mark.parametrize(("word", "outcome"), [("fail", "failed"), ("skip", "skipped")])
def test_another_stack_fails_or_skips_as_the_project_says(
    word: str, outcome: str, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from shiftbook.verify.replay.golden import read_golden, write_golden

    project.makeini(f"[pytest]\nshiftbook_other_stack = {word}\n")
    project.makepyfile(
        "def test_golden(shiftbook_replay):\n"
        "    shiftbook_replay('small:job', golden='small.golden')\n"
    )
    project.runpytest("-q", "--shiftbook-update-golden").assert_outcomes(passed=1)
    golden = project.path / "small.golden"
    trace, _ = read_golden(golden)
    write_golden(golden, replace(trace, stack="torch=1.0"))
    project.runpytest("-q").assert_outcomes(passed=1)
    monkeypatch.setenv("LOSS", "0.75")
    project.runpytest("-q").assert_outcomes(**{outcome: 1})


def test_a_verdict_with_findings_fails_with_the_first_of_them(project: pytest.Pytester) -> None:
    honest_run().write(project.path / "honest.db")
    faulty_run().write(project.path / "faulty.db")
    project.makepyfile(test_ledger=LEDGER_TESTS)
    result = project.runpytest("-q")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["shiftbook verify: findings", "*I6*", "*differing: lm_head*"])
    result.stdout.fnmatch_lines(["shiftbook verify: could not judge", "*absent.db*"])


def test_who_does_not_use_it_is_not_disturbed(project: pytest.Pytester) -> None:
    project.makepyfile(test_plain="def test_plain():\n    assert 1 + 1 == 2\n")
    result = project.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    text = result.stdout.str() + result.stderr.str()
    # It stands in the list of plugins that pytest prints by itself, and nowhere else.
    lines = [line for line in text.splitlines() if "shiftbook" in line.lower()]
    assert all(line.startswith("plugins: ") for line in lines), lines
    result = project.runpytest_subprocess("-p", "no:shiftbook")
    result.assert_outcomes(passed=1)


def test_pytest_starts_without_torch_ray_and_the_ledger(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n", encoding="utf-8")
    code = (
        "import sys, pytest\n"
        "assert pytest.main(['-q', '-p', 'no:cacheprovider', '--co']) == 0\n"
        "heavy = ('torch', 'ray', 'numba', 'sqlalchemy', 'pydantic', 'numpy', 'click')\n"
        "print(sorted(set(heavy) & set(sys.modules)), "
        "'shiftbook.verify.pytest_plugin' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] True", done.stdout


CI = Path(__file__).parents[2] / "docs" / "ci.md"


def test_the_workflow_that_the_documentation_offers_can_be_used() -> None:
    """It is YAML with what a workflow needs, and what it calls is there."""
    yaml = pytest.importorskip("yaml")
    (block,) = re.findall(r"```yaml\n(.*?)```", CI.read_text("utf-8"), re.S)
    workflow = yaml.safe_load(block)
    trigger = workflow[True]  # YAML 1.1 reads the word "on" so, and GitHub does not mind
    assert trigger == "pull_request"
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
    assert all(isinstance(value, str) for value in job["env"].values())
    steps = job["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step
    )
    commands = [step["run"] for step in steps if "run" in step]
    extras = re.search(r"\[([\w,]+)\]", next(c for c in commands if c.startswith("pip install")))
    declared = tomllib.loads((CI.parents[1] / "pyproject.toml").read_text("utf-8"))
    assert extras is not None
    assert {*extras[1].split(",")} <= {*declared["project"]["optional-dependencies"]}
    report = next(c for c in commands if c.startswith("pytest")).split("--junitxml=")[1]
    upload = next(step["with"] for step in steps if "upload-artifact" in step.get("uses", ""))
    assert upload["path"] == report
    bisect = shlex.split(next(c for c in commands if c.startswith("shiftbook")))
    context = replay_command.make_context("replay", bisect[2:])
    assert bisect[1] == "replay"
    assert context.params["bisect"] is True
