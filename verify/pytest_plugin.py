"""The pytest plugin: the fixtures ``shiftbook_replay`` and ``shiftbook_verify``.

It is registered where the package is installed, and does nothing for tests that use neither
fixture: no line is printed, no warning made, and neither torch nor Ray is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shiftbook.verify.replay.outcome import Outcome
    from shiftbook.verify.verdict import Verdict

HEADLINE = "shiftbook_headline"
"""Property of a failed test that says in one line what is wrong."""
SHOWN = 3
"""Findings that a failure tells in full."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the fixtures."""
    group = parser.getgroup("shiftbook", "determinism and verdicts (shiftbook)")
    group.addoption(
        "--shiftbook-update-golden",
        action="store_true",
        help="write the golden traces of shiftbook_replay anew, for review",
    )
    group.addoption(
        "--shiftbook-timeout",
        type=float,
        default=None,
        metavar="S",
        help="seconds that one run of shiftbook_replay may take",
    )
    parser.addini(
        "shiftbook_other_stack",
        "what a golden trace from another stack, with other bits here, does: fail or skip",
        default="fail",
    )


class Replayer:
    """What ``shiftbook_replay`` gives: call it with a target."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def __call__(
        self,
        target: Any,
        *,
        schedule: str | None = None,
        workers: Mapping[str, int] | None = None,
        moves: int | None = None,
        seed: int | None = None,
        steps: int | None = None,
        golden: str | Path | None = None,
        check: bool = True,
    ) -> Outcome:
        """Replay a target and fail the test where it diverges or cannot be told.

        ``target`` is a Python path, a ledger, or a job object; ``golden`` is relative to the
        test's folder; ``moves`` is the seed of injected moves. With ``check`` false the outcome is
        returned whatever it is.
        """
        __tracebackhide__ = True
        from shiftbook.ledger.errors import ShiftbookError
        from shiftbook.verify.replay.outcome import replay
        from shiftbook.verify.replay.running import LIMIT_S, Asked

        config = self._request.config
        place = None if golden is None else self._request.path.parent / golden
        asked = Asked(seed, steps, schedule, workers, moves)
        try:
            outcome = replay(
                target,
                asked,
                golden=place,
                update_golden=bool(place and config.getoption("--shiftbook-update-golden")),
                limit_s=config.getoption("--shiftbook-timeout") or LIMIT_S,
            )
        except ShiftbookError as error:
            if not check:
                raise
            self._fail(f"could not replay: {error}", f"shiftbook replay: could not tell\n{error}")
        self._record(outcome)
        if check and outcome.exit_code:
            self._judge(outcome, asked, place)
        return outcome

    def _record(self, outcome: Outcome) -> None:
        _property(self._request, "shiftbook_replay_target", outcome.target)
        _property(self._request, "shiftbook_replay_outcome", outcome.word)
        _property(self._request, "shiftbook_replay_exit_code", str(outcome.exit_code))
        _property(self._request, "shiftbook_replay_observations", str(outcome.observations))
        found = outcome.divergence
        if found is not None:
            at = f"{found.step} {found.component} {found.kind} {found.name}"
            _property(self._request, "shiftbook_replay_divergence", at)

    def _judge(self, outcome: Outcome, asked: Any, golden: Path | None) -> None:
        __tracebackhide__ = True
        from shiftbook.verify.replay.story import headline, outcome_lines

        skips = self._request.config.getini("shiftbook_other_stack") == "skip"
        if outcome.other_stack and skips:
            pytest.skip(outcome.could_not)
        lines = [f"shiftbook replay: {outcome.word}", *outcome_lines(outcome), ""]
        lines += self._advice(outcome, asked, golden)
        if outcome.divergence is not None and not outcome.could_not:
            title = f"replay diverged: {headline(outcome.divergence)}"
        else:
            title = f"replay could not tell: {outcome.could_not}"
        self._fail(title, "\n".join(lines))

    def _advice(self, outcome: Outcome, asked: Any, golden: Path | None) -> list[str]:
        words = [f"shiftbook replay {outcome.target}"]
        if asked.schedule:
            words.append(f"--schedule {asked.schedule}")
        if asked.workers:
            words.append("--workers " + ",".join(f"{n}={c}" for n, c in asked.workers.items()))
        if asked.moves is not None:
            words.append(f"--moves random:{asked.moves}")
        for name in ("seed", "steps"):
            if getattr(asked, name) is not None:
                words.append(f"--{name} {getattr(asked, name)}")
        lines = []
        if golden is not None:
            words.append(f"--golden {_shown(golden)}")
            node = self._request.node.nodeid
            lines = [f"meant so:  pytest --shiftbook-update-golden '{node}', then review {golden}"]
        again = f"again:     {' '.join(words)}"
        why = f"why:       shiftbook replay {outcome.target} --bisect"
        return [again, why, *lines]

    def _fail(self, title: str, text: str) -> None:
        __tracebackhide__ = True
        _property(self._request, HEADLINE, title)
        pytest.fail(text, pytrace=False)


class Verifier:
    """What ``shiftbook_verify`` gives: call it with a ledger."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def __call__(
        self,
        ledger: str | Path,
        *,
        job: str | None = None,
        evidence: str | None = None,
        allow_unknown: bool = False,
        check: bool = True,
    ) -> Verdict:
        """Verify a ledger or archive and fail the test for findings, or where it could not judge.

        ``ledger`` is a URL or the path of a file. ``allow_unknown`` passes over events of types
        that this build does not know. With ``check`` false the verdict is returned
        whatever it is.
        """
        __tracebackhide__ = True
        from shiftbook.ledger.errors import ShiftbookError
        from shiftbook.verify.verdict import verify

        url = str(ledger) if "://" in str(ledger) else f"sqlite:///{ledger}"
        try:
            verdict = verify(url, job, evidence=evidence, allow_unknown=allow_unknown)
        except ShiftbookError as error:
            if not check:
                raise
            _property(self._request, HEADLINE, f"could not verify: {error}")
            pytest.fail(f"shiftbook verify: could not judge\n{error}", pytrace=False)
        _property(self._request, "shiftbook_verify_ledger", verdict.url)
        _property(self._request, "shiftbook_verify_verdict", verdict.word)
        _property(self._request, "shiftbook_verify_exit_code", str(verdict.exit_code))
        _property(self._request, "shiftbook_verify_findings", str(len(verdict.findings)))
        if check and verdict.exit_code:
            self._fail(verdict)
        return verdict

    def _fail(self, verdict: Verdict) -> None:
        __tracebackhide__ = True
        from shiftbook.verify.story import closing_line, finding_lines

        lines = [f"shiftbook verify: {verdict.word}"]
        for finding in verdict.findings[:SHOWN]:
            lines += [*finding_lines(finding), ""]
        if len(verdict.findings) > SHOWN:
            lines.append(f"and {len(verdict.findings) - SHOWN} more findings")
        lines += [f"could not judge: {reason}" for reason in verdict.could_not]
        lines += [closing_line(verdict), f"again: shiftbook verify {verdict.url}"]
        if verdict.findings:
            first = verdict.findings[0]
            title = (
                f"{first.invariant} broken at position {first.position}: expected "
                f"{first.expected}, found {first.found}"
            )
        else:
            title = f"verify could not judge: {verdict.could_not[0]}"
        _property(self._request, HEADLINE, title)
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.fixture
def shiftbook_replay(request: pytest.FixtureRequest) -> Replayer:
    """Replay a small job and fail with the first divergence: ``shiftbook_replay(target, ...)``."""
    return Replayer(request)


@pytest.fixture
def shiftbook_verify(request: pytest.FixtureRequest) -> Verifier:
    """Verify a ledger and fail with its findings: ``shiftbook_verify(ledger, ...)``."""
    return Verifier(request)


def _property(request: pytest.FixtureRequest, name: str, value: str) -> None:
    """Property of the test in JUnit files; it travels with the report from xdist's workers."""
    request.node.user_properties.append((name, value))


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Annotate the failed tests of a GitHub workflow, at the test's line."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for report in terminalreporter.stats.get("failed", ()):
        told = dict(getattr(report, "user_properties", ())).get(HEADLINE)
        if told is None:
            continue
        path, line, name = report.location
        place = f"file={_escape(path, True)},line={(line or 0) + 1}"
        what = "not the same" if "replay" in told.partition(":")[0] else "not clean"
        title = _escape(f"{name}: {what}", True)
        terminalreporter.write_line(f"::error {place},title={title}::{_escape(told)}")


def _escape(text: str, in_property: bool = False) -> str:
    """Text as a workflow command carries it."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace(":", "%3A").replace(",", "%2C") if in_property else escaped
